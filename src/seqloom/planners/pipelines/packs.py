"""Short documents into packs: units in which every rank of a host works about as long as a unit shall take.

Every document takes the shape that costs least among those that are fast enough. Then the widest and longest go
first, each to the ranks that are free earliest, over all packs at once: so packs are level, and ranks in a pack.
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


class Packed(NamedTuple):
    """Packs, longest first, and what the fullest rank of each works, ns."""

    packs: tuple[Seats, ...]
    time: tuple[int, ...]


def fitting_shapes(hall: Hall, target: int, room: int) -> np.ndarray:
    """int64[n]: the cheapest shape in which each document takes at most `target` and fits in `room`; -1: none.

    Args:
        hall: the documents and shapes.
        target: ns that a unit shall take.
        room: tokens that a rank may hold in a unit.
    """
    held = -(-hall.tokens[None, :] // hall.degree[:, None])
    work = hall.degree[:, None] * hall.time
    never = np.iinfo(np.int64).max
    open_to = np.where((hall.time <= target) & (held <= room), work, never)
    best = open_to.argmin(axis=0)
    return np.where(open_to.min(axis=0) < never, best, -1)


def pack(hall: Hall, documents: Sequence[int], shape_of: np.ndarray, target: int, room: int) -> Packed:
    """Pack whole documents.

    Args:
        hall: prices.
        documents: which.
        shape_of: int64[n] shape of every document.
        target: ns that a pack shall take.
        room: tokens that a rank may hold in a pack.
    """
    if not len(documents):
        return Packed((), ())
    order = sorted(documents, key=lambda k: (-hall.degree[shape_of[k]], -hall.time[shape_of[k], k], k))
    work = sum(int(hall.degree[shape_of[k]] * hall.time[shape_of[k], k]) for k in order)
    count = max(1, -(-work // (hall.line.width * target)))
    for _ in range(TRIES):
        level = _level(hall, order, shape_of, count, room)
        if level.load.max() * 100 <= target * SLACK_PERCENT:
            break
        count = len(level.load) + 1
    return _packed(hall, level)


class _Level(NamedTuple):
    load: np.ndarray  # int64[packs, width] ns
    seats: list[dict[tuple[int, int], list[int]]]  # per pack: (shape, offset) -> documents


def _level(hall: Hall, order: Sequence[int], shape_of: np.ndarray, count: int, room: int) -> _Level:
    """Seat documents in this order on the earliest ranks of `count` packs, or of more if memory asks for them."""
    load = np.zeros((count, hall.line.width), dtype=np.int64)
    held = np.zeros_like(load)
    seats: list[dict[tuple[int, int], list[int]]] = [{} for _ in range(count)]
    never = np.iinfo(np.int64).max
    for k in order:
        shape = int(shape_of[k])
        degree, offsets = int(hall.degree[shape]), hall.offsets[shape]
        each = -(-int(hall.tokens[k]) // degree)
        ready = np.stack([load[:, at : at + degree].max(axis=1) for at in offsets], axis=1)
        full = np.stack([held[:, at : at + degree].max(axis=1) for at in offsets], axis=1) + each > room
        best = int(np.where(full, never, ready).argmin())
        p, o = divmod(best, len(offsets))
        if full[p, o]:
            load, held = (np.vstack([table, np.zeros_like(table[:1])]) for table in (load, held))
            seats.append({})
            p, o = len(load) - 1, 0
        at = offsets[o]
        load[p, at : at + degree] = load[p, at : at + degree].max() + hall.time[shape, k]
        held[p, at : at + degree] += each
        seats[p].setdefault((shape, at), []).append(k)
    return _Level(load, seats)


def _packed(hall: Hall, level: _Level) -> Packed:
    """Turn seats into groups, packs by falling time."""
    time = level.load.max(axis=1).tolist()
    order = sorted((p for p in range(len(time)) if level.seats[p]), key=lambda p: (-time[p], p))
    packs = []
    for p in order:
        seats = [
            Seat(hall.shapes[shape], at, tuple(Span(k, 0, int(hall.lengths[k])) for k in sorted(members)))
            for (shape, at), members in sorted(level.seats[p].items(), key=lambda item: (item[0][1], item[0][0]))
        ]
        packs.append(tuple(seats))
    return Packed(tuple(packs), tuple(time[p] for p in order))
