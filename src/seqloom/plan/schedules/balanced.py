"""Balanced: unequal units under a memory cap, backwards in halves; the best of several orders.

What is tried:

    list schedules      feed the hungrier neighbour; the same with less memory on later hosts; backwards first
    local search        host by host, forwards a little more or less urgent; what is faster is kept
    Seq1F1B             as it is, and with weight halves as fillers (its zero-bubble form), where it fits

No order is ever worse than Seq1F1B's if that fits. Everything is integers and the budget counts orders, not seconds:
the same input gives the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqloom.plan.error import broken
from seqloom.plan.schedules.listing import Listed, Problem, listed
from seqloom.plan.schedules.play import Times, play
from seqloom.plan.schedules.schedule import Schedule, Unit, units_of
from seqloom.plan.schedules.squeeze import IN_ORDER, squeezed
from seqloom.plan.schedules.strict import one_forward_one_backward

NAME = "balanced"
BUDGET = 12
"""List schedules tried."""


def balanced(
    hosts: Sequence[int],
    units: Sequence[Unit],
    times: Times,
    held: np.ndarray,
    cap: int | Sequence[int],
    *,
    budget: int = BUDGET,
) -> Schedule:
    """Return the fastest order found in which no host ever holds more than its cap.

    Args:
        hosts: the host of every stage, as in `Schedule`. With several stages per host (interleaved, V), what a unit
            holds on all of them is set aside when the first takes it in: valid, but not as sparing as V can be.
        units: in forward order.
        times: of every unit on every stage, integers.
        held: int64[stages, units], what a unit holds on a stage from its F to its B or W.
        cap: the most that a host may hold, or one number per host.
        budget: list schedules to try, at least 1.

    Raises:
        PlanError: a sequence does not fit under the cap.
    """
    problem = Problem.of(hosts, units, times, held)
    caps = [cap] * len(problem.needs) if isinstance(cap, int) else list(cap)
    check_fits(problem, caps)
    best = searched(problem, caps, budget)
    found = Schedule(NAME, problem.hosts, problem.units, best.actions(problem))
    orders = [found, *_seq1f1b(problem, times, held, caps)]
    return min(orders, key=lambda order: play(order, times).makespan)


def check_fits(problem: Problem, caps: Sequence[int]) -> None:
    """Refuse caps under which a sequence cannot be run."""
    for host, (most, least) in enumerate(zip(caps, problem.least, strict=True)):
        if most < least:
            value = f"host {host} may hold {most:,}"
            must = f"before its backward begins, the largest sequence needs {least:,} there"
            raise broken("memory", value, must, "raise the limit, or keep less of a unit (checkpointing)")


def searched(problem: Problem, caps: Sequence[int], budget: int) -> Listed:
    """Return the best of `budget` list schedules; the caps are such that the problem fits."""
    even, never = [0] * len(caps), [-len(problem.units)] * len(caps)
    last = max(1, len(caps) - 1)
    falling = [
        max(least, cap - cap * host // (5 * last))  # down to 80 %: the last hosts keep little but weight halves
        for host, (cap, least) in enumerate(zip(caps, problem.least, strict=True))
    ]
    best, lead, room = listed(problem, caps, even), even, caps
    for tried_lead, tried_room in ((even, falling), (never, caps))[: budget - 1]:
        order = listed(problem, tried_room, tried_lead)
        if order.makespan < best.makespan:
            best, lead, room = order, tried_lead, tried_room
    return _climbed(problem, best, lead, room, budget - 3)


def _climbed(problem: Problem, best: Listed, lead: list[int], room: Sequence[int], budget: int) -> Listed:
    """Make forwards a little more or less urgent, host by host, and keep what is faster."""
    steps = [(host, step) for host in range(len(lead)) for step in (1, -1)]
    failed = at = 0
    while budget > 0 and failed < len(steps):
        host, step = steps[at % len(steps)]
        moved = [value + step * (number == host) for number, value in enumerate(lead)]
        order = listed(problem, room, moved)
        budget, at, failed = budget - 1, at + 1, failed + 1
        if order.makespan < best.makespan:
            best, lead, failed = order, moved, 0
    return best


def _seq1f1b(problem: Problem, times: Times, held: np.ndarray, caps: Sequence[int]) -> list[Schedule]:
    """Seq1F1B whole and with weight halves as fillers, where it fits: one stage per host, sequences in turn."""
    pieces = {unit.sequence: unit.pieces for unit in problem.units}
    in_turn = [unit[1:] for unit in units_of(list(pieces.values()))] == [unit[1:] for unit in problem.units]
    if len(problem.hosts) != len(problem.needs) or not in_turn:
        return []
    rows = one_forward_one_backward(NAME, len(problem.hosts), list(pieces.values())).rows
    whole = Schedule(NAME, problem.hosts, problem.units, rows)
    peaks = play(whole, times, held).peak
    if any(peak > cap for peak, cap in zip(peaks, caps, strict=True)):
        return []
    split = [squeezed(whole, times, caps, held, freedom) for freedom in IN_ORDER]
    return [whole, *(order for order in split if order is not None)]
