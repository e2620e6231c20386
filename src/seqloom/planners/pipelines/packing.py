"""From documents to units: long ones cut into pieces of equal time, short ones packed, in an order that flows.

    starters        few short documents each, ever more: the first unit is through all stages soon
    long documents  the longest first: a short one in between would leave nothing to run backward meanwhile
    packs           of short documents, the slowest first

A piece that leaves time in its unit takes whole short documents in beside it; they belong to the piece's sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from seqloom.plan.error import PlanError
from seqloom.plan.schedules.schedule import Unit
from seqloom.planners.pipelines.cuts import Cost, equal_cuts

STARTERS = (16, 8, 4)
"""Starters have a 16th of a pack's time, then an 8th, then a 4th."""


class Part(NamedTuple):
    """Tokens `start` to `stop - 1` of a document."""

    document: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shape:
    """How coarse units are."""

    piece: int
    """The most time of a piece, in the unit of the cost."""
    pack: int
    """The most time of a pack; a document that takes no longer stays whole."""
    tokens: int
    """The most tokens of a pack."""
    starters: int = 0
    """How many starters of each size come first."""
    shared: bool = False
    """Whether the last piece of a long document may have short ones beside it."""
    later: int | None = None
    """The most time of a piece of a document that costs less than half as much as the longest; None: as `piece`.

    By the time these come, the pipeline is full and other work hides how long a piece takes to come through.
    """

    def piece_of(self, cost: int, longest: int) -> int:
        """The most time of a piece of a document that costs `cost`."""
        return self.piece if self.later is None or 2 * cost >= longest else self.later


@dataclass(frozen=True, slots=True)
class Packed:
    """Units in forward order, and the tokens of each."""

    units: tuple[Unit, ...]
    parts: tuple[tuple[Part, ...], ...]

    def __post_init__(self) -> None:
        if len(self.units) != len(self.parts):
            raise PlanError(f"{len(self.units)} units, but the tokens of {len(self.parts)}; give one list for each")


def packed(lengths: Sequence[int], cost: Cost, shape: Shape, *, multiple: int = 1, floor: int = 1) -> Packed:
    """Make units of documents.

    Args:
        lengths: tokens of every document, at least 1 each.
        cost: of the first x tokens of a document, forward and backward.
        shape: how coarse.
        multiple: cuts are at multiples of this.
        floor: the least tokens of a piece.
    """
    order = sorted(range(len(lengths)), key=lambda d: (-lengths[d], d))
    costs = {d: cost(lengths[d]) for d in order}
    long: list[list[list[Part]]] = []
    short: list[int] = []
    for d in order:
        wanted = -(-costs[d] // shape.piece_of(costs[d], costs[order[0]])) if costs[d] > shape.pack else 1
        borders = equal_cuts(lengths[d], min(wanted, lengths[d]), cost, multiple=multiple, floor=floor)
        if len(borders) > 2:
            long.append([[Part(d, *span)] for span in pairwise(borders)])
        else:
            short.append(d)
    first = list(_starters(short, lengths, costs, shape))
    if shape.shared:
        short = _beside(long, short, lengths, cost, shape)
    packs = _packs(short, lengths, costs, shape)
    whole = [[[Part(d, 0, lengths[d]) for d in pack]] for pack in [*first, *packs]]
    chains = [*whole[: len(first)], *long, *whole[len(first) :]]
    units = tuple(Unit(s, piece, len(chain)) for s, chain in enumerate(chains) for piece in range(len(chain)))
    return Packed(units, tuple(tuple(parts) for chain in chains for parts in chain))


def _beside(
    long: list[list[list[Part]]], short: Sequence[int], lengths: Sequence[int], cost: Cost, shape: Shape
) -> list[int]:
    """Put short documents beside the last pieces of long ones, longest first, where time is left; return the rest."""
    room = [shape.piece - cost(chain[-1][0].stop) + cost(chain[-1][0].start) for chain in long]
    rest = []
    for d in short:
        time = cost(lengths[d])
        best = max(range(len(room)), key=lambda n: room[n], default=-1)
        if best >= 0 and time <= room[best]:
            long[best][-1].append(Part(d, 0, lengths[d]))
            room[best] -= time
        else:
            rest.append(d)
    return rest


def _starters(short: list[int], lengths: Sequence[int], costs: dict[int, int], shape: Shape) -> Iterator[list[int]]:
    """Take the shortest documents off the end of `short` for units of growing time."""
    for share in STARTERS:
        for _ in range(shape.starters):
            unit: list[int] = []
            time = tokens = 0
            while short:
                d = short[-1]
                time, tokens = time + costs[d], tokens + lengths[d]
                if unit and (time * share > shape.pack or tokens > shape.tokens):
                    break
                unit.append(short.pop())
            if unit:
                yield unit


def _packs(short: Sequence[int], lengths: Sequence[int], costs: dict[int, int], shape: Shape) -> list[list[int]]:
    """Spread documents, longest first, over the fewest packs that keep the caps: each to the fastest pack with room."""
    time, tokens = sum(costs[d] for d in short), sum(lengths[d] for d in short)
    count = max(1, -(-time // shape.pack), -(-tokens // shape.tokens))
    while True:
        packs: list[list[int]] = [[] for _ in range(min(count, len(short)))]
        if _spread(packs, short, lengths, costs, shape):
            return sorted(packs, key=lambda pack: -sum(costs[d] for d in pack))
        count += 1 + count // 64


def _spread(
    packs: list[list[int]], short: Sequence[int], lengths: Sequence[int], costs: dict[int, int], shape: Shape
) -> bool:
    """Fill the packs; whether all documents found a place. One that is alone too long for a pack may be alone."""
    open_packs = [(0, number, 0) for number in range(len(packs))]  # time, number, tokens
    for d in short:
        full = []
        while open_packs:
            time, number, tokens = heappop(open_packs)
            if not tokens or tokens + lengths[d] <= shape.tokens:
                packs[number].append(d)
                heappush(open_packs, (time + costs[d], number, tokens + lengths[d]))
                break
            full.append((time, number, tokens))
        else:
            return False
        for pack in full:
            heappush(open_packs, pack)
    return True
