"""The schedule `balanced`: unequal units under a memory cap, backwards in halves; the best of several orders.

    list schedules      feed the hungrier neighbour; the same with less memory on later ranks; backwards first
    local search        rank by rank, forwards a little more or less urgent; what is faster is kept
    Seq1F1B             as it is, and with weight halves in its bubbles, where it fits

No order is ever worse than Seq1F1B's if that fits. Everything is integers and the budget counts orders, not seconds:
the same input gives the same order everywhere.

In a list schedule every pipeline rank, whenever it is free, takes the most urgent action that it may run. Where both a
forward and a backward could run, it feeds the hungrier neighbour: a forward if no more forwards wait at the next stage
than backwards at the stage before, else a backward. Nobody waits for a weight half: it runs where the rank would idle,
or where a forward needs the memory that it frees; the latest first, because pieces go backward from the last, which is
short, to the first, which is long and frees more. A unit holds memory from its F to its W.

Forwards run in the order of the units on every stage, and a pipeline rank reserves what its later stages will need of a
unit when its first stage takes the unit in. So a rank can only be full of whole sequences, whose backwards will come,
or of those that are being taken in, which fit by themselves: no list schedule runs into a deadlock.

An order costs a few microseconds per action, in plain Python: hence numbers in flat lists. A cell is
stage * units + unit; an action's code is kind * cells + cell, with kinds F, I, W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from seqloom.errors import violation
from seqloom.plan.action import Action, F, I, W
from seqloom.schedules.fixed import one_forward_one_backward
from seqloom.schedules.memory import peak_memory
from seqloom.schedules.schedule import Rows, Schedule, Unit, backward_order, units_of
from seqloom.schedules.timing import Times, simulate_schedule
from seqloom.schedules.zero_bubble import IN_ORDER, fill_bubbles

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
    """Return the fastest order found in which no pipeline rank ever holds more than its cap.

    Args:
        pp_ranks: the pipeline rank of every stage, as in `Schedule`. With several stages per rank (interleaved, V),
            what a unit holds on all of them is reserved when the first takes it in: valid, but not as sparing as V.
        units: in forward order.
        times: of every unit on every stage, integers.
        memory: int64[stages, units], what a unit holds on a stage from its F to its B or W.
        cap: the most that a pipeline rank may hold, or one number per rank.
        message: time from the end of an action to its result being on the next stage's rank.
        budget: list schedules to try, at least 1.

    Raises:
        PlanError: a sequence does not fit under the cap.
    """
    problem = SchedulingProblem.of(pp_ranks, units, times, memory, message)
    caps = [cap] * len(problem.needs) if isinstance(cap, int) else list(cap)
    for pp_rank, (most, least) in enumerate(zip(caps, problem.min_memory, strict=True)):
        if most < least:
            value = f"pp_rank {pp_rank} may hold {most:,}"
            must = f"before its backward begins, the largest sequence needs {least:,} there"
            raise violation("memory", value, must, "raise the limit, or keep less of a unit (checkpointing)")
    best = _search_list_schedules(problem, caps, budget)
    orders = [Schedule(NAME, problem.pp_ranks, problem.units, best.actions(problem))]
    orders += _seq1f1b(problem, times, memory, caps)
    return min(orders, key=lambda order: simulate_schedule(order, times, message).makespan)


def _search_list_schedules(problem: SchedulingProblem, caps: Sequence[int], budget: int) -> ListSchedule:
    """Return the best of `budget` list schedules; the caps are such that the problem fits."""
    even, never = [0] * len(caps), [-len(problem.units)] * len(caps)
    last = max(1, len(caps) - 1)
    falling = [
        max(least, cap - cap * pp_rank // (5 * last))  # down to 80 %: the last ranks hold little but weight halves
        for pp_rank, (cap, least) in enumerate(zip(caps, problem.min_memory, strict=True))
    ]
    best, lead, limits = list_schedule(problem, caps, even), even, caps
    for tried_lead, tried_limits in ((even, falling), (never, caps))[: budget - 1]:
        order = list_schedule(problem, tried_limits, tried_lead)
        if order.makespan < best.makespan:
            best, lead, limits = order, tried_lead, tried_limits
    # Local search: make forwards a little more or less urgent, rank by rank, and keep what is faster.
    steps = [(pp_rank, step) for pp_rank in range(len(lead)) for step in (1, -1)]
    failed = tried = 0
    while tried < budget - 3 and failed < len(steps):
        pp_rank, step = steps[tried % len(steps)]
        moved = [value + step * (number == pp_rank) for number, value in enumerate(lead)]
        order = list_schedule(problem, limits, moved)
        tried, failed = tried + 1, failed + 1
        if order.makespan < best.makespan:
            best, lead, failed = order, moved, 0
    return best


def _seq1f1b(problem: SchedulingProblem, times: Times, memory: np.ndarray, caps: Sequence[int]) -> list[Schedule]:
    """Return Seq1F1B as it is and with its bubbles filled, where it fits: one stage per rank, sequences in turn."""
    pieces = {unit.sequence: unit.pieces for unit in problem.units}
    in_turn = [unit[1:] for unit in units_of(list(pieces.values()))] == [unit[1:] for unit in problem.units]
    if len(problem.pp_ranks) != len(problem.needs) or not in_turn:
        return []
    rows = one_forward_one_backward(NAME, len(problem.pp_ranks), list(pieces.values())).rows
    whole = Schedule(NAME, problem.pp_ranks, problem.units, rows)
    if any(peak > cap for peak, cap in zip(peak_memory(whole, memory), caps, strict=True)):
        return []
    split = [fill_bubbles(whole, times, caps, memory, policy) for policy in IN_ORDER]
    return [whole, *(order for order in split if order is not None)]


@dataclass(frozen=True, slots=True)
class SchedulingProblem:
    """Units to put in order, as flat lists.

    Attributes:
        durations: of every action, by its code.
        held: memory of every cell.
        needs: [pp_rank][unit], what all stages of the rank hold of a unit.
        before: of every cell, the one of the same stage with the piece before, or -1.
        urgency: of every cell, the place of its unit in the order of backward.
        min_memory: what every rank must be able to hold: sequences that are not complete have no backward to run.
        message: time from one pipeline rank to the next.
    """

    pp_ranks: tuple[int, ...]
    units: tuple[Unit, ...]
    durations: list[int]
    held: list[int]
    needs: list[list[int]]
    before: list[int]
    urgency: list[int]
    min_memory: tuple[int, ...]
    message: int

    @classmethod
    def of(
        cls, pp_ranks: Sequence[int], units: Sequence[Unit], times: Times, memory: np.ndarray, message: int = 0
    ) -> SchedulingProblem:
        """Flatten arrays int64[stages, units]."""
        needs = np.zeros((max(pp_ranks) + 1, len(units)), dtype=np.int64)
        np.add.at(needs, list(pp_ranks), memory)
        before, last = np.full(len(units), -1), {}
        for number, unit in enumerate(units):
            before[number] = last.get(unit.sequence, -1)
            last[unit.sequence] = number
        first_cells = np.arange(len(pp_ranks))[:, None] * len(units)
        by_kind = (times.forward, times.backward_input, times.split_weight)
        return cls(
            tuple(pp_ranks),
            tuple(units),
            np.concatenate([column.ravel() for column in by_kind]).tolist(),
            memory.ravel().tolist(),
            needs.tolist(),
            np.where(before < 0, -1, first_cells + before).ravel().tolist(),
            np.tile(np.argsort(list(backward_order(units))), len(pp_ranks)).tolist(),
            _min_memory(units, needs),
            message,
        )


def _min_memory(units: Sequence[Unit], needs: np.ndarray) -> tuple[int, ...]:
    """Return the most that sequences hold before they are complete, per pipeline rank."""
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
    """Codes of actions per pipeline rank, and how long they take."""

    rows: list[list[int]]
    makespan: int

    def actions(self, problem: SchedulingProblem) -> Rows:
        """Return the rows as actions."""
        width, cells = len(problem.units), len(problem.held)
        return tuple(
            tuple(Action(code % cells // width, (F, I, W)[code // cells], code % width) for code in row)
            for row in self.rows
        )


class _Progress:
    """Where a list schedule stands, and what comes next; for the arguments see `list_schedule`."""

    def __init__(self, problem: SchedulingProblem, caps: Sequence[int], lead: Sequence[int]) -> None:
        pp_ranks, width = problem.pp_ranks, len(problem.units)
        self.problem, self.lead, self.free = problem, lead, list(caps)
        self.width, self.cells, self.last = width, len(problem.held), len(pp_ranks) - 1
        self.arrived = [width] + [0] * len(pp_ranks)
        self.forwards = [0] * len(pp_ranks)
        self.backwards_waiting = [0] * len(pp_ranks) + [1]  # by stage; stage -1 always has one
        self.missing = [1 if unit.piece == unit.pieces - 1 else 2 for unit in problem.units] * len(pp_ranks)
        self.ready: list[list[tuple[int, int]]] = [[] for _ in caps]
        self.weights: list[list[int]] = [[] for _ in caps]
        self.stages = [[s for s, own in enumerate(pp_ranks) if own == k][::-1] for k in range(len(caps))]

    def resolve(self, cell: int, pp_rank: int) -> None:
        self.missing[cell] -= 1
        if not self.missing[cell]:
            heappush(self.ready[pp_rank], (self.problem.urgency[cell], cell))

    def finish(self, pp_rank: int, code: int) -> int:
        """Record the end of an action; return the pipeline rank that waits for its result, or -1."""
        kind, cell = divmod(code, self.cells)
        if kind == 2:
            self.free[pp_rank] += self.problem.held[cell]
            return -1
        stage = cell // self.width
        if kind == 0:
            if stage < self.last:
                return self.problem.pp_ranks[stage + 1]
            self.resolve(cell, pp_rank)
            return -1
        self.weights[pp_rank].append(cell)
        if self.problem.before[cell] >= 0:
            self.resolve(self.problem.before[cell], pp_rank)
        if not stage:
            return -1
        self.backwards_waiting[stage - 1] += 1
        return self.problem.pp_ranks[stage - 1]

    def arrive(self, pp_rank: int, code: int) -> None:
        if code < self.cells:
            self.arrived[code // self.width + 1] += 1
        else:
            self.resolve(code - self.cells - self.width, pp_rank)

    def pick(self, pp_rank: int) -> int:
        """Return the action that a free pipeline rank takes, or -1."""
        stages, ready = self.stages[pp_rank], self.ready[pp_rank]
        for stage in stages:
            unit = self.forwards[stage]
            if unit < self.arrived[stage]:
                need = self.problem.needs[pp_rank][unit] if stage == stages[-1] else 0
                if need <= self.free[pp_rank] and (not ready or self.feeds_next(pp_rank, stage, ready[0][1])):
                    self.free[pp_rank] -= need
                    self.forwards[stage] = unit + 1
                    return stage * self.width + unit
                break
        if ready:
            cell = heappop(ready)[1]
            self.backwards_waiting[cell // self.width] -= 1
            return self.cells + cell
        return 2 * self.cells + self.weights[pp_rank].pop() if self.weights[pp_rank] else -1

    def feeds_next(self, pp_rank: int, stage: int, cell: int) -> bool:
        """Say whether the stage after `stage` is hungrier than the one before that of the backward at `cell`."""
        if stage == self.last:
            return False
        waiting = self.forwards[stage] - self.forwards[stage + 1]
        return waiting <= self.backwards_waiting[cell // self.width - 1] + self.lead[pp_rank]


def list_schedule(problem: SchedulingProblem, caps: Sequence[int], lead: Sequence[int]) -> ListSchedule:
    """Put a problem in order under caps of at least `min_memory`.

    `lead` is, per pipeline rank, how many forwards more may wait at the next stage than backwards at the one before for
    a forward to go first; with minus the number of units or less, backwards always go first.
    """
    progress, durations = _Progress(problem, caps, lead), problem.durations
    rows: list[list[int]] = [[] for _ in caps]
    idle = [True] * len(caps)
    heap: list[tuple[int, int, int]] = []  # time, pp_rank, and the code that arrives there; -1: its last action ends
    awake = list(range(len(caps)))
    now = 0
    while True:
        for pp_rank in awake:
            if idle[pp_rank]:
                code = progress.pick(pp_rank)
                if code >= 0:
                    rows[pp_rank].append(code)
                    heappush(heap, (now + durations[code], pp_rank, -1))
                    idle[pp_rank] = False
        if not heap:
            return ListSchedule(rows, now)
        now = heap[0][0]
        awake = []
        while heap and heap[0][0] == now:  # all that ends now has ended before anything begins
            _, pp_rank, code = heappop(heap)
            awake.append(pp_rank)
            if code < 0:
                idle[pp_rank] = True
                code = rows[pp_rank][-1]
                receiver = progress.finish(pp_rank, code)
                if receiver < 0:
                    continue
                if problem.message and receiver != pp_rank:
                    heappush(heap, (now + problem.message, receiver, code))
                    continue
                pp_rank = receiver
                awake.append(pp_rank)
            progress.arrive(pp_rank, code)
