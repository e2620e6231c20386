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

WINDOWS = (6, 8, 12, 16, 24)
"""Numbers of latest steps by which a speed is judged: the fewest by which it is certain."""
CERTAIN = 5.0
"""Standard errors from which on a difference is certain, where many steps are known; fewer need more (`_quantile`)."""
TRIMMED = 8
"""Of so many steps the slowest and the fastest do not count: something else ran on the machine."""
MOST_RATIO = 4.0
"""A rank's time per token over the median rank's is cut off here, in every step."""
DEAD_BAND = 0.05
"""A speed changes by this share at least: equal ranks stay equal."""
MOST_CHANGE = 1.5
"""Ratio by which a speed changes at most; for more it takes other steps."""
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
    has. A speed changes if the latest steps are certain of it by their spread (Yuen's test: trimmed means, winsorised
    deviations), so a few slow steps change nothing, and the more a machine's times scatter, the more steps it takes.
    A step that has changed a speed does not count for it again. Equal times give equal speeds.

    Attributes:
        values: in use, relative to the median rank, one for each rank; () where all are alike.
    """

    def __init__(self, described: RankSpeeds, ranks: int, state: Mapping[str, Any] | None = None) -> None:
        """Begin with what `state_dict` returned; None: with equal speeds."""
        self._ranks, self._described = ranks, np.array(described.values or [1.0] * ranks)
        state = {} if state is None else state
        self.values: tuple[float, ...] = tuple(state.get("values", ()))
        self._steps: deque[list[float]] = deque(map(list, state.get("steps", ())), maxlen=WINDOWS[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return everything as JSON can hold it."""
        return {"values": list(self.values), "steps": [list(step) for step in self._steps]}

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
        slower = np.clip(rate - np.nanmedian(rate), -math.log(MOST_RATIO), math.log(MOST_RATIO))
        self._steps.append([UNKNOWN if np.isnan(each) else round(each, 6) for each in slower.tolist()])
        before = self.values or (1.0,) * self._ranks
        found = self._judge(np.array(before))
        changed = [rank for rank in range(self._ranks) if found[rank] != before[rank]]
        if not changed:
            return ""
        for step in self._steps:
            for rank in changed:
                step[rank] = UNKNOWN
        self.values = () if all(speed == 1 for speed in found) else found
        moved = [f"rank {rank} {before[rank]:g} -> {found[rank]:g}" for rank in changed]
        rest = f" and {len(moved) - NAMED} more" if len(moved) > NAMED else ""
        return f"speeds of ranks, relative to the median rank: {', '.join(moved[:NAMED])}{rest}"

    def _judge(self, used: np.ndarray) -> tuple[float, ...]:
        """Return the speed of every rank by the latest steps, or the one in use."""
        steps = np.array(self._steps)
        steps[steps == UNKNOWN] = np.nan
        known_last = np.argsort(~np.isnan(steps), axis=0, kind="stable")
        known = np.take_along_axis(steps, known_last, axis=0)
        noise = _noise(known)
        found, open_ = used.copy(), np.ones(self._ranks, dtype=bool)
        for count in WINDOWS:
            if count > len(known):
                break
            slower, band = _mean_and_band(known[-count:], noise)  # nan where a rank has measured fewer steps
            certain = open_ & (np.abs(-slower - np.log(used)) > band)
            most = math.log(MOST_CHANGE) + 1e-9
            moved = np.exp(np.clip(-slower, np.log(used) - most, np.log(used) + most))
            found[certain] = np.where(np.abs(np.log(moved)) <= DEAD_BAND, 1.0, moved.round(LEARNED_DECIMALS))[certain]
            open_ &= ~certain
        return tuple(found.tolist())


def _noise(steps: np.ndarray) -> np.ndarray:
    """Return the deviation of every column of [steps, ranks] from step to step, at least that of the median rank.

    Six steps may be alike by chance where a rank loses its core in half of them; all steps of all ranks are not. A
    rank whose speed has changed has one large difference, which is left out with the largest quarter of them.
    """
    squares = np.sort(np.diff(steps, axis=0) ** 2, axis=0)  # nan comes last
    kept = (3 * np.isfinite(squares).sum(axis=0) + 3) // 4
    inside = np.arange(len(squares))[:, None] < kept
    own = np.sqrt(np.where(inside, squares, 0.0).sum(axis=0) / (2 * np.maximum(kept, 1)))
    return np.maximum(own, np.median(own[kept > 0]) if kept.any() else 0.0)


def _mean_and_band(steps: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the trimmed mean of every column of [steps, ranks], and from which distance a value certainly differs."""
    count, cut = len(steps), len(steps) // TRIMMED
    ordered = np.sort(steps, axis=0)
    kept = ordered[cut : count - cut]
    deviation = np.maximum(noise, np.clip(ordered, kept[0], kept[-1]).std(axis=0, ddof=1))
    error = deviation * math.sqrt(count) / len(kept)
    return kept.mean(axis=0), np.maximum(DEAD_BAND, _quantile(len(kept) - 1) * error)


def _quantile(freedom: int) -> float:
    """Quantile of Student's t of the same probability as `CERTAIN` of a normal variable (Gaver and Kafadar, 1984)."""
    power = CERTAIN**2 * (freedom - 5 / 6) / (freedom - 2 / 3 + 0.1 / freedom) ** 2
    return math.sqrt(freedom * math.expm1(power))


UNKNOWN = -99.0
"""In place of what a rank has not measured, or what has changed its speed, as JSON can hold it."""
NAMED = 8
"""Ranks that a message names."""
