"""Play a schedule: when every action starts and stops, how long hosts wait, how much they hold.

Every host runs its row in order, an action as soon as the host is free and what it needs is there. So the result
is the earliest time for the given order; nothing is decided here. All times are integers, in whatever unit the
caller has (nanoseconds for a planner).
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

from seqloom.plan.action import Action, ActionKind
from seqloom.schedules.schedule import Schedule, Unit

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward


class Times(NamedTuple):
    """int64[stages, units] each. A whole backward (B) takes `backward + weights`, W by itself `alone`."""

    forward: np.ndarray
    backward_input: np.ndarray
    """The half with respect to the input (I)."""
    backward_weight: np.ndarray
    """The half with respect to the weights (W)."""
    split_overhead: np.ndarray | int = 0
    """What both halves take more than a whole backward; any shape that fits."""

    @property
    def split_weight(self) -> np.ndarray:
        """W with what splitting costs."""
        return self.backward_weight + self.split_overhead

    @classmethod
    def uniform(cls, schedule: Schedule, forward: int = 1, backward_input: int = 1, backward_weight: int = 1) -> Times:
        """Return times that are the same for all units and stages."""
        shape = len(schedule.pp_ranks), len(schedule.units)
        return cls(*(np.full(shape, value, dtype=np.int64) for value in (forward, backward_input, backward_weight)))


@dataclass(frozen=True, slots=True)
class ScheduleTiming:
    """What came of it."""

    start: tuple[tuple[int, ...], ...]
    """When every action starts, in the shape of the schedule's rows."""
    stop: tuple[tuple[int, ...], ...]
    makespan: int
    """From the first start to the last stop."""
    step_time: int
    """The longest that any host takes from its own first action to its own last."""
    bubble: float
    """Share of the span in which hosts wait: idle / (hosts * span).

    Hosts that begin later than others may end later too: where no barrier ends a step, the next step begins so as
    well, and what a step costs is the span. In most orders the first host begins first and ends last, and the span
    is the makespan.
    """
    peak_memory: tuple[int, ...]
    """The most that every host holds at once, in the unit of `held`."""


def simulate_schedule(
    schedule: Schedule, times: Times, memory: np.ndarray | None = None, message: int = 0
) -> ScheduleTiming:
    """Run the schedule and return when what happened.

    Args:
        schedule: rows in an order that ends; see `Schedule.validate`.
        times: of every unit on every stage.
        memory: int64[stages, units], what a unit holds on a stage from the start of its F to the end of its B or W;
            1 without it.
        message: time between the end of an action and its result being on the next stage's host.
    """
    start, stop = _sweep(schedule, times, message)
    if any(len(done) < len(row) for done, row in zip(stop, schedule.rows, strict=True)):
        schedule.validate()  # which says why
    ends = [(begins[0], stops[-1]) for begins, stops in zip(start, stop, strict=True) if stops]
    makespan = max((last for _, last in ends), default=0)
    span = max((last - first for first, last in ends), default=0)
    busy = sum(sum(stops) - sum(begins) for begins, stops in zip(start, stop, strict=True))
    bubble = 1 - busy / (len(start) * span) if span else 0.0
    sizes = None if memory is None else memory.tolist()
    peak = tuple(_peak(row, sizes) for row in schedule.rows)
    return ScheduleTiming(tuple(map(tuple, start)), tuple(map(tuple, stop)), makespan, span, bubble, peak)


def _sweep(schedule: Schedule, times: Times, message: int) -> tuple[list[list[int]], list[list[int]]]:
    """Run all rows as far as they go; return the start and stop of every action that ran.

    A row that waits is taken up again when a row with a neighbouring stage has gone on.
    """
    hosts, rows = schedule.pp_ranks, schedule.rows
    last = len(hosts) - 1
    forward, backward, weights, alone = (column.tolist() for column in (*times[:3], times.split_weight))
    gone: list[list[int]] = [[-1] * len(schedule.units) for _ in hosts]  # when F has ended, by stage and unit
    back: list[list[int]] = [[-1] * len(schedule.units) for _ in hosts]  # when B or I has
    late = [message if s and hosts[s] != hosts[s - 1] else 0 for s in range(len(hosts))]
    start: list[list[int]] = [[] for _ in rows]
    stop: list[list[int]] = [[] for _ in rows]
    neighbours = schedule.neighbours
    work = list(range(len(rows)))
    while work:
        h = work.pop()
        begins, stops = start[h], stop[h]
        first, now = len(stops), stops[-1] if stops else 0
        for action in islice(rows[h], first, None):
            s, kind, u = action.stage, action.kind, action.round
            assert u is not None
            if kind is F:
                if s:
                    there = gone[s - 1][u]
                    if there < 0:
                        break
                    if there + late[s] > now:
                        now = there + late[s]
                begins.append(now)
                gone[s][u] = now = now + forward[s][u]
            elif kind is W:
                begins.append(now)
                now += alone[s][u]
            else:
                if s < last:
                    there = back[s + 1][u]
                    if there < 0:
                        break
                    if there + late[s + 1] > now:
                        now = there + late[s + 1]
                begins.append(now)
                back[s][u] = now = now + backward[s][u] + (weights[s][u] if kind is B else 0)
            stops.append(now)
        if len(stops) > first:
            work.extend(neighbours[h])
    return start, stop


def _peak(row: tuple[Action, ...], held: list[list[int]] | None) -> int:
    """Return the most that a host holds: a unit on a stage from its F to its B or W."""
    live = most = 0
    for action in row:
        if action.kind is I:
            continue
        assert action.round is not None
        size = 1 if held is None else held[action.stage][action.round]
        if action.kind is F:
            live += size
            if live > most:
                most = live
        else:
            live -= size
    return most


# ---- merged: plan.schedules.figures
# The figures of a schedule of equal micro-batches on equal stages: bubble, makespan, peak memory.
#
# Times are those of a whole micro-batch on all stages of a host. A piece is an equal part of its micro-batch, a
# chunk an
# equal part of its host's share of the model. Memory is in micro-batches on all stages of a host, so 1F1B holds p.


class ScheduleMetrics(NamedTuple):
    """What a schedule costs, in the unit of the times that were given."""

    bubble: float
    """Idle share of the makespan, over all hosts."""
    step_time: float
    """The longest that a host takes from its first action to its last: what a step costs when steps follow steps."""
    makespan: float
    """From the first start to the last stop; more than the makespan where hosts that begin late also end late."""
    peak_memory: tuple[float, ...]
    """Per host."""
    timing: ScheduleTiming
    """The same in integers, with the start and stop of every action."""


def schedule_metrics(
    schedule: Schedule, forward: Fraction, backward_input: Fraction, backward_weight: Fraction
) -> ScheduleMetrics:
    """Play a schedule that is in order.

    Args:
        schedule: of equal micro-batches.
        forward: time of a whole micro-batch on all stages of a host.
        backward_input: the same for the input half of its backward.
        backward_weight: the same for the weight half.
    """
    whole = math.lcm(*(value.denominator for value in (forward, backward_input, backward_weight)))
    scaled = [int(value * whole) for value in (forward, backward_input, backward_weight)]
    held, one = unit_sizes(schedule)
    played = simulate_schedule(schedule, Times(*(held * value for value in scaled)), held)
    unit = whole * one
    peak = tuple(most / one for most in played.peak_memory)
    return ScheduleMetrics(played.bubble, played.step_time / unit, played.makespan / unit, peak, played)


def unit_sizes(schedule: Schedule) -> tuple[np.ndarray, int]:
    """int64[stages, units], the share of a micro-batch on a host that a unit on a stage is; and what all of it is."""
    return unit_sizes_on(schedule.pp_ranks, schedule.units)


def unit_sizes_on(pp_ranks: Sequence[int], units: Sequence[Unit]) -> tuple[np.ndarray, int]:
    """`sizes` of a schedule that is not made yet."""
    count = Counter(pp_ranks)
    chunks = np.array([count[host] for host in pp_ranks], dtype=np.int64)
    pieces = np.array([unit.pieces for unit in units], dtype=np.int64)
    parts = np.outer(chunks, pieces)
    one = math.lcm(*np.unique(parts).tolist())
    return one // parts, one
