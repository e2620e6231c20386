"""Long documents side by side: convoys of units, in which every lane of a host carries one document after another.

A document in pieces sits in one group from its first piece to its last. Groups narrower than the host leave room for
others beside them: with groups of half a host, a convoy of six units may carry

    lane 0   A1 A2 A3 A4 A5 A6        A in six pieces,
    lane 1   B1 B2 B3 C1 C2           B in three and then C in two; short documents take what is left

A convoy is one sequence to the order: forward through all its units, and backward from the last to the first.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from seqloom.cost import Shape, Variant
from seqloom.plan import Span
from seqloom.planners.pipelines.cuts import equal_cuts
from seqloom.planners.pipelines.seats import Hall, Seat

GRID = 512
"""Places at which the time up to a token is looked up; in between it is taken as straight."""

Convoy = list[list[Seat]]
"""The seats of every unit."""


def convoys(hall: Hall, variant: Variant, targets: dict[int, int], degree: int, room: int) -> list[Convoy]:
    """Seat documents that are too long for one unit, the longest first.

    Args:
        hall: the batch.
        variant: by whose prices documents are cut.
        targets: which, and ns that a piece of each shall take.
        degree: ranks of their groups.
        room: tokens that a rank may hold in a unit.
    """
    cuts = {k: _cut_of(hall, variant, k, degree, target, room) for k, target in targets.items()}
    found: list[Convoy] = []
    lanes: list[list[int]] = []  # of every convoy, the units that each lane has used
    for k in sorted(targets, key=lambda k: (-len(cuts[k][1]), -int(hall.tokens[k]), k)):
        shape, spans = cuts[k]
        offsets = hall.offsets[shape]
        for number, used in enumerate(lanes):
            lane = min(range(len(used)), key=lambda o: (used[o], o))
            if used[lane] + len(spans) <= len(found[number]):
                break
        else:
            number, lane = len(found), 0
            found.append([[] for _ in spans])
            lanes.append([0] * len(offsets))
        begin = lanes[number][lane]
        for unit, span in enumerate(spans, begin):
            found[number][unit].append(Seat(hall.shapes[shape], offsets[lane], (span,)))
        lanes[number][lane] += len(spans)
    return found


def _cut_of(
    hall: Hall, variant: Variant, document: int, degree: int, target: int, room: int
) -> tuple[int, tuple[Span, ...]]:
    """(shape, pieces) of a document."""
    shape = hall.fastest(document, degree, target)
    wanted = max(-(-int(hall.time[shape, document]) // target), -(-int(hall.tokens[document]) // (room * degree)))
    return shape, cut(hall, variant, document, hall.shapes[shape], wanted, room)


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
