"""Routes: how a group's messages between nodes travel when one NIC is not enough (Zeppelin).

A message leaves its node through the NIC near its sender. A routed one is cut into parts that cross through the NICs of
all proxies, and is put together again at its receiver:

    sender -> proxies of its node -> proxies of the receiver's node -> receiver

`route_move` says which boxes go when. Slices follow each other, so that all three links work at once:

    step         0        1        2        3
    dispatch  slice 0  slice 1                     sender to proxy
    cross              slice 0  slice 1            proxy to the proxy with the same local rank in the other node
    inside             slice 0  slice 1            boxes that stay in a node, beside those that cross
    combine                     slice 0  slice 1   proxy to receivers
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np

from seqloom.errors import PlanError
from seqloom.layout.layout import Column, Grid, count_up
from seqloom.layout.move import Move


@dataclass(frozen=True, slots=True)
class Route:
    """Ranks that carry a group's traffic between nodes.

    Attributes:
        proxies: ascending, in every node of the group the same local ranks, one near each NIC. They take part in the
            round; those that are not in the group only pass on.
        slices: pieces of a message that are under way at once, one behind the other.
    """

    proxies: tuple[int, ...]
    slices: int = 1

    def common_local_ranks(self, nodes: set[int], node_size: int) -> tuple[int, ...]:
        """Return the local ranks of the proxies, the same in all of `nodes`; raise PlanError if they differ."""
        proxies = groupby(sorted(self.proxies), key=lambda rank: rank // node_size)
        by_node = {node: tuple(rank % node_size for rank in ranks) for node, ranks in proxies}
        first = by_node.get(min(nodes), ())
        for node in sorted(nodes):
            if not by_node.get(node):
                raise PlanError(
                    f"a route through proxies {list(self.proxies)} has none in node {node}; "
                    f"every node of the group needs one; add a rank of {node * node_size}-{(node + 1) * node_size - 1}"
                )
            if by_node[node] != first:
                raise PlanError(
                    f"a route has proxies at places {list(first)} of node {min(nodes)}, {list(by_node[node])} of node "
                    f"{node}; they must be the same in every node; use {[node * node_size + p for p in first]}"
                )
        return first


def route_move(move: Move, route: Route, node_size: int) -> tuple[Move, ...]:
    """Cut a move into steps, one after the other, after which every receiver holds what `move` gives it.

    Boxes inside a node go in slices as well, beside those that cross. A box that several receivers of one node want
    crosses once and is sent on to each of them. Between two nodes every proxy carries the same number of elements, in
    every slice, within one; so it does over all nodes it sends to. In a step every sender holds what it sends: its own,
    what a step before brought for passing on, or what it received there for itself. Boxes that touch are joined, so one
    may bring a rank both what it wants and what it passes on; no element reaches a rank twice.

    The move has one axis; an item belongs to one message, so (item, element) means the same everywhere. The proxies
    have the same local ranks in all nodes that it joins. Returns at most `slices + 2` moves, none of them empty.
    """
    if move.axes != 1:
        raise PlanError("a routed move has two axes; flatten its messages to one axis first")
    if route.slices < 1:
        raise PlanError(f"a route with {route.slices} slices: a message is at least one piece; use 1")
    sends, receives = move.sender // node_size, move.receiver // node_size
    across = sends != receives
    if not across.any():
        return (move,) if len(move) else ()
    nodes = set(np.unique(np.concatenate([sends[across], receives[across]])).tolist())
    local_ranks = np.array(route.common_local_ranks(nodes, node_size), dtype=np.int64)

    loads = _Loads.of(move, across, node_size)
    slices = _slice(_share(loads, local_ranks, node_size), route.slices)
    hops = [_hops(loads, parts, local_ranks, node_size) for parts in slices]
    inside = _slice_boxes(tuple(column[~across] for column in move.columns()), route.slices)
    once = _drop_repeats([*(hop[0] for hop in hops), *inside])
    steps: list[list[tuple[Column, ...]]] = [[] for _ in range(route.slices + 2)]
    for number, (_, cross, combine) in enumerate(hops):
        steps[number].append(once[number])
        steps[number + 1] += [cross, once[route.slices + number]]
        steps[number + 2].append(combine)
    joined = [tuple(np.concatenate(columns) for columns in zip(*boxes, strict=True)) for boxes in steps]
    return tuple(Move(*columns) for columns in joined if len(columns[0]))


def _codes(*columns: Column) -> Column:
    """Number rows of equal values without gaps, so that further codes fit one integer."""
    code = np.zeros_like(columns[0])
    for column in columns:
        value = np.unique(column, return_inverse=True)[1]
        code = np.unique(code * (int(value.max()) + 1) + value, return_inverse=True)[1]
    return code


def _cut(message: Column, start: Column, stop: Column) -> tuple[Column, Column, Column, Column]:
    """Cut boxes at all edges of boxes of the same message. Returns box, number of the cell, its start and stop."""
    grid = Grid.over((message, start, stop))
    cell, box = grid.cells(message, start, stop)
    start, stop = grid.intervals(cell)
    return box, cell, start, stop


def _slice_boxes(boxes: tuple[Column, ...], slices: int) -> list[tuple[Column, ...]]:
    """Cut every box into equal slices, the first of all boxes, then the second of all, and so on."""
    *who, start, stop = boxes
    cuts = [start + (stop - start) * k // slices for k in range(slices + 1)]
    cut = [(*who, low, high) for low, high in pairwise(cuts)]
    return [tuple(column[part[-1] > part[-2]] for column in part) for part in cut]


def _drop_repeats(moves: list[tuple[Column, ...]]) -> list[tuple[Column, ...]]:
    """Leave out of every move what one before it has brought to the same rank."""
    sender, receiver, item, start, stop = (np.concatenate(columns) for columns in zip(*moves, strict=True))
    if not len(sender):
        return moves
    turn = np.repeat(np.arange(len(moves)), [len(columns[0]) for columns in moves])
    box, cell, start, stop = _cut(_codes(sender, receiver, item), start, stop)
    order = np.lexsort([turn[box], cell])
    new = order[np.append(True, cell[order][1:] != cell[order][:-1])]
    columns = (sender[box[new]], receiver[box[new]], item[box[new]], start[new], stop[new])
    return [tuple(column[turn[box[new]] == k] for column in columns) for k in range(len(moves))]


@dataclass(frozen=True, slots=True, eq=False)
class _Loads:
    """Elements that cross: a load is a cell (elements that the same ranks of a node want) and that node.

    Attributes:
        sender, item, start, stop, source, target: int64[loads], sorted by source and target node.
        load, receiver: int64[wants], who wants each load, sorted by load.
    """

    sender: Column
    item: Column
    start: Column
    stop: Column
    source: Column
    target: Column
    load: Column
    receiver: Column

    @classmethod
    def of(cls, move: Move, across: np.ndarray, node_size: int) -> _Loads:
        """Cut the boxes that cross at all edges of their message and node, and gather who wants which cell."""
        sender, receiver, item, start, stop = (column[across] for column in move.columns())
        target = receiver // node_size
        box, cell, start, stop = _cut(_codes(sender, item, target), start, stop)
        source = sender[box] // node_size
        order = np.lexsort([receiver[box], cell, target[box], source])
        box, cell, start, stop, source = (column[order] for column in (box, cell, start, stop, source))
        fresh = np.append(True, cell[1:] != cell[:-1])
        first = box[fresh]
        loads = (sender[first], item[first], start[fresh], stop[fresh], source[fresh], target[first])
        return cls(*loads, np.cumsum(fresh) - 1, receiver[box])


Parts = tuple[Column, Column, Column, Column, Column]
"""Parts of loads, int64[parts] each: the load, the proxy that carries it (an index), start, stop, the pair of nodes."""


def _share(loads: _Loads, proxies: Column, node_size: int) -> Parts:
    """Give every proxy the same number of elements of every pair of nodes.

    In turn: loads whose sender and one receiver have the proxy's local rank, then those whose sender does, those of
    which a receiver does, and what is left. So few parts are dispatched or combined at all.
    """
    pair = _codes(loads.source, loads.target)
    first = np.flatnonzero(np.append(True, pair[1:] != pair[:-1]))
    total = np.add.reduceat(loads.stop - loads.start, first)
    share = _proxy_shares(total, loads.source[first], len(proxies))
    leaves = (loads.sender % node_size)[:, None] == proxies
    arrives = np.zeros_like(leaves)
    wants, proxy = np.nonzero((loads.receiver % node_size)[:, None] == proxies)
    arrives[loads.load[wants], proxy] = True

    start, found = loads.start.copy(), []
    for fitting in (leaves & arrives, leaves, arrives, np.ones_like(leaves)):
        for k in range(len(proxies)):
            take = np.where(fitting[:, k], loads.stop - start, 0)
            before = np.cumsum(take) - take
            take = np.clip(share[pair, k] - (before - before[first][pair]), 0, take)
            share[:, k] -= np.add.reduceat(take, first)
            used = np.flatnonzero(take)
            found.append((used, np.full_like(used, k), start[used], start[used] + take[used], pair[used]))
            start += take
    load, proxy, begin, end, of_pair = (np.concatenate(columns) for columns in zip(*found, strict=True))
    return load, proxy, begin, end, of_pair


def _proxy_shares(total: Column, source: Column, proxies: int) -> np.ndarray:
    """int64[pairs, proxies]: elements that every proxy carries. The odd ones go on where the pair before left off."""
    base, extra = np.divmod(total, proxies)
    before = np.cumsum(extra) - extra
    before -= before[np.searchsorted(source, source)]
    turn = (np.arange(proxies) - before[:, None]) % proxies
    return base[:, None] + (turn < extra[:, None])


def _slice(parts: Parts, slices: int) -> list[Parts]:
    """Lay the parts of every pair of nodes and proxy end to end and cut them into equal slices."""
    order = np.lexsort([parts[2], parts[0], parts[1], parts[4]])
    load, proxy, begin, end, pair = (column[order] for column in parts)
    size = end - begin
    stream = _codes(pair, proxy)
    first = np.flatnonzero(np.append(True, stream[1:] != stream[:-1]))
    base, extra = np.divmod(np.add.reduceat(size, first), slices)
    offset = np.cumsum(size) - size
    offset -= offset[first][stream]
    cut = []
    for number in range(slices):
        low, high = (k * base + np.minimum(k, extra) for k in (number, number + 1))
        start = begin + np.clip(low[stream] - offset, 0, size)
        stop = begin + np.clip(high[stream] - offset, 0, size)
        used = stop > start
        cut.append((load[used], proxy[used], start[used], stop[used], pair[used]))
    return cut


def _hops(loads: _Loads, parts: Parts, proxies: Column, node_size: int) -> tuple[tuple[Column, ...], ...]:
    """Return the boxes of the three hops of some parts; what a rank would send to itself is left out."""
    load, proxy, start, stop, _ = parts
    item = loads.item[load]
    leaves, enters = (node[load] * node_size + proxies[proxy] for node in (loads.source, loads.target))
    dispatch = (loads.sender[load], leaves, item, start, stop)
    low, high = (np.searchsorted(loads.load, load, side=side) for side in ("left", "right"))
    each = np.repeat(np.arange(len(load)), high - low)
    receiver = loads.receiver[low[each] + count_up(high - low)]
    combine = (enters[each], receiver, item[each], start[each], stop[each])
    return _remote(dispatch), (leaves, enters, item, start, stop), _remote(combine)


def _remote(boxes: tuple[Column, ...]) -> tuple[Column, ...]:
    return tuple(column[boxes[0] != boxes[1]] for column in boxes)
