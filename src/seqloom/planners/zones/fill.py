"""Fill one round: longest first, cut only where the target asks for it, the rest whole on the least loaded rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from seqloom.planners.fill import NEVER
from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.seating import Ranks, Seating, best_ranks

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
