"""Split backwards with two stages per host, placed as a V: ZB-V, V-Half and V-Min.

A micro-batch goes down the hosts through its first half of the stages and up again through the second, so a host
near the top holds what it runs first for long and what it runs last for a short time, and all hosts hold as much.

    zb-v      memory p                  no bubble where F = B = W and there are 2p micro-batches
    v-half    memory about p / 2 + 1    about half the bubble of 1F1B where F = B = W
    v-min     memory about (p + 2) / 3  about two thirds

V-Half and V-Min repeat the slots of one micro-batch every six slots: its two F, two I and two W. Who holds a
micro-batch for t slots holds t / 6 of them at a time.
"""

from __future__ import annotations

from collections.abc import Callable

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.schedules.play import Times
from seqloom.plan.schedules.schedule import Schedule, units_of
from seqloom.plan.schedules.squeeze import IN_ORDER, RUN_AHEAD, best_of

F, B = ActionKind.F, ActionKind.B
PERIOD = 6


def zb_v(name: str, hosts: int, micro_batches: int, times: Times) -> Schedule:
    """ZB-V: the memory of 1F1B, and no bubble where F, I and W take the same time.

    Args:
        name: of the schedule.
        hosts: of the pipeline, with two stages each.
        micro_batches: in one piece each.
        times: of every unit on every stage.
    """
    rows = []
    for r in range(hosts):
        turns = [("f", 2 * (hosts - r) - 1), ("gf", r), ("gb", hosts - r), ("fagb", 4 * micro_batches)]
        rows.append(_in_turn(r, 2 * hosts - 1 - r, micro_batches, turns))
    return best_of(_vee(name, hosts, micro_batches, rows), times, (2 * hosts,))


def v_half(name: str, hosts: int, micro_batches: int, times: Times) -> Schedule:
    """V-Half: about half the memory of 1F1B. Arguments as `zb_v`."""
    extra = 3 if hosts % 2 == 0 else 0

    def slots(r: int) -> tuple[int, int, int, int]:
        return 2 * r, 3 * hosts - r - 2, 3 * hosts + extra + 2 * r - 1, 6 * hosts + extra - r - 2

    return best_of(_repeated(name, hosts, micro_batches, slots), times, (hosts + 2,), IN_ORDER + RUN_AHEAD)


def v_min(name: str, hosts: int, micro_batches: int, times: Times) -> Schedule:
    """V-Min: about a third of the memory of 1F1B. Arguments as `zb_v`."""
    extra = 2 if hosts % 3 == 0 else 0
    cap = 2 * -(-(hosts + 2) // 3)

    def slots(r: int) -> tuple[int, int, int, int]:
        return r, 2 * hosts - r - 1, 2 * hosts + extra + r, 4 * hosts + extra - r - 1

    return best_of(_repeated(name, hosts, micro_batches, slots), times, (cap,), IN_ORDER + RUN_AHEAD)


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


def _repeated(name: str, hosts: int, micro_batches: int, slots: Callable[[int], tuple[int, int, int, int]]) -> Schedule:
    """Repeat the four slots of one micro-batch on every host, in the order of the lanes, every period."""
    rows = []
    for r in range(hosts):
        down, up = r, 2 * hosts - 1 - r
        block = zip(slots(r), ((down, F), (up, F), (up, B), (down, B)), strict=True)
        entries = sorted((at + PERIOD * u, s, k, u) for at, (s, k) in block for u in range(micro_batches))
        rows.append(tuple(Action(stage, kind, u) for _, stage, kind, u in entries))
    return _vee(name, hosts, micro_batches, rows)


def _vee(name: str, hosts: int, micro_batches: int, rows: list[tuple[Action, ...]]) -> Schedule:
    placement = (*range(hosts), *reversed(range(hosts)))
    return Schedule(name, placement, units_of([1] * micro_batches), tuple(rows))
