"""Layouts cut into cells: starts and stops cut every item into a grid, and every box is a rectangle of whole cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqloom.plan.boxes import Column
from seqloom.plan.layout import Layout


@dataclass(frozen=True, slots=True)
class Grid:
    """All cuts of some layouts. Cell (i, k) lies between edges i, i + 1 of axis 1 and k, k + 1 of axis 2.

    Attributes:
        keys: per axis, sorted int64 codes of (item, edge); edges of different items never mix.
        edges: per axis, the edge belonging to every code.
        items, values: sorted items and edge values, for making codes that cannot overflow.
    """

    keys: tuple[Column, ...]
    edges: tuple[Column, ...]
    items: Column
    values: tuple[Column, ...]

    @classmethod
    def over(cls, *layouts: Layout) -> Grid:
        """Cut by the edges of all boxes of some layouts."""
        items = np.unique(np.concatenate([layout.item for layout in layouts]))
        keys, edges, values = [], [], []
        for axis in range(layouts[0].axes):
            where = 2 + 2 * axis
            cuts = np.concatenate([column for layout in layouts for column in layout.columns()[where : where + 2]])
            item = np.concatenate([layout.item for layout in layouts for _ in range(2)])
            value = np.unique(cuts)
            key = np.unique(np.searchsorted(items, item) * len(value) + np.searchsorted(value, cuts))
            keys.append(key)
            edges.append(value[key % len(value)])
            values.append(value)
        return cls(tuple(keys), tuple(edges), items, tuple(values))

    @property
    def width(self) -> int:
        """Cells per step of axis 1 in the numbering of cells."""
        return len(self.keys[1]) if len(self.keys) == 2 else 1

    def _position(self, axis: int, item: Column, edge: Column) -> Column:
        code = np.searchsorted(self.items, item) * len(self.values[axis]) + np.searchsorted(self.values[axis], edge)
        return np.searchsorted(self.keys[axis], code)

    def cells(self, layout: Layout) -> tuple[Column, Column]:
        """Return the number of every cell of every box, and the box it belongs to."""
        _, item, start, stop, *second = layout.columns()
        low, high = self._position(0, item, start), self._position(0, item, stop)
        box = np.repeat(np.arange(len(layout)), high - low)
        row = low[box] + _count_up(high - low)
        if not second:
            return row, box
        low, high = (self._position(1, item, edge) for edge in second)
        spread = (high - low)[box]
        row, box = np.repeat(row, spread), np.repeat(box, spread)
        return row * self.width + low[box] + _count_up(spread), box

    def sizes(self, cell: Column) -> Column:
        """Return the elements of every cell."""
        first, second = np.divmod(cell, self.width)
        size = np.diff(self.edges[0])[first]
        return size if self.width == 1 else size * np.diff(self.edges[1])[second]


def _count_up(lengths: Column) -> Column:
    """Return 0, 1, .., n - 1 for every n in `lengths`, one after the other."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - lengths, lengths)
