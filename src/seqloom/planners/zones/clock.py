"""When the ranks of a seated round are done, as the cost model counts it for groups that share ranks."""

from __future__ import annotations

from itertools import chain

import numpy as np

from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.seating import Seating


def rank_times(prices: Prices, seating: Seating) -> np.ndarray:
    """int64[ranks] ns: fixed cost, computing, and the ring messages that attention does not hide.

    A rank's whole documents have no messages of their own: their attention hides what a ring leaves exposed.
    """
    ranks = len(seating.load)
    documents = np.fromiter(chain.from_iterable(seating.whole), np.int64)
    first = np.cumsum([0, *map(len, seating.whole)])
    busy = np.diff(np.append(0, np.cumsum(prices.whole[documents]))[first])
    filler = np.diff(np.append(0, np.cumsum(prices.attention[documents]))[first])
    exposed = np.zeros(ranks, np.int64)
    network = np.zeros(ranks, np.int64)
    for (members, s), cut in seating.cut.items():
        columns = [prices.column[k] for k in cut]
        lane0 = int(prices.lane0[s, columns].sum()) + int(prices.extra[0, s])
        ring = int(prices.ring[s, columns].sum()) + int(prices.extra[1, s])
        at = list(members)
        busy[at] += lane0
        exposed[at] += max(0, ring - lane0)
        network[at] += int(prices.network[s, columns].sum())
    computing = prices.fixed + busy + np.maximum(0, exposed - filler)
    return np.where(busy > 0, np.maximum(computing, prices.floor + network), 0)


def finish(prices: Prices, seating: Seating, times: np.ndarray, ready: np.ndarray) -> np.ndarray:
    """int64[islands] ns: when every island is done after this round.

    Islands that a group joins meet in it: they start together and end together.

    Args:
        times: int64[ranks] ns that each rank takes in the round.
        ready: int64[islands] ns at which each island is free.
    """
    size = prices.cost.island_size
    slowest = times.reshape(-1, size).max(axis=1)
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
