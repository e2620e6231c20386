"""Orders with one stage per host and whole backwards: GPipe, 1F1B, TeraPipe and Seq1F1B.

All of them run forwards in the order of the units and backwards in the order of `backward_order`: sequences first
in, first out; pieces last in, first out. They differ in how many forwards come before which backward.

    GPipe, TeraPipe    all forwards first: the least waiting for messages, the most memory
    1F1B, Seq1F1B      one forward, one backward; a host that is d hosts before the last is d forwards ahead of it

Sequences may have different numbers of pieces. Where all have k, the last host begins with k forwards and host r
of p holds at most k + p - 1 - r units.
"""

from __future__ import annotations

from collections.abc import Sequence

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.schedules.schedule import Schedule, Unit, backward_order, units_of

F, B = ActionKind.F, ActionKind.B


def all_forwards_first(name: str, stages: int, pieces: Sequence[int]) -> Schedule:
    """GPipe over pieces, which is TeraPipe's order.

    Args:
        name: of the schedule.
        stages: one per host.
        pieces: how many each sequence has, in forward order.
    """
    units = units_of(pieces)
    back = list(backward_order(units))
    rows = tuple(
        (*(Action(s, F, u) for u in range(len(units))), *(Action(s, B, u) for u in back)) for s in range(stages)
    )
    return Schedule(name, tuple(range(stages)), units, rows)


def one_forward_one_backward(name: str, stages: int, pieces: Sequence[int]) -> Schedule:
    """1F1B over pieces, which is Seq1F1B: warm-up of p - r - 2 + k forwards on host r where all have k pieces.

    Args:
        name: of the schedule.
        stages: one per host.
        pieces: how many each sequence has, in forward order.
    """
    units = units_of(pieces)
    back, lead = list(backward_order(units)), forwards_before(units)
    rows = []
    for s in range(stages):
        row, done = [], 0
        for u, least in zip(back, lead, strict=True):
            until = min(len(units), least + stages - 1 - s)
            row += [Action(s, F, number) for number in range(done, until)]
            row.append(Action(s, B, u))
            done = max(done, until)
        rows.append(tuple(row))
    return Schedule(name, tuple(range(stages)), units, tuple(rows))


def forwards_before(units: Sequence[Unit]) -> list[int]:
    """How many forwards the last host runs before its 1st, 2nd, .. backward: one more each time, or what it needs.

    A backward needs the forwards of its whole sequence. With k pieces each: k, k + 1, k + 2, .., all.
    """
    ends: dict[int, int] = {unit.sequence: number + 1 for number, unit in enumerate(units)}
    lead: list[int] = []
    for u in backward_order(units):
        lead.append(min(len(units), max(ends[units[u].sequence], lead[-1] + 1 if lead else 0)))
    return lead
