"""Layouts cut into cells: starts and stops cut every item into a grid, and every box is a rectangle of whole cells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqloom.errors import PlanError
from seqloom.layout.boxes import Boxes, Column, as_column, freeze_columns, merge_touching
from seqloom.layout.layout import Layout


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


# ---- merged: plan.move
# From one layout to another: who sends which boxes to whom.
#
# Handing out data, the Ulysses exchange, stage to stage, remapping for linear layers and parameter resharding
# are all moves. The arithmetic is done on cells: all starts and stops of both layouts cut every item into a
# grid, every box is a rectangle of whole cells, and for every cell that a rank needs one holder is chosen.
# Equal neighbours are then joined.


@dataclass(frozen=True, slots=True, eq=False)
class Move(Boxes):
    """Boxes with a sender and a receiver, sorted by sender, receiver, item and start.

    A box whose sender is its receiver is a local copy. Columns are int64[n], the last two None with one axis.
    """

    sender: Column
    receiver: Column
    item: Column
    start: Column
    stop: Column
    start2: Column | None = None
    stop2: Column | None = None

    def __post_init__(self) -> None:
        """Bring the boxes into the canonical order and make them read-only."""
        columns = merge_touching([as_column(column) for column in self.columns()], keys=3)
        freeze_columns(self, columns)

    @property
    def remote(self) -> Column:
        """Which boxes travel, bool[n]: those whose sender is not their receiver."""
        return self.sender != self.receiver

    def __repr__(self) -> str:
        """Say how much moves, not every box."""
        travels = int(self.sizes[self.remote].sum())
        return f"Move({len(self)} boxes, {self.axes} axes, {travels} of {int(self.sizes.sum())} elements travel)"


def move_between(source: Layout, target: Layout, *, node_size: int | None = None) -> Move:
    """Return the move after which every rank holds what `target` gives it.

    Every box of the target is received exactly once. A rank that holds something already keeps it (a local
    copy). Otherwise the sender is, among the holders: one in the receiver's node if `node_size` is given,
    then the one that sends the fewest elements so far, then the lowest rank.

    Args:
        source: who holds what before; may replicate.
        target: who shall hold what after; may replicate, and may leave things out.
        node_size: ranks per node.
    """
    if not len(target):
        return Move(*(np.empty(0, dtype=np.int64) for _ in range(3 + 2 * target.axes)))
    if source.axes != target.axes and len(source):
        raise PlanError(
            f"source has {source.axes} axes, target {target.axes}; they need the same, use Layout.with_axis"
        )
    grid = Grid.over(source if len(source) else Layout.empty(target.axes), target)
    needed, box = grid.cells(target)
    receiver = target.rank[box]
    sender = _choose_senders(source, grid, needed, receiver, node_size)
    first, second = np.divmod(needed, grid.width)
    columns = [sender, receiver, target.item[box], grid.edges[0][first], grid.edges[0][first + 1]]
    if target.axes == 1:
        return Move(*columns)
    across = [*columns, grid.edges[1][second], grid.edges[1][second + 1]]
    # Join along the second axis first (axes exchanged); Move then joins whole strips along the first.
    swapped = merge_touching([*across[:3], *across[5:7], *across[3:5]], keys=3)
    return Move(*swapped[:3], *swapped[5:7], *swapped[3:5])


def _choose_senders(source: Layout, grid: Grid, needed: Column, receiver: Column, node_size: int | None) -> Column:
    """Return a holder for every needed cell: the receiver, else the only candidate, else the least loaded."""
    held, box = grid.cells(source)
    holder = source.rank[box]
    order = np.lexsort([holder, held])
    held, holder = held[order], holder[order]
    low, high = np.searchsorted(held, needed, side="left"), np.searchsorted(held, needed, side="right")
    _refuse_missing(low == high, grid, needed, receiver)

    if node_size is not None:
        low, high, _ = _narrow(held, holder, needed, receiver, low, high, node_size)
    low, high, local = _narrow(held, holder, needed, receiver, low, high, 1)
    sender = holder[low]
    size = grid.sizes(needed)
    load = np.zeros(int(holder.max()) + 1, dtype=np.int64)
    forced = (high - low == 1) & ~local
    np.add.at(load, sender[forced], size[forced])
    for k in np.flatnonzero(high - low > 1):
        candidates = holder[low[k] : high[k]]
        sender[k] = candidates[np.argmin(load[candidates])]
        load[sender[k]] += size[k]
    return sender


def _narrow(
    held: Column, holder: Column, needed: Column, receiver: Column, low: Column, high: Column, block: int
) -> tuple[Column, Column, Column]:
    """Narrow the candidates low..high to those in the receiver's block of ranks, where there are any.

    Holders are sorted within a cell, so the ranks of a block are neighbours. Returns low, high and where it
    narrowed.
    """
    blocks = int(max(holder.max(), receiver.max())) // block + 1
    code = _codes(held, needed)
    have = code[: len(held)] * blocks + holder // block
    want = code[len(held) :] * blocks + receiver // block
    begin, end = np.searchsorted(have, want, side="left"), np.searchsorted(have, want, side="right")
    near = end > begin
    return np.where(near, begin, low), np.where(near, end, high), near


def _codes(held: Column, needed: Column) -> Column:
    """Number the cells without gaps, so that (cell, rank) fits one integer."""
    return np.unique(np.concatenate([held, needed]), return_inverse=True)[1]


def _refuse_missing(missing: np.ndarray, grid: Grid, needed: Column, receiver: Column) -> None:
    if not missing.any():
        return
    k = int(np.flatnonzero(missing)[0])
    first, second = divmod(int(needed[k]), grid.width)
    item = grid.items[grid.keys[0][first] // len(grid.values[0])]
    where = f"[{grid.edges[0][first]}:{grid.edges[0][first + 1]})"
    if grid.width > 1:
        where += f"x[{grid.edges[1][second]}:{grid.edges[1][second + 1]})"
    raise PlanError(
        f"rank {receiver[k]} shall receive item {item} {where}, which nobody holds; "
        "a target may only ask for what the source holds, add it to the source"
    )


# ---- merged: plan.landing
# What crosses the network once for a node in which several ranks want it.
#
# Weights go in two hops from their owners to all ranks that compute with them. After the first a rank has its
# landing:
#
#     what owners in its node have     all that it wants of it: this never crosses the network
#     what owners elsewhere have       of what n ranks of its node want, 1 / n of the rows
#
# In the second, ranks of a node give each other what is missing. So every rank still receives every element once,
# and
# nobody receives what it does not want. Two nodes of two ranks, a weight of 8 rows that all want:
#
#                 owns     landing                 from its node after that
#     rank 0      0-1      0-3 and rows 4-5        6-7
#     rank 1      2-3      0-3 and rows 6-7        4-5
#     rank 2      4-5      4-7 and rows 0-1        2-3
#     rank 3      6-7      4-7 and rows 2-3        0-1


def node_staging_layout(source: Layout, target: Layout, node_size: int) -> Layout:
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


# ---- merged: plan.rank_move
# One rank's part of a move, without the parts of all others: what a rank of a thousand has time to work out.
#
# Parameters of a large model that go to many pipelines make tens of millions of boxes in all, and tens of thousands
# for
# any one rank. Where nobody holds what another does (the optimiser's layout), the sender of every element is known
# without looking at what others receive.


def move_of_rank(rank: int, source: Layout, target: Layout, *, node_size: int | None = None) -> Move:
    """Return the boxes of `move_between(source, target, node_size=node_size)` that a rank sends or receives.

    Both ends of a pair of ranks find the same boxes in the same order, each for itself. It is quick where all ranks
    hold different rows in the source; otherwise the whole move is made, since a choice of senders looks at all of it.

    Args:
        rank: the one asked for.
        source, target: as in `move_between`, with two axes.
        node_size: ranks per node.
    """
    order = np.lexsort([source.start, source.item])
    if source.axes != 2 or target.axes != 2 or not _rows_differ(source, order):
        move = move_between(source, target, node_size=node_size)
        return _pick(move, (move.sender == rank) | (move.receiver == rank))
    received = _received(source, order, target.restrict([rank]))
    sent = _overlaps(source, order[source.rank[order] == rank], target)
    return _join(_pick(sent, sent.receiver != rank), received)


def reshard_moves_of_rank(
    rank: int, source: Layout, target: Layout, *, node_size: int | None = None
) -> tuple[Move, ...]:
    """Return what a rank sends and receives so that nothing crosses the network twice for one node.

    Two moves where several ranks of a node, any node, want what nobody there has, and all ranks hold different rows in
    the source: to the landing layout, and from there inside the node. The second has only what travels. Otherwise one
    move: that of `move_of_rank`. All ranks find the same number.

    Args:
        rank, source, target, node_size: see `move_of_rank`.
    """
    order = np.lexsort([source.start, source.item])
    if node_size is not None and source.axes == target.axes == 2 and _rows_differ(source, order):
        landing = node_staging_layout(source, target, node_size)
        if int(landing.sizes.sum()) < int(target.sizes.sum()):
            _received(source, order, target.restrict([rank]))  # all that is wanted is there, wherever it lands
            first = rank // node_size * node_size
            node = range(first, first + node_size)
            inside = move_between(landing.restrict(node), target.restrict(node))
            travels = inside.remote & ((inside.sender == rank) | (inside.receiver == rank))
            return move_of_rank(rank, source, landing), _pick(inside, travels)
    return (move_of_rank(rank, source, target, node_size=node_size),)


def _received(source: Layout, order: Column, mine: Layout) -> Move:
    """Return what a rank gets of the source, see `_overlaps`; refuse what nobody holds."""
    received = _overlaps(source, order, mine)
    if int(received.sizes.sum()) != int(mine.sizes.sum()):
        move_between(source, mine)  # names it
    return received


def _rows_differ(source: Layout, order: Column) -> bool:
    """Whether no two boxes of an item, sorted by item and start, have a row in common."""
    item, start, stop = (column[order] for column in (source.item, source.start, source.stop))
    return not np.any((item[1:] == item[:-1]) & (start[1:] < stop[:-1]))


def _overlaps(source: Layout, order: Column, target: Layout) -> Move:
    """Return what boxes of the source, `order` of them, and of the target have in common.

    Args:
        source: who sends.
        order: of its boxes, sorted by item and start; rows of an item differ from box to box.
        target: who receives.
    """
    span = 1 + int(max(source.stop.max(initial=0), target.stop.max(initial=0)))
    begins, ends = (source.item[order] * span + edge[order] for edge in (source.start, source.stop))
    low = np.searchsorted(ends, target.item * span + target.start, side="right")
    high = np.searchsorted(begins, target.item * span + target.stop, side="left")
    count = np.maximum(high - low, 0)
    into = np.repeat(np.arange(len(target)), count)
    out_of = order[np.repeat(low - (np.cumsum(count) - count), count) + np.arange(len(into))]
    edges = []
    for low_edge, high_edge in (("start", "stop"), ("start2", "stop2")):
        edges.append(np.maximum(getattr(source, low_edge)[out_of], getattr(target, low_edge)[into]))
        edges.append(np.minimum(getattr(source, high_edge)[out_of], getattr(target, high_edge)[into]))
    common = edges[2] < edges[3]
    columns = (source.rank[out_of], target.rank[into], target.item[into], *edges)
    return Move(*(column[common] for column in columns))


def _pick(move: Move, chosen: np.ndarray) -> Move:
    return Move(*(column[chosen] for column in move.columns()))


def _join(first: Move, second: Move) -> Move:
    return Move(*(np.concatenate(pair) for pair in zip(first.columns(), second.columns(), strict=True)))
