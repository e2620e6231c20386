"""Moves: from one layout to another, who sends which boxes to whom.

Handing out data, the Ulysses exchange, stage to stage, remapping for linear layers and parameter resharding are all
moves. All starts and stops of both layouts cut every item into a grid, every box is a rectangle of whole cells, and for
every cell that a rank needs one holder is chosen. Equal neighbours are then joined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqloom.errors import PlanError
from seqloom.layout.layout import (
    Boxes,
    Column,
    Grid,
    Layout,
    as_column,
    count_up,
    freeze_columns,
    merge_across,
    merge_touching,
)


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
        columns = merge_touching([as_column(column) for column in self.columns()], keys=3)
        freeze_columns(self, columns)

    @property
    def remote(self) -> Column:
        """Which boxes travel, bool[n]: those whose sender is not their receiver."""
        return self.sender != self.receiver

    def select(self, chosen: np.ndarray) -> Move:
        """Return some of the boxes; `chosen` is bool[n]."""
        return Move(*(column[chosen] for column in self.columns()))

    def __repr__(self) -> str:
        travels = int(self.sizes[self.remote].sum())
        return f"Move({len(self)} boxes, {self.axes} axes, {travels} of {int(self.sizes.sum())} elements travel)"


def move_between(source: Layout, target: Layout, *, node_size: int | None = None) -> Move:
    """Return the move after which every rank holds what `target` gives it.

    Both layouts may replicate; the target may leave things out. Every box of the target is received exactly once. A
    rank that holds something already keeps it (a local copy). Otherwise the sender is, among the holders: one in the
    receiver's node if `node_size` is given, then the one that sends the fewest elements so far, then the lowest rank.
    """
    if not len(target):
        return Move(*(np.empty(0, dtype=np.int64) for _ in range(3 + 2 * target.axes)))
    if source.axes != target.axes and len(source):
        raise PlanError(
            f"source has {source.axes} axes, target {target.axes}; they need the same, use Layout.with_axis"
        )
    source = source if len(source) else Layout.empty(target.axes)
    grid = Grid.over(source.columns()[1:], target.columns()[1:])
    needed, box = grid.cells(*target.columns()[1:])
    receiver = target.rank[box]
    sender = _choose_senders(source, grid, needed, receiver, node_size)
    columns = [sender, receiver, target.item[box], *grid.intervals(needed)]
    return Move(*columns) if target.axes == 1 else Move(*merge_across(columns, keys=3))


def _choose_senders(source: Layout, grid: Grid, needed: Column, receiver: Column, node_size: int | None) -> Column:
    """Return a holder for every needed cell: the receiver, else the only candidate, else the least loaded."""
    held, box = grid.cells(*source.columns()[1:])
    holder = source.rank[box]
    order = np.lexsort([holder, held])
    held, holder = held[order], holder[order]
    low, high = np.searchsorted(held, needed, side="left"), np.searchsorted(held, needed, side="right")
    _check_held(low < high, grid, needed, receiver)

    # Cells numbered without gaps, so that (cell, rank) fits one integer.
    code = np.unique(np.concatenate([held, needed]), return_inverse=True)[1]
    local = np.zeros(len(needed), dtype=bool)
    for block in (1,) if node_size is None else (node_size, 1):
        # Narrow the candidates low..high to those in the receiver's block of ranks, where there are any. Holders are
        # sorted within a cell, so the ranks of a block are neighbours.
        blocks = int(max(holder.max(), receiver.max())) // block + 1
        have = code[: len(held)] * blocks + holder // block
        want = code[len(held) :] * blocks + receiver // block
        begin, end = np.searchsorted(have, want, side="left"), np.searchsorted(have, want, side="right")
        local = end > begin
        low, high = np.where(local, begin, low), np.where(local, end, high)

    sender = holder[low]
    edges = grid.intervals(needed)
    size = np.prod([stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True)], axis=0)
    load = np.zeros(int(holder.max()) + 1, dtype=np.int64)
    forced = (high - low == 1) & ~local
    np.add.at(load, sender[forced], size[forced])
    for k in np.flatnonzero(high - low > 1):
        candidates = holder[low[k] : high[k]]
        sender[k] = candidates[np.argmin(load[candidates])]
        load[sender[k]] += size[k]
    return sender


def _check_held(held: np.ndarray, grid: Grid, needed: Column, receiver: Column) -> None:
    if held.all():
        return
    k = int(np.flatnonzero(~held)[0])
    edges = [int(column[0]) for column in grid.intervals(needed[k : k + 1])]
    where = "x".join(f"[{start}:{stop})" for start, stop in zip(edges[::2], edges[1::2], strict=True))
    raise PlanError(
        f"rank {receiver[k]} shall receive item {grid.item_of(int(needed[k]))} {where}, which nobody holds; "
        "a target may only ask for what the source holds, add it to the source"
    )


def node_staging_layout(source: Layout, target: Layout, node_size: int) -> Layout:
    """Return what every rank has after the first hop of two-hop resharding; the target where one hop is enough.

    Two hops send each weight over the network to a node once, then share it there. After the first hop a rank has

        what owners in its node have     all that it wants of it: this never crosses the network
        what owners elsewhere have       of what n ranks of its node want, 1 / n of the rows

    In the second, ranks of a node give each other what is missing. So every rank still receives every element once,
    and nobody receives what it does not want. Two nodes of two ranks, a weight of 8 rows that all want:

                    owns     node staging            from its node after that
        rank 0      0-1      0-3 and rows 4-5        6-7
        rank 1      2-3      0-3 and rows 6-7        4-5
        rank 2      4-5      4-7 and rows 0-1        2-3
        rank 3      6-7      4-7 and rows 2-3        0-1

    Both layouts have two axes; no two ranks of the source have a row of an item in common.
    """
    if not len(source) or not len(target):
        return target
    nodes = 1 + int(max(source.rank.max(), target.rank.max())) // node_size
    # One grid for every node and item, cut only by what that node owns and wants.
    owned_by_node = Layout(source.rank // node_size, *source.columns()[1:])
    owned = (owned_by_node.item * nodes + owned_by_node.rank, *owned_by_node.columns()[2:])
    wanted = (target.item * nodes + target.rank // node_size, *target.columns()[2:])
    grid = Grid.over(owned, wanted)
    cell, box = grid.cells(*wanted)
    rank = target.rank[box]
    start, stop, start2, stop2 = grid.intervals(cell)
    start, stop = _share_rows(cell, rank, start, stop, grid.cells(*owned)[0])
    filled = stop > start
    columns = [column[filled] for column in (rank, target.item[box], start, stop, start2, stop2)]
    return Layout(*merge_across(columns, keys=2))


def _share_rows(cell: Column, rank: Column, start: Column, stop: Column, owned: Column) -> tuple[Column, Column]:
    """Return the rows that each rank gets first: all of an owned cell, else an even share among those who want it."""
    order = np.lexsort([rank, cell])
    _, begins, inverse, sharers = np.unique(cell[order], return_index=True, return_inverse=True, return_counts=True)
    index, of = np.empty_like(cell), np.empty_like(cell)
    index[order], of[order] = np.arange(len(cell)) - begins[inverse], sharers[inverse]
    away = ~np.isin(cell, owned)
    index, of = np.where(away, index, 0), np.where(away, of, 1)
    length = stop - start
    return start + length * index // of, start + length * (index + 1) // of


# -- one rank's part of a move -------------------------------------------------------------------------------------
#
# Parameters of a large model that go to many pipelines make tens of millions of boxes in all, and tens of thousands for
# any one rank. Where nobody holds what another does (the optimiser's layout), the sender of every element is known
# without looking at what others receive.


def move_of_rank(rank: int, source: Layout, target: Layout, *, node_size: int | None = None) -> Move:
    """Return the boxes of `move_between(source, target, node_size=node_size)` that a rank sends or receives.

    Both ends of a pair of ranks find the same boxes in the same order, each for itself. It is quick where all ranks
    hold different rows in the source, with two axes; otherwise the whole move is made, since a choice of senders looks
    at all of it.
    """
    order = np.lexsort([source.start, source.item])
    if source.axes != 2 or target.axes != 2 or not _rows_differ(source, order):
        move = move_between(source, target, node_size=node_size)
        return move.select((move.sender == rank) | (move.receiver == rank))
    received = _received(source, order, target.restrict([rank]))
    sent = _overlaps(source, order[source.rank[order] == rank], target)
    both = (sent.select(sent.receiver != rank).columns(), received.columns())
    return Move(*(np.concatenate(columns) for columns in zip(*both, strict=True)))


def reshard_moves_of_rank(
    rank: int, source: Layout, target: Layout, *, node_size: int | None = None
) -> tuple[Move, ...]:
    """Return what a rank sends and receives so that nothing crosses the network twice for one node.

    Two moves where several ranks of a node, any node, want what nobody there has, and all ranks hold different rows in
    the source: to `node_staging_layout`, and from there inside the node. The second has only what travels. Otherwise
    one move: that of `move_of_rank`. All ranks find the same number.
    """
    order = np.lexsort([source.start, source.item])
    if node_size is not None and source.axes == target.axes == 2 and _rows_differ(source, order):
        staging = node_staging_layout(source, target, node_size)
        if int(staging.sizes.sum()) < int(target.sizes.sum()):
            _received(source, order, target.restrict([rank]))  # refuse what nobody holds, wherever it is staged
            first = rank // node_size * node_size
            node = range(first, first + node_size)
            inside = move_between(staging.restrict(node), target.restrict(node))
            travels = inside.remote & ((inside.sender == rank) | (inside.receiver == rank))
            return move_of_rank(rank, source, staging), inside.select(travels)
    return (move_of_rank(rank, source, target, node_size=node_size),)


def _received(source: Layout, order: Column, mine: Layout) -> Move:
    """Return what a rank gets of the source, see `_overlaps`; refuse what nobody holds."""
    received = _overlaps(source, order, mine)
    if int(received.sizes.sum()) != int(mine.sizes.sum()):
        move_between(source, mine)  # raises, with the missing box
    return received


def _rows_differ(source: Layout, order: Column) -> bool:
    """Say whether no two boxes of an item, sorted by item and start, have a row in common."""
    item, start, stop = (column[order] for column in (source.item, source.start, source.stop))
    return not np.any((item[1:] == item[:-1]) & (start[1:] < stop[:-1]))


def _overlaps(source: Layout, order: Column, target: Layout) -> Move:
    """Return what boxes of the source, `order` of them, and of the target have in common.

    `order` sorts by item and start; rows of an item differ from box to box.
    """
    span = 1 + int(max(source.stop.max(initial=0), target.stop.max(initial=0)))
    begins, ends = (source.item[order] * span + edge[order] for edge in (source.start, source.stop))
    low = np.searchsorted(ends, target.item * span + target.start, side="right")
    high = np.searchsorted(begins, target.item * span + target.stop, side="left")
    count = np.maximum(high - low, 0)
    into = np.repeat(np.arange(len(target)), count)
    out_of = order[low[into] + count_up(count)]
    pairs = zip(source.columns()[2:], target.columns()[2:], strict=True)  # start, stop, start2, stop2
    edges = [(np.maximum, np.minimum)[k % 2](a[out_of], b[into]) for k, (a, b) in enumerate(pairs)]
    common = edges[2] < edges[3]
    columns = (source.rank[out_of], target.rank[into], target.item[into], *edges)
    return Move(*(column[common] for column in columns))
