"""Features that a Hugging Face model may not have: each would make the result wrong, or dependent on the plan.

Every check below is a generator, given the model as the user has it (perhaps wrapped by peft) and the language model of
transformers inside; it yields where it finds the feature. Modules count for more than the config, since configs carry
keys that a model does not use. `check` runs all of them before anything else runs and lists every reason with its way
out. What only shows in a call (a batch, a cache, a mask, a window that a layer does not pass on) is refused by
`attach.attention_function`, before anything is sent.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.mixers import is_mixer, takes_keywords
from seqloom.models.dropout import is_planned
from seqloom.models.loss import Logits

SHOWN = 3
"""Places that a message names for one reason."""
CHUNKED = "chunked_attention"
ATTENTION_TYPES = ("full_attention", "sliding_attention", CHUNKED)
STATE_TYPES = ("linear_attention", "conv", "hybrid", "hybrid_sliding")
FEED_FORWARD_TYPES = ("mlp", "moe")
STATE_CLASSES = re.compile(
    r"(Mamba|SSM|Rwkv|LSTM|RecurrentBlock|Rglru|DeltaNet|LightningAttention|ShortConv)(?!.*Norm)"
)
ATTENTION = re.compile(r"att(n|ention)", re.IGNORECASE)
ROUTER_LOSSES = ("router_aux_loss_coef", "router_z_loss_coef", "aux_loss_coef")
CAPS = ("logits_soft_cap", "output_logit_soft_cap")
SCALES = ("logits_mup_width_multiplier",)

Find = Callable[[nn.Module, Any], Iterable[str]]


class Refusal(NamedTuple):
    """A feature that is refused."""

    name: str
    why: str  # what would be wrong with the result
    way_out: str
    find: Find  # given the model and the language model in it, yields where the feature is


REFUSALS: list[Refusal] = []
"""All of them, in the order in which they are reported."""


def check(model: nn.Module) -> None:
    """Refuse a model that the engine would compute wrongly, or whose result would depend on the plan.

    The error has every reason, where it was found, and the way out. Dropout counts whether the model, of transformers
    or wrapped by peft, is in training mode or not, since it will be.
    """
    causal = unwrap(model)
    reasons = []
    for refusal in REFUSALS:
        places = list(dict.fromkeys(refusal.find(model, causal)))
        if places:
            more = f" and {len(places) - SHOWN} more" if len(places) > SHOWN else ""
            reasons.append(f"{refusal.name} ({', '.join(places[:SHOWN])}{more}): {refusal.why}; {refusal.way_out}")
    if reasons:
        raise SeqloomError(f"{type(causal).__name__} is refused:\n" + "\n".join(f"  - {reason}" for reason in reasons))


def unwrap(model: nn.Module) -> Any:
    """Return the model of transformers inside peft's wrapper, or the model itself."""
    inner: Any = model
    if not isinstance(model, PreTrainedModel) and hasattr(model, "get_base_model"):
        inner = inner.get_base_model()
    if not isinstance(inner, PreTrainedModel):
        raise SeqloomError(
            f"{type(model).__name__} is not a model of transformers; load one with AutoModelForCausalLM, "
            "or use seqloom.models.transformer.Transformer as it is"
        )
    return inner


def decoder_of(causal: Any) -> Any:
    """Return what a causal model has below its head: the child with the token embedding, if it names no other."""
    named, embedding = causal.get_decoder(), causal.get_input_embeddings()
    if named is not causal and any(module is embedding for module in named.modules()):
        return named
    children = (child for child in causal.children() if any(module is embedding for module in child.modules()))
    return next(children, named)


def output_head(causal: Any) -> Any:
    """Return the output projection of a causal model; where peft trains a copy of it (`modules_to_save`), the copy."""
    head = causal.get_output_embeddings()
    copies = getattr(head, "modules_to_save", None)
    return head if copies is None else copies[head.active_adapters[0]]


def decoder_layers(causal: Any) -> tuple[nn.Module, ...]:
    """Return the layers of a causal model, in their order: those that its class names, or that checkpoint gradients."""
    classes = causal._no_split_modules or ()
    modules = list(decoder_of(causal).modules())
    layers = [module for module in modules if type(module).__name__ in classes]
    layers = layers or [module for module in modules if isinstance(module, GradientCheckpointingLayer)]
    inside = {part for layer in layers for part in layer.modules() if part is not layer}
    if not layers:
        raise SeqloomError(
            f"{type(causal).__name__} does not say what its layers are (_no_split_modules = {list(classes)}); "
            "say it yourself: seqloom.models.adapter.ModelAdapter(module, layers, hidden, head)"
        )
    return tuple(layer for layer in layers if layer not in inside)


def planned_dropouts(causal: Any) -> set[nn.Module]:
    """Return the dropout modules of a causal model that `models.dropout` makes independent of the plan."""
    try:
        layers = decoder_layers(causal)
    except SeqloomError:  # a model that does not say what its layers are
        return set()
    return {module for layer in layers for module in layer.modules() if is_planned(module)}


def attention_dropouts(model: nn.Module) -> dict[str, float]:
    """Return the dropouts of attention weights above 0 that modules of a model have, by where they are."""
    return {where: p for where, p in _all_dropouts(model) if _dropout_kind(where) == "attention"}


def _all_dropouts(model: nn.Module) -> list[tuple[str, float]]:
    """Return (where, value) of all dropout above 0 in a model, modules and numbers that modules keep."""
    found = ((name, each.p) for name, each in model.named_modules() if isinstance(each, _DropoutNd) and each.p)
    modules = [(name, p) for name, p in found if not _is_never_called(model, name)]
    return [*modules, *_numbers(model, "dropout"), *_numbers(model, "layerdrop")]


def _is_never_called(model: nn.Module, dropout: str) -> bool:
    """Whether a dropout module is that of an adapted embedding: peft drops nothing of token ids."""
    owner, _, of_adapter = dropout.partition(".lora_dropout.")
    return bool(of_adapter) and isinstance(getattr(model.get_submodule(owner), "base_layer", None), nn.Embedding)


def _refuse(name: str, why: str, way_out: str) -> Callable[[Find], Find]:
    """Add the decorated check to `REFUSALS`."""

    def add(find: Find) -> Find:
        REFUSALS.append(Refusal(name, why, way_out, find))
        return find

    return add


# What kind of model.


@_refuse("no language model head", "there are no logits to train", "load it with AutoModelForCausalLM")
def _no_head(model: nn.Module, causal: Any) -> Iterator[str]:
    if causal.get_output_embeddings() is None:
        yield "get_output_embeddings() is None"


@_refuse(
    "encoder-decoder", "two sequences that attend to each other are not one packed sequence", "use a decoder-only model"
)
def _encoder_decoder(model: nn.Module, causal: Any) -> Iterator[str]:
    if getattr(causal.config, "is_encoder_decoder", False):
        yield "is_encoder_decoder = True"


@_refuse("cross attention", "keys come from outside the packed tokens", "use a decoder-only model")
def _cross_attention(model: nn.Module, causal: Any) -> Iterator[str]:
    yield from _set_keys(causal, "add_cross_attention")
    if "shared_kv_states" in inspect.signature(causal.forward).parameters:
        yield "shared_kv_states, of another model"
    for name, module in causal.named_modules():
        if "CrossAttention" in type(module).__name__ or name.endswith("encoder_attn"):
            yield name


@_refuse(
    "several modalities", "images and sounds bring masks and positions of their own", "load the language model alone"
)
def _modalities(model: nn.Module, causal: Any) -> Iterator[str]:
    if causal.config.get_text_config() is not causal.config and not getattr(causal.config, "is_encoder_decoder", False):
        yield from causal.config.sub_configs


@_refuse(
    "layers without a name",
    "which modules are sharded and recomputed one by one is not known",
    "use a model whose class names its layers (_no_split_modules), or seqloom.models.adapter.ModelAdapter in a loop of "
    "your own",
)
def _unnamed_layers(model: nn.Module, causal: Any) -> Iterator[str]:
    try:
        decoder_layers(causal)
    except SeqloomError:
        yield f"{type(causal).__name__}._no_split_modules = {causal._no_split_modules}"


# What attention computes.


@_refuse(
    "bidirectional sliding windows",
    "a window counts back from a causal token",
    "use a causal model, or one whose tokens see their whole document (is_causal = False, full_attention layers)",
)
def _bidirectional_windows(model: nn.Module, causal: Any) -> Iterator[str]:
    config = _text_config(causal)
    if getattr(config, "use_bidirectional_attention", None) != "vision":  # which is of images alone
        yield from _set_keys(causal, "use_bidirectional_attention")  # of Gemma, with windows in most layers
    windows = "sliding_attention" in _layer_types(causal) or (
        not _layer_types(causal) and getattr(config, "sliding_window", None)
    )
    modules = (module for module in causal.modules() if getattr(module, "is_causal", True) is False)
    if windows and (getattr(config, "is_causal", True) is False or any(True for _ in modules)):
        yield "is_causal = False with sliding windows"


@_refuse(
    "a recurrence of its own",
    "how its state is passed between ranks is not known",
    "use a model whose layers are attention, short convolutions, gated delta rules or Mamba-2",
)
def _recurrent_state(model: nn.Module, causal: Any) -> Iterator[str]:
    mixers = [module for module in causal.modules() if is_mixer(module)]
    inside = {part for mixer in mixers for part in mixer.modules()}
    for name, module in causal.named_modules():
        stateful = isinstance(module, nn.Conv1d | nn.RNNBase) or STATE_CLASSES.search(type(module).__name__)
        if stateful and module not in inside and not inside & {*module.modules()}:
            yield f"{name}: {type(module).__name__}"
    if not mixers:
        yield from (f"layer_types has {kind}" for kind in _layer_types(causal) if kind in STATE_TYPES)


@_refuse(
    "mixers that take no keywords",
    "the context of the round does not reach their scans",
    "install a newer transformers: its mixers hand keywords on",
)
def _mixers_without_keywords(model: nn.Module, causal: Any) -> Iterator[str]:
    for name, module in causal.named_modules():
        if is_mixer(module) and not takes_keywords(module):
            yield f"{name}: {type(module).__name__}"


@_refuse("no attention", "plans are for documents whose tokens attend", "use a model with some layers of attention")
def _no_attention(model: nn.Module, causal: Any) -> Iterator[str]:
    if not causal._supports_attention_backend and not _attention_modules(causal):
        yield f"{type(causal).__name__} has no module of it"


@_refuse(
    "no attention interface",
    "its attention cannot be exchanged by name",
    "use a model whose class has _supports_attention_backend",
)
def _no_attention_interface(model: nn.Module, causal: Any) -> Iterator[str]:
    # Hybrids, and classes that do not hand keywords on, do not say that they have it; their attention modules do.
    if not causal._supports_attention_backend and not all(map(_asks_interface, _attention_modules(causal))):
        yield f"{type(causal).__name__}._supports_attention_backend = False"


def _attention_modules(causal: Any) -> list[nn.Module]:
    return [module for module in causal.modules() if type(module).__name__.endswith("Attention")]


def _asks_interface(attention: nn.Module) -> bool:
    """Whether an attention module looks it up by name."""
    forward = inspect.unwrap(type(attention).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(forward, "__code__", _asks_interface.__code__).co_names


@_refuse(
    "sparse attention",
    "only full, sliding-window and chunked attention are computed",
    f"use a model whose layers are {', '.join(ATTENTION_TYPES)}",
)
def _sparse_attention(model: nn.Module, causal: Any) -> Iterator[str]:
    known = (*ATTENTION_TYPES, *STATE_TYPES, *FEED_FORWARD_TYPES)
    yield from (f"layer_types has {kind}" for kind in _layer_types(causal) if kind not in known)
    yield from (name for name, module in causal.named_modules() if "Indexer" in type(module).__name__)


# Positions.


@_refuse(
    "positions that cannot be given",
    "a rank's tokens are not the first of their documents",
    "use a model whose forward takes position_ids",
)
def _no_position_ids(model: nn.Module, causal: Any) -> Iterator[str]:
    decoder = decoder_of(causal)
    if "position_ids" not in inspect.signature(decoder.forward).parameters:
        yield f"{type(decoder).__name__}.forward has no position_ids"


@_refuse(
    "RoPE by the longest sequence",
    "frequencies would depend on which documents share a call",
    "say how long the longest document of the run is (data.max_length, or attach(model, longest=tokens))",
)
def _dynamic_rope(model: nn.Module, causal: Any) -> Iterator[str]:
    for name, module in causal.named_modules():
        yield from (f"{name}: rope_type = {kind}" for _, kind in dynamic_ropes(module))
    if any(hasattr(module, "rope_type") for module in causal.modules()):
        return
    parameters = getattr(_text_config(causal), "rope_parameters", None) or {}  # modules do not say what they do
    for values in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        kind = values.get("rope_type") or ""
        if is_dynamic_rope(kind):
            yield f"rope_type = {kind}"


def dynamic_ropes(module: nn.Module) -> list[tuple[str | None, str]]:
    """Return the rotary embeddings of a module that follow the longest sequence: (type of layers, kind of RoPE).

    None: they are of all layers.
    """
    kinds = getattr(module, "rope_type", None)
    by_layer = kinds.items() if isinstance(kinds, dict) else [(None, kinds)]
    return [(layer, kind) for layer, kind in by_layer if isinstance(kind, str) and is_dynamic_rope(kind)]


def is_dynamic_rope(kind: str) -> bool:
    """Whether a kind of RoPE follows the longest sequence."""
    return "dynamic" in kind or kind == "longrope"


# Randomness, adapters and losses that would depend on the plan.


def _dropouts_of(kind: str, model: nn.Module, causal: Any) -> Iterator[str]:
    """Yield the dropouts of one kind above 0 in modules, after the keys of the config that set them.

    Left out is dropout that is made independent of the plan: modules in layers, and that of attention weights in a
    module which knows the number of its layer.
    """
    configs = getattr(model, "peft_config", {}).values() if kind == "adapter" else (_text_config(causal),)
    modules = dict(model.named_modules())
    dropouts = planned_dropouts(causal)
    planned = {name for name, module in modules.items() if module in dropouts}
    numbered = {name for name, module in modules.items() if isinstance(getattr(module, "layer_idx", None), int)}
    places = []
    for where, value in _all_dropouts(model):
        served = where.rpartition(".")[0] in numbered if kind == "attention" else where in planned
        if _dropout_kind(where) == kind and not served:
            places.append(f"{where} = {value}")
    for key, value in (item for config in configs for item in vars(config).items()) if places else ():
        if "drop" in key and type(value) in (int, float) and value and _dropout_kind(key) == kind:
            yield f"{key} = {value} in the config"
    yield from places


for name, kind, way_out in (
    ("attention dropout in layers without a number", "attention", "load with this key of the config set to 0.0"),
    ("dropout that is no module of a layer", "other", "load with this key of the config set to 0.0"),
    ("LoRA dropout outside of layers", "adapter", "use LoraConfig(lora_dropout=0.0)"),
):
    why = "which elements are dropped would depend on the plan"
    REFUSALS.append(Refusal(name, why, way_out, partial(_dropouts_of, kind)))


@_refuse("virtual tokens", "prompt and prefix tuning add tokens that no document has", "use LoRA")
def _virtual_tokens(model: nn.Module, causal: Any) -> Iterator[str]:
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            yield f"adapter {name}: {type(config).__name__}"


@_refuse("router noise", "the noise would depend on the plan", "load with this jitter set to 0.0 in the config")
def _router_noise(model: nn.Module, causal: Any) -> Iterator[str]:
    yield from (f"{where} = {value}" for where, value in _numbers(causal, "jitter"))


@_refuse(
    "another router loss than Mixtral's",
    "its statistics are those of one call, so it would depend on the plan",
    "load with output_router_logits=False, without which transformers computes none",
)
def _router_loss(model: nn.Module, causal: Any) -> Iterator[str]:
    if has_router_loss(causal) and routers_of(causal) is None:
        yield from _set_keys(causal, *ROUTER_LOSSES)


def has_router_loss(causal: Any) -> bool:
    """Whether transformers adds a loss of the routers to that of the tokens."""
    active = getattr(_text_config(causal), "output_router_logits", False)
    return bool(active) and any(True for _ in _set_keys(causal, *ROUTER_LOSSES))


class Routers(NamedTuple):
    """Where the logits are that a load-balancing loss is made of."""

    kind: type[nn.Module]
    index: int  # of the logits in what a router returns


def routers_of(causal: Any) -> Routers | None:
    """Return the routers of a model whose router loss is that of Mixtral; None: its loss is another one.

    Transformers copies the function into every model that has it, and records logits by the class of routers.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    function = getattr(sys.modules[type(causal).__module__], load_balancing_loss_func.__name__, None)
    recorded: Any = (getattr(decoder_of(causal), "_can_record_outputs", None) or {}).get("router_logits")
    kind = getattr(recorded, "target_class", None)  # not of a list of several
    known = all(hasattr(causal, name) for name in ("router_aux_loss_coef", "num_experts", "num_experts_per_tok"))
    if not isinstance(function, FunctionType) or kind is None or not known:
        return None
    own, usual = (each.__code__ for each in (function, load_balancing_loss_func))
    same = (own.co_code, own.co_consts, own.co_names) == (usual.co_code, usual.co_consts, usual.co_names)
    in_parts = not any(type(child) is kind for layer in decoder_layers(causal) for child in layer.children())
    z_loss = any(True for _ in _set_keys(causal, "router_z_loss_coef"))
    return Routers(kind, recorded.index) if same and in_parts and not z_loss else None


@_refuse(
    "logits altered after the head",
    "the loss is computed from hidden states and the weight of the head, without logits",
    "use a model whose logits are hidden @ weight.T + bias, scaled or capped; adapt no head, or train all of it "
    "(modules_to_save)",
)
def _altered_logits(model: nn.Module, causal: Any) -> Iterator[str]:
    config, head = _text_config(causal), output_head(causal)
    yield from _set_keys(causal, *CAPS, "z_loss_coefficient")
    yield from (f"{key} = {getattr(config, key)}" for key in SCALES if getattr(config, key, None) not in (None, 1))
    if head is None:
        return
    if type(head) is not nn.Linear:
        yield f"the head is a {type(head).__name__}"
    decoder = decoder_of(causal)
    for name, child in causal.named_children():
        known = child is causal.get_output_embeddings() or any(module is decoder for module in child.modules())
        if not known and any(True for _ in child.parameters()):
            yield f"{name} beside decoder and head"


@_refuse("multi-token prediction", "it shifts tokens across the borders of spans", "train the main model without it")
def _multi_token(model: nn.Module, causal: Any) -> Iterator[str]:
    for name, module in causal.named_modules():
        if re.search(r"Mtp|MTP", type(module).__name__):
            yield f"{name or 'the model'}: {type(module).__name__}"


def logits_of(causal: Any) -> Logits:
    """Return what a model makes of the products of hidden states and head, by the keys that say so."""
    config = _text_config(causal)
    factors = [getattr(config, key, None) or 1.0 for key in ("logit_scale", "lm_head_multiplier")]
    scale = math.prod(factors) / (getattr(config, "logits_scaling", None) or 1.0)
    return Logits(scale, getattr(config, "final_logit_softcapping", None))


def _text_config(causal: Any) -> Any:
    return causal.config.get_text_config(decoder=True)


def _set_keys(causal: Any, *keys: str) -> Iterator[str]:
    config = _text_config(causal)
    return (f"{key} = {getattr(config, key)}" for key in keys if getattr(config, key, None))


def _layer_types(causal: Any) -> list[str]:
    return getattr(_text_config(causal), "layer_types", None) or []


def _dropout_kind(where: str) -> str:
    """Return whose dropout it is: "attention" means of attention weights, not of attention's output."""
    if "lora" in where:
        return "adapter"
    *_, parent, own = ("", *where.split("."))
    return "attention" if ATTENTION.search(parent if own == "dropout" else own) else "other"


def _numbers(model: nn.Module, word: str) -> Iterator[tuple[str, float]]:
    """Yield (where, value) of numbers other than 0 that modules keep under a name with this word."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if word in key and isinstance(value, int | float) and value:
                yield f"{name}.{key}".lstrip("."), value
