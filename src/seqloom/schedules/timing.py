"""Timing of a schedule: when every action starts and stops, and how long pipeline ranks wait.

Every pipeline rank runs its row in order, an action as soon as the rank is free and its input is there. So the result
is the earliest time for the given order; nothing is decided here. Times are integers in the caller's unit
(nanoseconds for a planner).

This is the only place that times an order that is given. `fill_bubbles` and `list_schedule` decide an order while time
passes, so they have event loops of their own; the closed form of 1F1B in `planners.loops` is called hundreds of
thousands of times per plan, where building a `Schedule` would take too long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import NamedTuple

import numpy as np

from seqloom.plan.action import B, F, W
from seqloom.schedules.memory import peak_memory
from seqloom.schedules.schedule import Schedule, Unit


class Times(NamedTuple):
    """Durations, int64[stages, units] each. B takes `backward_input + backward_weight`, W by itself `split_weight`."""

    forward: np.ndarray
    backward_input: np.ndarray
    """The half with respect to the input (I)."""
    backward_weight: np.ndarray
    """The half with respect to the weights (W)."""
    split_overhead: np.ndarray | int = 0
    """What I and W together take more than B; any shape that broadcasts."""

    @property
    def split_weight(self) -> np.ndarray:
        """W with the overhead of splitting."""
        return self.backward_weight + self.split_overhead

    @classmethod
    def uniform(cls, schedule: Schedule, forward: int = 1, backward_input: int = 1, backward_weight: int = 1) -> Times:
        """Return times that are the same for all units and stages."""
        shape = len(schedule.pp_ranks), len(schedule.units)
        return cls(*(np.full(shape, value, dtype=np.int64) for value in (forward, backward_input, backward_weight)))


@dataclass(frozen=True, slots=True)
class ScheduleTiming:
    """When everything happens.

    Pipeline ranks that begin later than others may end later too. Where no barrier ends a step, the next step begins
    so as well, and a step costs `step_time`. In most orders the first pipeline rank begins first and ends last, and
    `step_time` is the makespan.

    Attributes:
        start, stop: of every action, in the shape of the schedule's rows.
        makespan: from the first start to the last stop.
        step_time: the longest that any pipeline rank takes from its first action to its last.
        bubble: idle share, idle / (pipeline ranks * step_time).
    """

    start: tuple[tuple[int, ...], ...]
    stop: tuple[tuple[int, ...], ...]
    makespan: int
    step_time: int
    bubble: float


def simulate_schedule(schedule: Schedule, times: Times, message: int = 0) -> ScheduleTiming:
    """Run a schedule whose rows are in an order that ends; see `Schedule.validate`.

    `message` is the time from the end of an action to its result being on the next stage's pipeline rank.
    """
    start, stop = _run_rows(schedule, times, message)
    if any(len(done) < len(row) for done, row in zip(stop, schedule.rows, strict=True)):
        schedule.validate()  # says why
    ends = [(begins[0], stops[-1]) for begins, stops in zip(start, stop, strict=True) if stops]
    makespan = max((last for _, last in ends), default=0)
    step_time = max((last - first for first, last in ends), default=0)
    busy = sum(sum(stops) - sum(begins) for begins, stops in zip(start, stop, strict=True))
    bubble = 1 - busy / (len(start) * step_time) if step_time else 0.0
    return ScheduleTiming(tuple(map(tuple, start)), tuple(map(tuple, stop)), makespan, step_time, bubble)


def _run_rows(schedule: Schedule, times: Times, message: int) -> tuple[list[list[int]], list[list[int]]]:
    """Run all rows as far as they go; return the start and stop of every action that ran.

    A row that waits is taken up again when a row with a neighbouring stage has gone on.
    """
    pp_ranks, rows, chain = schedule.pp_ranks, schedule.rows, schedule.chain
    previous = [chain.previous(s) for s in range(len(pp_ranks))]
    following = [chain.following(s) for s in range(len(pp_ranks))]
    forward, backward, weight, split_weight = (column.tolist() for column in (*times[:3], times.split_weight))
    forward_end: list[list[int]] = [[-1] * len(schedule.units) for _ in pp_ranks]
    backward_end: list[list[int]] = [[-1] * len(schedule.units) for _ in pp_ranks]  # of B or I
    delay = [message if s and pp_ranks[s] != pp_ranks[before] else 0 for s, before in enumerate(previous)]
    start: list[list[int]] = [[] for _ in rows]
    stop: list[list[int]] = [[] for _ in rows]
    neighbours = schedule.neighbours
    runnable = list(range(len(rows)))
    while runnable:
        pp_rank = runnable.pop()
        begins, stops = start[pp_rank], stop[pp_rank]
        first, now = len(stops), stops[-1] if stops else 0
        for action in islice(rows[pp_rank], first, None):
            s, kind, u = action.stage, action.kind, action.round
            assert u is not None
            if kind is F:
                if s:
                    ready = forward_end[previous[s]][u]
                    if ready < 0:
                        break
                    if ready + delay[s] > now:
                        now = ready + delay[s]
                begins.append(now)
                forward_end[s][u] = now = now + forward[s][u]
            elif kind is W:
                begins.append(now)
                now += split_weight[s][u]
            else:
                ready = 0
                for after in following[s]:
                    ready = backward_end[after][u]
                    if ready < 0:
                        break
                    if ready + delay[after] > now:
                        now = ready + delay[after]
                if ready < 0:
                    break
                begins.append(now)
                backward_end[s][u] = now = now + backward[s][u] + (weight[s][u] if kind is B else 0)
            stops.append(now)
        if len(stops) > first:
            runnable.extend(neighbours[pp_rank])
    return start, stop


class ScheduleMetrics(NamedTuple):
    """Bubble, times and memory of a schedule of equal micro-batches on equal stages, in the unit of the given times."""

    bubble: float
    step_time: float
    makespan: float
    peak_memory: tuple[float, ...]
    """Per pipeline rank, in micro-batches on all its stages: 1F1B holds p."""
    timing: ScheduleTiming
    """The same in integers, with the start and stop of every action."""


def schedule_metrics(
    schedule: Schedule, forward: Fraction, backward_input: Fraction, backward_weight: Fraction
) -> ScheduleMetrics:
    """Time a schedule of equal micro-batches; see `ScheduleTiming` for the figures.

    The times are those of a whole micro-batch on all stages of a pipeline rank.
    """
    given = (forward, backward_input, backward_weight)
    denominator = math.lcm(*(value.denominator for value in given))
    sizes, one = unit_sizes(schedule.pp_ranks, schedule.units)
    timing = simulate_schedule(schedule, Times(*(sizes * int(value * denominator) for value in given)))
    unit = denominator * one
    peak = tuple(most / one for most in peak_memory(schedule, sizes))
    return ScheduleMetrics(timing.bubble, timing.step_time / unit, timing.makespan / unit, peak, timing)


def unit_sizes(pp_ranks: Sequence[int], units: Sequence[Unit]) -> tuple[np.ndarray, int]:
    """Return int64[stages, units], each unit's share of a micro-batch on a pipeline rank, and what the whole is.

    A piece is an equal part of its micro-batch, a chunk an equal part of its pipeline rank's layers.
    """
    count = Counter(pp_ranks)
    chunks = np.array([count[pp_rank] for pp_rank in pp_ranks], dtype=np.int64)
    parts = np.outer(chunks, np.array([unit.pieces for unit in units], dtype=np.int64))
    one = math.lcm(*np.unique(parts).tolist())
    return one // parts, one
