"""Seats on a host: which documents a unit works on, in which shape, from which of the host's ranks on.

All hosts seat a unit alike, so a seat counts ranks from the host's first one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.shapes import STREAMS
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Method, StageMicroBatch, in_order
from seqloom.planners.pipeline.stage_layout import Line, host_shapes


class Seat(NamedTuple):
    """A group to be, on every host."""

    shape: GroupShape
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
    shapes: tuple[GroupShape, ...]
    offsets: tuple[tuple[int, ...], ...]
    """Where groups of each shape may begin."""
    degree: np.ndarray
    """int64[S]"""
    lanes: np.ndarray
    """int64[3, S, n]: what a document adds to every lane of its group."""
    prefix: np.ndarray
    """float64[3, S]: what every token in front of a piece adds."""
    fixed: int
    """What a unit costs before its first document, at least."""

    @classmethod
    def of(cls, lengths: np.ndarray, cost: CostModel, line: Line, policy: MemoryPolicy) -> Hall:
        """Price the documents."""
        seatings = host_shapes(cost, line)
        tables = cost.tables(lengths, policy, tuple(seatings))
        return cls(
            cost=cost,
            line=line,
            lengths=lengths,
            tokens=tables.tokens,
            shapes=tables.shapes,
            offsets=tuple(seatings.values()),
            degree=tables.degree,
            lanes=tables.cost,
            prefix=np.array([_prefix(cost, shape, policy) for shape in tables.shapes]).T,
            fixed=int(tables.fixed.max(axis=0).min()),
        )

    @property
    def degrees(self) -> tuple[int, ...]:
        """Ranks that the group of a document in pieces may have: those with a ring or without one."""
        return tuple(sorted({shape.degree for shape in self.shapes if shape.method == Method.RING}))

    def grain(self, shape: GroupShape) -> int:
        """Tokens of which pieces have whole multiples, so that the ranks of a group share them evenly."""
        return self.cost.pad_multiple * shape.degree * (2 if shape.ring > 1 else 1)

    @cached_property
    def time(self) -> np.ndarray:
        """int64[S, n]: a whole document alone, without what a unit costs before its first."""
        return self.lanes.max(axis=0)

    def fastest(self, document: int, degree: int, target: int) -> int:
        """The shape of this degree that is fastest for a document in pieces that take about `target`.

        In a ring the prefix of every piece goes round once more: of k pieces about (k - 1) / 2 times the document.
        """
        rows = [s for s, shape in enumerate(self.shapes) if shape.method == Method.RING and shape.degree == degree]
        pieces = -(-self.time[rows, document] // target)
        again = (pieces - 1) * int(self.tokens[document]) / 2
        lanes = self.lanes[:, rows, document] + np.rint(self.prefix[:, rows] * again)
        return rows[int(lanes.max(axis=0).argmin())]

    def least(self, document: int, degree: int) -> int:
        """ns of a document, whole, in a group of this degree."""
        rows = [s for s, shape in enumerate(self.shapes) if shape.method == Method.RING and shape.degree == degree]
        return int(self.time[rows, document].min())

    def longest(self, degree: int) -> int:
        """ns of the longest document, whole, in a group of this degree."""
        return self.least(int(self.lengths.argmax()), degree)

    @property
    def work(self) -> int:
        """rank-ns of all documents, each in its cheapest shape."""
        return int((self.degree[:, None] * self.time).min(axis=0).sum())


def _prefix(cost: CostModel, shape: GroupShape, policy: MemoryPolicy) -> list[float]:
    """ns per token of a prefix, by lane."""
    if shape.ring == 1:
        return [0.0] * len(STREAMS)
    rates = cost.engine.prefix_token_ns(shape, policy, cost.aligned_traffic(shape))
    return [sum(rate for name, rate in rates.items() if name in lane) for lane in STREAMS]


class Level(NamedTuple):
    """How little is kept of a unit on a stage."""

    checkpoint: Checkpoint
    offload: bool = False


def work_of(cost: CostModel, line: Line, seats: Sequence[Seat], host: int, level: Level) -> StageMicroBatch:
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
    return StageMicroBatch(in_order(groups, cost.node_size), level.checkpoint, offload=level.offload)
