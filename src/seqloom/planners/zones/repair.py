"""Level a filled round: whole documents change places between the slowest rank and the fastest ones."""

from __future__ import annotations

import numpy as np

from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.seating import Seating

PARTNERS = 8
"""Fastest ranks that are looked at in every step."""
SETTLED = 1000
"""Ranks that wait less than one part in this many are level."""
STEPS = 3
"""Steps per rank at most."""


def level(prices: Prices, seating: Seating, times: np.ndarray, begin: np.ndarray) -> None:
    """Move or exchange whole documents, one pair of ranks at a time, as long as the slowest rank gets faster.

    Args:
        times: int64[ranks] ns that the ranks take; changed along with the seating.
        begin: int64[ranks] ns at which they are free.
    """
    times += begin
    even = int(times.sum()) // len(times)
    for _ in range(STEPS * len(times)):
        slow = int(times.argmax())
        if times[slow] - even <= even // SETTLED or not seating.whole[slow]:
            break
        partners = np.argsort(times, kind="stable")[:PARTNERS].tolist()
        if not _exchange(prices, seating, times, slow, partners):
            break
    times -= begin


def _exchange(prices: Prices, seating: Seating, times: np.ndarray, slow: int, partners: list[int]) -> bool:
    """Make the best exchange of a document of ``slow`` for one of a partner, or for none; False if none helps."""
    given = np.array(seating.whole[slow])
    taken = np.array([k for rank in partners for k in (-1, *seating.whole[rank])])
    owner = np.repeat(partners, [1 + len(seating.whole[rank]) for rank in partners])
    room = np.array(seating.room)
    time = np.where(taken < 0, 0, prices.whole[taken])
    size = np.where(taken < 0, 0, prices.tokens[taken])
    shift = prices.whole[given][:, None] - time[None, :]
    more = prices.tokens[given][:, None] - size[None, :]
    fits = (more <= room[owner][None, :]) & (-more <= room[slow])
    later = np.maximum(times[slow] - shift, times[owner][None, :] + shift)
    later = np.where(fits, later, times[slow])
    row, at = divmod(int(later.argmin()), len(taken))
    if later[row, at] >= times[slow]:
        return False
    fast, gift, back = int(owner[at]), int(given[row]), int(taken[at])
    seating.whole[slow].remove(gift)
    seating.whole[fast].append(gift)
    if back >= 0:
        seating.whole[fast].remove(back)
        seating.whole[slow].append(back)
    for rank, sign in ((slow, -1), (fast, 1)):
        times[rank] += sign * shift[row, at]
        seating.load[rank] += sign * int(shift[row, at])
        seating.room[rank] -= sign * int(more[row, at])
    return True
