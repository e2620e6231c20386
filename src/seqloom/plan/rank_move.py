"""One rank's part of a move, without the parts of all others: what a rank of a thousand has time to work out.

Parameters of a large model that go to many pipelines make tens of millions of boxes in all, and tens of thousands for
any one rank. Where nobody holds what another does (the optimiser's layout), the sender of every element is known
without looking at what others receive.
"""

from __future__ import annotations

import numpy as np

from seqloom.plan.boxes import Column
from seqloom.plan.landing import landing_layout
from seqloom.plan.layout import Layout
from seqloom.plan.move import Move, move_between


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
    received = _received(source, order, target.among([rank]))
    sent = _overlaps(source, order[source.rank[order] == rank], target)
    return _join(_pick(sent, sent.receiver != rank), received)


def hops_of_rank(rank: int, source: Layout, target: Layout, *, node_size: int | None = None) -> tuple[Move, ...]:
    """Return what a rank sends and receives so that nothing crosses the network twice for one node.

    Two moves where several ranks of a node, any node, want what nobody there has, and all ranks hold different rows in
    the source: to the landing layout, and from there inside the node. The second has only what travels. Otherwise one
    move: that of `move_of_rank`. All ranks find the same number.

    Args:
        rank, source, target, node_size: see `move_of_rank`.
    """
    order = np.lexsort([source.start, source.item])
    if node_size is not None and source.axes == target.axes == 2 and _rows_differ(source, order):
        landing = landing_layout(source, target, node_size)
        if int(landing.sizes.sum()) < int(target.sizes.sum()):
            _received(source, order, target.among([rank]))  # all that is wanted is there, wherever it lands
            first = rank // node_size * node_size
            node = range(first, first + node_size)
            inside = move_between(landing.among(node), target.among(node))
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
