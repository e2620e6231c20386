"""Play a schedule: when every action starts and stops, how long hosts wait, how much they hold.

Every host runs its row in order, an action as soon as the host is free and what it needs is there. So the result
is the earliest time for the given order; nothing is decided here. All times are integers, in whatever unit the
caller has (nanoseconds for a planner).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqloom.plan.action import ActionKind
from seqloom.plan.schedules.schedule import Schedule


class Times(NamedTuple):
    """int64[stages, units] each. A whole backward (B) takes `backward + weights`."""

    forward: np.ndarray
    backward: np.ndarray
    """The half with respect to the input (I)."""
    weights: np.ndarray
    """The half with respect to the weights (W)."""

    @classmethod
    def equal(cls, schedule: Schedule, forward: int = 1, backward: int = 1, weights: int = 1) -> Times:
        """Return times that are the same for all units and stages."""
        shape = len(schedule.hosts), len(schedule.units)
        return cls(*(np.full(shape, value, dtype=np.int64) for value in (forward, backward, weights)))


@dataclass(frozen=True, slots=True)
class Played:
    """What came of it."""

    start: tuple[tuple[int, ...], ...]
    """When every action starts, in the shape of the schedule's rows."""
    stop: tuple[tuple[int, ...], ...]
    makespan: int
    """From the first start to the last stop."""
    span: int
    """The longest that any host takes from its own first action to its own last."""
    bubble: float
    """Share of the span in which hosts wait: idle / (hosts * span).

    Hosts that begin later than others may end later too: where no barrier ends a step, the next step begins so as
    well, and what a step costs is the span. In most orders the first host begins first and ends last, and the span
    is the makespan.
    """
    peak: tuple[int, ...]
    """The most that every host holds at once, in the unit of `held`."""


class Stuck(NamedTuple):
    """Where every host stands when none can go on: the number of the action in its row."""

    at: tuple[int, ...]


def play(schedule: Schedule, times: Times, held: np.ndarray | None = None, message: int = 0) -> Played:
    """Run the schedule and return when what happened.

    Args:
        schedule: rows in an order that ends; see `Schedule.validate`.
        times: of every unit on every stage.
        held: int64[stages, units], what a unit holds on a stage from the start of its F to the end of its B or W;
            1 without it.
        message: time between the end of an action and its result being on the next stage's host.
    """
    start, stop, stuck = sweep(schedule, times, message)
    if stuck is not None:
        schedule.validate()
    ends = [(begins[0], stops[-1]) for begins, stops in zip(start, stop, strict=True) if stops]
    makespan = max((last for _, last in ends), default=0)
    span = max((last - first for first, last in ends), default=0)
    busy = sum(sum(stops) - sum(begins) for begins, stops in zip(start, stop, strict=True))
    bubble = 1 - busy / (len(start) * span) if span else 0.0
    sizes = None if held is None else held.tolist()
    peak = tuple(_peak(row, sizes) for row in schedule.rows)
    return Played(tuple(map(tuple, start)), tuple(map(tuple, stop)), makespan, span, bubble, peak)


def sweep(schedule: Schedule, times: Times, message: int = 0) -> tuple[list[list[int]], list[list[int]], Stuck | None]:
    """Run all rows as far as they go: start and stop of every action that ran; where rows stand if not at the end."""
    hosts, rows = schedule.hosts, schedule.rows
    last = len(hosts) - 1
    forward, backward, weights = (column.tolist() for column in times)
    ready: list[dict[int, int]] = [{} for _ in hosts]  # stage -> unit -> when its forward has ended
    back: list[dict[int, int]] = [{} for _ in hosts]
    late = [message if s and hosts[s] != hosts[s - 1] else 0 for s in range(len(hosts))] + [0]
    start: list[list[int]] = [[] for _ in rows]
    stop: list[list[int]] = [[] for _ in rows]
    work = list(range(len(rows)))
    while work:
        h = work.pop()
        row, begins, stops = rows[h], start[h], stop[h]
        k, now = len(stops), stops[-1] if stops else 0
        first = k
        while k < len(row):
            action = row[k]
            s, kind, u = action.stage, action.kind, action.round
            assert u is not None
            if kind is ActionKind.F:
                if s:
                    there = ready[s - 1].get(u)
                    if there is None:
                        break
                    now = max(now, there + late[s])
                begins.append(now)
                now += forward[s][u]
                ready[s][u] = now
            elif kind is ActionKind.W:
                begins.append(now)
                now += weights[s][u]
            else:
                if s < last:
                    there = back[s + 1].get(u)
                    if there is None:
                        break
                    now = max(now, there + late[s + 1])
                begins.append(now)
                now += backward[s][u] + (weights[s][u] if kind is ActionKind.B else 0)
                back[s][u] = now
            stops.append(now)
            k += 1
        if k > first:
            work.extend({hosts[n] for s in range(last + 1) if hosts[s] == h for n in (s - 1, s + 1) if 0 <= n <= last})
    at = tuple(map(len, stop))
    return start, stop, None if at == tuple(map(len, rows)) else Stuck(at)


def _peak(row: tuple, held: list[list[int]] | None) -> int:
    """Return the most that a host holds: a unit on a stage from its F to its B or W."""
    live = most = 0
    for action in row:
        size = 1 if held is None else held[action.stage][action.round]
        if action.kind is ActionKind.F:
            live += size
            most = max(most, live)
        elif action.kind is not ActionKind.I:
            live -= size
    return most
