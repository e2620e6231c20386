"""A draft: the units of a batch in forward order. Long documents in pieces of equal time first, then packs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqloom.cost import Shape, Variant
from seqloom.plan import Span
from seqloom.plan.schedules import Unit, units_of
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
        spans = cut(hall, variant, k, hall.shapes[shape], count)
        at = hall.offsets[shape][0]
        chains.append([(Seat(hall.shapes[shape], at, (span,)),) for span in spans])
    short = np.flatnonzero(shape_of >= 0).tolist()
    chains += [[seats] for seats in pack(hall, short, shape_of, target, room).packs]
    seats = tuple(seats for chain in chains for seats in chain)
    return Draft(seats, units_of([len(chain) for chain in chains]), target)


def _ceil(value: int, by: int) -> int:
    return -(-value // max(by, 1))


def cut(hall: Hall, variant: Variant, document: int, shape: Shape, count: int) -> tuple[Span, ...]:
    """Cut a document into at most `count` pieces of equal time, at multiples of what its group splits evenly."""
    length = int(hall.lengths[document])
    grain = hall.cost.granule * shape.degree * (2 if shape.ring > 1 else 1)
    grid = np.unique(np.linspace(0, length, GRID + 1).astype(np.int64))
    time = hall.cost.tables(grid, variant, (shape,)).cost.max(axis=0)[0]
    wanted = time[-1] * (np.arange(1, count) / count)
    places = np.interp(wanted, time.astype(np.float64), grid.astype(np.float64))
    inner = np.unique(np.rint(places / grain).astype(np.int64) * grain)
    edges: Sequence[int] = [0, *inner[(inner > 0) & (inner < length)].tolist(), length]
    return tuple(Span(document, a, b) for a, b in zip(edges, edges[1:], strict=False))
