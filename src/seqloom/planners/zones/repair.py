"""Level a filled round: whole documents change places between the slowest rank and the fastest ones."""

from __future__ import annotations

import numpy as np

from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.seating import Seating

PARTNERS = 4
"""Fast ranks that each slow one is offered."""
SWEEPS = 4
"""Times that all slow ranks are gone through."""
SETTLED = 1000
"""Ranks that wait less than one part in this many are level."""


def level(prices: Prices, seating: Seating, times: np.ndarray, begin: np.ndarray) -> None:
    """Move or exchange whole documents, the slowest ranks with the fastest, as long as the slowest gets faster.

    Args:
        times: int64[ranks] ns that the ranks take; changed along with the seating.
        begin: int64[ranks] ns at which they are free.
    """
    times += begin
    room = np.array(seating.room)
    even = int(times.sum()) // len(times)
    for _ in range(SWEEPS):
        order = np.argsort(times, kind="stable").tolist()
        slow = [rank for rank in reversed(order) if times[rank] - even > even // SETTLED and seating.whole[rank]]
        gained = 0
        for at, rank in enumerate(slow):
            partners = order[at : at + PARTNERS]
            if rank in partners:
                break
            gained += _exchange(prices, seating, times, room, rank, partners)
        if not gained:
            break
    times -= begin
    seating.room[:] = room.tolist()


def _exchange(
    prices: Prices, seating: Seating, times: np.ndarray, room: np.ndarray, slow: int, partners: list[int]
) -> bool:
    """Make the best exchange of a document of ``slow`` for one of a partner, or for none; False if none helps."""
    given = np.array(seating.whole[slow])
    taken = np.array([k for rank in partners for k in (-1, *seating.whole[rank])])
    owner = np.repeat(np.array(partners), [1 + len(seating.whole[rank]) for rank in partners])
    time = np.where(taken < 0, 0, prices.whole[taken])
    size = np.where(taken < 0, 0, prices.tokens[taken])
    shift = prices.whole[given][:, None] - time
    more = prices.tokens[given][:, None] - size
    later = np.maximum(times[slow] - shift, times[owner] + shift)
    later[(more > room[owner]) | (-more > room[slow])] = times[slow]
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
        room[rank] -= sign * more[row, at]
    return True
