"""A draft: the units of a batch in forward order. Long documents in pieces of equal time first, then packs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from seqloom.cost import Variant
from seqloom.plan.schedules import Unit, units_of
from seqloom.planners.pipelines.convoys import convoys
from seqloom.planners.pipelines.packs import fitting_shapes, pack
from seqloom.planners.pipelines.seats import Hall, Seats

STARTERS = (16, 8, 4)
"""Starters take a 16th of what a unit shall take, then an 8th, then a 4th."""


class Size(NamedTuple):
    """How coarse units are."""

    degree: int
    """Ranks of the groups of documents in pieces; no group is wider."""
    target: int
    """ns of a unit, forward and backward of all layers."""
    room: int
    """Tokens that a rank may hold in a unit."""
    starters: int = 0
    """How many small units of each kind come first: the sooner the last stage has work, the better."""
    packs: int = 100
    """What packs of whole documents take, in percent of the target; a document that takes no more stays whole."""
    later: int = 100
    """What pieces of documents take that have less than half the work of the longest, in percent of the target: when
    these come, the pipeline is full, and other work hides how long a piece takes to come through."""


class Draft(NamedTuple):
    """Units in forward order, and who sits in each."""

    size: Size
    seats: tuple[Seats, ...]
    units: tuple[Unit, ...]


def draft(hall: Hall, variant: Variant, size: Size) -> Draft:
    """Cut and pack a batch such that every unit takes about as long as its size says.

    Args:
        hall: the batch.
        variant: by whose prices documents are cut.
        size: of the units.
    """
    degree, target, room, starters = size[:4]
    longer = max(1, target * size.packs // 100)
    shape_of = fitting_shapes(hall, degree, longer, room)
    long = np.flatnonzero(shape_of < 0).tolist()
    time = {k: hall.least(k, degree) for k in long}
    half = max(time.values(), default=0) // 2
    targets = {k: target if time[k] >= half else max(1, target * size.later // 100) for k in long}
    carried = convoys(hall, variant, targets, degree, room)
    begun = [unit for convoy in carried for unit in convoy]
    short = sorted(np.flatnonzero(shape_of >= 0).tolist(), key=lambda k: (-int(hall.tokens[k]), k))
    first = [
        unit
        for share in STARTERS[: 3 if starters else 0]
        for unit in _starters(hall, short, shape_of, longer // share, room, starters)
    ]
    seats = [*first, *pack(hall, short, shape_of, begun, longer, room)]
    counts = [1] * len(first) + [len(convoy) for convoy in carried] + [1] * (len(seats) - len(first) - len(begun))
    return Draft(size, tuple(seats), units_of(counts))


def _starters(
    hall: Hall, short: list[int], shape_of: np.ndarray, target: int, room: int, count: int
) -> Iterator[Seats]:
    """Take the shortest documents off the end of `short` for `count` units of this time."""
    for _ in range(count):
        taken: list[int] = []
        left = hall.line.width * target
        while short and int(hall.time[shape_of[short[-1]], short[-1]]) <= target:
            left -= int(hall.degree[shape_of[short[-1]]] * hall.time[shape_of[short[-1]], short[-1]])
            if left < 0:
                break
            taken.append(short.pop())
        if taken:
            unit, *rest = pack(hall, taken, shape_of, [], target, room)
            short += [span.document for seats in rest for seat in seats for span in seat.spans]
            yield unit
