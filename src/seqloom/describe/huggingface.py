"""Model specs from the ``config.json`` of a Hugging Face model. Reads a mapping; fetches nothing.

For machines without torch, on which plans are made, and for the commonest types. Where transformers is installed the
shapes of a folder are read from the model itself (`integrations.transformers.describe`); a test holds that both agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seqloom.describe.model import MAX_LAYERS, MAX_SIZE, ModelSpec
from seqloom.errors import SeqloomError

Config = Mapping[str, Any]

WAY_OUT = (
    "describe the model in a .json or .toml file with the fields of ModelSpec, or have the shapes read from the model "
    "itself, which needs 'seqloom[train,hf]': give its folder to a command, or call "
    "seqloom.integrations.transformers.describe_model"
)


@dataclass(frozen=True, slots=True)
class Family:
    """Facts that a ``model_type`` implies and its config does not state."""

    gated: bool = True
    tied: bool = False
    """Default of ``tie_word_embeddings``."""
    learned_positions: bool = False
    window: str = "none"
    """Which layers a ``sliding_window`` applies to when ``layer_types`` is absent: none, all, upper (from
    ``max_window_layers`` up, if ``use_sliding_window``), alternate (every ``sliding_window_pattern``-th is
    full)."""
    latent: bool = False
    """Latent attention (MLA)."""
    defaults: Config = field(default_factory=dict)
    """Values of keys that published configs leave out."""


_GEMMA3: Config = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}

_QWEN: Config = {"sliding_window": 4096, "max_window_layers": 28}
_LATENT: dict[str, int] = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
_DEEPSEEK3: dict[str, int] = _LATENT | {"v_head_dim": 128, "n_shared_experts": 1, "first_k_dense_replace": 3}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": Family(window="all", defaults={"sliding_window": 4096}),
    "ministral": Family(window="all"),
    "mixtral": Family(window="all"),
    "qwen2": Family(window="upper", defaults=_QWEN),
    "qwen2_moe": Family(window="upper", defaults=_QWEN),
    "qwen3": Family(window="upper", defaults=_QWEN),
    "qwen3_moe": Family(window="upper", defaults=_QWEN),
    "gemma": Family(tied=True),
    "gemma2": Family(tied=True, window="alternate", defaults={"sliding_window": 4096, "sliding_window_pattern": 2}),
    "gemma3": Family(tied=True, window="alternate", defaults=_GEMMA3),
    "gemma3_text": Family(tied=True, window="alternate", defaults=_GEMMA3),
    "phi3": Family(window="all"),
    "granite": Family(),
    "smollm3": Family(tied=True),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family(window="alternate", defaults={"sliding_window": 4096, "sliding_window_pattern": 4}),
    "olmoe": Family(),
    "starcoder2": Family(gated=False, tied=True, window="all"),
    "deepseek": Family(),
    "deepseek_v2": Family(latent=True, defaults=_LATENT | {"v_head_dim": 128}),
    "deepseek_v3": Family(latent=True, defaults=_DEEPSEEK3),
    "kimi_k2": Family(latent=True, defaults=_DEEPSEEK3),
    "axk1": Family(latent=True, defaults=_DEEPSEEK3 | {"first_k_dense_replace": 1}),
    "glm4_moe_lite": Family(latent=True, defaults=_DEEPSEEK3 | {"first_k_dense_replace": 1}),
    "youtu": Family(latent=True, tied=True, defaults=_LATENT | {"v_head_dim": 128}),
    "minicpm3": Family(latent=True, tied=True, defaults=_LATENT),
    "glm4_moe": Family(),
    "gpt2": Family(gated=False, tied=True, learned_positions=True, defaults={"n_positions": 1024}),
    "gpt_neox": Family(gated=False),
}
"""Values of ``model_type`` whose shapes follow from the config. Of these `deepseek` and `kimi_k2` are for plans alone:
transformers has no code of them."""

_NAMES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer"),
    "hidden": ("hidden_size", "n_embd"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner"),
    "vocabulary": ("vocab_size",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_ffn": ("moe_intermediate_size", "intermediate_size"),
    "active_experts": ("num_experts_per_tok", "num_experts_per_token", "moe_topk"),
    "positions": ("n_positions", "max_position_embeddings"),
}
"""Our field -> the keys that configs use for it."""

LATENT = "kv_lora_rank"
"""The key of latent attention."""
_REFUSED: Mapping[str, str] = {
    LATENT: "latent attention (MLA), whose keys and values are not per head,",
    "ssm_cfg": "state-space layers",
    "state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "ssm_state_size": "state-space layers",
    "linear_num_value_heads": "linear-attention layers",
    "attention_chunk_size": "chunked attention",
    "hybrid_override_pattern": "hybrid layers",
}
"""A key with a value -> a feature of the model that a ModelSpec cannot describe."""


def model_from_config(config: Config, *, name: str | None = None) -> ModelSpec:
    """Describe the model of a Hugging Face config, the language model of a multimodal one (``text_config``).

    Without a ``name`` the spec is named by ``_name_or_path`` or the model type.
    """
    try:
        return _model_from_config(config, name)
    except SeqloomError:
        raise
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise SeqloomError(f"a value of the config is of a wrong type ({error}); {WAY_OUT}") from error


def _model_from_config(config: Config, name: str | None) -> ModelSpec:
    text = config.get("text_config")
    if isinstance(text, Mapping):
        inherited = {key: config[key] for key in ("model_type", "tie_word_embeddings") if key in config}
        config = inherited | dict(text)
    family = _family(config)
    merged = {**family.defaults, **config}  # an explicit null overrides a default
    config = {key: value for key, value in merged.items() if value is not None}
    _refuse(config, latent=family.latent)
    layers = _number(config, "layers", least=1, most=MAX_LAYERS)
    hidden, heads = (_number(config, key, least=1) for key in ("hidden", "heads"))
    if "head_dim" not in config and hidden % heads and not family.latent:
        raise SeqloomError(f"hidden size {hidden} is not a multiple of {heads} heads; add head_dim to the config")
    by_head = _latent_heads(config, heads, hidden) if family.latent else _plain_heads(config, heads, hidden)
    return ModelSpec(
        name=name or str(config.get("_name_or_path") or config["model_type"]),
        layers=layers,
        hidden=hidden,
        heads=heads,
        ffn=_number(config, "ffn", 4 * hidden if config["model_type"] == "gpt2" else None),
        gated=family.gated,
        vocabulary=_number(config, "vocabulary"),
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        windows=_windows(config, family, layers),
        causal=config.get("is_causal") is not False,
        learned_positions=family.learned_positions,
        **by_head,
        **_experts(config, layers),
    )


def position_rows(config: Config) -> int:
    """Return the longest document that a model takes that has a table of positions (`learned_positions`)."""
    family = FAMILIES.get(config.get("model_type", ""), Family())
    return _number({**family.defaults, **config}, "positions", least=1)


def _family(config: Config) -> Family:
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise SeqloomError(f"no 'model_type': this is not a Hugging Face config; {WAY_OUT}")
    if kind not in FAMILIES:
        _refuse(config)
        raise SeqloomError(
            f"model_type {kind!r}: its shapes do not follow from the config alone, as those of llama, qwen3 and "
            f"{len(FAMILIES) - 2} other types do; {WAY_OUT}"
        )
    return FAMILIES[kind]


def _refuse(config: Config, *, latent: bool = False) -> None:
    """Raise for what a ModelSpec cannot describe: a wrong cost is worse than none."""
    kind = config.get("model_type")
    for key, what in _REFUSED.items():
        if config.get(key) and not (latent and key == LATENT):
            raise SeqloomError(f"model_type {kind!r} with {key} = {config[key]!r}: {what} is not supported; {WAY_OUT}")
    if config.get("is_encoder_decoder"):
        raise SeqloomError(f"model_type {kind!r} is an encoder-decoder, which is not supported; {WAY_OUT}")


def _number(config: Config, name: str, default: int | None = None, *, least: int = 0, most: int = MAX_SIZE) -> int:
    """Return the whole number that the config gives for our field ``name``, or for a key of its own."""
    keys = _NAMES.get(name, (name,))
    key = next((key for key in keys if config.get(key) is not None), keys[0])
    value = config.get(key, default)
    if value is None:
        raise SeqloomError(f"key {key!r} is missing; add it to the config")
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SeqloomError(f"{key} = {value!r}; it must be a whole number from {least} to {most}")
    return value


def _plain_heads(config: Config, heads: int, hidden: int) -> dict[str, Any]:
    """Return the fields of attention by heads."""
    return {
        "kv_heads": _number(config, "kv_heads", heads),
        "head_dim": _number(config, "head_dim", hidden // heads),
    }


def _latent_heads(config: Config, heads: int, hidden: int) -> dict[str, Any]:
    """Return the fields of latent attention; a key has a part that is rotated, and one that is not."""
    values = _number(config, "v_head_dim", hidden // heads, least=1)
    rotated = _number(config, "qk_rope_head_dim", least=1)
    head_dim = max(values, rotated + _number(config, "qk_nope_head_dim", least=1))
    return {
        "kv_heads": heads,
        "head_dim": head_dim,
        "latent": _number(config, LATENT, least=1),
        "rotated": rotated,
        "value_dim": values,
        "query_latent": _number(config, "q_lora_rank", 0),
    }


def _windows(config: Config, family: Family, layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, from ``layer_types`` or from the rule of the family."""
    window = _number(config, "sliding_window") or None if config.get("sliding_window") is not None else None
    types = config.get("layer_types")
    if types is not None:
        return tuple(_window_of(str(kind), window) for kind in types)
    if window is None or family.window == "none":
        return (None,) * layers
    if family.window == "all":
        return (window,) * layers
    if family.window == "upper":
        first = _number(config, "max_window_layers") if config.get("use_sliding_window") else layers
        return tuple(window if layer >= first else None for layer in range(layers))
    pattern = _number(config, "sliding_window_pattern", least=1)
    return tuple(window if (layer + 1) % pattern else None for layer in range(layers))


def _window_of(kind: str, window: int | None) -> int | None:
    if kind == "full_attention":
        return None
    if kind != "sliding_attention":
        raise SeqloomError(f"layer_types holds {kind!r}; only full and sliding attention are supported; {WAY_OUT}")
    if window is None:
        raise SeqloomError("layer_types has sliding_attention but sliding_window is missing; add it to the config")
    return window


def _experts(config: Config, layers: int) -> dict[str, Any]:
    """Return the fields of the experts; none for a dense model."""
    experts = _number(config, "experts", 0)
    sparse = _sparse_layers(config, layers) if experts else ()
    if not sparse:
        return {}
    width = _number(config, "expert_ffn")
    shared = _number(config, "shared_expert_intermediate_size", width * _number(config, "n_shared_experts", 0))
    return {
        "experts": experts,
        "active_experts": _number(config, "active_experts"),
        "expert_ffn": width,
        "shared_ffn": shared,
        "counts_routing": bool(config.get("output_router_logits")) and config.get("router_aux_loss_coef") != 0,
        "moe_layers": sparse,
    }


def _sparse_layers(config: Config, layers: int) -> tuple[int, ...]:
    """Return the layers with experts: as listed, or by the rules of Qwen (every so many) and DeepSeek (from one up)."""
    if config.get("mlp_layer_types") is not None:
        return tuple(layer for layer, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse")
    step = _number(config, "decoder_sparse_step", 1, least=1)
    frequency = _number(config, "moe_layer_freq", 1, least=1)
    first = _number(config, "first_k_dense_replace", 0)
    dense = set(config.get("mlp_only_layers", ()))
    return tuple(
        layer
        for layer in range(layers)
        if (layer + 1) % step == 0 and layer >= first and layer % frequency == 0 and layer not in dense
    )
