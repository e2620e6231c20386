"""Deal a batch into rounds, in two ways: long documents apart, or long documents together."""

from __future__ import annotations

from heapq import heapify, heappush, heapreplace

import numpy as np

from seqloom.planners.zones.prices import Prices

FILLER = 40
"""Per cent of the tokens, in the shortest documents, that level the ranks of every round alike."""


def deal_apart(prices: Prices, rounds: int) -> list[list[int]]:
    """Give every document to the round with the least work that has room; the documents of a round by falling time.

    All rounds take about as long. A document that no round has room for goes to the one with most room; what its ranks
    cannot hold is left over there.
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


def deal_together(prices: Prices, rounds: int) -> list[list[int]]:
    """Cut the long documents, by falling time, into runs of equal tokens, a run per round; deal the short ones in turn.

    The first round takes longest: there is more time for the longest documents, which are cut less finely.
    """
    order = prices.order
    if rounds == 1:
        return [order.tolist()]
    tokens = prices.tokens[order]
    upto = np.cumsum(tokens)
    long = upto * 100 <= int(upto[-1]) * (100 - FILLER)
    runs = np.minimum((upto - tokens) * rounds // max(1, int(tokens[long].sum())), rounds - 1)
    chosen = np.where(long, runs, (np.cumsum(~long) - 1) % rounds)
    return [order[chosen == r].tolist() for r in range(rounds)]
