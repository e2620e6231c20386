"""Seats on a host: which documents a unit works on, in which shape, from which of the host's ranks on.

All hosts seat a unit alike, so a seat counts ranks from the host's first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, Shape, Variant
from seqloom.plan import Checkpoint, Group, Method, Span, Work, in_order
from seqloom.planners.pipelines.line import Line, host_shapes


class Seat(NamedTuple):
    """A group to be, on every host."""

    shape: Shape
    offset: int
    spans: tuple[Span, ...]


Seats = tuple[Seat, ...]
"""A unit: the seats that work side by side."""


@dataclass(frozen=True, eq=False)
class Hall:
    """A batch, and every way to seat its documents in a host. ns of forward and backward of all layers."""

    cost: CostModel
    line: Line
    lengths: np.ndarray
    """int64[n]"""
    tokens: np.ndarray
    """int64[n]: what they occupy."""
    shapes: tuple[Shape, ...]
    offsets: tuple[tuple[int, ...], ...]
    """Where groups of each shape may begin."""
    degree: np.ndarray
    """int64[S]"""
    time: np.ndarray
    """int64[S, n]: a document alone, without what a unit costs before its first."""
    fixed: int
    """What a unit costs before its first document, at least."""

    @classmethod
    def of(cls, lengths: np.ndarray, cost: CostModel, line: Line, variant: Variant) -> Hall:
        """Price the documents."""
        seatings = host_shapes(cost, line)
        tables = cost.tables(lengths, variant, tuple(seatings))
        return cls(
            cost=cost,
            line=line,
            lengths=lengths,
            tokens=tables.tokens,
            shapes=tables.shapes,
            offsets=tuple(seatings.values()),
            degree=tables.degree,
            time=tables.cost.max(axis=0),
            fixed=int(tables.fixed.max(axis=0).min()),
        )

    @property
    def longest(self) -> int:
        """ns of the document that takes longest, on a whole host."""
        return max(int(self.time[self.widest(k), k]) for k in np.argsort(-self.lengths)[:1].tolist())

    def grain(self, shape: Shape) -> int:
        """Tokens of which pieces have whole multiples, so that the ranks of a group share them evenly."""
        return self.cost.granule * shape.degree * (2 if shape.ring > 1 else 1)

    def widest(self, document: int) -> int:
        """The shape that is fastest for a document in pieces, among those of the most ranks."""
        rows = [s for s, shape in enumerate(self.shapes) if shape.method == Method.RING]
        most = max(self.degree[rows])
        return min((s for s in rows if self.degree[s] == most), key=lambda s: (int(self.time[s, document]), s))


class Level(NamedTuple):
    """How little is kept of a unit on a stage."""

    checkpoint: Checkpoint
    offload: bool = False


def work_of(cost: CostModel, line: Line, seats: Sequence[Seat], host: int, level: Level) -> Work:
    """One stage's share of a unit."""
    first = host * line.width
    groups = [
        Group(
            tuple(range(first + seat.offset, first + seat.offset + seat.shape.degree)),
            seat.shape.ulysses,
            seat.shape.ring,
            seat.spans,
            seat.shape.method,
        )
        for seat in seats
    ]
    return Work(in_order(groups, cost.node_size), level.checkpoint, offload=level.offload)
