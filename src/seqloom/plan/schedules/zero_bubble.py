"""Split backwards with one stage per host: ZB-H1, ZB-H2 and Seq1F1B-ZB.

The order of forwards and input halves is that of 1F1B; `squeeze` places the weight halves. p hosts, k pieces, times
F, B (input half) and W of a micro-batch:

    zb-h1, seq1f1b-zb    memory of 1F1B                          bubble (p - 1) (F + B - W) / k
    zb-h2                two forwards ahead per host, memory 2p  bubble (p - 1) (F + B - 2 W) / k or less
"""

from __future__ import annotations

from collections.abc import Sequence

from seqloom.plan.schedules.figures import sizes
from seqloom.plan.schedules.play import Times, play
from seqloom.plan.schedules.schedule import Schedule
from seqloom.plan.schedules.squeeze import best_of
from seqloom.plan.schedules.strict import one_forward_one_backward


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
    held, _ = sizes(order)
    cap = max(play(order, times, held).peak, default=0)
    return best_of(order, times, (cap,) if lead == 1 else (cap, cap + int(held.max())), held=held)
