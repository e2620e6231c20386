"""A draft: the units of a batch in forward order. Long documents in pieces of equal time first, then packs."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seqloom.cost import Shape, Variant
from seqloom.plan import Span
from seqloom.plan.schedules import Unit, units_of
from seqloom.planners.pipelines.cuts import equal_cuts
from seqloom.planners.pipelines.packs import fitting_shapes, pack
from seqloom.planners.pipelines.seats import Hall, Seat, Seats

GRID = 512
"""Places at which the time up to a token is looked up; in between it is taken as straight."""


class Draft(NamedTuple):
    """Units in forward order, and who sits in each."""

    seats: tuple[Seats, ...]
    units: tuple[Unit, ...]
    target: int
    """ns that a unit was to take, all layers."""


def draft(hall: Hall, variant: Variant, target: int, room: int) -> Draft:
    """Cut and pack a batch such that every unit takes about `target`.

    Args:
        hall: the batch.
        variant: by whose prices documents are cut.
        target: ns of a unit, forward and backward of all layers.
        room: tokens that a rank may hold in a unit.
    """
    shape_of = fitting_shapes(hall, target, room)
    long = sorted(np.flatnonzero(shape_of < 0).tolist(), key=lambda k: (-int(hall.tokens[k]), k))
    chains: list[list[Seats]] = []
    for k in long:
        shape = hall.widest(k)
        count = max(_ceil(int(hall.time[shape, k]), target), _ceil(int(hall.tokens[k]), room * int(hall.degree[shape])))
        spans = cut(hall, variant, k, hall.shapes[shape], count, room)
        at = hall.offsets[shape][0]
        chains.append([(Seat(hall.shapes[shape], at, (span,)),) for span in spans])
    short = np.flatnonzero(shape_of >= 0).tolist()
    chains += [[seats] for seats in pack(hall, short, shape_of, target, room).packs]
    seats = tuple(seats for chain in chains for seats in chain)
    return Draft(seats, units_of([len(chain) for chain in chains]), target)


def _ceil(value: int, by: int) -> int:
    return -(-value // max(by, 1))


def cut(hall: Hall, variant: Variant, document: int, shape: Shape, count: int, room: int) -> tuple[Span, ...]:
    """Cut a document into pieces of equal time, at multiples of what its group splits evenly.

    Args:
        hall: the batch.
        variant: by whose prices.
        document: which.
        shape: of its group.
        count: pieces that are wanted; more where one would not fit, fewer where they would be too short.
        room: tokens that a rank may hold in a unit.
    """
    length, grain = int(hall.lengths[document]), hall.grain(shape)
    step = max(grain, -(-length // GRID))
    grid = np.minimum(np.arange(0, length + step, step), length)
    time = hall.cost.tables(grid, variant, (shape,)).cost.max(axis=0)[0].tolist()

    def upto(tokens: int) -> int:
        at = min(tokens // step, len(time) - 2)
        width = min(length, (at + 1) * step) - at * step
        return time[at] + (time[at + 1] - time[at]) * (tokens - at * step) // width

    most = room * shape.degree
    while True:
        edges = equal_cuts(length, min(count, length), upto, multiple=grain, floor=min(grain, length))
        longest = max(b - a for a, b in pairwise(edges))
        if longest <= most or longest <= grain or count >= length:
            return tuple(Span(document, a, b) for a, b in pairwise(edges))
        count = max(count + 1, min(length, -(-count * longest // most)))
