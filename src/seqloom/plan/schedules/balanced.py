"""Balanced: unequal units under a memory cap, backwards in halves; the best of several orders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqloom.plan.error import broken
from seqloom.plan.schedules.listing import Problem, listed
from seqloom.plan.schedules.play import Times, play
from seqloom.plan.schedules.schedule import Schedule, Unit
from seqloom.plan.schedules.strict import one_forward_one_backward

NAME = "balanced"


def balanced(
    hosts: Sequence[int], units: Sequence[Unit], times: Times, held: np.ndarray, cap: int | Sequence[int]
) -> Schedule:
    """Return the fastest order found in which no host ever holds more than its cap.

    Args:
        hosts: the host of every stage, as in `Schedule`; one stage per host, interleaved and V all work.
        units: in forward order.
        times: of every unit on every stage, integers.
        held: int64[stages, units], what a unit holds on a stage from its F to its B or W.
        cap: the most that a host may hold, or one number per host.

    Raises:
        PlanError: a sequence does not fit under the cap.
    """
    problem = Problem.of(hosts, units, times, held)
    caps = [cap] * len(problem.needs) if isinstance(cap, int) else list(cap)
    for host, (most, least) in enumerate(zip(caps, problem.least(), strict=True)):
        if most < least:
            value = f"host {host} may hold {most:,}"
            must = f"before its backward begins, the largest sequence needs {least:,} there"
            raise broken("memory", value, must, "raise the limit, or keep less of a unit (checkpointing)")
    found = [Schedule(NAME, problem.hosts, problem.units, listed(problem, caps).actions(problem))]
    if len(hosts) == len(problem.needs):
        found += _strict(problem.units, held, caps)
    return min(found, key=lambda schedule: play(schedule, times).makespan)


def _strict(units: tuple[Unit, ...], held: np.ndarray, caps: Sequence[int]) -> list[Schedule]:
    """Seq1F1B where it fits."""
    pieces = {unit.sequence: unit.pieces for unit in units}
    contiguous = [unit for s, count in pieces.items() for unit in (Unit(s, piece, count) for piece in range(count))]
    if contiguous != list(units):
        return []
    schedule = one_forward_one_backward(NAME, len(held), list(pieces.values()))
    schedule = Schedule(NAME, schedule.hosts, units, schedule.rows)
    peaks = play(schedule, Times.equal(schedule), held).peak
    return [schedule] if all(peak <= most for peak, most in zip(peaks, caps, strict=True)) else []
