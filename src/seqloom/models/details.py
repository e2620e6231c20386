"""What a model computes beyond its shapes: a `ModelSpec` leaves it out, since no time and no memory depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from seqloom.errors import SeqloomError, unknown
from seqloom.models.rope import Rope, Stretch

_FAMILIES: Mapping[str, Mapping[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
}
_EXPECTED: Mapping[str, object] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "partial_rotary_factor": 1.0,
}
"""Keys of a config that the model has no other value for."""


@dataclass(frozen=True, slots=True)
class Details:
    """Constants and switches of the Llama family.

    Attributes:
        rope: rotary positions.
        eps: added to the mean square in every norm.
        qk_norm: queries and keys are normalised per head before they are turned (Qwen 3).
        qkv_bias: the query, key and value projections have biases (Qwen 2).
    """

    rope: Rope = field(default_factory=Rope)
    eps: float = 1e-6
    qk_norm: bool = False
    qkv_bias: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Details:
        """Read the content of a Hugging Face ``config.json``, beside `ModelSpec.load`, which reads the shapes.

        Raises:
            SeqloomError: a model type or a setting that the reference transformer does not have.
        """
        kind = str(config.get("model_type"))
        if kind not in _FAMILIES:
            raise unknown("model_type of the reference transformer", kind, _FAMILIES)
        for key, expected in _EXPECTED.items():
            value = config.get(key)
            if value is not None and value != expected:
                raise SeqloomError(f"{key} = {value!r}: the reference transformer has {expected!r} only; leave it out")
        return cls(rope=_rope(config), eps=float(config.get("rms_norm_eps", 1e-6)), **_FAMILIES[kind])


def _rope(config: Mapping[str, Any]) -> Rope:
    """Read both spellings: `rope_parameters` with theta inside, and `rope_scaling` with theta beside it."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(given.get("rope_theta", config.get("rope_theta", 10_000.0)))
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind != "llama3":
        raise SeqloomError(f"rope scaling {kind!r}: the reference transformer has 'default' and 'llama3' only")
    keys = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    missing = [key for key in keys if key not in given]
    if missing:
        raise SeqloomError(f"rope scaling 'llama3' without {', '.join(missing)}; add it to the config")
    factor, low, high, context = (given[key] for key in keys)
    return Rope(theta, Stretch(float(factor), float(low), float(high), int(context)))
