"""Where to cut a document so that its pieces take equal time.

A token reads all tokens before it, so equal time means ever shorter pieces. With C(x) the cost of the first x tokens,
a piece from x to y costs C(y) - C(x), and the borders of k pieces of n tokens are where C(x) = C(n) * i / k:

    C(x)  |                /      n = 8, k = 3
          |- - - - - - - -/       borders 0 4 6 8
          |            . /
          |- - - - - -/
          |      . /
          |__/________________ x
             0     4   6 8

Everything is in integers, so every machine cuts alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seqloom.cost import GroupShape, MemoryPolicy
from seqloom.errors import PlanError
from seqloom.layout import Span
from seqloom.planners.pipeline.placement import Hall, Seat, Seats
from seqloom.schedules import Unit, units_of

Cost = Callable[[int], int]
"""Cost of the first x tokens of a document: 0 for 0 tokens, never falling; its unit does not matter."""


def equal_cuts(length: int, pieces: int, cost: Cost, *, multiple: int = 1, floor: int = 1) -> tuple[int, ...]:
    """Cut a document into pieces of equal cost, found by bisection.

    Args:
        length: tokens of the document.
        pieces: how many are wanted; fewer come back where they would be shorter than `floor`.
        cost: of the first x tokens.
        multiple: borders inside the document are multiples of this.
        floor: the least tokens of a piece, below which kernels lose efficiency; a document shorter than that stays
            whole.

    Returns:
        Borders: 0, .., `length`, one more than pieces.
    """
    count = fitting_pieces(length, pieces, cost, floor)
    total = cost(length)
    while True:
        borders = rounded([_reach(cost, total * i, count, length) for i in range(count + 1)], multiple)
        if count == 1 or shortest(borders) >= floor:
            return borders
        count -= 1


def quadratic_cuts(length: int, pieces: int, linear: int, quadratic: int) -> tuple[int, ...]:
    """Cut a document into pieces of equal cost for C(x) = linear * x + quadratic * x^2 / 2, in closed form.

    The borders are x_i = (-b + sqrt(b^2 + 2 a C(n) i / k)) / a, rounded down, with b `linear` and a `quadratic`.

    Args:
        length: tokens of the document, n.
        pieces: how many, k.
        linear: cost per token, whatever its place.
        quadratic: cost per pair of tokens.
    """
    _check(length, pieces)
    b, a, k = linear, quadratic, pieces
    if not a:
        return tuple(length * i // k for i in range(k + 1))
    twice = 2 * b * length + a * length * length  # C(n), twice
    roots = [math.isqrt(b * b * k * k + a * twice * i * k) for i in range(k + 1)]  # times k, to stay in integers
    return (0, *((root - b * k) // (a * k) for root in roots[1:-1]), length)


def cuts_from_back(length: int, pieces: int, linear: int, quadratic: int, multiple: int = 8) -> tuple[int, ...]:
    """Cut as the published code of Seq1F1B does: from the last piece to the first, each rounded down to a multiple.

    What rounding takes from a piece goes to the ones before it, so the first piece is the longest by more than its
    share. The arguments are those of `quadratic_cuts`.
    """
    _check(length, pieces)
    b, a, k = linear, quadratic, pieces
    twice = 2 * b * length + a * length * length
    borders = [length]
    for _ in range(pieces - 1):
        end = borders[-1]
        left = (2 * b * end + a * end * end) * k - twice  # twice C(begin), times k
        root = math.isqrt((b * b * k + a * left) * k)
        begin = -((b * k - root) // (a * k)) if a else -(-left // (2 * b * k))
        borders.append(end - (end - begin) // multiple * multiple)
    return (0, *reversed(borders))


def fitting_pieces(length: int, pieces: int, cost: Cost, floor: int) -> int:
    """The number of pieces, lowered until the last of them, which is the shortest, has `floor` tokens."""
    _check(length, pieces)
    if length < 2 * floor:
        return 1
    last = cost(length) - cost(length - floor)
    return max(1, min(pieces, length // floor, cost(length) // last if last else pieces))


def rounded(borders: Sequence[int], multiple: int) -> tuple[int, ...]:
    """Move borders to the nearest multiples; the ends stay. Borders that meet become one."""
    inner = [(border + multiple // 2) // multiple * multiple for border in borders[1:-1]]
    return (0, *sorted({border for border in inner if 0 < border < borders[-1]}), borders[-1])


def shortest(borders: Sequence[int]) -> int:
    """Tokens of the shortest piece."""
    return min(end - begin for begin, end in pairwise(borders))


def _reach(cost: Cost, share: int, parts: int, length: int) -> int:
    """The most tokens x with C(x) * parts <= share."""
    low, high = 0, length
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) * parts <= share:
            low = middle
        else:
            high = middle - 1
    return low


def _check(length: int, pieces: int) -> None:
    if not 1 <= pieces <= length:
        raise PlanError(
            f"{length:,} tokens cannot be cut into {pieces:,} pieces; take between 1 and {max(1, length):,} pieces",
            rule="pieces",
        )


# ---- merged: planners.pipelines.convoys
# Long documents side by side: convoys of units, in which every lane of a host carries one document after another.
#
# A document in pieces sits in one group from its first piece to its last. Groups narrower than the host leave room
# for
# others beside them: with groups of half a host, a convoy of six units may carry
#
#     lane 0   A1 A2 A3 A4 A5 A6        A in six pieces,
#     lane 1   B1 B2 B3 C1 C2           B in three and then C in two; short documents take what is left
#
# A convoy is one sequence to the order: forward through all its units, and backward from the last to the first.


GRID = 512
"""Places at which the time up to a token is looked up; in between it is taken as straight."""

Convoy = list[list[Seat]]
"""The seats of every unit."""


def convoys(hall: Hall, policy: MemoryPolicy, targets: dict[int, int], degree: int, room: int) -> list[Convoy]:
    """Seat documents that are too long for one unit, the longest first.

    Args:
        hall: the batch.
        policy: by whose prices documents are cut.
        targets: which, and ns that a piece of each shall take.
        degree: ranks of their groups.
        room: tokens that a rank may hold in a unit.
    """
    cuts = {k: _cut_of(hall, policy, k, degree, target, room) for k, target in targets.items()}
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
    hall: Hall, policy: MemoryPolicy, document: int, degree: int, target: int, room: int
) -> tuple[int, tuple[Span, ...]]:
    """(shape, pieces) of a document."""
    shape = hall.fastest(document, degree, target)
    wanted = max(-(-int(hall.time[shape, document]) // target), -(-int(hall.tokens[document]) // (room * degree)))
    return shape, cut(hall, policy, document, hall.shapes[shape], wanted, room)


def cut(hall: Hall, policy: MemoryPolicy, document: int, shape: GroupShape, count: int, room: int) -> tuple[Span, ...]:
    """Cut a document into pieces of equal time, at multiples of what its group splits evenly.

    Args:
        hall: the batch.
        policy: by whose prices.
        document: which.
        shape: of its group.
        count: pieces that are wanted; more where one would not fit, fewer where they would be too short.
        room: tokens that a rank may hold in a unit.
    """
    length, grain = int(hall.lengths[document]), hall.grain(shape)
    step = max(grain, -(-length // GRID))
    grid = np.minimum(np.arange(0, length + step, step), length)
    time = hall.cost.tables(grid, policy, (shape,)).cost.max(axis=0)[0].tolist()

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


# ---- merged: planners.pipelines.packs
# Short documents into packs: units in which every rank of a host works about as long as a unit shall take.
#
# Every document takes the shape that costs least among those that are fast enough. Then the widest and longest go
# first, each to the ranks that are free earliest, over all packs at once: so packs are level, and ranks in a pack.
# Units with pieces of long documents take short ones on ranks that would wait for the others.


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


# ---- merged: planners.pipelines.draft
# A draft: the units of a batch in forward order. Long documents in pieces of equal time first, then packs.


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


def draft(hall: Hall, policy: MemoryPolicy, size: Size) -> Draft:
    """Cut and pack a batch such that every unit takes about as long as its size says.

    Args:
        hall: the batch.
        policy: by whose prices documents are cut.
        size: of the units.
    """
    degree, target, room, starters = size[:4]
    longer = max(1, target * size.packs // 100)
    shape_of = fitting_shapes(hall, degree, longer, room)
    long = np.flatnonzero(shape_of < 0).tolist()
    time = {k: hall.least(k, degree) for k in long}
    half = max(time.values(), default=0) // 2
    targets = {k: target if time[k] >= half else max(1, target * size.later // 100) for k in long}
    carried = convoys(hall, policy, targets, degree, room)
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
