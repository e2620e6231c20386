"""The ranks of a round while it is filled: how loaded each is, how much room it has, and where a shape fits best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from seqloom.cost import GroupShape
from seqloom.planners.loops import NEVER
from seqloom.planners.zones.prices import Prices

Ranks = tuple[int, ...]


@dataclass(eq=False)
class Seating:
    """Who holds what in a round. Groups may share ranks; loads are estimates in ns, rooms are tokens."""

    load: list[int]
    room: list[int]
    whole: list[list[int]]
    """Documents that are whole on each rank."""
    cut: dict[tuple[Ranks, int], list[int]] = field(default_factory=dict)
    """(ranks, index of the shape) -> documents cut over them: one group."""
    groups: dict[int, list[Ranks]] = field(default_factory=dict)
    """Index of a shape -> the ranks of each group of it."""
    left: list[int] = field(default_factory=list)
    """Documents that found no room."""

    @classmethod
    def empty(cls, begin: list[int], capacity: int) -> Seating:
        """A round in which nobody holds anything; rank i is free from ``begin[i]`` on."""
        return cls(list(begin), [capacity] * len(begin), [[] for _ in begin])

    def place(self, ranks: Ranks, shape: int, document: int, tokens: int, charge: int) -> None:
        """Cut a document over these ranks, each of which takes ``charge`` ns more."""
        if (ranks, shape) not in self.cut:
            self.cut[ranks, shape] = []
            self.groups.setdefault(shape, []).append(ranks)
        self.cut[ranks, shape].append(document)
        share = -(-tokens // len(ranks))
        for rank in ranks:
            self.load[rank] += charge
            self.room[rank] -= share


def best_ranks(
    shape: GroupShape, load: np.ndarray, room: np.ndarray, share: int, node_size: int
) -> tuple[int, Ranks] | None:
    """The least loaded ranks that a group of this shape may have, each with room for ``share`` tokens.

    Inside a node these are any aligned Ulysses blocks of it (any ranks, for a pure ring), across nodes whole nodes.

    Args:
        load: int64[ranks] ns.
        room: int64[ranks] tokens.

    Returns:
        load of the fullest of them and the ranks, or None where there is no room.
    """
    inner = shape.ulysses
    load = np.where(room >= share, load, NEVER)
    if shape.degree > node_size:
        width = max(inner, node_size)
        blocks = load[: len(load) // width * width].reshape(-1, width).max(axis=1)
        first, count = 0, shape.degree // width
    else:
        width, per_node = inner, node_size // inner
        rows = load.reshape(-1, node_size)[:, : per_node * inner].reshape(-1, per_node, inner).max(axis=2)
        worst = np.sort(rows, axis=1)[:, shape.ring - 1]
        node = int(worst.argmin())
        first, count, blocks = node * node_size, shape.ring, rows[node]
    chosen = np.argsort(blocks, kind="stable")[:count].tolist()
    fullest = int(blocks[chosen[-1]]) if len(chosen) == count else int(NEVER)
    if fullest >= NEVER:
        return None
    starts = (first + block * width for block in sorted(chosen))
    return fullest, tuple(rank for start in starts for rank in range(start, start + width))


# ---- merged: planners.zones.fill
# Fill one round: longest first, cut only where the target asks for it, the rest whole on the least loaded rank.


GROUPS_TRIED = 16
"""Groups of a shape that a document may join; it may open another anywhere."""


class Aim(NamedTuple):
    """What a round is filled towards."""

    target: int
    """ns after which every rank should be done, without the round's fixed cost."""
    limit: int
    """ns that a single document may take of a rank; one that takes longer is cut."""
    break_even: int
    """Per mille that a cut may cost above the whole document, where nothing but balance asks for it."""
    hidden: bool = False
    """Whether ring messages are taken to hide behind the rank's other work."""
    widths: Mapping[int, int] = {}
    """Document -> the least degree it gets; 1 leaves it whole if one rank holds it. Others follow from the rest."""


class Cut(NamedTuple):
    """A way to cut a document: index of the shape, ns on each of its ranks, the ranks."""

    shape: int
    charge: int
    ranks: Ranks


def fill(prices: Prices, documents: Sequence[int], begin: list[int], aim: Aim) -> Seating:
    """Seat the documents of one round, which come by falling time.

    Args:
        begin: ns at which each rank is free.
    """
    seating = Seating.empty(begin, prices.capacity)
    tokens, whole = prices.listed
    cut, rest = [], []
    for at, k in enumerate(documents):
        if k not in prices.column:  # nor is any shorter one
            rest += documents[at:]
            break
        width = aim.widths.get(k, 2 if whole[k] > aim.limit else 1)
        (cut if width > 1 or tokens[k] > prices.capacity else rest).append(k)
    _cut_all(prices, cut, seating, aim)
    _seat_rest(prices, rest, seating, aim)
    return seating


def _cut_all(prices: Prices, documents: Sequence[int], seating: Seating, aim: Aim) -> None:
    """Cut documents that no rank may have alone."""
    load, room = np.array(seating.load), np.array(seating.room)
    for k in documents:
        cut = _cheapest_cut(prices, k, seating, load, room, aim, int(NEVER), int(NEVER))
        if cut is None:
            seating.left.append(k)
            continue
        seating.place(cut.ranks, cut.shape, k, int(prices.tokens[k]), cut.charge)
        at = list(cut.ranks)
        load[at] = [seating.load[rank] for rank in at]
        room[at] = [seating.room[rank] for rank in at]


def _seat_rest(prices: Prices, documents: Sequence[int], seating: Seating, aim: Aim) -> None:
    """Seat documents whole on the least loaded rank with room, or cut those that would end late there."""
    tokens, whole = prices.listed
    load, room, column = seating.load, seating.room, prices.column
    cheapest = prices.cheapest(aim.hidden)
    heap = [(load[rank], rank) for rank in range(len(load))]
    heapify(heap)
    aside: list[tuple[int, int]] = []  # (-room, rank) of ranks without room for the document at hand
    for k in documents:
        size, time = tokens[k], whole[k]
        while aside and -aside[0][0] >= size:
            held, rank = heappop(aside)
            if -held == room[rank]:
                heappush(heap, (load[rank], rank))
            else:
                heappush(aside, (-room[rank], rank))
        while heap:
            least, rank = heap[0]
            if room[rank] < size:
                heappop(heap)
                heappush(aside, (-room[rank], rank))
            elif least != load[rank]:
                heapreplace(heap, (load[rank], rank))
            else:
                break
        ends = heap[0][0] + time if heap else int(NEVER)
        if ends > aim.target and k in column and (k not in aim.widths or not heap):
            most = time + time * aim.break_even // 1000 if heap else int(NEVER)
            if cheapest[column[k]] <= most:
                cut = _cheapest_cut(prices, k, seating, np.array(load), np.array(room), aim, most, ends)
                if cut is not None:
                    seating.place(cut.ranks, cut.shape, k, size, cut.charge)
                    continue
        if not heap:
            seating.left.append(k)
            continue
        rank = heap[0][1]
        load[rank] = ends
        room[rank] -= size
        seating.whole[rank].append(k)
        heapreplace(heap, (ends, rank))


def _own(prices: Prices, shape: int, aim: Aim) -> int:
    """ns of a document's charge that are its group's own: one that joins a group does not pay them again."""
    return int(prices.extra[0, shape] if aim.hidden else prices.extra[:, shape].min())


def _cheapest_cut(
    prices: Prices, k: int, seating: Seating, load: np.ndarray, room: np.ndarray, aim: Aim, most: int, ends: int
) -> Cut | None:
    """The cheapest cut of document ``k`` that ends within the target; else the one that ends first, before ``ends``.

    Args:
        load: int64[ranks] ns, those of the seating.
        room: int64[ranks] tokens, likewise.
        most: rank-ns that it may cost.
    """
    at, size = prices.column[k], int(prices.tokens[k])
    charges, spent = prices.charges(aim.hidden)[:, at].tolist(), prices.spent(aim.hidden)[:, at].tolist()
    limit, narrowest = (int(NEVER), aim.widths[k]) if k in aim.widths else (aim.limit, 2)
    best: Cut | None = None
    for s in prices.by_price(aim.hidden)[:, at].tolist():
        charge, shape = charges[s], prices.shapes[s]
        if spent[s] > most or charge >= NEVER:
            break
        if shape.degree < max(2, narrowest) or charge > limit:
            continue
        share = -(-size // shape.degree)
        less = charge - _own(prices, s, aim)
        joined = _best_group(seating, s, share, less)
        if joined is not None and joined[0] < ends:
            ends, best = joined[0], Cut(s, less, joined[1])
        opened = best_ranks(shape, load, room, share, prices.cost.node_size)
        if opened is not None and opened[0] + charge < ends:
            ends, best = opened[0] + charge, Cut(s, charge, opened[1])
        if ends <= aim.target:
            break
    return best


def _best_group(seating: Seating, s: int, share: int, charge: int) -> tuple[int, Ranks] | None:
    """The group of this shape, among those there are, that ends first with ``charge`` more: (ns, ranks)."""
    load, room = seating.load, seating.room
    best: tuple[int, Ranks] | None = None
    for ranks in seating.groups.get(s, ())[:GROUPS_TRIED]:
        end = max(load[rank] for rank in ranks) + charge
        if (best is None or end < best[0]) and min(room[rank] for rank in ranks) >= share:
            best = (end, ranks)
    return best


# ---- merged: planners.zones.repair
# Level a filled round: whole documents change places between slow ranks and fast ones, all pairs of ranks at once.


SWEEPS = 8
"""Times that the slow ranks are paired with the fast ones."""
LOOKED = 8
"""Documents of a rank, the shortest ones, that may change places in a sweep."""
SETTLED = 1000
"""Ranks that wait less than one part in this many are level."""


def level(prices: Prices, seating: Seating, times: np.ndarray, begin: np.ndarray) -> None:
    """Move or exchange whole documents, as long as that helps.

    The slowest rank is paired with the fastest and so on; in every other sweep with the least fast one and so on.

    Args:
        times: int64[ranks] ns that the ranks take; changed along with the seating.
        begin: int64[ranks] ns at which they are free.
    """
    times += begin
    room = np.array(seating.room)
    even = int(times.sum()) // len(times)
    idle = 0
    for sweep in range(SWEEPS):
        order = np.argsort(times, kind="stable")
        movable = np.array([bool(documents) for documents in seating.whole])
        slow = order[(times[order] - even > even // SETTLED) & movable[order]][::-1]
        fast = order[times[order] <= even]
        pairs = min(len(slow), len(fast))
        turned = fast[:pairs] if sweep % 2 == 0 else fast[:pairs][::-1]
        idle = 0 if pairs and _sweep(prices, seating, times, room, slow[:pairs].tolist(), turned.tolist()) else idle + 1
        if not pairs or idle == 2:
            break
    times -= begin
    seating.room[:] = room.tolist()


def _sweep(
    prices: Prices, seating: Seating, times: np.ndarray, room: np.ndarray, slow: list[int], fast: list[int]
) -> bool:
    """Make the best exchange of each pair: a document of the slow rank for one of the fast rank, or for none.

    Returns:
        whether any pair gained.
    """
    given, taken = _shortest(seating, slow), _shortest(seating, fast)
    taken = np.concatenate([np.full((len(fast), 1), -1), taken], axis=1)
    # P pairs, G documents to give, T to take: shifts of time and tokens are int64[P, G, T]
    shift = prices.whole[given][:, :, None] - np.where(taken < 0, 0, prices.whole[taken])[:, None, :]
    more = prices.tokens[given][:, :, None] - np.where(taken < 0, 0, prices.tokens[taken])[:, None, :]
    before, after = times[slow], times[fast]
    later = np.maximum(before[:, None, None] - shift, after[:, None, None] + shift)
    barred = (more > room[fast][:, None, None]) | (-more > room[slow][:, None, None]) | (given < 0)[:, :, None]
    barred |= np.concatenate([np.zeros((len(fast), 1), bool), taken[:, 1:] < 0], axis=1)[:, None, :]
    later = np.where(barred, before[:, None, None], later).reshape(len(slow), -1)
    best = later.argmin(axis=1)
    gained = later[np.arange(len(slow)), best] < before
    for pair in np.flatnonzero(gained).tolist():
        row, at = divmod(int(best[pair]), taken.shape[1])
        _swap(seating, slow[pair], fast[pair], int(given[pair, row]), int(taken[pair, at]))
        for rank, sign in ((slow[pair], -1), (fast[pair], 1)):
            times[rank] += sign * shift[pair, row, at]
            seating.load[rank] += sign * int(shift[pair, row, at])
            room[rank] -= sign * more[pair, row, at]
    return bool(gained.any())


def _shortest(seating: Seating, ranks: list[int]) -> np.ndarray:
    """int64[ranks, LOOKED]: the last whole documents of each rank, which are its shortest; -1 where it has fewer."""
    width = max(1, min(LOOKED, max(len(seating.whole[rank]) for rank in ranks)))
    rows = [seating.whole[rank][-width:] for rank in ranks]
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int64)


def _swap(seating: Seating, slow: int, fast: int, gift: int, back: int) -> None:
    """Give ``gift`` to the fast rank and take ``back`` (-1: nothing) for it."""
    seating.whole[slow].remove(gift)
    seating.whole[fast].append(gift)
    if back >= 0:
        seating.whole[fast].remove(back)
        seating.whole[slow].append(back)
