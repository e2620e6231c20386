"""Deal a batch into rounds: equal work, equal tokens, long documents apart."""

from __future__ import annotations

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
    work = [0] * rounds
    dealt: list[list[int]] = [[] for _ in range(rounds)]
    for k in order:
        size = tokens[k]
        fitting = [r for r in range(rounds) if room[r] >= size]
        chosen = min(fitting, key=work.__getitem__) if fitting else max(range(rounds), key=room.__getitem__)
        work[chosen] += whole[k]
        room[chosen] -= size
        dealt[chosen].append(k)
    return dealt
