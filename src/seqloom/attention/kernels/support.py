"""The support matrix of the documentation, asked from the abilities themselves.

Every cell is what a kernel answers to an example: it takes it (supported), takes it but no test of this project runs
it (untested), or refuses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from seqloom.attention.kernels.dispatch import all_abilities
from seqloom.attention.kernels.interface import Ability, AttentionShape
from seqloom.attention.masks import Segments

SUPPORTED, REFUSED, UNTESTED = "supported", "refused", "untested"
ENGINE = "engine"
"""The column of `attention(...)`: some kernel takes it."""


class Feature(NamedTuple):
    """One row: an example that has the feature. Fields left out are those that every kernel takes."""

    name: str
    segments: Segments = Segments.packed([512, 512])
    device: str | None = None
    dtype: torch.dtype | None = None
    dim: int = 128
    kv_heads: int = 8


FEATURES = (
    Feature("CPU", device="cpu"),
    Feature("CUDA", device="cuda"),
    *(
        Feature(str(dtype).removeprefix("torch."), dtype=dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    ),
    *(Feature(f"head dim {dim}", dim=dim) for dim in (64, 80, 100, 128, 192, 256, 512)),
    Feature("grouped-query heads (GQA)", kv_heads=2),
    Feature("one key/value head (MQA)", kv_heads=1),
    Feature("causal, packed documents"),
    Feature("full (not causal), packed documents", Segments.packed([512, 512], causal=False)),
    Feature("sliding window", Segments.packed([512, 512], window=128)),
    Feature("piece with its prefix", Segments.of([(0, 256, 0, 512, 256)])),
    Feature("any offset", Segments.of([(0, 256, 0, 512, 100)])),
    Feature("tile without mask", Segments.of([(0, 256, 0, 512, 512)])),
)
NEVER = ("dropout", "logit soft-cap", "bias, ALiBi", "attention sinks", "values wider or narrower than keys")
"""What a call cannot even say: the engine refuses it before any kernel is asked."""


def support_matrix() -> str:
    """Return the matrix in Markdown: a row per feature, a column per kernel, the engine last."""
    abilities = all_abilities()
    columns = [*abilities, ENGINE]
    rows = [(feature.name, _answers(feature, abilities)) for feature in FEATURES]
    rows += [(name, dict.fromkeys(columns, REFUSED)) for name in NEVER]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells[column] for column in columns) + " |" for name, cells in rows]
    return "\n".join(lines) + "\n"


def _answers(feature: Feature, abilities: Mapping[str, Ability]) -> dict[str, str]:
    """Ask every kernel, and the engine, which has what its best kernel has."""
    cells = {name: _answer(ability, feature) for name, ability in abilities.items()}
    cells[ENGINE] = next(answer for answer in (SUPPORTED, UNTESTED, REFUSED) if answer in cells.values())
    return cells


def _answer(ability: Ability, feature: Feature) -> str:
    """Ask one kernel, on its own device and in its own dtype where the feature names none."""
    shape = AttentionShape(
        heads=8,
        kv_heads=feature.kv_heads,
        dim=feature.dim,
        dtype=feature.dtype or ability.dtypes[0],
        device=torch.device(feature.device or ability.devices[0]),
        scale=feature.dim**-0.5,
    )
    if ability.refusal(feature.segments, shape) is not None:
        return REFUSED
    return SUPPORTED if ability.tested else UNTESTED
