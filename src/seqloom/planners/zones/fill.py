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


def fill(prices: Prices, documents: Sequence[int], begin: list[int], aim: Aim) -> Seating:
    """Seat the documents of one round, which come by falling time.

    Args:
        begin: ns at which each rank is free.
    """
    seating = Seating.empty(begin, prices.capacity)
    charges = prices.charges(aim.hidden)
    tokens, whole = prices.listed
    load, room, column = seating.load, seating.room, prices.column
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
        free = heap[0] if heap else None
        late = free is None or time > aim.limit or free[0] + time > aim.target
        if late and k in column and _cut(prices, charges, seating, k, aim, free):
            continue
        if free is None:
            seating.left.append(k)
            continue
        rank = free[1]
        load[rank] += time
        room[rank] -= size
        seating.whole[rank].append(k)
        heapreplace(heap, (load[rank], rank))
    return seating


def _cut(
    prices: Prices, charges: np.ndarray, seating: Seating, k: int, aim: Aim, free: tuple[int, int] | None
) -> bool:
    """Cut document ``k`` if that is allowed and ends earlier than the whole document; the cheapest cut within the target."""
    time, size = int(prices.whole[k]), int(prices.tokens[k])
    column = charges[:, prices.column[k]]
    spent = column * prices.degrees
    demanded = free is None or time > aim.limit
    most = int(NEVER) if demanded else time + time * aim.break_even // 1000
    load, room = np.array(seating.load), np.array(seating.room)
    best: tuple[int, int, Ranks] | None = None
    ends = int(NEVER) if free is None else free[0] + time
    for s in np.argsort(spent, kind="stable").tolist():
        charge, shape = int(column[s]), prices.shapes[s]
        if shape.degree == 1 or charge > aim.limit:
            continue
        if spent[s] > most or column[s] >= NEVER:
            break
        found = best_ranks(shape, load, room, -(-size // shape.degree), prices.cost.node_size)
        if found is None:
            continue
        if found[0] + charge < ends:
            ends, best = found[0] + charge, (s, charge, found[1])
        if found[0] + charge <= aim.target:
            break
    if best is None:
        return False
    s, charge, ranks = best
    extra = int(prices.extra[0, s] if aim.hidden else prices.extra[:, s].max())
    seating.place(ranks, s, k, size, charge, min(extra, charge))
    return True
