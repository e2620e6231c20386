"""Orders with one stage per host: GPipe, 1F1B, TeraPipe and Seq1F1B.

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
from seqloom.plan.schedules.pace import one_more_each, paced
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
    return _paced(name, stages, units, [len(units)] * len(units), 0)


def one_forward_one_backward(name: str, stages: int, pieces: Sequence[int], lead: int = 1) -> Schedule:
    """1F1B over pieces, which is Seq1F1B: warm-up of p - r - 2 + k forwards on host r where all have k pieces.

    Args:
        name: of the schedule.
        stages: one per host.
        pieces: how many each sequence has, in forward order.
        lead: forwards that a host is ahead of the next one; 1 is the least that never waits for itself.
    """
    units = units_of(pieces)
    ends = {unit.sequence: number + 1 for number, unit in enumerate(units)}
    before = one_more_each([ends[units[u].sequence] for u in backward_order(units)], len(units))
    return _paced(name, stages, units, before, lead)


def _paced(name: str, stages: int, units: tuple[Unit, ...], before: Sequence[int], lead: int) -> Schedule:
    back = list(backward_order(units))
    rows = [
        paced([Action(s, F, u) for u in range(len(units))], [Action(s, B, u) for u in back], before, lead * d)
        for s, d in zip(range(stages), reversed(range(stages)), strict=True)
    ]
    return Schedule(name, tuple(range(stages)), units, tuple(rows))
