"""Zero-bubble orders: weight halves (W) of backwards fill the bubbles of an order, within memory.

    zb-h1, seq1f1b-zb    1F1B, its memory                               bubble (p - 1) (F + B - W) / k
    zb-h2                two forwards ahead per pipeline rank, 2 p       bubble (p - 1) (F + B - 2 W) / k or less
    zb-v                 two stages per pipeline rank as a V, memory p   no bubble where F = B = W, 2 p micro-batches
    v-half               V, memory about p / 2 + 1                      about half the bubble of 1F1B where F = B = W
    v-min                V, memory about (p + 2) / 3                    about two thirds

for p pipeline ranks, k pieces, and times F, B (input half) and W of a micro-batch. In a V a micro-batch goes down the
pipeline ranks through the first half of the stages and up again through the second: the first ranks hold what they run
first for long and what they run last for a short time, so all ranks hold the same.

`fill_bubbles` takes rows of forwards and backwards. Every backward becomes an I, which the stage before waits for, and
a W, which nobody waits for. The rows are run in time: a pipeline rank takes its next action as soon as it can, and a W
when it would otherwise wait or when its memory is full. What it did is the new order. A unit is held from F to W.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from seqloom.errors import PlanError
from seqloom.plan.action import Action, ActionKind, B, F, I, W
from seqloom.schedules.fixed import one_forward_one_backward
from seqloom.schedules.memory import peak_memory
from seqloom.schedules.schedule import Rows, Schedule, units_of
from seqloom.schedules.timing import Times, simulate_schedule, unit_sizes


@dataclass(frozen=True, slots=True)
class FillPolicy:
    """How far a pipeline rank may depart from its row.

    Attributes:
        patience: a W is put into a gap that is at least this share of it, even where it delays what comes next.
        lookahead: an action may come before others of its row that are not ready, this many places early.
        reserve: a forward that comes early leaves this much memory free.
    """

    patience: float = 0.0
    lookahead: int = 0
    reserve: int = 0


IN_ORDER = tuple(FillPolicy(patience) for patience in (0.0, 0.5, 1.0))
RUN_AHEAD = tuple(FillPolicy(patience, 4, reserve) for patience, reserve in product((0.0, 0.5, 1.0), (0, 1, 2, 5)))


def zero_bubble(name: str, pp_size: int, pieces: Sequence[int], times: Times, lead: int = 1) -> Schedule:
    """Build ZB-H1 (lead 1) or ZB-H2 (lead 2) over pieces; with lead 1 and k pieces this is Seq1F1B-ZB.

    A piece holds its part of a micro-batch's memory; `lead` is that of `one_forward_one_backward`.
    """
    order = one_forward_one_backward(name, pp_size, pieces, lead)
    sizes, _ = unit_sizes(order.pp_ranks, order.units)
    cap = max(peak_memory(order, sizes), default=0)
    return fastest_fill(order, times, (cap,) if lead == 1 else (cap, cap + int(sizes.max())), memory=sizes)


def zb_v(name: str, pp_size: int, micro_batches: int, times: Times) -> Schedule:
    """Build ZB-V: two stages per pipeline rank, micro-batches in one piece each."""
    rows = []
    for r in range(pp_size):
        turns = [("f", 2 * (pp_size - r) - 1), ("gf", r), ("gb", pp_size - r), ("fagb", 4 * micro_batches)]
        rows.append(_take_turns(r, 2 * pp_size - 1 - r, micro_batches, turns))
    return fastest_fill(_v_schedule(name, pp_size, micro_batches, rows), times, (2 * pp_size,))


def v_half(name: str, pp_size: int, micro_batches: int, times: Times) -> Schedule:
    """Build V-Half: about half the memory of 1F1B."""
    p, extra = pp_size, 3 if pp_size % 2 == 0 else 0
    slots = [(2 * r, 3 * p - r - 2, 3 * p + extra + 2 * r - 1, 6 * p + extra - r - 2) for r in range(p)]
    return fastest_fill(_periodic(name, slots, micro_batches), times, (p + 2,), IN_ORDER + RUN_AHEAD)


def v_min(name: str, pp_size: int, micro_batches: int, times: Times) -> Schedule:
    """Build V-Min: about a third of the memory of 1F1B."""
    p, extra = pp_size, 2 if pp_size % 3 == 0 else 0
    slots = [(r, 2 * p - r - 1, 2 * p + extra + r, 4 * p + extra - r - 1) for r in range(p)]
    return fastest_fill(_periodic(name, slots, micro_batches), times, (2 * -(-(p + 2) // 3),), IN_ORDER + RUN_AHEAD)


def _take_turns(down: int, up: int, micro_batches: int, turns: list[tuple[str, int]]) -> tuple[Action, ...]:
    """Run the next micro-batch of the named queues in turn, so many times; skip a queue that would overtake another.

    Queues: f forward on the way down, g forward on the way up, b backward of the way up, a backward of the way down.
    """
    stage_and_kind: dict[str, tuple[int, ActionKind]] = {"f": (down, F), "g": (up, F), "b": (up, B), "a": (down, B)}
    before: dict[str, str] = {"f": "", "g": "f", "b": "g", "a": "b"}
    taken: dict[str, int] = {"": micro_batches, **dict.fromkeys(stage_and_kind, 0)}
    row: list[Action] = []
    for queues, times in turns:
        for queue in queues * times:
            if taken[queue] < taken[before[queue]]:
                row.append(Action(*stage_and_kind[queue], taken[queue]))
                taken[queue] += 1
    return tuple(row)


def _periodic(name: str, slots: Sequence[tuple[int, int, int, int]], micro_batches: int) -> Schedule:
    """Repeat the slots of one micro-batch on every pipeline rank every six slots: its two F, two I and two W.

    A rank that holds a micro-batch for t slots holds t / 6 of them at a time.
    """
    rows = []
    for down, slots_of_rank in enumerate(slots):
        up = 2 * len(slots) - 1 - down
        block = zip(slots_of_rank, ((down, F), (up, F), (up, B), (down, B)), strict=True)
        entries = sorted((at + 6 * u, s, k, u) for at, (s, k) in block for u in range(micro_batches))
        rows.append(tuple(Action(stage, kind, u) for _, stage, kind, u in entries))
    return _v_schedule(name, len(slots), micro_batches, rows)


def _v_schedule(name: str, pp_size: int, micro_batches: int, rows: list[tuple[Action, ...]]) -> Schedule:
    pp_ranks = (*range(pp_size), *reversed(range(pp_size)))
    return Schedule(name, pp_ranks, units_of([1] * micro_batches), tuple(rows))


def fastest_fill(
    order: Schedule,
    times: Times,
    caps: Iterable[int],
    policies: Iterable[FillPolicy] = IN_ORDER,
    memory: np.ndarray | None = None,
) -> Schedule:
    """Return the fastest result of `fill_bubbles` over several caps and policies; of equal ones the leanest."""
    filled = [fill_bubbles(order, times, cap, memory, policy) for cap, policy in product(caps, policies)]
    timed = [(simulate_schedule(each, times), each) for each in filled if each is not None]
    if not timed:
        raise PlanError(f"{order.name} finds no order for {len(order.units)} units; use 1f1b, or more micro-batches")
    fastest = min((timing.step_time, timing.makespan) for timing, _ in timed)
    equal = [each for timing, each in timed if (timing.step_time, timing.makespan) == fastest]
    return equal[0] if len(equal) == 1 else min(equal, key=lambda each: max(peak_memory(each, memory), default=0))


def fill_bubbles(
    schedule: Schedule,
    times: Times,
    cap: int | Sequence[int],
    memory: np.ndarray | None = None,
    policy: FillPolicy = IN_ORDER[0],
) -> Schedule | None:
    """Return the schedule with split backwards, or None where it comes to a stop at this memory.

    Args:
        schedule: rows of F and B in an order that ends.
        times: of every unit on every stage.
        cap: the most that a pipeline rank may hold, or one number per pipeline rank.
        memory: int64[stages, units], what a unit holds on a stage from its F to its W; 1 without it.
    """
    caps = [cap] * len(schedule.rows) if isinstance(cap, int) else list(cap)
    sizes = np.ones((len(schedule.pp_ranks), len(schedule.units)), dtype=np.int64) if memory is None else memory
    rows = _BubbleFiller(schedule, times, caps, sizes, policy).rows()
    return None if rows is None else replace(schedule, rows=rows)


class _BubbleFiller:
    """All pipeline ranks in time; `heap` holds (time, pipeline rank) at which a rank may go on."""

    def __init__(
        self, schedule: Schedule, times: Times, caps: list[int], sizes: np.ndarray, policy: FillPolicy
    ) -> None:
        self.caps, self.policy = caps, policy
        self.sizes: list[list[int]] = sizes.tolist()
        self.last_stage = len(schedule.pp_ranks) - 1
        self.forward, self.backward, self.weight = (
            column.tolist() for column in (times.forward, times.backward_input, times.split_weight)
        )
        pp_size = len(schedule.rows)
        self.queues = [_queues(row) for row in schedule.rows]
        self.done: dict[tuple[int, bool, int], int] = {}  # (stage, forward, unit): when it ended
        self.pending_weights: list[deque[tuple[int, int]]] = [deque() for _ in range(pp_size)]
        self.live, self.free_at = [0] * pp_size, [0] * pp_size
        self.out: list[list[Action]] = [[] for _ in range(pp_size)]
        self.heap = [(0, pp_rank) for pp_rank in range(pp_size)]
        self.neighbours = schedule.neighbours

    def rows(self) -> Rows | None:
        """Run to the end; None where actions are left that nobody can run."""
        while self.heap:
            now, pp_rank = heapq.heappop(self.heap)
            if now >= self.free_at[pp_rank]:
                self.step(now, pp_rank)
        return None if any(any(queues) for queues in self.queues) else tuple(map(tuple, self.out))

    def step(self, now: int, pp_rank: int) -> None:
        action, full, ready_at = self.choose(now, pp_rank)
        pending = self.pending_weights[pp_rank]
        if action is not None:
            self.run(now, pp_rank, action)
        elif pending and (full or ready_at is None or self.fits_gap(ready_at - now, *pending[0])):
            stage, unit = pending.popleft()
            self.out[pp_rank].append(Action(stage, W, unit))
            self.live[pp_rank] -= self.sizes[stage][unit]
            self.set_busy(pp_rank, now + self.weight[stage][unit])
        elif ready_at is not None:
            heapq.heappush(self.heap, (ready_at, pp_rank))

    def fits_gap(self, gap: int, stage: int, unit: int) -> bool:
        return gap >= self.policy.patience * self.weight[stage][unit]

    def choose(self, now: int, pp_rank: int) -> tuple[Action | None, bool, int | None]:
        """Return the action to run now; whether only memory forbids one; and when the next is known to be ready."""
        heads = sorted(queue[0] for queue in self.queues[pp_rank] if queue)
        ready_at, full = None, False
        for place, stage, kind, unit in heads:
            if place - heads[0][0] > self.policy.lookahead:
                break
            ready = self.ready(stage, kind, unit)
            if ready is None:
                continue
            if ready > now:
                ready_at = ready if ready_at is None else min(ready_at, ready)
                continue
            first = place == heads[0][0]
            spare = self.caps[pp_rank] - self.live[pp_rank] - (0 if first else self.policy.reserve)
            if kind is F and self.sizes[stage][unit] > spare:
                if first:
                    return None, True, ready_at
                full = True
                continue
            return Action(stage, kind, unit), False, ready_at
        return None, full, ready_at

    def ready(self, stage: int, kind: ActionKind, unit: int) -> int | None:
        """Return when the input of an action is there; None where that is not known yet."""
        if kind is F:
            return self.done.get((stage - 1, True, unit)) if stage else 0
        own = self.done.get((stage, True, unit))
        return own if stage == self.last_stage or own is None else self.done.get((stage + 1, False, unit))

    def run(self, now: int, pp_rank: int, action: Action) -> None:
        stage, unit = action.stage, action.round
        assert unit is not None
        forward = action.kind is F
        stop = now + (self.forward if forward else self.backward)[stage][unit]
        queue = next(queue for queue in self.queues[pp_rank] if queue and queue[0][1:] == (stage, action.kind, unit))
        queue.popleft()
        if forward:
            self.live[pp_rank] += self.sizes[stage][unit]
            self.out[pp_rank].append(action)
        else:
            self.out[pp_rank].append(Action(stage, I, unit))
            self.pending_weights[pp_rank].append((stage, unit))
        self.done[stage, forward, unit] = stop
        self.set_busy(pp_rank, stop)
        for other in self.neighbours[pp_rank]:
            heapq.heappush(self.heap, (max(stop, self.free_at[other]), other))

    def set_busy(self, pp_rank: int, until: int) -> None:
        self.free_at[pp_rank] = until
        heapq.heappush(self.heap, (until, pp_rank))


def _queues(row: tuple[Action, ...]) -> list[deque[tuple[int, int, ActionKind, int]]]:
    """Split a row into each stage's forwards and backwards: (place in the row, stage, kind, unit), in order."""
    queues: dict[tuple[int, ActionKind], deque] = {}
    for place, action in enumerate(row):
        entry = (place, action.stage, action.kind, action.round)
        queues.setdefault((action.stage, action.kind), deque()).append(entry)
    return list(queues.values())
