"""List schedules: every host, whenever it is free, takes the most urgent action that it may run.

Where both a forward and a backward could run, the neighbour that is hungrier is fed: a forward if no more forwards
wait at the next stage than backwards at the stage before, else a backward. A weight half has no one waiting for it:
it runs where the host would idle, or where a forward needs the memory that it frees; the latest first, because
pieces go backward from the last, which is short, to the first, which is long and frees more. What a unit holds counts
from its F to its W.

Forwards run in the order of the units on every stage, and what the later stages of a host will need of a unit is set
aside when the first of them takes it in. So a host can only be full of whole sequences, whose backwards will come, or
of those that are being taken in, which fit by themselves: no list schedule runs into a deadlock.

An order costs a few microseconds per action, in plain Python: hence numbers in flat lists. A place is
stage * units + unit; an action is kind * places + place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from seqloom.errors import violation
from seqloom.plan.action import Action, ActionKind
from seqloom.schedules.fixed import one_forward_one_backward
from seqloom.schedules.schedule import Rows, Schedule, Unit, backward_order, units_of
from seqloom.schedules.timing import Times, simulate_schedule
from seqloom.schedules.zero_bubble import IN_ORDER, fill_bubbles

KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)


@dataclass(frozen=True, slots=True)
class SchedulingProblem:
    """What is to be put in order."""

    pp_ranks: tuple[int, ...]
    units: tuple[Unit, ...]
    durations: list[int]
    """Of every action."""
    held: list[int]
    """Of every place."""
    needs: list[list[int]]
    """Host, unit: what all stages of the host hold of it."""
    before: list[int]
    """Of every place: the one of the same stage with the piece before, or -1."""
    urgency: list[int]
    """Of every place: where its unit is in the order of backward."""
    least: tuple[int, ...]
    """What every host must be able to hold: sequences that are not yet complete have no backward to run."""
    message: int
    """Time from one host to the next."""

    @classmethod
    def of(
        cls, pp_ranks: Sequence[int], units: Sequence[Unit], times: Times, memory: np.ndarray, message: int = 0
    ) -> SchedulingProblem:
        """Take arrays int64[stages, units] apart."""
        needs = np.zeros((max(pp_ranks) + 1, len(units)), dtype=np.int64)
        np.add.at(needs, list(pp_ranks), memory)
        before, last = np.full(len(units), -1), {}
        for number, unit in enumerate(units):
            before[number] = last.get(unit.sequence, -1)
            last[unit.sequence] = number
        urgency = np.argsort(list(backward_order(units)))
        first = np.arange(len(pp_ranks))[:, None] * len(units)
        return cls(
            tuple(pp_ranks),
            tuple(units),
            np.concatenate(
                [column.ravel() for column in (times.forward, times.backward_input, times.split_weight)]
            ).tolist(),
            memory.ravel().tolist(),
            needs.tolist(),
            np.where(before < 0, -1, first + before).ravel().tolist(),
            np.tile(urgency, len(pp_ranks)).tolist(),
            _least(units, needs),
            message,
        )


def _least(units: Sequence[Unit], needs: np.ndarray) -> tuple[int, ...]:
    """The most that sequences hold before they are complete, per host."""
    total, most = np.zeros(len(needs), dtype=np.int64), np.zeros(len(needs), dtype=np.int64)
    members: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        members.setdefault(unit.sequence, []).append(number)
        total += needs[:, number]
        most = np.maximum(most, total)
        if unit.piece == unit.pieces - 1:
            total -= needs[:, members[unit.sequence]].sum(axis=1)
    return tuple(most.tolist())


@dataclass(frozen=True, slots=True)
class ListSchedule:
    """An order, and how long it takes."""

    rows: list[list[int]]
    makespan: int

    def actions(self, problem: SchedulingProblem) -> Rows:
        """The rows as actions."""
        width, places = len(problem.units), len(problem.held)
        return tuple(
            tuple(Action(code % places // width, KINDS[code // places], code % width) for code in row)
            for row in self.rows
        )


class State:
    """Where a list schedule stands, and what comes next.

    Args:
        problem: what is to be done.
        caps: the most that each host may hold, at least `Problem.least`.
        lead: per host, how many forwards more may wait at the next stage than backwards at the one before for a
            forward to go first; with minus the number of units or less, backwards always go first.
    """

    def __init__(self, problem: SchedulingProblem, caps: Sequence[int], lead: Sequence[int]) -> None:
        hosts, width = problem.pp_ranks, len(problem.units)
        self.problem, self.lead, self.room = problem, lead, list(caps)
        self.width, self.places, self.last = width, len(problem.held), len(hosts) - 1
        self.arrived = [width] + [0] * len(hosts)
        self.forwards = [0] * len(hosts)
        self.back = [0] * len(hosts) + [1]  # backwards that wait at a stage; stage -1 always has one
        self.missing = [1 if unit.piece == unit.pieces - 1 else 2 for unit in problem.units] * len(hosts)
        self.ready: list[list[tuple[int, int]]] = [[] for _ in caps]
        self.weights: list[list[int]] = [[] for _ in caps]
        self.stages = [[s for s, own in enumerate(hosts) if own == h][::-1] for h in range(len(caps))]

    def less(self, place: int, host: int) -> None:
        """One thing fewer that a backward waits for."""
        self.missing[place] -= 1
        if not self.missing[place]:
            heappush(self.ready[host], (self.problem.urgency[place], place))

    def finish(self, host: int, code: int) -> int:
        """Take note of the end of an action; return the host that waits for what it made, or -1."""
        kind, place = divmod(code, self.places)
        if kind == 2:
            self.room[host] += self.problem.held[place]
            return -1
        stage = place // self.width
        if kind == 0:
            if stage < self.last:
                return self.problem.pp_ranks[stage + 1]
            self.less(place, host)
            return -1
        self.weights[host].append(place)
        if self.problem.before[place] >= 0:
            self.less(self.problem.before[place], host)
        if not stage:
            return -1
        self.back[stage - 1] += 1
        return self.problem.pp_ranks[stage - 1]

    def arrive(self, host: int, code: int) -> None:
        """Hand what an action made to the host that waits for it."""
        if code < self.places:
            self.arrived[code // self.width + 1] += 1
        else:
            self.less(code - self.places - self.width, host)

    def pick(self, host: int) -> int:
        """The action that a free host takes, or -1."""
        stages, ready = self.stages[host], self.ready[host]
        for stage in stages:
            unit = self.forwards[stage]
            if unit < self.arrived[stage]:
                need = self.problem.needs[host][unit] if stage == stages[-1] else 0
                if need <= self.room[host] and (not ready or self.feeds(host, stage, ready[0][1])):
                    self.room[host] -= need
                    self.forwards[stage] = unit + 1
                    return stage * self.width + unit
                break
        if ready:
            place = heappop(ready)[1]
            self.back[place // self.width] -= 1
            return self.places + place
        return 2 * self.places + self.weights[host].pop() if self.weights[host] else -1

    def feeds(self, host: int, stage: int, place: int) -> bool:
        """Whether the stage after `stage` is hungrier than the one before that of the backward at `place`."""
        if stage == self.last:
            return False
        waiting = self.forwards[stage] - self.forwards[stage + 1]
        return waiting <= self.back[place // self.width - 1] + self.lead[host]


def list_schedule(problem: SchedulingProblem, caps: Sequence[int], lead: Sequence[int]) -> ListSchedule:
    """Put a problem in order; for the arguments see `State`."""
    state, durations = State(problem, caps, lead), problem.durations
    rows: list[list[int]] = [[] for _ in caps]
    idle = [True] * len(caps)
    heap: list[tuple[int, int, int]] = []  # when, host, and what arrives there; -1: it is done with its last action
    awake = list(range(len(caps)))
    now = 0
    while True:
        for host in awake:
            if idle[host]:
                code = state.pick(host)
                if code >= 0:
                    rows[host].append(code)
                    heappush(heap, (now + durations[code], host, -1))
                    idle[host] = False
        if not heap:
            return ListSchedule(rows, now)
        now = heap[0][0]
        awake = []
        while heap and heap[0][0] == now:  # all that ends now has ended before anything begins
            _, host, code = heappop(heap)
            awake.append(host)
            if code < 0:
                idle[host] = True
                code = rows[host][-1]
                other = state.finish(host, code)
                if other < 0:
                    continue
                if problem.message and other != host:
                    heappush(heap, (now + problem.message, other, code))
                    continue
                host = other
                awake.append(host)
            state.arrive(host, code)


# ---- merged: plan.schedules.balanced
# Balanced: unequal units under a memory cap, backwards in halves; the best of several orders.
#
# What is tried:
#
#     list schedules      feed the hungrier neighbour; the same with less memory on later hosts; backwards first
#     local search        host by host, forwards a little more or less urgent; what is faster is kept
#     Seq1F1B             as it is, and with weight halves as fillers (its zero-bubble form), where it fits
#
# No order is ever worse than Seq1F1B's if that fits. Everything is integers and the budget counts orders, not
# seconds:
# the same input gives the same order everywhere.


NAME = "balanced"
BUDGET = 12
"""List schedules tried."""


def balanced_schedule(
    pp_ranks: Sequence[int],
    units: Sequence[Unit],
    times: Times,
    memory: np.ndarray,
    cap: int | Sequence[int],
    *,
    message: int = 0,
    budget: int = BUDGET,
) -> Schedule:
    """Return the fastest order found in which no host ever holds more than its cap.

    Args:
        pp_ranks: the host of every stage, as in `Schedule`. With several stages per host (interleaved, V), what a unit
            holds on all of them is set aside when the first takes it in: valid, but not as sparing as V can be.
        units: in forward order.
        times: of every unit on every stage, integers.
        memory: int64[stages, units], what a unit holds on a stage from its F to its B or W.
        cap: the most that a host may hold, or one number per host.
        message: time between the end of an action and its result being on the next stage's host.
        budget: list schedules to try, at least 1.

    Raises:
        PlanError: a sequence does not fit under the cap.
    """
    problem = SchedulingProblem.of(pp_ranks, units, times, memory, message)
    caps = [cap] * len(problem.needs) if isinstance(cap, int) else list(cap)
    check_fits(problem, caps)
    best = search_list_schedules(problem, caps, budget)
    found = Schedule(NAME, problem.pp_ranks, problem.units, best.actions(problem))
    orders = [found, *_seq1f1b(problem, times, memory, caps)]
    return min(orders, key=lambda order: simulate_schedule(order, times, message=message).makespan)


def check_fits(problem: SchedulingProblem, caps: Sequence[int]) -> None:
    """Refuse caps under which a sequence cannot be run."""
    for host, (most, least) in enumerate(zip(caps, problem.least, strict=True)):
        if most < least:
            value = f"host {host} may hold {most:,}"
            must = f"before its backward begins, the largest sequence needs {least:,} there"
            raise violation("memory", value, must, "raise the limit, or keep less of a unit (checkpointing)")


def search_list_schedules(problem: SchedulingProblem, caps: Sequence[int], budget: int) -> ListSchedule:
    """Return the best of `budget` list schedules; the caps are such that the problem fits."""
    even, never = [0] * len(caps), [-len(problem.units)] * len(caps)
    last = max(1, len(caps) - 1)
    falling = [
        max(least, cap - cap * host // (5 * last))  # down to 80 %: the last hosts keep little but weight halves
        for host, (cap, least) in enumerate(zip(caps, problem.least, strict=True))
    ]
    best, lead, room = list_schedule(problem, caps, even), even, caps
    for tried_lead, tried_room in ((even, falling), (never, caps))[: budget - 1]:
        order = list_schedule(problem, tried_room, tried_lead)
        if order.makespan < best.makespan:
            best, lead, room = order, tried_lead, tried_room
    return _climbed(problem, best, lead, room, budget - 3)


def _climbed(
    problem: SchedulingProblem, best: ListSchedule, lead: list[int], room: Sequence[int], budget: int
) -> ListSchedule:
    """Make forwards a little more or less urgent, host by host, and keep what is faster."""
    steps = [(host, step) for host in range(len(lead)) for step in (1, -1)]
    failed = at = 0
    while budget > 0 and failed < len(steps):
        host, step = steps[at % len(steps)]
        moved = [value + step * (number == host) for number, value in enumerate(lead)]
        order = list_schedule(problem, room, moved)
        budget, at, failed = budget - 1, at + 1, failed + 1
        if order.makespan < best.makespan:
            best, lead, failed = order, moved, 0
    return best


def _seq1f1b(problem: SchedulingProblem, times: Times, held: np.ndarray, caps: Sequence[int]) -> list[Schedule]:
    """Seq1F1B whole and with weight halves as fillers, where it fits: one stage per host, sequences in turn."""
    pieces = {unit.sequence: unit.pieces for unit in problem.units}
    in_turn = [unit[1:] for unit in units_of(list(pieces.values()))] == [unit[1:] for unit in problem.units]
    if len(problem.pp_ranks) != len(problem.needs) or not in_turn:
        return []
    rows = one_forward_one_backward(NAME, len(problem.pp_ranks), list(pieces.values())).rows
    whole = Schedule(NAME, problem.pp_ranks, problem.units, rows)
    peaks = simulate_schedule(whole, times, held).peak_memory
    if any(peak > cap for peak, cap in zip(peaks, caps, strict=True)):
        return []
    split = [fill_bubbles(whole, times, caps, held, freedom) for freedom in IN_ORDER]
    return [whole, *(order for order in split if order is not None)]
