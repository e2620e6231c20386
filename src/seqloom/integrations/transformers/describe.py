"""Shapes of a Hugging Face model, read from its modules on the meta device.

Plans are priced with a `ModelSpec`. Of any model that `check` does not refuse it is read here: heads and windows from
the attention modules, widths from the matrices beside them, and what mixers scan. Without torch, that of the commonest
types follows from the config alone (`describe.huggingface`); a test holds that both give the same.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from seqloom.attention import AttentionSpec
from seqloom.describe import ModelSpec
from seqloom.errors import SeqloomError
from seqloom.integrations.transformers.attach import attach, attention_spec, attention_specs
from seqloom.integrations.transformers.checks import (
    FEED_FORWARD_TYPES,
    decoder_layers,
    decoder_of,
    has_router_loss,
    unwrap,
)
from seqloom.integrations.transformers.latents import is_latent, latent_shape
from seqloom.integrations.transformers.mixers import convolved_values, is_mixer, mixer_costs, scanned_values

LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""Fetch nothing, and run no code of a folder."""

IMAGE_TEXT_TYPES = (
    *("gemma3", "gemma3n", "gemma4", "gemma4_unified", "got_ocr2", "idefics3", "internvl", "llama4", "llava"),
    *("llava_next", "llava_onevision", "mistral3", "qwen3_5", "qwen3_5_moe", "smolvlm", "video_llava", "vipllava"),
)
"""Types of models of images and text that compute of text alone what their language model does; a test compares them.
Others, such as Aya Vision, which leaves the scale of its logits out, are refused."""

ACTIVE_EXPERTS = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k", "moe_top_k", "top_k_experts"),
)
"""Keys of configs for the experts that a token goes to."""


class FeedForward(NamedTuple):
    """The matrices of a layer beside its attention, as widths.

    Attributes:
        width: of a dense layer, or of what all tokens go through beside experts; 0: none.
        gated: whether three matrices have this width, and not two.
        experts: 0: a dense layer.
        expert_width: of one expert.
    """

    width: int
    gated: bool
    experts: int = 0
    expert_width: int = 0


def from_config(folder: Path, dtype: torch.dtype) -> Any:
    """Build the model of a folder's config.json with fresh parameters; of one that sees images, its language model."""
    config = AutoConfig.from_pretrained(folder, **LOCAL)
    _check_architectures(folder, config)
    text = language_model_config(config)
    model = AutoModelForCausalLM.from_config(config if text is None else text, dtype=dtype, trust_remote_code=False)
    if type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        kind = type(model.config).__name__
        raise SeqloomError(
            f"{type(model).__name__} is refused:\n  - several modalities ({config.model_type}): the trained language "
            f"model, of a {kind}, could not be read back with AutoModelForCausalLM; use a model of text alone"
        )
    return model


def _check_architectures(folder: Path, config: Any) -> None:
    """Refuse a config whose type is not that of the class it names: another model may fit the same tensors."""
    for name in config.architectures or ():
        types = [kind for kind, causal in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if causal == name]
        if types and config.model_type not in types:
            raise SeqloomError(
                f"{str(folder)!r}: its config.json says model_type {config.model_type!r} and architectures {name}, "
                f"which is of model_type {types[0]!r}: the same tensors would be computed otherwise; give the "
                "config.json that belongs to them"
            )


def language_model_config(config: Any) -> Any | None:
    """Return the config of the causal language model inside a model of images and text; None: this is no such model."""
    if config.model_type not in IMAGE_TEXT_TYPES or type(config.text_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    text = copy.deepcopy(config.text_config)
    text.tie_word_embeddings = config.tie_word_embeddings  # the head belongs to the outer model
    return text


def model_on_meta(folder: Path) -> Any:
    """Build the model of a folder's config.json without values."""
    try:
        with torch.device("meta"):
            return from_config(folder, torch.bfloat16)
    except SeqloomError:
        raise
    except Exception as error:  # whatever the class may raise for this config
        reason = str(error).strip().partition("\n")[0]
        raise SeqloomError(
            f"{folder} is no causal language model of the installed transformers ({reason}); give the folder of one"
        ) from error


def has_type(config: Mapping[str, Any]) -> bool:
    """Whether the installed transformers has the model type of a config."""
    return config.get("model_type") in CONFIG_MAPPING_NAMES


def describe_folder(folder: Path) -> ModelSpec:
    """Return the shapes of the model of a folder's config.json; refuse what `check` refuses."""
    model = model_on_meta(folder)
    try:
        return describe_model(attach(model, longest=1), folder.absolute().name)
    except SeqloomError as error:
        raise SeqloomError(f"{folder}: {error}") from None


def describe_model(model: nn.Module, name: str | None = None) -> ModelSpec:
    """Return the shapes of an attached model; layers whose feed-forwards differ, or lack one, have the mean width.

    Without a `name` the spec is named by the class of the model.
    """
    causal: Any = unwrap(model)
    embedding, layers = causal.get_input_embeddings().weight, decoder_layers(causal)
    hidden, attentions = embedding.shape[1], [_attention_of(layer) for layer in layers]
    sizes = Counter((each.heads, each.kv_heads, each.dim) for each in attentions if each is not None)
    if not sizes:
        raise SeqloomError(f"{type(causal).__name__} has no attention: plans are for models with some layers of it")
    heads, kv_heads, dim = sizes.most_common(1)[0][0]
    others = sorted({each[0] for each in sizes} - {heads})
    if others:
        raise SeqloomError(
            f"{type(causal).__name__} has layers of {heads} heads and layers of {others[0]} heads: plans give every "
            "rank of a group as many heads in all layers; use a model whose layers agree"
        )
    shapes = tuple((kv_heads, dim) if each is None else (each.kv_heads, each.dim) for each in attentions)
    parts = [_feed_forward(layer, hidden) for layer in layers]
    dense, sparse = [part for part in parts if not part.experts], [n for n, part in enumerate(parts) if part.experts]
    widest = max(dense or parts, key=lambda part: part.width or part.expert_width)
    chunks = tuple(None if each is None else each.attention_chunk for each in attentions)
    return ModelSpec(
        name=name or type(causal).__name__,
        layers=len(layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        ffn=-(-sum(part.width for part in dense) // len(dense)) if dense else parts[0].expert_width,
        gated=widest.gated,
        vocabulary=embedding.shape[0],
        tied=causal.get_output_embeddings().weight is embedding,
        windows=tuple(0 if each is None else each.window for each in attentions),
        causal=all(each.causal for each in attentions if each is not None),
        learned_positions=has_position_table(causal),
        attention_chunks=chunks if any(chunks) else (),
        counts_routing=has_router_loss(causal),
        head_shapes=shapes if len(sizes) > 1 else (),
        other_tables=sum(each.weight.numel() for each in _other_tables(causal) if not _is_position_table(each, causal)),
        **({} if not sparse else _experts(causal, parts[sparse[0]], tuple(sparse))),
        **_mixers(layers),
        **_latents(layers),
    )


def has_position_table(causal: Any) -> bool:
    """Whether a model looks positions up in a table, beside that of its tokens, and does not compute them."""
    return any(_is_position_table(each, causal) for each in _other_tables(causal))


def _other_tables(causal: Any) -> list[nn.Embedding]:
    """Return the tables of a decoder beside its token embedding."""
    tables = [each for each in decoder_of(causal).modules() if isinstance(each, nn.Embedding)]
    return [each for each in tables if each is not causal.get_input_embeddings()]


def _is_position_table(table: nn.Embedding, causal: Any) -> bool:
    """Whether a table has rows for all positions, as wide as hidden states, to which they are added."""
    config = causal.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    return most is not None and table.num_embeddings >= most and table.embedding_dim == config.hidden_size


def _attention_of(layer: nn.Module) -> AttentionSpec | None:
    """Return the attention of a layer; None: it has a mixer in its place, or is a feed-forward alone."""
    specs = attention_specs([layer])
    if not specs and (any(map(is_mixer, layer.modules())) or getattr(layer, "block_type", "") in FEED_FORWARD_TYPES):
        return None
    if len(specs) != 1:
        raise SeqloomError(
            f"{type(layer).__name__} has {len(specs)} attention modules that say their heads and width "
            "(config.num_attention_heads, head_dim, scaling), not one: its cost is not known"
        )
    return specs[0]


def _feed_forward(layer: nn.Module, hidden: int) -> FeedForward:
    """Read the widths of the matrices that stand beside attention and mixers."""
    mixing = [module for module in layer.modules() if attention_spec(module) or is_mixer(module)]
    known = {id(each) for module in mixing for each in module.parameters()}
    weights = [each for each in layer.parameters() if id(each) not in known and each.ndim > 1]
    counts = [(module, getattr(module, "moe_num_experts", 0)) for module in layer.modules()]
    below = {id(each): count for module, count in counts if count for each in module.parameters(recurse=False)}  # DBRX
    shapes = [each.unflatten(0, (below[id(each)], -1)).shape if id(each) in below else each.shape for each in weights]
    stacked = [shape for shape in shapes if len(shape) == 3]
    plain = [shape for shape in shapes if len(shape) == 2]
    if not stacked:
        width, gated = _widths([shape for shape in plain if hidden in shape], hidden)
        return FeedForward(width, gated)
    count = stacked[0][0]
    width, gated = _widths([shape[1:] for shape in stacked], hidden)
    beside = [shape for shape in plain if hidden in shape and shape[0] != 1]  # not a gate
    router = next((shape for shape in beside if shape[0] == count), None)
    if router is not None:  # one of them: a shared expert may be as wide as there are experts
        beside.remove(router)
    return FeedForward(_widths(beside, hidden)[0], gated, count, width)


def _widths(shapes: list[torch.Size], hidden: int) -> tuple[int, bool]:
    """Return the width of a feed-forward from its matrices, and whether there are three of that width."""
    elements = sum(shape.numel() for shape in shapes)
    if not elements:
        return 0, True
    narrow = min(max(shape.numel() // hidden, 1) for shape in shapes)
    gated = elements // hidden >= 3 * narrow
    return elements // hidden // (3 if gated else 2), gated


def _mixers(layers: Sequence[nn.Module]) -> Mapping[str, Any]:
    """Return the fields of layers that scan, of the largest of their mixers."""
    found = {n: each for n, layer in enumerate(layers) for each in layer.modules() if is_mixer(each)}
    if not found:
        return {}
    largest = max(map(mixer_costs, found.values()), key=lambda each: each.flops)
    return {
        "mixer_layers": tuple(found),
        "mixer_parameters": max(sum(each.numel() for each in mixer.parameters()) for mixer in found.values()),
        "mixer_values": max(map(convolved_values, found.values())) + max(map(scanned_values, found.values())),
        "mixer_exchange": max(map(scanned_values, found.values())),
        **{f"mixer_{name}": value for name, value in largest._asdict().items()},
    }


def _latents(layers: Sequence[nn.Module]) -> Mapping[str, Any]:
    """Return the fields of latent attention, of the first module that has it."""
    module: Any = next((each for layer in layers for each in layer.modules() if is_latent(each)), None)
    if module is None:
        return {}
    latent, rotated, _, values = latent_shape(module)
    return {
        "latent": latent,
        "rotated": rotated,
        "value_dim": values,
        "query_latent": getattr(module, "q_lora_rank", None) or 0,
    }


def _experts(causal: Any, part: FeedForward, sparse: tuple[int, ...]) -> Mapping[str, Any]:
    said = [getattr(each, key, None) for each in (causal.config.get_text_config(), causal) for key in ACTIVE_EXPERTS]
    active = next((value for value in said if isinstance(value, int)), None)
    if active is None:
        kind = type(causal.config).__name__
        raise SeqloomError(f"{kind} does not say to how many of {part.experts} experts a token goes")
    return {
        "experts": part.experts,
        "active_experts": active,
        "expert_ffn": part.expert_width,
        "shared_ffn": part.width,
        "moe_layers": sparse,
    }
