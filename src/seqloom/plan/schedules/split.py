"""Orders with split backwards: ZB-H1, ZB-H2, Seq1F1B-ZB with one stage per host; ZB-V, V-Half, V-Min with two.

Each is an order of forwards and input halves, and a limit on memory; `squeeze` places the weight halves and, for
the V orders, lets hosts run ahead where that is free. p hosts, times F, B (input half), W of a micro-batch:

    zb-h1, seq1f1b-zb   order of 1F1B, its memory               bubble (p - 1) (F + B - W) / k
    zb-h2               two forwards ahead per host, memory 2p  bubble (p - 1) (F + B - 2 W) or less
    zb-v                V, memory p                             no bubble where F = B = W and there are 2p micro-batches
    v-half, v-min       V, memory about p / 2 + 1 and (p + 2) / 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.error import PlanError
from seqloom.plan.schedules.play import Times, play
from seqloom.plan.schedules.schedule import Schedule, units_of
from seqloom.plan.schedules.squeeze import Freedom, squeezed
from seqloom.plan.schedules.strict import one_forward_one_backward

F, B = ActionKind.F, ActionKind.B
Ratio = tuple[int, int, int]
IN_ORDER = tuple(Freedom(patience) for patience in (0.0, 0.5, 1.0))
RUN_AHEAD = tuple(Freedom(patience, 4, reserve) for patience, reserve in product((0.0, 0.5, 1.0), (0, 1, 2, 5)))
PERIOD = 6
"""Slots of one micro-batch on a host with two stages: two each of F, I and W."""


def zero_bubble(name: str, stages: int, pieces: Sequence[int], times: Times | Ratio, lead: int = 1) -> Schedule:
    """ZB-H1 (lead 1) and ZB-H2 (lead 2) over pieces; with lead 1 and k pieces this is Seq1F1B-ZB.

    Args:
        name: of the schedule.
        stages: one per host.
        pieces: how many each sequence has, in forward order.
        times: F, I and W of a unit.
        lead: forwards that a host is ahead of the next one.
    """
    order = one_forward_one_backward(name, stages, pieces, lead)
    cap = max(play(order, Times.equal(order)).peak, default=0)
    return _best(order, times, (cap,) if lead == 1 else (cap, cap + 1), IN_ORDER)


def zb_v(name: str, hosts: int, micro_batches: int, times: Times | Ratio) -> Schedule:
    """ZB-V: the memory of 1F1B, and no bubble where F, I and W take the same time.

    Args:
        name: of the schedule.
        hosts: of the pipeline, with two stages each.
        micro_batches: in one piece each.
        times: F, I and W of a unit on a stage.
    """
    rows = []
    for r in range(hosts):
        down, up = r, 2 * hosts - 1 - r
        order = _Lanes(down, up, micro_batches)
        order.take("f", 2 * (hosts - r) - 1)
        order.take("gf", r)
        order.take("gb", hosts - r)
        order.take("fagb", 4 * micro_batches)
        rows.append(tuple(order.row))
    vee = Schedule(name, _vee(hosts), units_of([1] * micro_batches), tuple(rows))
    return _best(vee, times, (2 * hosts,), IN_ORDER)


def v_half(name: str, hosts: int, micro_batches: int, times: Times | Ratio) -> Schedule:
    """V-Half: about half the memory of 1F1B. Arguments as `zb_v`."""
    extra = 3 if hosts % 2 == 0 else 0

    def slots(r: int) -> tuple[int, int, int, int]:
        return 2 * r, 3 * hosts - r - 2, 3 * hosts + extra + 2 * r - 1, 6 * hosts + extra - r - 2

    return _best(_repeated(name, hosts, micro_batches, slots), times, (hosts + 2,), IN_ORDER + RUN_AHEAD)


def v_min(name: str, hosts: int, micro_batches: int, times: Times | Ratio) -> Schedule:
    """V-Min: about a third of the memory of 1F1B. Arguments as `zb_v`."""
    extra = 2 if hosts % 3 == 0 else 0

    def slots(r: int) -> tuple[int, int, int, int]:
        return r, 2 * hosts - r - 1, 2 * hosts + extra + r, 4 * hosts + extra - r - 1

    return _best(_repeated(name, hosts, micro_batches, slots), times, (2 * -(-(hosts + 2) // 3),), IN_ORDER + RUN_AHEAD)


def _repeated(name: str, hosts: int, micro_batches: int, slots: Callable[[int], tuple[int, int, int, int]]) -> Schedule:
    """Repeat one micro-batch's slots (down, up, back on the way up, back on the way down) every period."""
    rows = []
    for r in range(hosts):
        down, up = r, 2 * hosts - 1 - r
        block = zip(slots(r), ((down, F), (up, F), (up, B), (down, B)), strict=True)
        entries = sorted((at + PERIOD * u, s, k, u) for at, (s, k) in block for u in range(micro_batches))
        rows.append(tuple(Action(stage, kind, u) for _, stage, kind, u in entries))
    return Schedule(name, _vee(hosts), units_of([1] * micro_batches), tuple(rows))


def _vee(hosts: int) -> tuple[int, ...]:
    return (*range(hosts), *reversed(range(hosts)))


class _Lanes:
    """One host's next micro-batch of: f forward down, g forward up, b backward up, a backward down."""

    def __init__(self, down: int, up: int, of: int) -> None:
        self.of = of
        self.next = dict.fromkeys("fgba", 0)
        self.what = {"f": (down, F), "g": (up, F), "b": (up, B), "a": (down, B)}
        self.row: list[Action] = []

    def take(self, lanes: str, times: int) -> None:
        """Take from the lanes in turn, so many times; skip one whose next micro-batch has not come that far."""
        for _ in range(times):
            for lane in lanes:
                before = {"g": "f", "b": "g", "a": "b"}.get(lane)
                if self.next[lane] < (self.of if before is None else self.next[before]):
                    stage, kind = self.what[lane]
                    self.row.append(Action(stage, kind, self.next[lane]))
                    self.next[lane] += 1


def _best(order: Schedule, times: Times | Ratio, caps: Iterable[int], freedoms: Iterable[Freedom]) -> Schedule:
    """Return the fastest of several ways to place the weight halves, then the one with the least memory."""
    if not isinstance(times, Times):
        times = Times.equal(order, *times)
    best: tuple[tuple[int, int, int], Schedule] | None = None
    for cap, freedom in product(caps, freedoms):
        found = squeezed(order, times, cap, freedom)
        if found is not None:
            played = play(found, times)
            score = played.span, max(played.peak, default=0), played.makespan
            if best is None or score < best[0]:
                best = score, found
    if best is None:
        raise PlanError(f"{order.name} finds no order for {len(order.units)} units; use 1f1b, or more micro-batches")
    return replace(best[1], name=order.name)
