"""Ranks of unequal speed: how many times as fast as by the profile each rank computes.

A speed scales what tokens take on the device: matrix products, elementwise work, kernels. It does not scale messages,
nor what a round, a group or a step takes without tokens, nor the optimiser. The ranks of a group have equal shares of
its documents and wait for each other in every layer, so a group computes as fast as its slowest rank. Plans, prices and
the bound are those of equal ranks wherever all speeds are 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from seqloom.errors import SeqloomError

LEAST_SPEED, MOST_SPEED = 0.05, 20.0
"""Slower ranks are of no use to a step, and nothing is that much faster than a profile."""
DECIMALS = 4
"""Speeds are rounded to so many decimals: equal ones are equal, and few classes of groups differ."""


@dataclass(frozen=True)
class RankSpeeds:
    """The speed of every rank; no values where all are 1."""

    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, ranks: int, *factors: Sequence[float] | None) -> RankSpeeds:
        """Multiply speeds of the ranks, or of equal runs of them such as nodes, rank by rank."""
        speeds = np.ones(ranks)
        for each in factors:
            if each is None or not len(each):
                continue
            if ranks % len(each):
                raise SeqloomError(
                    f"{len(each)} speeds for {ranks} ranks; give one for each rank, or one for each node"
                )
            speeds = speeds * np.repeat(np.array(each, dtype=np.float64), ranks // len(each))
        values = tuple(round(speed, DECIMALS) for speed in speeds.tolist())
        wrong = [(rank, speed) for rank, speed in enumerate(values) if not LEAST_SPEED <= speed <= MOST_SPEED]
        if wrong:
            rank, speed = wrong[0]
            raise SeqloomError(
                f"rank {rank} has a speed of {speed:g}; speeds are relative to the profile: give {LEAST_SPEED:g} to "
                f"{MOST_SPEED:g}, or leave the rank out"
            )
        return cls(() if all(speed == 1 for speed in values) else values)

    def __bool__(self) -> bool:
        """Whether some rank differs from the profile."""
        return bool(self.values)

    @cached_property
    def slowness(self) -> np.ndarray:
        """float64[ranks]: times as long as by the profile that a rank computes. Only where some rank differs."""
        return 1.0 / np.array(self.values)

    def of_group(self, ranks: Iterable[int]) -> float:
        """Times as long as by the profile that a group of these ranks computes: its slowest rank."""
        return float(self.slowness[list(ranks)].max()) if self.values else 1.0

    @cached_property
    def classes(self) -> tuple[float, ...]:
        """Every slowness that ranks have, and so every one that a group may have, the fastest first."""
        return tuple(np.unique(self.slowness).tolist()) if self.values else (1.0,)

    @cached_property
    def class_of_rank(self) -> np.ndarray:
        """int64[ranks]: index of the class of every rank. Only where some rank differs."""
        return np.searchsorted(np.array(self.classes), self.slowness)

    def total(self, ranks: int) -> float:
        """Ranks of speed 1 that compute as much."""
        return float(np.sum(self.values)) if self.values else ranks
