"""A draft: the units of a batch in forward order. Long documents in pieces of equal time first, then packs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.cost import Variant
from seqloom.plan.schedules import Unit, units_of
from seqloom.planners.pipelines.convoys import convoys
from seqloom.planners.pipelines.packs import fitting_shapes, pack
from seqloom.planners.pipelines.seats import Hall, Seats


class Draft(NamedTuple):
    """Units in forward order, and who sits in each."""

    seats: tuple[Seats, ...]
    units: tuple[Unit, ...]


def draft(hall: Hall, variant: Variant, degree: int, target: int, room: int) -> Draft:
    """Cut and pack a batch such that every unit takes about `target`.

    Args:
        hall: the batch.
        variant: by whose prices documents are cut.
        degree: ranks of the groups of documents in pieces; no group is wider.
        target: ns of a unit, forward and backward of all layers.
        room: tokens that a rank may hold in a unit.
    """
    shape_of = fitting_shapes(hall, degree, target, room)
    long = np.flatnonzero(shape_of < 0).tolist()
    carried = convoys(hall, variant, long, degree, target, room)
    begun = [unit for convoy in carried for unit in convoy]
    short = np.flatnonzero(shape_of >= 0).tolist()
    seats = pack(hall, short, shape_of, begun, target, room)
    counts = [len(convoy) for convoy in carried] + [1] * (len(seats) - len(begun))
    return Draft(tuple(seats), units_of(counts))
