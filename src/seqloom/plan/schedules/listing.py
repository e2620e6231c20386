"""List schedules: every host, whenever it is free, takes the most urgent action that it may run.

Where both a forward and a backward could run, the neighbour that is hungrier is fed: a forward if no more forwards
wait at the next stage than backwards at the stage before, else a backward. A weight half has no one waiting for it:
it runs where the host would idle, or where a forward needs the memory that it frees. What a unit holds counts from
its F to its W.

Forwards run in the order of the units on every stage, and what the later stages of a host will need of a unit is set
aside when the first of them takes it in. So a host can only be full of whole sequences, whose backwards will come, or
of the one sequence that is being taken in, which fits by itself: no list schedule runs into a deadlock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.schedules.play import Times
from seqloom.plan.schedules.schedule import Rows, Unit, backward_order

KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)
F, I, W = range(3)  # noqa: E741 - the field's name for the input half of a backward


@dataclass(frozen=True, slots=True)
class Problem:
    """What is to be put in order, as plain lists: stage first, then unit."""

    hosts: tuple[int, ...]
    units: tuple[Unit, ...]
    durations: tuple[list[list[int]], ...]
    """Of F, I and W."""
    held: list[list[int]]
    needs: list[list[int]]
    """Host, unit: what all stages of the host hold of it."""
    before: list[int]
    """The unit with the piece before, or -1."""
    urgency: list[int]
    """Place of a unit in the order of backward."""

    @classmethod
    def of(cls, hosts: Sequence[int], units: Sequence[Unit], times: Times, held: np.ndarray) -> Problem:
        """Take arrays int64[stages, units] apart."""
        needs = np.zeros((max(hosts) + 1, len(units)), dtype=np.int64)
        np.add.at(needs, list(hosts), held)
        before, last = [], {}
        for number, unit in enumerate(units):
            before.append(last.get(unit.sequence, -1))
            last[unit.sequence] = number
        urgency = [0] * len(units)
        for place, number in enumerate(backward_order(units)):
            urgency[number] = place
        columns = tuple(column.tolist() for column in times)
        return cls(tuple(hosts), tuple(units), columns, held.tolist(), needs.tolist(), before, urgency)

    def least(self) -> list[int]:
        """What every host must be able to hold: sequences that are not yet complete have no backward to run."""
        most = [0] * len(self.needs)
        for host, need in enumerate(self.needs):
            open_sequences: dict[int, int] = {}
            total = 0
            for unit, size in zip(self.units, need, strict=True):
                open_sequences[unit.sequence] = open_sequences.get(unit.sequence, 0) + size
                total += size
                most[host] = max(most[host], total)
                if unit.piece == unit.pieces - 1:
                    total -= open_sequences.pop(unit.sequence)
        return most


@dataclass(frozen=True, slots=True)
class Listed:
    """An order, and how long it takes."""

    rows: list[list[int]]
    """Per host, (stage * units + unit) * 3 + kind."""
    makespan: int

    def actions(self, problem: Problem) -> Rows:
        """The rows as actions."""
        width = len(problem.units)
        return tuple(
            tuple(Action(code // 3 // width, KINDS[code % 3], code // 3 % width) for code in row) for row in self.rows
        )


class State:
    """Where a list schedule stands, and what comes next.

    Args:
        problem: what is to be done.
        caps: the most that each host may hold, at least `Problem.least`.
        lead: per host, how many forwards more may wait at the next stage than backwards at the one before for a
            forward to go first; with minus the number of units or less, backwards always go first.
    """

    def __init__(self, problem: Problem, caps: Sequence[int], lead: Sequence[int]) -> None:
        hosts, count = problem.hosts, len(problem.units)
        self.lead = lead
        self.room = list(caps)
        self.back = [1] + [0] * (len(hosts) - 1)  # backwards that wait at a stage; nothing ever waits before stage 0
        self.arrived = [count] + [0] * len(hosts)
        self.forwards = [0] * len(hosts)
        pieces_after = [0 if unit.piece == unit.pieces - 1 else 1 for unit in problem.units]
        self.missing = [[1 + more for more in pieces_after] for _ in hosts]
        self.ready: list[list[tuple[int, int]]] = [[] for _ in problem.needs]
        self.weights: list[deque[int]] = [deque() for _ in problem.needs]
        self.stages = [[s for s, own in enumerate(hosts) if own == h][::-1] for h in range(len(problem.needs))]

    def less(self, problem: Problem, stage: int, unit: int) -> None:
        """One thing fewer that an I waits for."""
        self.missing[stage][unit] -= 1
        if not self.missing[stage][unit]:
            heappush(self.ready[problem.hosts[stage]], (problem.urgency[unit], stage * len(problem.units) + unit))

    def finish(self, problem: Problem, host: int, code: int) -> int:
        """Hand on what an action made; return the host that may have been waiting for it."""
        place, kind = divmod(code, 3)
        stage, unit = divmod(place, len(problem.units))
        if kind == F:
            self.arrived[stage + 1] += 1
            if stage + 1 < len(problem.hosts):
                return problem.hosts[stage + 1]
            self.less(problem, stage, unit)
        elif kind == I:
            self.weights[host].append(place)
            if problem.before[unit] >= 0:
                self.less(problem, stage, problem.before[unit])
            if stage:
                self.back[stage - 1] += 1
                self.less(problem, stage - 1, unit)
                return problem.hosts[stage - 1]
        else:
            self.room[host] += problem.held[stage][unit]
        return host

    def pick(self, problem: Problem, host: int) -> int:
        """The action that a free host takes, or -1."""
        width = len(problem.units)
        stage = self.forward(problem, host)
        if self.ready[host]:
            place = self.ready[host][0][1]
            own = place // width
            if stage < 0 or not self.hungry(problem, stage, own, self.lead[host]):
                heappop(self.ready[host])
                if own < len(problem.hosts) - 1:
                    self.back[own] -= 1
                return place * 3 + I
        if stage < 0:
            return self.weights[host].popleft() * 3 + W if self.weights[host] else -1
        unit = self.forwards[stage]
        if stage == self.stages[host][-1]:
            self.room[host] -= problem.needs[host][unit]
        self.forwards[stage] = unit + 1
        return (stage * width + unit) * 3

    def forward(self, problem: Problem, host: int) -> int:
        """The stage of a host that may run its next forward, the latest of them; or -1."""
        stages = self.stages[host]
        for stage in stages:
            unit = self.forwards[stage]
            if unit < self.arrived[stage] and (stage != stages[-1] or problem.needs[host][unit] <= self.room[host]):
                return stage
        return -1

    def hungry(self, problem: Problem, forward: int, backward: int, lead: int) -> bool:
        """Whether the stage after `forward` is hungrier than the stage before `backward`."""
        if forward == len(problem.hosts) - 1:
            return False
        waiting = self.arrived[forward + 1] - self.forwards[forward + 1]
        return waiting <= (self.back[backward - 1] if backward else 1) + lead


def listed(problem: Problem, state: State) -> Listed:
    """Put a problem in order: whenever a host is free, it runs what `state` picks.

    Args:
        problem: what is to be done.
        state: of before the start; it is used up.
    """
    durations, width = problem.durations, len(problem.units)
    rows: list[list[int]] = [[] for _ in problem.needs]
    idle = [True] * len(rows)
    heap: list[tuple[int, int]] = []
    awake = set(range(len(rows)))
    now = 0
    while True:
        for host in sorted(awake):
            code = state.pick(problem, host) if idle[host] else -1
            if code >= 0:
                rows[host].append(code)
                place, kind = divmod(code, 3)
                heappush(heap, (now + durations[kind][place // width][place % width], host))
                idle[host] = False
        if not heap:
            return Listed(rows, now)
        now = heap[0][0]
        awake = set()
        while heap and heap[0][0] == now:  # all that ends now has ended before anything begins
            host = heappop(heap)[1]
            idle[host] = True
            awake |= {host, state.finish(problem, host, rows[host][-1])}
