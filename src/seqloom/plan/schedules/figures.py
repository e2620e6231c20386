"""The figures of a schedule of equal micro-batches on equal stages: bubble, makespan, peak memory.

Times are those of a whole micro-batch on all stages of a host. A piece is an equal part of its micro-batch, a chunk an
equal part of its host's share of the model. Memory is in micro-batches on all stages of a host, so 1F1B holds p.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from seqloom.plan.schedules.play import Played, Times, play
from seqloom.plan.schedules.schedule import Schedule, Unit


class Figures(NamedTuple):
    """What a schedule costs, in the unit of the times that were given."""

    bubble: float
    """Idle share of the makespan, over all hosts."""
    makespan: float
    """The longest that a host takes from its first action to its last: what a step costs when steps follow steps."""
    until_end: float
    """From the first start to the last stop; more than the makespan where hosts that begin late also end late."""
    peak_memory: tuple[float, ...]
    """Per host."""
    played: Played
    """The same in integers, with the start and stop of every action."""


def figures(schedule: Schedule, forward: Fraction, backward: Fraction, weights: Fraction) -> Figures:
    """Play a schedule that is in order.

    Args:
        schedule: of equal micro-batches.
        forward: time of a whole micro-batch on all stages of a host.
        backward: the same for the input half of its backward.
        weights: the same for the weight half.
    """
    whole = math.lcm(*(value.denominator for value in (forward, backward, weights)))
    scaled = [int(value * whole) for value in (forward, backward, weights)]
    held, one = sizes(schedule)
    played = play(schedule, Times(*(held * value for value in scaled)), held)
    unit = whole * one
    peak = tuple(most / one for most in played.peak)
    return Figures(played.bubble, played.span / unit, played.makespan / unit, peak, played)


def sizes(schedule: Schedule) -> tuple[np.ndarray, int]:
    """int64[stages, units], the share of a micro-batch on a host that a unit on a stage is; and what all of it is."""
    return shares(schedule.hosts, schedule.units)


def shares(hosts: Sequence[int], units: Sequence[Unit]) -> tuple[np.ndarray, int]:
    """`sizes` of a schedule that is not made yet."""
    count = Counter(hosts)
    chunks = np.array([count[host] for host in hosts], dtype=np.int64)
    pieces = np.array([unit.pieces for unit in units], dtype=np.int64)
    parts = np.outer(chunks, pieces)
    one = math.lcm(*np.unique(parts).tolist())
    return one // parts, one
