"""Who holds what: boxes (an item and an interval on one or two axes) per rank, stored as columns.

An item is a document (axes: tokens, then heads) or a parameter (axes: rows, then columns). Several ranks may
hold the same box; one rank holds nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from seqloom.errors import PlanError
from seqloom.layout.boxes import Boxes, Column, as_column, freeze_columns, merge_touching


class Span(NamedTuple):
    """The tokens `start .. stop - 1` of a document."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many tokens these are."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class Layout(Boxes):
    """Boxes of all ranks, sorted by rank, item and start; boxes that touch along the first axis are one box.

    Attributes:
        rank, item, start, stop: int64[n], the holder, what it holds, and the interval on the first axis.
        start2, stop2: int64[n], the interval on the second axis, or None for a layout with one axis.
    """

    rank: Column
    item: Column
    start: Column
    stop: Column
    start2: Column | None = None
    stop2: Column | None = None

    def __post_init__(self) -> None:
        if (self.start2 is None) != (self.stop2 is None):
            raise PlanError("a layout with start2 but no stop2 (or the reverse); give both or neither")
        columns = [as_column(column) for column in self.columns()]
        if len({len(column) for column in columns}) > 1:
            lengths = ", ".join(str(len(column)) for column in columns)
            raise PlanError(f"columns of {lengths} entries; all columns of a layout must have the same length")
        _refuse_empty_boxes(columns)
        columns = merge_touching(columns, keys=2)
        _refuse_overlaps(columns)
        freeze_columns(self, columns)

    @classmethod
    def of(cls, boxes: Iterable[tuple[int, ...]]) -> Layout:
        """Build from (rank, item, start, stop[, start2, stop2]) tuples."""
        rows = list(boxes)
        if not rows:
            return cls.empty()
        widths = {len(row) for row in rows}
        if widths - {4} and widths - {6}:
            raise PlanError(f"boxes of {sorted(widths)} numbers; a box is (rank, item, start, stop[, start2, stop2])")
        return cls(*np.array(rows, dtype=np.int64).T)

    @classmethod
    def empty(cls, axes: int = 1) -> Layout:
        """Return the layout in which nobody holds anything."""
        return cls(*(np.empty(0, dtype=np.int64) for _ in range(2 + 2 * axes)))

    @classmethod
    def union(cls, layouts: Iterable[Layout]) -> Layout:
        """Join layouts with the same number of axes whose ranks hold different things."""
        parts = list(layouts)
        if not parts:
            return cls.empty()
        if len({part.axes for part in parts}) > 1:
            raise PlanError("layouts with one and with two axes cannot be joined; use with_axis on the former")
        return cls(*(np.concatenate(columns) for columns in zip(*(part.columns() for part in parts), strict=True)))

    def spans(self, rank: int) -> tuple[Span, ...]:
        """Return what one rank holds, by document and start (the first axis only)."""
        low, high = np.searchsorted(self.rank, [rank, rank + 1])
        columns = (column[low:high].tolist() for column in (self.item, self.start, self.stop))
        return tuple(Span(*box) for box in zip(*columns, strict=True))

    def restrict(self, ranks: Iterable[int]) -> Layout:
        """Return what some ranks hold."""
        here = np.isin(self.rank, list(ranks))
        return self if here.all() else Layout(*(column[here] for column in self.columns()))

    def with_axis(self, start: int, stop: int) -> Layout:
        """Add a second axis on which every box covers `start .. stop - 1`."""
        if self.axes == 2:
            raise PlanError("the layout has two axes already; with_axis adds the second one")
        ones = np.ones_like(self.rank)
        return Layout(self.rank, self.item, self.start, self.stop, start * ones, stop * ones)

    def __getitem__(self, index: int) -> Span:
        """Return box `index` as a span of its first axis."""
        return Span(int(self.item[index]), int(self.start[index]), int(self.stop[index]))

    def __iter__(self) -> Iterator[Span]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        holders = len(np.unique(self.rank))
        return f"Layout({len(self)} boxes, {self.axes} axes, {holders} ranks, {int(self.sizes.sum())} elements)"


def _refuse_empty_boxes(columns: list[Column]) -> None:
    negative = np.flatnonzero((columns[0] < 0) | (columns[1] < 0))
    if len(negative):
        k = negative[0]
        raise PlanError(f"rank {columns[0][k]} item {columns[1][k]}: ranks and items are numbered from 0")
    for start, stop in zip(columns[2::2], columns[3::2], strict=True):
        bad = np.flatnonzero((start < 0) | (stop <= start))
        if len(bad):
            k = bad[0]
            raise PlanError(
                f"rank {columns[0][k]} item {columns[1][k]}: [{start[k]}:{stop[k]}) is empty or negative; "
                "a box needs 0 <= start < stop, leave empty boxes out"
            )


def _refuse_overlaps(columns: list[Column]) -> None:
    """Refuse a rank that holds something twice (boxes are sorted by rank, item and start)."""
    rank, item, start, stop = columns[:4]
    if len(rank) < 2:
        return
    follows = (rank[1:] == rank[:-1]) & (item[1:] == item[:-1])
    if len(columns) == 4:
        clash = np.flatnonzero(follows & (start[1:] < stop[:-1]))
        pair = (clash[0], clash[0] + 1) if len(clash) else None
    else:
        pair = _overlap_on_two_axes(columns, np.append(True, ~follows))
    if pair is not None:
        k, j = pair
        first, second = f"[{start[k]}:{stop[k]})", f"[{start[j]}:{stop[j]})"
        raise PlanError(
            f"rank {rank[j]} holds item {item[j]} twice, in {first} and in {second}; "
            "boxes of one rank must be disjoint, cut one of them"
        )


def _overlap_on_two_axes(columns: list[Column], fresh: np.ndarray) -> tuple[int, int] | None:
    """Find two boxes of one rank and item that overlap on both axes.

    Every box is compared with those 1, 2, ... places after it, as long as these begin before it ends: boxes
    are sorted by start, so no later one can overlap once one does not.
    """
    _, _, start, stop, start2, stop2 = columns
    run = np.cumsum(fresh)
    distance, live = 1, np.arange(len(start))
    while len(live):
        live = live[live + distance < len(start)]
        other = live + distance
        near = (run[live] == run[other]) & (start[other] < stop[live])
        live, other = live[near], other[near]
        both = np.flatnonzero((start2[other] < stop2[live]) & (start2[live] < stop2[other]))
        if len(both):
            return int(live[both[0]]), int(other[both[0]])
        distance += 1
    return None
