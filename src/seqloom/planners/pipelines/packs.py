"""Short documents into packs: units in which every rank of a host works about as long as a unit shall take.

Every document takes the shape that costs least among those that are fast enough. Then the widest and longest go
first, each to the ranks that are free earliest, over all packs at once: so packs are level, and ranks in a pack.
Units with pieces of long documents take short ones on ranks that would wait for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqloom.plan import Span
from seqloom.planners.pipelines.seats import Hall, Seat, Seats

SLACK_PERCENT = 105
"""Packs may take this much of what a unit shall take before one more pack is opened."""
TRIES = 6
NEVER = np.iinfo(np.int64).max


def fitting_shapes(hall: Hall, degree: int, target: int, room: int) -> np.ndarray:
    """int64[n]: the cheapest shape in which each document takes at most `target` and fits in `room`; -1: none.

    Args:
        hall: the documents and shapes.
        degree: the most ranks of a group.
        target: ns that a unit shall take.
        room: tokens that a rank may hold in a unit.
    """
    held = -(-hall.tokens[None, :] // hall.degree[:, None])
    fits = (hall.time <= target) & (held <= room) & (hall.degree <= degree)[:, None]
    work = np.where(fits, hall.degree[:, None] * hall.time, NEVER)
    return np.where(work.min(axis=0) < NEVER, work.argmin(axis=0), -1)


def pack(
    hall: Hall,
    documents: Sequence[int],
    shape_of: np.ndarray,
    begun: Sequence[Sequence[Seat]],
    target: int,
    room: int,
) -> list[Seats]:
    """Seat whole documents in units that have begun and in new ones; return all of them, new ones by falling time.

    Args:
        hall: prices.
        documents: which.
        shape_of: int64[n] shape of every document.
        begun: seats of units with pieces of long documents.
        target: ns that a unit shall take.
        room: tokens that a rank may hold in a unit.
    """
    order = sorted(documents, key=lambda k: (-hall.degree[shape_of[k]], -hall.time[shape_of[k], k], k))
    first = _begin(hall, begun, target)
    work = sum(int(hall.degree[shape_of[k]] * hall.time[shape_of[k], k]) for k in order)
    idle = sum(max(0, target - int(time)) for time in first.load.ravel())
    count = max(0, -(-(work - idle) // (hall.line.width * target)))
    for _ in range(TRIES):
        level = _level(hall, order, shape_of, first.with_packs(count), len(begun), target, room)
        if level.load[len(begun) :].max(initial=0) * 100 <= target * SLACK_PERCENT:
            break
        count = len(level.load) - len(begun) + 1
    time = level.load.max(axis=1).tolist()
    late = sorted((p for p in range(len(begun), len(time)) if level.seats[p]), key=lambda p: (-time[p], p))
    packed = [(*seats, *_seats(hall, level.seats[u])) for u, seats in enumerate(begun)]
    return packed + [_seats(hall, level.seats[p]) for p in late]


class _Level(NamedTuple):
    """Units so far."""

    load: np.ndarray  # int64[units, width] ns
    held: np.ndarray  # int64[units, width] tokens
    seats: list[dict[tuple[int, int], list[int]]]  # per unit: (shape, offset) -> documents

    def with_packs(self, count: int) -> _Level:
        """A copy with so many empty units more."""
        empty = np.zeros((count, self.load.shape[1]), dtype=np.int64)
        seats = [{place: list(members) for place, members in unit.items()} for unit in self.seats]
        load, held = np.concatenate([self.load, empty]), np.concatenate([self.held, empty])
        return _Level(load, held, seats + [{} for _ in range(count)])


def _begin(hall: Hall, begun: Sequence[Sequence[Seat]], target: int) -> _Level:
    """Units with their pieces: of equal time, so each is taken to last as long as a unit shall."""
    nothing = np.zeros((0, hall.line.width), dtype=np.int64)
    level = _Level(nothing, nothing, []).with_packs(len(begun))
    for unit, seats in enumerate(begun):
        for shape, offset, spans in seats:
            level.load[unit, offset : offset + shape.degree] = target
            tokens = sum(span.tokens for span in spans)
            level.held[unit, offset : offset + shape.degree] += -(-tokens // shape.degree)
    return level


def _level(
    hall: Hall, order: Sequence[int], shape_of: np.ndarray, level: _Level, begun: int, target: int, room: int
) -> _Level:
    """Seat documents in this order on the earliest ranks of all units; more units where memory asks for them.

    A unit that has begun takes a document only if it does not get longer by it.
    """
    ranks: dict[int, np.ndarray] = {}  # int64[offsets, degree]
    for k in order:
        shape = int(shape_of[k])
        degree, offsets, time = int(hall.degree[shape]), hall.offsets[shape], int(hall.time[shape_of[k], k])
        each = -(-int(hall.tokens[k]) // degree)
        if not len(level.load):
            level = level.with_packs(1)
        if shape not in ranks:
            ranks[shape] = np.add.outer(offsets, range(degree))
        ready = level.load[:, ranks[shape]].max(axis=2)
        closed = level.held[:, ranks[shape]].max(axis=2) + each > room
        closed[:begun] |= ready[:begun] + time > target
        best = int(np.where(closed, NEVER, ready).argmin())
        unit, place = divmod(best, len(offsets))
        if closed[unit, place]:
            level = level.with_packs(1)
            unit, place = len(level.load) - 1, 0
        at = offsets[place]
        level.load[unit, at : at + degree] = level.load[unit, at : at + degree].max() + time
        level.held[unit, at : at + degree] += each
        level.seats[unit].setdefault((shape, at), []).append(k)
    return level


def _seats(hall: Hall, seats: dict[tuple[int, int], list[int]]) -> Seats:
    """Turn documents into groups."""
    return tuple(
        Seat(hall.shapes[shape], at, tuple(Span(k, 0, int(hall.lengths[k])) for k in sorted(members)))
        for (shape, at), members in sorted(seats.items(), key=lambda item: (item[0][1], item[0][0]))
    )
