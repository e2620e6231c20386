"""How coarse to cut and pack, found by trying: small units fill and empty a pipeline fast, large ones lose less each.

First the number of pieces, from few to many; then one thing after the other around the best. Every trial is one list
schedule, timed; the full search for an order is made for the winner only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from seqloom.plan.schedules import Schedule, Times
from seqloom.plan.schedules.balanced import BUDGET, balanced, searched
from seqloom.plan.schedules.listing import Problem
from seqloom.planners.pipelines.cuts import Cost
from seqloom.planners.pipelines.packing import Packed, Shape, packed

PIECES = (8, 12, 16, 24, 32, 48)

Price = Callable[[Packed], tuple[Times, np.ndarray]]
"""Times of units and what they hold, int64[stages, units] each."""


class Grain(NamedTuple):
    """A shape relative to the longest document and to memory."""

    pieces: int
    """Of the longest document."""
    halves: int = 4
    """Half pieces that a pack takes as long as."""
    packs: int = 14
    """Packs that fill a host's memory: hosts hold about as many units as there are stages, and twice that flows."""
    starters: int = 4
    shared: bool = True


CHANGES: tuple[Callable[[Grain], Grain], ...] = (
    lambda grain: grain._replace(pieces=grain.pieces * 5 // 6),
    lambda grain: grain._replace(pieces=grain.pieces * 7 // 6),
    lambda grain: grain._replace(halves=grain.halves - 1),
    lambda grain: grain._replace(halves=grain.halves + 1),
    lambda grain: grain._replace(starters=grain.starters * 3 // 2),
    lambda grain: grain._replace(shared=False),
    lambda grain: grain._replace(packs=grain.packs - 2),
    lambda grain: grain._replace(packs=grain.packs + 2),
)
"""What is tried around the best, one after the other."""


class Chosen(NamedTuple):
    """Units, their order, and what was known of them."""

    packed: Packed
    schedule: Schedule
    times: Times
    held: np.ndarray


class _Trial(NamedTuple):
    makespan: int
    packed: Packed
    times: Times
    held: np.ndarray


def chosen(
    lengths: Sequence[int],
    cost: Cost,
    price: Price,
    hosts: Sequence[int],
    cap: int,
    tokens: int,
    *,
    multiple: int = 1,
    floor: int = 1,
    budget: int = BUDGET,
) -> Chosen:
    """Make units of documents and put them in order, as fast as is found under the cap.

    Args:
        lengths: tokens of every document.
        cost: of the first x tokens of a document, forward and backward.
        price: times of units, and what they hold.
        hosts: the host of every stage.
        cap: the most that a host may hold, in the unit of what `price` returns.
        tokens: about how many tokens that is.
        multiple: cuts are at multiples of this.
        floor: the least tokens of a piece.
        budget: list schedules tried for the final order.

    Raises:
        PlanError: the longest document does not fit under the cap.
    """
    longest = cost(max(lengths))

    def trial(grain: Grain) -> _Trial | None:
        piece = max(1, -(-longest // grain.pieces))
        pack, most = max(1, piece * grain.halves // 2), max(1, tokens // grain.packs)
        shape = Shape(piece, pack, most, grain.starters, grain.shared, later=piece * 3 // 2)
        units = packed(lengths, cost, shape, multiple=multiple, floor=floor)
        times, held = price(units)
        problem = Problem.of(hosts, units.units, times, held)
        if max(problem.least) > cap:
            return None
        return _Trial(searched(problem, [cap] * len(problem.needs), 1).makespan, units, times, held)

    best = _best(trial, max(hosts) + 1)
    if best is None:  # nothing fits: say why, for the units that need least
        piece = max(1, longest // PIECES[-1])
        units = packed(lengths, cost, Shape(piece, piece, 1), multiple=multiple, floor=floor)
        best = _Trial(0, units, *price(units))
    order = balanced(hosts, best.packed.units, best.times, best.held, cap, budget=budget)
    return Chosen(best.packed, order, best.times, best.held)


def _best(trial: Callable[[Grain], _Trial | None], hosts: int) -> _Trial | None:
    """Try numbers of pieces, then one field after the other; keep what is faster."""
    best, grain = None, Grain(PIECES[0], starters=hosts // 2)
    for pieces in PIECES:
        tried = trial(grain._replace(pieces=pieces)) or trial(grain._replace(pieces=pieces, shared=False))
        if tried is not None and (best is None or tried.makespan < best.makespan):
            best, grain = tried, grain._replace(pieces=pieces)
    for change in CHANGES if best is not None else ():
        tried = trial(change(grain))
        if tried is not None and best is not None and tried.makespan < best.makespan:
            best, grain = tried, change(grain)
    return best
