"""Split backwards: put the weight halves (W) into the gaps of an order, within memory.

Given are rows of forwards and backwards. Every backward becomes an I, which the stage before waits for, and a W,
which nobody waits for. The rows are run in time: a host takes its next action as soon as it can, and a W when it
would otherwise wait or when its memory is full. What it did is the new order. A unit is held from F to W.

Three knobs say how far a host may depart from its row; `best_of` tries several and keeps the fastest.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from seqloom.errors import PlanError
from seqloom.plan.action import Action, ActionKind
from seqloom.schedules.fixed import one_forward_one_backward
from seqloom.schedules.schedule import Schedule, units_of
from seqloom.schedules.timing import Times, simulate_schedule, unit_sizes

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward


@dataclass(frozen=True, slots=True)
class FillPolicy:
    """How a host may depart from its row."""

    patience: float = 0.0
    """A W is put into a gap that is at least this share of it, even where it delays what comes next."""
    lookahead: int = 0
    """An action may come before others of its row that are not ready, this many places early."""
    reserve: int = 0
    """A forward that comes early leaves this much memory free."""


IN_ORDER = tuple(FillPolicy(patience) for patience in (0.0, 0.5, 1.0))
RUN_AHEAD = tuple(FillPolicy(patience, 4, reserve) for patience, reserve in product((0.0, 0.5, 1.0), (0, 1, 2, 5)))


def fastest_fill(
    order: Schedule,
    times: Times,
    caps: Iterable[int],
    policies: Iterable[FillPolicy] = IN_ORDER,
    memory: np.ndarray | None = None,
) -> Schedule:
    """Return the fastest of several ways to place the weight halves, then the one with the least memory.

    Args:
        order: rows of F and B in an order that ends.
        times: of every unit on every stage.
        caps: what a host may hold, to try.
        policies: to try.
        memory: as for `squeezed`.
    """
    best: tuple[tuple[int, int, int], Schedule] | None = None
    for cap, freedom in product(caps, policies):
        found = fill_bubbles(order, times, cap, memory, freedom)
        if found is not None:
            played = simulate_schedule(found, times, memory)
            score = played.step_time, played.makespan, max(played.peak_memory, default=0)
            if best is None or score < best[0]:
                best = score, found
    if best is None:
        raise PlanError(f"{order.name} finds no order for {len(order.units)} units; use 1f1b, or more micro-batches")
    return best[1]


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
        cap: the most that a host may hold, or one number per host.
        memory: int64[stages, units], what a unit holds on a stage from its F to its W; 1 without it.
        policy: how far a host may depart from its row.
    """
    caps = [cap] * len(schedule.rows) if isinstance(cap, int) else list(cap)
    sizes = np.ones((len(schedule.pp_ranks), len(schedule.units)), dtype=np.int64) if memory is None else memory
    rows = _Run(schedule, times, caps, sizes, policy).rows()
    return None if rows is None else replace(schedule, rows=rows)


class _Run:
    """All hosts in time."""

    def __init__(
        self, schedule: Schedule, times: Times, caps: list[int], held: np.ndarray, freedom: FillPolicy
    ) -> None:
        self.caps, self.freedom = caps, freedom
        self.held: list[list[int]] = held.tolist()
        self.last = len(schedule.pp_ranks) - 1
        self.forward, self.backward, self.weights = (
            column.tolist() for column in (times.forward, times.backward_input, times.split_weight)
        )
        width = len(schedule.rows)
        self.lanes = [_lanes(row) for row in schedule.rows]
        self.done: dict[tuple[int, bool, int], int] = {}
        self.pending: list[deque[tuple[int, int]]] = [deque() for _ in range(width)]
        self.live, self.free = [0] * width, [0] * width
        self.out: list[list[Action]] = [[] for _ in range(width)]
        self.heap = [(0, h) for h in range(width)]
        self.neighbours = schedule.neighbours

    def rows(self) -> tuple[tuple[Action, ...], ...] | None:
        """Run to the end."""
        while self.heap:
            now, host = heapq.heappop(self.heap)
            if now >= self.free[host]:
                self.step(now, host)
        return None if any(any(lanes) for lanes in self.lanes) else tuple(map(tuple, self.out))

    def step(self, now: int, host: int) -> None:
        """Let a free host do one thing, or wait."""
        action, full, soon = self.choose(now, host)
        if action is not None:
            self.run(now, host, action)
        elif self.pending[host] and (full or soon is None or self.worth(soon - now, *self.pending[host][0])):
            stage, number = self.pending[host].popleft()
            self.out[host].append(Action(stage, W, number))
            self.live[host] -= self.held[stage][number]
            self.busy(host, now + self.weights[stage][number])
        elif soon is not None:
            heapq.heappush(self.heap, (soon, host))

    def worth(self, gap: int, stage: int, number: int) -> bool:
        """Whether a W may go into a gap."""
        return gap >= self.freedom.patience * self.weights[stage][number]

    def choose(self, now: int, host: int) -> tuple[Action | None, bool, int | None]:
        """Return what to run now; whether only memory forbids it; and when the next one is known to be ready."""
        heads = sorted(lane[0] for lane in self.lanes[host] if lane)
        soon, full = None, False
        for place, stage, kind, number in heads:
            if place - heads[0][0] > self.freedom.lookahead:
                break
            ready = self.ready(stage, kind, number)
            if ready is None:
                continue
            if ready > now:
                soon = ready if soon is None else min(soon, ready)
                continue
            first = place == heads[0][0]
            spare = self.caps[host] - self.live[host] - (0 if first else self.freedom.reserve)
            if kind is F and self.held[stage][number] > spare:
                if first:
                    return None, True, soon
                full = True
                continue
            return Action(stage, kind, number), False, soon
        return None, full, soon

    def ready(self, stage: int, kind: ActionKind, number: int) -> int | None:
        """When what an action needs is there; None where that is not known yet."""
        if kind is F:
            return self.done.get((stage - 1, True, number)) if stage else 0
        own = self.done.get((stage, True, number))
        return own if stage == self.last or own is None else self.done.get((stage + 1, False, number))

    def run(self, now: int, host: int, action: Action) -> None:
        """Run a forward, or the input half of a backward."""
        stage, number = action.stage, action.round
        assert number is not None
        forward = action.kind is F
        stop = now + (self.forward if forward else self.backward)[stage][number]
        lane = next(lane for lane in self.lanes[host] if lane and lane[0][1:] == (stage, action.kind, number))
        lane.popleft()
        if forward:
            self.live[host] += self.held[stage][number]
            self.out[host].append(action)
        else:
            self.out[host].append(Action(stage, I, number))
            self.pending[host].append((stage, number))
        self.done[stage, forward, number] = stop
        self.busy(host, stop)
        for other in self.neighbours[host]:
            heapq.heappush(self.heap, (max(stop, self.free[other]), other))

    def busy(self, host: int, until: int) -> None:
        """Come back to a host when it is free again."""
        self.free[host] = until
        heapq.heappush(self.heap, (until, host))


def _lanes(row: tuple[Action, ...]) -> list[deque[tuple[int, int, ActionKind, int]]]:
    """Split a row into its stages' forwards and backwards, each in its order and with its place in the row."""
    lanes: dict[tuple[int, ActionKind], deque] = {}
    for place, action in enumerate(row):
        entry = (place, action.stage, action.kind, action.round)
        lanes.setdefault((action.stage, action.kind), deque()).append(entry)
    return list(lanes.values())


# ---- merged: plan.schedules.zero_bubble
# Split backwards with one stage per host: ZB-H1, ZB-H2 and Seq1F1B-ZB.
#
# The order of forwards and input halves is that of 1F1B; `squeeze` places the weight halves. p hosts, k pieces,
# times
# F, B (input half) and W of a micro-batch:
#
#     zb-h1, seq1f1b-zb    memory of 1F1B                          bubble (p - 1) (F + B - W) / k
#     zb-h2                two forwards ahead per host, memory 2p  bubble (p - 1) (F + B - 2 W) / k or less


def zero_bubble(name: str, stages: int, pieces: Sequence[int], times: Times, lead: int = 1) -> Schedule:
    """ZB-H1 (lead 1) and ZB-H2 (lead 2) over pieces; with lead 1 and k pieces this is Seq1F1B-ZB.

    Args:
        name: of the schedule.
        stages: one per host.
        pieces: how many each sequence has, in forward order; a piece counts as that part of a micro-batch's memory.
        times: of every unit on every stage.
        lead: forwards that a host is ahead of the next one.
    """
    order = one_forward_one_backward(name, stages, pieces, lead)
    held, _ = unit_sizes(order)
    cap = max(simulate_schedule(order, times, held).peak_memory, default=0)
    return fastest_fill(order, times, (cap,) if lead == 1 else (cap, cap + int(held.max())), memory=held)


# ---- merged: plan.schedules.vee
# Split backwards with two stages per host, placed as a V: ZB-V, V-Half and V-Min.
#
# A micro-batch goes down the hosts through its first half of the stages and up again through the second, so a host
# near the top holds what it runs first for long and what it runs last for a short time, and all hosts hold as much.
#
#     zb-v      memory p                  no bubble where F = B = W and there are 2p micro-batches
#     v-half    memory about p / 2 + 1    about half the bubble of 1F1B where F = B = W
#     v-min     memory about (p + 2) / 3  about two thirds
#
# V-Half and V-Min repeat the slots of one micro-batch every six slots: its two F, two I and two W. Who holds a
# micro-batch for t slots holds t / 6 of them at a time.


F, B = ActionKind.F, ActionKind.B
PERIOD = 6


def zb_v(name: str, pp_size: int, micro_batches: int, times: Times) -> Schedule:
    """ZB-V: the memory of 1F1B, and no bubble where F, I and W take the same time.

    Args:
        name: of the schedule.
        pp_size: of the pipeline, with two stages each.
        micro_batches: in one piece each.
        times: of every unit on every stage.
    """
    rows = []
    for r in range(pp_size):
        turns = [("f", 2 * (pp_size - r) - 1), ("gf", r), ("gb", pp_size - r), ("fagb", 4 * micro_batches)]
        rows.append(_in_turn(r, 2 * pp_size - 1 - r, micro_batches, turns))
    return fastest_fill(_vee(name, pp_size, micro_batches, rows), times, (2 * pp_size,))


def v_half(name: str, pp_size: int, micro_batches: int, times: Times) -> Schedule:
    """V-Half: about half the memory of 1F1B. Arguments as `zb_v`."""
    extra = 3 if pp_size % 2 == 0 else 0

    def slots(r: int) -> tuple[int, int, int, int]:
        return 2 * r, 3 * pp_size - r - 2, 3 * pp_size + extra + 2 * r - 1, 6 * pp_size + extra - r - 2

    return fastest_fill(_repeated(name, pp_size, micro_batches, slots), times, (pp_size + 2,), IN_ORDER + RUN_AHEAD)


def v_min(name: str, pp_size: int, micro_batches: int, times: Times) -> Schedule:
    """V-Min: about a third of the memory of 1F1B. Arguments as `zb_v`."""
    extra = 2 if pp_size % 3 == 0 else 0
    cap = 2 * -(-(pp_size + 2) // 3)

    def slots(r: int) -> tuple[int, int, int, int]:
        return r, 2 * pp_size - r - 1, 2 * pp_size + extra + r, 4 * pp_size + extra - r - 1

    return fastest_fill(_repeated(name, pp_size, micro_batches, slots), times, (cap,), IN_ORDER + RUN_AHEAD)


def _in_turn(down: int, up: int, micro_batches: int, turns: list[tuple[str, int]]) -> tuple[Action, ...]:
    """Take the next micro-batch of the named lanes in turn, so many times; skip a lane that would overtake another.

    Lanes: f forward on the way down, g forward on the way up, b backward of the way up, a backward of the way down.
    """
    what: dict[str, tuple[int, ActionKind]] = {"f": (down, F), "g": (up, F), "b": (up, B), "a": (down, B)}
    before: dict[str, str] = {"f": "", "g": "f", "b": "g", "a": "b"}
    taken: dict[str, int] = {"": micro_batches, **dict.fromkeys(what, 0)}
    row: list[Action] = []
    for lanes, times in turns:
        for lane in lanes * times:
            if taken[lane] < taken[before[lane]]:
                row.append(Action(*what[lane], taken[lane]))
                taken[lane] += 1
    return tuple(row)


def _repeated(
    name: str, pp_size: int, micro_batches: int, slots: Callable[[int], tuple[int, int, int, int]]
) -> Schedule:
    """Repeat the four slots of one micro-batch on every host, in the order of the lanes, every period."""
    rows = []
    for r in range(pp_size):
        down, up = r, 2 * pp_size - 1 - r
        block = zip(slots(r), ((down, F), (up, F), (up, B), (down, B)), strict=True)
        entries = sorted((at + PERIOD * u, s, k, u) for at, (s, k) in block for u in range(micro_batches))
        rows.append(tuple(Action(stage, kind, u) for _, stage, kind, u in entries))
    return _vee(name, pp_size, micro_batches, rows)


def _vee(name: str, pp_size: int, micro_batches: int, rows: list[tuple[Action, ...]]) -> Schedule:
    placement = (*range(pp_size), *reversed(range(pp_size)))
    return Schedule(name, placement, units_of([1] * micro_batches), tuple(rows))
