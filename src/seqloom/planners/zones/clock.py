"""When the ranks of a seated round are done, as the cost model counts it for groups that share ranks."""

from __future__ import annotations

import numpy as np

from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.seating import Seating


def rank_times(prices: Prices, seating: Seating) -> np.ndarray:
    """int64[ranks] ns: fixed cost, computing, and the ring messages that attention does not hide.

    A rank's whole documents have no messages of their own: their attention hides what a ring leaves exposed.
    """
    ranks = len(seating.load)
    busy = np.zeros(ranks, np.int64)
    filler = np.zeros(ranks, np.int64)
    exposed = np.zeros(ranks, np.int64)
    network = np.zeros(ranks, np.int64)
    for rank, documents in enumerate(seating.whole):
        if documents:
            busy[rank] = prices.whole[documents].sum()
            filler[rank] = prices.attention[documents].sum()
    for (members, s), documents in seating.cut.items():
        columns = [prices.column[k] for k in documents]
        lane0 = int(prices.lane0[s, columns].sum()) + int(prices.extra[0, s])
        ring = int(prices.ring[s, columns].sum()) + int(prices.extra[1, s])
        at = list(members)
        busy[at] += lane0
        exposed[at] += max(0, ring - lane0)
        network[at] += int(prices.network[s, columns].sum())
    computing = prices.fixed + busy + np.maximum(0, exposed - filler)
    return np.where(busy > 0, np.maximum(computing, prices.floor + network), 0)


def finish(prices: Prices, seating: Seating, ready: np.ndarray) -> np.ndarray:
    """int64[islands] ns: when every island is done after this round, given when it was free before.

    Islands that a group joins meet in it: they start together and end together.
    """
    size = prices.cost.island_size
    slowest = rank_times(prices, seating).reshape(-1, size).max(axis=1)
    if len(ready) == 1:
        return ready + slowest
    root = np.arange(len(ready))
    for members, _ in seating.cut:
        joined = root[np.unique(np.array(members) // size)]
        root[np.isin(root, joined)] = joined.min()
    done = ready.copy()
    for first in np.unique(root[slowest > 0]):
        islands = root == first
        done[islands] = ready[islands].max() + slowest[islands].max()
    return done
