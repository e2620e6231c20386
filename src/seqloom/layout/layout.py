"""Who holds what: boxes (an item and an interval on one or two axes) per rank, and the arithmetic of boxes.

An item is a document (axes: tokens, then heads) or a parameter (axes: rows, then columns). Several ranks may
hold the same box; one rank holds nothing twice.

Boxes are stored as columns: some keys, then an interval per axis. Layouts, moves and routes are all computed by cutting
boxes at each other's edges (`Grid`), joining boxes that touch (`merge_touching`), and dealing intervals laid end to end
(`deal_intervals`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.errors import PlanError

Column = np.ndarray
"""A read-only int64 array with one entry per box."""


class Span(NamedTuple):
    """The tokens `start .. stop - 1` of a document."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """How many tokens these are."""
        return self.stop - self.start


class Boxes:
    """Base of frozen dataclasses whose fields are key columns, then start, stop, start2 and stop2.

    The last two are None for boxes with one axis. Equality and hash are those of the content.
    """

    __slots__: tuple[str, ...] = ()

    if TYPE_CHECKING:  # the fields that every kind of boxes has

        @property
        def start(self) -> Column: ...  # noqa: D102
        @property
        def stop(self) -> Column: ...  # noqa: D102
        @property
        def start2(self) -> Column | None: ...  # noqa: D102
        @property
        def stop2(self) -> Column | None: ...  # noqa: D102

    @property
    def axes(self) -> int:
        """1 or 2."""
        return 1 if self.start2 is None else 2

    @property
    def sizes(self) -> Column:
        """Elements of every box (tokens, or tokens x heads), int64[n]."""
        first = self.stop - self.start
        return first if self.start2 is None or self.stop2 is None else first * (self.stop2 - self.start2)

    def columns(self) -> tuple[Column, ...]:
        """Return the key columns and the intervals; two columns fewer with one axis."""
        return tuple(column for name in self.__slots__ if (column := getattr(self, name)) is not None)

    def __len__(self) -> int:
        return len(self.start)

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self) or not isinstance(other, Boxes):
            return NotImplemented
        return self.axes == other.axes and all(map(np.array_equal, self.columns(), other.columns()))

    def __hash__(self) -> int:
        return hash((self.axes, *(column.tobytes() for column in self.columns())))


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


def freeze_columns(boxes: Boxes, columns: list[Column]) -> None:
    """Store the final columns of boxes under construction, read-only."""
    for name, column in zip(boxes.__slots__, columns, strict=False):
        column.setflags(write=False)
        object.__setattr__(boxes, name, column)


def as_column(values: object) -> Column:
    """Return a fresh one-dimensional int64 array; refuse anything that is not whole numbers."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise PlanError(f"a column of type {array.dtype} and shape {array.shape}; columns are lists of whole numbers")
    return array.astype(np.int64)


def merge_touching(columns: list[Column], *, keys: int) -> list[Column]:
    """Sort boxes and join those that touch along the first axis and agree in everything else.

    `keys` columns come first, two in a layout (rank, item) and three in a move (sender, receiver, item); then start and
    stop of one or two axes.
    """
    start, stop = keys, keys + 1
    second = list(range(keys + 2, len(columns)))
    same = [*range(keys), *second]
    order = np.lexsort([columns[k] for k in (start, *reversed(same))])
    columns = [column[order] for column in columns]
    if len(columns[0]):
        fresh = np.ones(len(columns[0]), dtype=bool)
        fresh[1:] = columns[start][1:] != columns[stop][:-1]
        for k in same:
            fresh[1:] |= columns[k][1:] != columns[k][:-1]
        last = np.append(np.flatnonzero(fresh)[1:], len(fresh)) - 1
        columns = [column[last] if k == stop else column[fresh] for k, column in enumerate(columns)]
    order = np.lexsort([columns[k] for k in (*reversed(second), start, *reversed(range(keys)))])
    return [column[order] for column in columns]


def merge_across(columns: list[Column], *, keys: int) -> list[Column]:
    """Join boxes that touch along the second axis; a layout or a move then joins whole strips along the first."""
    swapped = merge_touching([*columns[:keys], *columns[keys + 2 :], *columns[keys : keys + 2]], keys=keys)
    return [*swapped[:keys], *swapped[keys + 2 :], *swapped[keys : keys + 2]]


@dataclass(frozen=True, slots=True)
class Grid:
    """Cuts of every item at all edges of some boxes, so that every box is a rectangle of whole cells.

    Cell (i, k) lies between edges i, i + 1 of axis 1 and k, k + 1 of axis 2; its number is i * width + k.

    Attributes:
        items: sorted items.
        values: per axis, sorted values of edges of any item.
        keys: per axis, sorted codes of (item, edge); edges of different items never mix, and codes cannot overflow.
        edges: per axis, the edge of every code.
    """

    items: Column
    values: tuple[Column, ...]
    keys: tuple[Column, ...]
    edges: tuple[Column, ...]

    @classmethod
    def over(cls, *boxes: Sequence[Column]) -> Grid:
        """Cut by the edges of boxes, each given as columns: item, start, stop[, start2, stop2]."""
        items = np.unique(np.concatenate([columns[0] for columns in boxes]))
        keys, edges, values = [], [], []
        for axis in range(1, len(boxes[0]), 2):
            cuts = np.concatenate([column for columns in boxes for column in columns[axis : axis + 2]])
            item = np.concatenate([columns[0] for columns in boxes for _ in range(2)])
            value = np.unique(cuts)
            key = np.unique(np.searchsorted(items, item) * len(value) + np.searchsorted(value, cuts))
            keys.append(key)
            edges.append(value[key % len(value)])
            values.append(value)
        return cls(items, tuple(values), tuple(keys), tuple(edges))

    @property
    def width(self) -> int:
        """Cells per step of axis 1 in the numbering of cells."""
        return len(self.keys[1]) if len(self.keys) == 2 else 1

    def _position(self, axis: int, item: Column, edge: Column) -> Column:
        code = np.searchsorted(self.items, item) * len(self.values[axis]) + np.searchsorted(self.values[axis], edge)
        return np.searchsorted(self.keys[axis], code)

    def cells(self, item: Column, start: Column, stop: Column, *second: Column) -> tuple[Column, Column]:
        """Return the number of every cell of every box, and the box it belongs to."""
        low, high = self._position(0, item, start), self._position(0, item, stop)
        box = np.repeat(np.arange(len(item)), high - low)
        row = low[box] + count_up(high - low)
        if not second:
            return row, box
        low, high = (self._position(1, item, edge) for edge in second)
        spread = (high - low)[box]
        row, box = np.repeat(row, spread), np.repeat(box, spread)
        return row * self.width + low[box] + count_up(spread), box

    def intervals(self, cell: Column) -> list[Column]:
        """Return start and stop, and with two axes start2 and stop2, of every cell."""
        indices = np.divmod(cell, self.width) if len(self.keys) == 2 else (cell,)
        return [edges[index + k] for edges, index in zip(self.edges, indices, strict=True) for k in (0, 1)]

    def item_of(self, cell: int) -> int:
        """Return the item of a cell."""
        return int(self.items[self.keys[0][cell // self.width] // len(self.values[0])])


def count_up(lengths: Column) -> Column:
    """Return 0, 1, .., n - 1 for every n in `lengths`, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def deal_intervals(
    item: Column, start: Column, stop: Column, holder: Column, ends: Column
) -> tuple[Column, Column, Column, Column]:
    """Lay intervals end to end and give holder k the elements before `ends[k]` that none before it has.

    Returns holder, item, start and stop of every resulting interval.
    """
    stops = np.cumsum(stop - start)
    edges = np.unique(np.concatenate([[0], stops, ends]))
    low, high = edges[:-1], edges[1:]
    box = np.searchsorted(stops, low, side="right")
    shift = stop[box] - stops[box]
    return holder[np.searchsorted(ends, low, side="right")], item[box], low + shift, high + shift
