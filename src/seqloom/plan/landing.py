"""What crosses the network once for a node in which several ranks want it.

Weights go in two hops from their owners to all ranks that compute with them. After the first a rank has its landing:

    what owners in its node have     all that it wants of it: this never crosses the network
    what owners elsewhere have       of what n ranks of its node want, 1 / n of the rows

In the second, ranks of a node give each other what is missing. So every rank still receives every element once, and
nobody receives what it does not want. Two nodes of two ranks, a weight of 8 rows that all want:

                owns     landing                 from its node after that
    rank 0      0-1      0-3 and rows 4-5        6-7
    rank 1      2-3      0-3 and rows 6-7        4-5
    rank 2      4-5      4-7 and rows 0-1        2-3
    rank 3      6-7      4-7 and rows 2-3        0-1
"""

from __future__ import annotations

import numpy as np

from seqloom.plan.boxes import Column, merge_touching
from seqloom.plan.grid import Grid
from seqloom.plan.layout import Layout


def landing_layout(source: Layout, target: Layout, node_size: int) -> Layout:
    """Return what every rank has after the first hop: some of the target, or all of it where one hop is enough.

    Args:
        source: who owns what, two axes; no two ranks have a row of an item in common.
        target: who shall have what, two axes.
        node_size: ranks per node.
    """
    if not len(source) or not len(target):
        return target
    nodes = 1 + int(max(source.rank.max(), target.rank.max())) // node_size
    # One grid for every node and item, cut only by what that node owns and wants.
    owned = Layout(source.rank // node_size, *source.columns()[1:])
    owned, wanted = _by_node(owned, owned.rank, nodes), _by_node(target, target.rank // node_size, nodes)
    grid = Grid.over(owned, wanted)
    cell, box = grid.cells(wanted)
    first, second = np.divmod(cell, grid.width)
    rows, columns = grid.edges
    rank = wanted.rank[box]
    start, stop = _share(cell, rank, rows[first], rows[first + 1], grid.cells(owned)[0])
    parts = [rank, wanted.item[box] // nodes, columns[second], columns[second + 1], start, stop]
    filled = stop > start
    # Join along the columns first, then the layout joins whole strips along the rows.
    joined = merge_touching([part[filled] for part in parts], keys=2)
    return Layout(*joined[:2], *joined[4:6], *joined[2:4])


def _by_node(layout: Layout, node: Column, nodes: int) -> Layout:
    """Return a layout whose items are different from node to node."""
    return Layout(layout.rank, layout.item * nodes + node, *layout.columns()[2:])


def _share(cell: Column, rank: Column, start: Column, stop: Column, owned: Column) -> tuple[Column, Column]:
    """Return the rows that land on each rank: all of an owned cell, else an even run of those of its sharers."""
    order = np.lexsort([rank, cell])
    _, begins, inverse, sharers = np.unique(cell[order], return_index=True, return_inverse=True, return_counts=True)
    index, of = np.empty_like(cell), np.empty_like(cell)
    index[order], of[order] = np.arange(len(cell)) - begins[inverse], sharers[inverse]
    away = ~np.isin(cell, owned)
    index, of = np.where(away, index, 0), np.where(away, of, 1)
    length = stop - start
    return start + length * index // of, start + length * (index + 1) // of
