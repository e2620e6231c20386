"""Published constants of Hydraulis: costs of parallel configs, and the memory formula of the longest micro-batch.

What a switch of strategies moves is ours: bf16 parameters in and float32 gradients out, on one nic of each GPU.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from seqloom.errors import unknown_name
from seqloom.planners.hydraulis.strategy import ConfigCost, ParallelConfig, Strategy

MIB = 1024**2
GPUS, NODE = 64, 8
PARAMETERS, CARD_BYTES_NS, BUNDLES = 32.1e9, 25.0, 62
REPLAYED = {
    32 * 1024: {"fixed packing": 7.98, "two-stage, published clock": 6.25, "published list, published clock": 5.11},
    16 * 1024: {"fixed packing": 6.45, "two-stage, published clock": 5.74, "published list, published clock": 4.63},
}
"""Context -> rung -> seconds, of a replay of the released 32B constants on Wikipedia lengths, no switch cost."""
ROUNDED_TO = 128
"""Tokens: longest lengths are rounded down to a multiple of this."""


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """One published model: sizes, memory constants and the cost of every parallel config.

    Attributes:
        optimiser: (data parallel, tensor, stages) of the layout in which the optimiser's share of the state lies.
        activation_bytes: per token x hidden / tensor x layer, by tensor degree.
        configs: (tensor, stages) to (a ms per token squared, b ms per token, c ms).
    """

    layers: int
    hidden: int
    vocabulary: int
    device_mib: int
    gap_mib: int
    safety_gib: int
    state_bytes: int
    optimiser_share: float
    optimiser: tuple[int, int, int]
    activation_bytes: dict[int, int]
    configs: dict[tuple[int, int], tuple[float, float, float]]

    def state(self, tensor: int, stages: int) -> float:
        """Bytes of a GPU before any token: the optimiser's share in its own layout, the rest as the config computes."""
        replicas, own_tensor, own_stages = self.optimiser
        kept = self.optimiser_share / replicas
        layers = self.layers * self.hidden**2 * self.state_bytes
        tables = self.hidden * self.vocabulary
        own = layers / (own_stages * own_tensor) * kept + tables / own_tensor * _table_bytes(own_stages) * kept
        rest = layers / (stages * tensor) + tables / tensor * _table_bytes(stages)
        return own + rest * (1 - self.optimiser_share)

    def longest(self, tensor: int, stages: int) -> int:
        """Tokens of the longest micro-batch; stages do not help, since 1F1B keeps one micro-batch per stage."""
        room = (self.device_mib - self.safety_gib * 1024 - self.gap_mib) * MIB - self.state(tensor, stages)
        each = self.layers * self.hidden / tensor * self.activation_bytes[tensor]
        return max(0, int(room // each) // ROUNDED_TO * ROUNDED_TO)

    def costs(self) -> dict[ParallelConfig, ConfigCost]:
        """Costs of every published config that holds a token, in ns."""
        return {
            ParallelConfig(stages, tensor): ConfigCost(a * 1e6, b * 1e6, round(c * 1e6), self.longest(tensor, stages))
            for (tensor, stages), (a, b, c) in self.configs.items()
            if self.longest(tensor, stages) > 0
        }


def published_model(name: str) -> PublishedModel:
    """Return the published constants of ``7b``, ``13b`` or ``32b``."""
    known = _tables()
    if name not in known:
        raise unknown_name("published model", name, known)
    return known[name]


def _table_bytes(stages: int) -> int:
    """Bytes per entry of embedding and head; with several stages no GPU has both."""
    return 32 if stages == 1 else 16


@cache
def _tables() -> dict[str, PublishedModel]:
    content = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return {name: _model(content["common"] | entry) for name, entry in content["models"].items()}


def _model(entry: dict[str, Any]) -> PublishedModel:
    rows = {(tensor, stages): tuple(prices) for tensor, stages, *prices in entry["schemes"]}
    own: dict[str, Any] = {
        "optimiser": tuple(entry["optimiser"]),
        "activation_bytes": {int(tensor): size for tensor, size in entry["activation_bytes"].items()},
        "configs": rows,
    }
    return PublishedModel(**{key: value for key, value in (entry | own).items() if key != "schemes"})


def moved_ns(chosen: Strategy) -> tuple[int, int]:
    """(parameters in, gradients out) of the fullest GPU, ns on its nic."""
    held = PARAMETERS / min(pipe.parallel.tensor * pipe.parallel.stages for pipe in chosen.pipelines)
    away = held * (GPUS - NODE) / GPUS
    return round(2 * away / CARD_BYTES_NS), round(4 * away / CARD_BYTES_NS)


def exposed_ns(chosen: Strategy, step_ns: int) -> int:
    """ns that bundles do not hide: the first one, and what exceeds forward or backward."""
    return sum(
        round(moved / BUNDLES + max(0.0, moved - moved / BUNDLES - share * step_ns))
        for moved, share in zip(moved_ns(chosen), (1 / 3, 2 / 3), strict=True)
    )
