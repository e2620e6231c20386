"""Ranks of unequal speed: how many times as fast as by the profile each rank computes.

A speed scales what tokens take on the device: matrix products, elementwise work, kernels. It does not scale messages,
nor what a round, a group or a step takes without tokens, nor the optimiser. The ranks of a group have equal shares of
its documents and wait for each other in every layer, so a group computes as fast as its slowest rank. Plans, prices and
the bound are those of equal ranks wherever all speeds are 1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

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

    def of_blocks(self, size: int) -> RankSpeeds:
        """The speeds of neighbouring ranks that do everything together, so many at a time."""
        if not self.values or size == 1:
            return self
        slowest = np.array(self.values).reshape(-1, size).min(axis=1)
        return RankSpeeds.of(len(slowest), slowest.tolist())

    def total(self, ranks: int) -> float:
        """Ranks of speed 1 that compute as much."""
        return float(np.sum(self.values)) if self.values else ranks


# -- learned while a run trains ---------------------------------------------------------------------------------------

WINDOW, LEAST_STEPS = 12, 6
"""Latest steps that count for speeds, and how many of a rank there must be."""
DEAD_BAND, DEVIATIONS = 0.05, 4.0
"""A speed changes by this share at least, and by so many standard errors of its median: equal ranks stay equal."""
LEAST_TOKENS = 0.25
"""Ranks with fewer tokens in a step than this share of the median rank's do not count: they measure launches."""
LEARNED_DECIMALS = 2


class BusyTime(NamedTuple):
    """What a rank computed in a step while it waited for nobody: seconds, and for how many tokens."""

    seconds: float
    tokens: float


class SpeedFeedback:
    """The speeds of a run's ranks as their own busy times say, beside those that the cluster is described with.

    A rank's time per token over that of the median rank of the same step says how much slower it is, whatever the step
    has. The median over the latest steps counts. It replaces the speed in use if it is far from it, by more than the
    noise of steps explains: else plans would change with the noise. Equal times give equal speeds.

    Attributes:
        values: in use, relative to the median rank, one for each rank; () where all are alike.
    """

    def __init__(self, described: RankSpeeds, ranks: int, state: Mapping[str, Any] | None = None) -> None:
        """Begin with what `state_dict` returned; None: with equal speeds."""
        self._ranks, self._described = ranks, np.array(described.values or [1.0] * ranks)
        state = {} if state is None else state
        self.values: tuple[float, ...] = tuple(state.get("values", ()))
        self._steps: deque[list[float]] = deque(state.get("steps", ()), maxlen=WINDOW)

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        return {"values": list(self.values), "steps": list(self._steps)}

    def observe(self, busy: Sequence[BusyTime]) -> str:
        """Count what every rank measured in a step; return how speeds change, "" where none does."""
        seconds, tokens = np.array(busy, dtype=np.float64).reshape(-1, 2).T
        if len(seconds) != self._ranks:
            raise SeqloomError(f"busy times of {len(seconds)} ranks, the run has {self._ranks}; give one for each")
        counts = (seconds > 0) & (tokens > 0)
        if not counts.any():
            return ""
        counts &= tokens >= LEAST_TOKENS * np.median(tokens[counts])
        if counts.sum() < max(2, self._ranks // 2):
            return ""
        rate = np.where(counts, np.log(np.where(counts, seconds / np.maximum(tokens, 1), 1) * self._described), np.nan)
        self._steps.append([UNKNOWN if np.isnan(each) else round(each, 6) for each in rate - np.nanmedian(rate)])
        found = tuple(self._speed_of(rank) for rank in range(self._ranks))
        before = self.values or (1.0,) * self._ranks
        if found == before:
            return ""
        self.values = () if all(speed == 1 for speed in found) else found
        both = enumerate(zip(before, found, strict=True))
        moved = [f"rank {rank} {old:g} -> {new:g}" for rank, (old, new) in both if old != new]
        rest = f" and {len(moved) - NAMED} more" if len(moved) > NAMED else ""
        return f"speeds of ranks, relative to the median rank: {', '.join(moved[:NAMED])}{rest}"

    def _speed_of(self, rank: int) -> float:
        """The speed of a rank by the latest steps, or the one in use."""
        used = self.values[rank] if self.values else 1.0
        slower = np.array([step[rank] for step in self._steps if step[rank] != UNKNOWN])
        if len(slower) < LEAST_STEPS:
            return used
        middle = float(np.median(slower))
        deviation = 1.4826 * float(np.median(np.abs(slower - middle)))  # of normal noise, from its median deviation
        band = max(DEAD_BAND, DEVIATIONS * 1.2533 * deviation / math.sqrt(len(slower)))
        if abs(-middle - math.log(used)) <= band:
            return used
        low, high = math.log(LEAST_SPEED * 2), math.log(MOST_SPEED / 2)
        return 1.0 if abs(middle) <= band else round(math.exp(min(max(-middle, low), high)), LEARNED_DECIMALS)


UNKNOWN = -99.0
"""In place of what a rank has not measured, as JSON can hold it."""
NAMED = 8
"""Ranks that a message names."""
