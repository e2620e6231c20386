"""Where a model shows a feature that is refused. Every function yields short texts; nothing means: not there.

All take the model as the user has it (perhaps wrapped by peft) and the language model of transformers in it. What the
modules are counts for more than what the config says, since configs carry keys that a model does not use.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from seqloom.errors import SeqloomError
from seqloom.integrations.transformers import checks as evidence
from transformers import PreTrainedModel

ATTENTION_TYPES = ("full_attention", "sliding_attention")
STATE_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
STATE_CLASSES = re.compile(r"Mamba|SSM|Rwkv|LSTM|RecurrentBlock|Rglru|DeltaNet|LightningAttention|ShortConv")
ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)
ROUTER_LOSSES = ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef", "z_loss_coefficient")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "logits_mup_width_multiplier")


def no_interface(model: nn.Module, causal: Any) -> Iterator[str]:
    """The class does not say that it looks attention up by name."""
    if not causal._supports_attention_backend:
        yield f"{type(causal).__name__}._supports_attention_backend = False"


def no_head(model: nn.Module, causal: Any) -> Iterator[str]:
    """There is no output projection."""
    if causal.get_output_embeddings() is None:
        yield "get_output_embeddings() is None"


def encoder_decoder(model: nn.Module, causal: Any) -> Iterator[str]:
    """The config says so."""
    if getattr(causal.config, "is_encoder_decoder", False):
        yield "is_encoder_decoder = True"


def modalities(model: nn.Module, causal: Any) -> Iterator[str]:
    """The language model has a config of its own inside another."""
    if causal.config.get_text_config() is not causal.config and not getattr(causal.config, "is_encoder_decoder", False):
        yield from causal.config.sub_configs


def cross(model: nn.Module, causal: Any) -> Iterator[str]:
    """The config asks for it, or a module has it."""
    if getattr(_text(causal), "add_cross_attention", False):
        yield "add_cross_attention = True"
    yield from (name for name, module in causal.named_modules() if "CrossAttention" in type(module).__name__)


def bidirectional(model: nn.Module, causal: Any) -> Iterator[str]:
    """Config keys, and attention modules that are not causal."""
    config = _text(causal)
    if getattr(config, "is_causal", True) is False:
        yield "is_causal = False"
    if getattr(config, "use_bidirectional_attention", None):
        yield f"use_bidirectional_attention = {config.use_bidirectional_attention}"
    yield from (name for name, module in causal.named_modules() if getattr(module, "is_causal", True) is False)


def stateful(model: nn.Module, causal: Any) -> Iterator[str]:
    """Layer types, convolutions along the sequence, and modules that are known by their class."""
    yield from (f"layer_types has {kind}" for kind in _types(causal) if kind in STATE_TYPES)
    for name, module in causal.named_modules():
        known = isinstance(module, nn.Conv1d | nn.RNNBase) or STATE_CLASSES.search(type(module).__name__)
        if known and module is not causal:
            yield f"{name}: {type(module).__name__}"


def sparse(model: nn.Module, causal: Any) -> Iterator[str]:
    """Layer types of attention that are neither full nor windowed, and indexers."""
    yield from (f"layer_types has {k}" for k in _types(causal) if k not in ATTENTION_TYPES and k not in STATE_TYPES)
    yield from (name for name, module in causal.named_modules() if "Indexer" in type(module).__name__)


def softcap(model: nn.Module, causal: Any) -> Iterator[str]:
    """Config keys of soft-caps in attention."""
    for key, value in vars(_text(causal)).items():
        if "softcap" in key and ATTENTION.search(key) and value:
            yield f"{key} = {value}"


def sinks(model: nn.Module, causal: Any) -> Iterator[str]:
    """Parameters of that name."""
    yield from (name for name, _ in causal.named_parameters() if "sink" in name.rpartition(".")[2])


def value_width(model: nn.Module, causal: Any) -> Iterator[str]:
    """Attention modules that know two widths."""
    for name, module in causal.named_modules():
        values = getattr(module, "v_head_dim", None)
        keys = getattr(module, "qk_head_dim", getattr(module, "head_dim", None))
        if isinstance(values, int) and isinstance(keys, int) and values != keys:
            yield f"{name}: values {values}, keys {keys}"


def positions(model: nn.Module, causal: Any) -> Iterator[str]:
    """The decoder has no such argument."""
    decoder = causal.get_decoder()
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        yield f"{type(decoder).__name__}.forward has no position_ids"


def rope(model: nn.Module, causal: Any) -> Iterator[str]:
    """Kinds of RoPE that look at the highest position of a call."""
    parameters = getattr(_text(causal), "rope_parameters", None) or {}
    for values in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = values.get("rope_type") or ""
        if "dynamic" in kind or kind == "longrope":
            yield f"rope_type = {kind}"


def attention_dropout(model: nn.Module, causal: Any) -> Iterator[str]:
    """Dropout of attention's weights."""
    yield from _dropouts_of("attention", model, vars(_text(causal)))


def other_dropout(model: nn.Module, causal: Any) -> Iterator[str]:
    """Dropout of embeddings, residuals, whole layers."""
    yield from _dropouts_of("other", model, vars(_text(causal)))


def lora_dropout(model: nn.Module, causal: Any) -> Iterator[str]:
    """Dropout in adapters."""
    configs = getattr(model, "peft_config", {}).values()
    yield from _dropouts_of("adapter", model, {key: value for each in configs for key, value in vars(each).items()})


def virtual_tokens(model: nn.Module, causal: Any) -> Iterator[str]:
    """Peft's prompt learning."""
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            yield f"adapter {name}: {type(config).__name__}"


def router_noise(model: nn.Module, causal: Any) -> Iterator[str]:
    """Jitter in modules that choose experts."""
    yield from (text for _, text in _numbers(causal, "jitter"))


def router_loss(model: nn.Module, causal: Any) -> Iterator[str]:
    """Coefficients that are not 0, in a model with experts."""
    config = _text(causal)
    if not any(getattr(config, key, None) for key in EXPERTS):
        return
    for key in (*ROUTER_LOSSES, "output_router_logits"):
        if getattr(config, key, None):
            yield f"{key} = {getattr(config, key)}"


def altered_logits(model: nn.Module, causal: Any) -> Iterator[str]:
    """Scales and caps, a bias, an adapter on the head, or a module between the decoder and the head."""
    config, head = _text(causal), causal.get_output_embeddings()
    yield from (f"{key} = {getattr(config, key)}" for key in CAPS if getattr(config, key, None))
    yield from (f"{key} = {getattr(config, key)}" for key in SCALES if getattr(config, key, None) not in (None, 1))
    if head is None:
        return
    if type(head) is not nn.Linear:
        yield f"the head is a {type(head).__name__}"
    elif head.bias is not None:
        yield "the head has a bias"
    decoder = causal.get_decoder()
    for name, child in causal.named_children():
        known = child is head or any(module is decoder for module in child.modules())
        if not known and any(True for _ in child.parameters()):
            yield f"{name} beside decoder and head"


def multi_token(model: nn.Module, causal: Any) -> Iterator[str]:
    """Layers that transformers builds for it."""
    for name, module in causal.named_modules():
        if re.search(r"Mtp|MTP", type(module).__name__):
            yield f"{name or 'the model'}: {type(module).__name__}"


def _text(causal: Any) -> Any:
    return causal.config.get_text_config(decoder=True)


def _types(causal: Any) -> list[str]:
    return getattr(_text(causal), "layer_types", None) or []


def _dropouts_of(kind: str, model: nn.Module, config: Mapping[str, Any]) -> Iterator[str]:
    """Dropouts of one kind that modules have: the keys of the config that set them, then where they are."""
    where = [text for found, text in _dropouts(model) if found == kind]
    for key, value in config.items() if where else ():
        if "drop" in key and type(value) in (int, float) and value and _kind(key) == kind:
            yield f"{key} = {value} in the config"
    yield from where


def _dropouts(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Every dropout above 0 as (kind, where and how much): modules, and numbers that modules keep."""
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p:
            yield _kind(name), f"{name} = {module.p}"
    for word in ("dropout", "layerdrop"):
        yield from ((_kind(where), text) for where, text in _numbers(model, word))


def _kind(where: str) -> str:
    """Whose dropout it is: "attention" means its weights, not what comes after it."""
    if "lora" in where:
        return "adapter"
    *_, parent, own = ("", *where.split("."))
    return "attention" if ATTENTION.search(parent if own == "dropout" else own) else "other"


def _numbers(model: nn.Module, word: str) -> Iterator[tuple[str, str]]:
    """Numbers other than 0 that modules keep under a name with this word, as (where, where and how much)."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if word in key and isinstance(value, int | float) and value:
                where = f"{name}.{key}".lstrip(".")
                yield where, f"{where} = {value}"


# ---- merged: integrations.refusals
# What a Hugging Face model may not have, by name: each would make the result wrong, or dependent on the plan.
#
# `check` asks before anything runs and lists every reason with its way out. What only shows in a call (a batch, a
# cache,
# a mask, a window that a layer does not pass on) is refused by `interface`, before anything is sent.


SHOWN = 3
"""Pieces of evidence that a message shows for one reason."""

Find = Callable[[nn.Module, Any], Iterable[str]]


class Refusal(NamedTuple):
    """One reason to refuse a model.

    Attributes:
        name: of the feature.
        why: what would be wrong with the result.
        way_out: what to do instead.
        find: given the model and the language model in it, says where the feature is; nothing: not there.
    """

    name: str
    why: str
    way_out: str
    find: Find


_PLAN = "which elements are dropped would depend on the plan"
_ZERO = "load with this key of the config set to 0.0"

REFUSALS = (
    Refusal(
        "no attention interface",
        "its attention cannot be exchanged by name",
        "use a model whose class has _supports_attention_backend",
        evidence.no_interface,
    ),
    Refusal(
        "no language model head",
        "there are no logits to train",
        "load it with AutoModelForCausalLM",
        evidence.no_head,
    ),
    Refusal(
        "encoder-decoder",
        "two sequences that attend to each other are not one packed sequence",
        "use a decoder-only model",
        evidence.encoder_decoder,
    ),
    Refusal(
        "several modalities",
        "images and sounds bring masks and positions of their own",
        "load the language model alone",
        evidence.modalities,
    ),
    Refusal("cross attention", "keys come from outside the packed tokens", "use a decoder-only model", evidence.cross),
    Refusal(
        "bidirectional attention",
        "the context means causal attention",
        "use a causal model, and leave use_bidirectional_attention off",
        evidence.bidirectional,
    ),
    Refusal(
        "linear attention, convolution or state space",
        "a state that runs along the sequence is not passed between ranks",
        "use a model in which only attention mixes tokens",
        evidence.stateful,
    ),
    Refusal(
        "sparse or chunked attention",
        "only full and sliding-window attention are computed",
        "use a model with full_attention and sliding_attention layers",
        evidence.sparse,
    ),
    Refusal(
        "logit soft-cap",
        "no kernel here caps the logits of attention",
        "use a model without it, for example one with QK norm",
        evidence.softcap,
    ),
    Refusal("attention sinks", "no kernel here has them", "use a model without them", evidence.sinks),
    Refusal(
        "values of another width than keys",
        "keys and values travel as one buffer (MLA)",
        "use a model with equal widths",
        evidence.value_width,
    ),
    Refusal(
        "positions that cannot be given",
        "a rank's tokens are not the first of their documents",
        "use a model whose forward takes position_ids",
        evidence.positions,
    ),
    Refusal(
        "RoPE by the longest sequence",
        "frequencies would depend on which documents share a call",
        "use rope_type default, linear, llama3 or yarn",
        evidence.rope,
    ),
    Refusal("attention dropout", _PLAN, _ZERO, evidence.attention_dropout),
    Refusal("dropout", _PLAN, _ZERO, evidence.other_dropout),
    Refusal("LoRA dropout", _PLAN, "use LoraConfig(lora_dropout=0.0)", evidence.lora_dropout),
    Refusal(
        "virtual tokens",
        "prompt and prefix tuning add tokens that no document has",
        "use LoRA",
        evidence.virtual_tokens,
    ),
    Refusal(
        "router noise",
        "the noise would depend on the plan",
        "load with this jitter set to 0.0 in the config",
        evidence.router_noise,
    ),
    Refusal(
        "router loss",
        "its statistics are those of one call, so it would depend on the plan",
        "load with router_aux_loss_coef=0.0 and output_router_logits=False",
        evidence.router_loss,
    ),
    Refusal(
        "logits altered after the head",
        "the loss is computed from hidden states and the weight of the head, without logits",
        "use a model whose logits are hidden @ weight.T; leave the head out of adapters",
        evidence.altered_logits,
    ),
    Refusal(
        "multi-token prediction",
        "it shifts tokens across the borders of spans",
        "train the main model without it",
        evidence.multi_token,
    ),
)
"""In the order in which they are reported."""


def check(model: nn.Module) -> None:
    """Refuse a model that the engine would compute wrongly, or whose result would depend on the plan.

    Dropout counts whether the model is in training mode or not, since it will be.

    Args:
        model: of transformers, or one that peft wraps.

    Raises:
        SeqloomError: every reason, where it was found, and the way out.
    """
    causal = unwrapped(model)
    reasons = []
    for refusal in REFUSALS:
        found = list(dict.fromkeys(refusal.find(model, causal)))
        if found:
            more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            where = ", ".join(found[:SHOWN]) + more
            reasons.append(f"{refusal.name} ({where}): {refusal.why}; {refusal.way_out}")
    if reasons:
        raise SeqloomError(f"{type(causal).__name__} is refused:\n" + "\n".join(f"  - {reason}" for reason in reasons))


def unwrapped(model: nn.Module) -> Any:
    """Return the model of transformers inside what peft may have put around it."""
    inner: Any = model
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise SeqloomError(
            f"{type(model).__name__} is not a model of transformers; load one with AutoModelForCausalLM, "
            "or use seqloom.models.transformer.Transformer as it is"
        )
    return inner


# ---- merged: integrations.support
# The table of the documentation: what a model may have, and what is refused, from the code itself.


SUPPORTED = (
    ("full causal attention, grouped or single key/value heads", "computed by the engine, heads unrepeated"),
    ("sliding windows, one per layer", "taken from the layer's own call"),
    ("biases, QK norm, any scaling, RoPE of all kinds but two, learned positions", "the model's own code"),
    ("experts (router loss 0)", "the model's own code; routing is by token"),
    ("tied and untied heads", "`head(model)` says which"),
    ("LoRA through peft (dropout 0)", "attach the wrapped model"),
    ("gradient checkpointing", "`gradient_checkpointing_enable()`, or torch.utils.checkpoint"),
)
"""What is supported, and how; every row is under test."""


def support_table() -> str:
    """Return the table in Markdown: supported features, then refused ones with reason and way out."""
    lines = ["| a model with | | why, and the way out |", "|---|---|---|"]
    lines += [f"| {feature} | supported | {how} |" for feature, how in SUPPORTED]
    lines += [f"| {each.name} | refused | {each.why}; {each.way_out} |" for each in REFUSALS]
    return "\n".join(lines) + "\n"
