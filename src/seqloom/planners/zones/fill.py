"""Fill one round: longest first, cut only where the target asks for it, the rest whole on the least loaded rank."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from seqloom.planners.fill import NEVER
from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.seating import Ranks, Seating, best_ranks


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
    first = 0
    for k in documents:
        if k not in prices.column or (whole[k] <= aim.limit and tokens[k] <= prices.capacity):
            break  # short ones are never cut, whatever the limit
        first += 1
    _cut_all(prices, documents[:first], seating, aim)
    _seat_rest(prices, documents[first:], seating, aim)
    return seating


def _cut_all(prices: Prices, documents: Sequence[int], seating: Seating, aim: Aim) -> None:
    """Cut documents that no rank may have alone."""
    load, room = np.array(seating.load), np.array(seating.room)
    for k in documents:
        cut = _cheapest_cut(prices, k, load, room, aim, int(NEVER), int(NEVER))
        if cut is None:
            seating.left.append(k)
            continue
        seating.place(cut.ranks, cut.shape, k, int(prices.tokens[k]), cut.charge, _own(prices, cut.shape, aim))
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
        if ends > aim.target and k in column:
            most = time + time * aim.break_even // 1000 if heap else int(NEVER)
            if cheapest[column[k]] <= most:
                cut = _cheapest_cut(prices, k, np.array(load), np.array(room), aim, most, ends)
                if cut is not None:
                    seating.place(cut.ranks, cut.shape, k, size, cut.charge, _own(prices, cut.shape, aim))
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
    """ns of a group's charge that are counted once, however many documents it has."""
    return int(prices.extra[0, shape] if aim.hidden else prices.extra[:, shape].max())


def _cheapest_cut(
    prices: Prices, k: int, load: np.ndarray, room: np.ndarray, aim: Aim, most: int, ends: int
) -> Cut | None:
    """The cheapest cut of document ``k`` that ends within the target; else the one that ends first, before ``ends``.

    Args:
        load: int64[ranks] ns.
        room: int64[ranks] tokens.
        most: rank-ns that it may cost.
    """
    at, size = prices.column[k], int(prices.tokens[k])
    charges, spent = prices.charges(aim.hidden)[:, at].tolist(), prices.spent(aim.hidden)[:, at].tolist()
    best: Cut | None = None
    for s in prices.by_price(aim.hidden)[:, at].tolist():
        charge, shape = charges[s], prices.shapes[s]
        if spent[s] > most or charge >= NEVER:
            break
        if shape.degree == 1 or charge > aim.limit:
            continue
        found = best_ranks(shape, load, room, -(-size // shape.degree), prices.cost.node_size)
        if found is None:
            continue
        if found[0] + charge < ends:
            ends, best = found[0] + charge, Cut(s, charge, found[1])
        if ends <= aim.target:
            break
    return best
