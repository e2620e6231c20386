"""Where a model shows a feature that is refused. Every function yields short texts; nothing means: not there.

All take the model as the user has it (perhaps wrapped by peft) and the language model of transformers in it. What the
modules are counts for more than what the config says, since configs carry keys that a model does not use.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

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
