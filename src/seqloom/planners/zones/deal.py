"""Deal a batch into rounds: equal work, equal tokens, long documents apart."""

from __future__ import annotations

from heapq import heapify, heappush, heapreplace

from seqloom.planners.zones.prices import Prices


def deal(prices: Prices, rounds: int) -> list[list[int]]:
    """Give every document to the round with the least work that has room; the documents of a round by falling time.

    A document that no round has room for goes to the one with most room; what its ranks cannot hold is left over there.
    """
    order = prices.order.tolist()
    if rounds == 1:
        return [order]
    tokens, whole = prices.listed
    room = [prices.capacity * prices.cost.ranks] * rounds
    work = [(0, r) for r in range(rounds)]
    dealt: list[list[int]] = [[] for _ in range(rounds)]
    for k in order:
        size, chosen = tokens[k], work[0]
        if room[chosen[1]] < size:
            chosen = min((one for one in work if room[one[1]] >= size), default=max(work, key=lambda one: room[one[1]]))
            work.remove(chosen)
            heapify(work)
            heappush(work, (chosen[0] + whole[k], chosen[1]))
        else:
            heapreplace(work, (chosen[0] + whole[k], chosen[1]))
        room[chosen[1]] -= size
        dealt[chosen[1]].append(k)
    return dealt
