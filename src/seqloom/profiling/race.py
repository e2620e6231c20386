"""A paired race on these ranks: training steps of the same batches under two planners, in turns.

The ranks first measure a profile, unless that of this machine is stored (`profiling.stored`), plan every batch with it,
and predict how much faster the second planner is. A race whose predicted gain would drown in the noise of the machine
is not run (`LEAST_GAIN`). Each pair of steps gives a ratio of times; the other work of the machine meets both steps of
a pair alike. The median ratio counts, with an interval that holds the true one in 95 % of races, whatever the noise is
like: it goes from one order statistic to another.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import comb
from typing import Any

import numpy as np
import torch

from seqloom.api import cost_model
from seqloom.describe import ModelSpec
from seqloom.dist import Transport
from seqloom.planners import make_plan
from seqloom.profiling.calibration import Calibrator
from seqloom.profiling.stored import measured_profile
from seqloom.simulate import predicted_ns

LEAST_GAIN = 1.15
"""Predicted ratio of times from which on a race is run."""
TURNS = 2
"""How often every batch is run under both planners; in the second turn in the other order."""
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class RaceSettings:
    """What is raced."""

    spec: ModelSpec
    batches: tuple[tuple[int, ...], ...]  # lengths, tokens
    planners: tuple[str, str]  # the time of the first / that of the second is the ratio
    capacity: int  # tokens of a rank in a round
    sharding: str = "full"
    profiles: str | None = None  # folder of stored profiles; None: `stored.stored_profiles`

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(map(max, self.batches))

    @property
    def pairs(self) -> int:
        """Pairs of steps of a race."""
        return TURNS * len(self.batches)


@dataclass(frozen=True, slots=True)
class RaceResult:
    """Predicted and measured ratio of times."""

    planners: tuple[str, str]
    predicted: float  # sum over batches, by the calibrated profile
    calibration_error: float  # mean over its trials, relative
    ratios: tuple[float, ...]  # of every pair of steps; none: the race was not run

    @property
    def median(self) -> float | None:
        """The measured ratio; None: the race was not run."""
        return statistics.median(self.ratios) if self.ratios else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between which ratios the median lies with `CONFIDENCE`; None: the race was not run."""
        return median_interval(self.ratios) if self.ratios else None

    @property
    def conclusive(self) -> bool:
        """Whether the interval is on one side of 1."""
        return self.interval is not None and not self.interval[0] <= 1 <= self.interval[1]

    def to_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return asdict(self) | {"median": self.median, "interval": self.interval, "conclusive": self.conclusive}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return a confidence interval of the median that assumes nothing of the distribution but independence.

    The median is above the k-th of n sorted values unless fewer than k of them are below it, of which the binomial
    distribution gives the probability. With fewer than six values the interval is all of them.
    """
    ordered, n = sorted(values), len(values)
    below, outside = 0, 0.0
    while below < (n - 1) // 2:
        outside += 2 * comb(n, below) / 2**n
        if outside > 1 - CONFIDENCE:
            break
        below += 1
    first = max(0, below - 1)
    return ordered[first], ordered[n - 1 - first]


def race(
    settings: RaceSettings,
    transport: Transport,
    device: torch.device,
    report: Callable[[str], None] = lambda text: None,
) -> RaceResult:
    """Calibrate, predict and, where the gain shows, race. All ranks call it and get the same."""
    options = {"sharding": settings.sharding, "capacity": settings.capacity, "max_length": settings.longest}
    cluster = f"1x{transport.ranks}xCPU"
    calibrator = Calibrator(cost_model(cluster, settings.spec, **options), transport, device, torch.float32)
    measure = partial(measured_profile, calibrator, settings.longest, folder=settings.profiles)
    measured, _ = measure(lambda text: report(f"measuring: {text}"))
    cost = cost_model(cluster, settings.spec, profile=measured.profile, **options)
    report("planning")
    pairs = [[make_plan(name, np.array(each), cost) for name in settings.planners] for each in settings.batches]
    first, second = (sum(predicted_ns(pair[side], cost) for pair in pairs) for side in (0, 1))
    ratios: list[float] = []
    for turn in range(TURNS if first >= LEAST_GAIN * second else 0):
        for pair in pairs:
            report(f"pair {len(ratios) + 1} of {settings.pairs}")
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            seconds = {side: calibrator.timer.seconds(pair[side]) for side in order}
            ratios.append(seconds[0] / seconds[1])
    return RaceResult(settings.planners, first / second, measured.error, tuple(ratios))
