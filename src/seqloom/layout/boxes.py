"""Boxes as columns: some keys, then an interval on one or two axes. What layouts and moves have in common."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from seqloom.errors import PlanError

Column = np.ndarray
"""A read-only int64 array with one entry per box."""


class Boxes:
    """Base of frozen dataclasses whose fields are key columns, then start, stop, start2 and stop2.

    The last two are None for boxes with one axis. Equality and hash are those of the content.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # the fields that every kind of boxes has

        @property
        def start(self) -> Column:
            """First element on the first axis."""
            ...

        @property
        def stop(self) -> Column:
            """One past the last."""
            ...

        @property
        def start2(self) -> Column | None:
            """The same on the second axis, if there is one."""
            ...

        @property
        def stop2(self) -> Column | None:
            """One past the last there."""
            ...

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
        return tuple(column for name in column_names(self) if (column := getattr(self, name)) is not None)

    def __len__(self) -> int:
        """Return the number of boxes."""
        return len(self.start)

    def __eq__(self, other: object) -> bool:
        """Compare box by box."""
        if type(other) is not type(self) or not isinstance(other, Boxes):
            return NotImplemented
        return self.axes == other.axes and all(map(np.array_equal, self.columns(), other.columns()))

    def __hash__(self) -> int:
        """Hash the boxes."""
        return hash((self.axes, *(column.tobytes() for column in self.columns())))


def column_names(boxes: Any) -> tuple[str, ...]:
    """The fields of a kind of boxes, in order."""
    return tuple(field.name for field in fields(boxes))


def freeze_columns(boxes: Boxes, columns: list[Column]) -> None:
    """Store the final columns of boxes under construction, read-only."""
    for name, column in zip(column_names(boxes), columns, strict=False):
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

    Args:
        columns: the key columns, then start and stop of one or two axes.
        keys: number of key columns: two in a layout (rank, item), three in a move (sender, receiver, item).
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
