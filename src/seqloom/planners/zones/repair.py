"""Level a filled round: whole documents change places between slow ranks and fast ones, all pairs of ranks at once."""

from __future__ import annotations

import numpy as np

from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.seating import Seating

SWEEPS = 8
"""Times that the slow ranks are paired with the fast ones."""
LOOKED = 8
"""Documents of a rank, the shortest ones, that may change places in a sweep."""
SETTLED = 1000
"""Ranks that wait less than one part in this many are level."""


def level(prices: Prices, seating: Seating, times: np.ndarray, begin: np.ndarray) -> None:
    """Move or exchange whole documents, as long as that helps.

    The slowest rank is paired with the fastest and so on; in every other sweep with the least fast one and so on.

    Args:
        times: int64[ranks] ns that the ranks take; changed along with the seating.
        begin: int64[ranks] ns at which they are free.
    """
    times += begin
    room = np.array(seating.room)
    even = int(times.sum()) // len(times)
    idle = 0
    for sweep in range(SWEEPS):
        order = np.argsort(times, kind="stable")
        movable = np.array([bool(documents) for documents in seating.whole])
        slow = order[(times[order] - even > even // SETTLED) & movable[order]][::-1]
        fast = order[times[order] <= even]
        pairs = min(len(slow), len(fast))
        turned = fast[:pairs] if sweep % 2 == 0 else fast[:pairs][::-1]
        idle = 0 if pairs and _sweep(prices, seating, times, room, slow[:pairs].tolist(), turned.tolist()) else idle + 1
        if not pairs or idle == 2:
            break
    times -= begin
    seating.room[:] = room.tolist()


def _sweep(
    prices: Prices, seating: Seating, times: np.ndarray, room: np.ndarray, slow: list[int], fast: list[int]
) -> bool:
    """Make the best exchange of each pair: a document of the slow rank for one of the fast rank, or for none.

    Returns:
        whether any pair gained.
    """
    given, taken = _shortest(seating, slow), _shortest(seating, fast)
    taken = np.concatenate([np.full((len(fast), 1), -1), taken], axis=1)
    # P pairs, G documents to give, T to take: shifts of time and tokens are int64[P, G, T]
    shift = prices.whole[given][:, :, None] - np.where(taken < 0, 0, prices.whole[taken])[:, None, :]
    more = prices.tokens[given][:, :, None] - np.where(taken < 0, 0, prices.tokens[taken])[:, None, :]
    before, after = times[slow], times[fast]
    later = np.maximum(before[:, None, None] - shift, after[:, None, None] + shift)
    barred = (more > room[fast][:, None, None]) | (-more > room[slow][:, None, None]) | (given < 0)[:, :, None]
    barred |= np.concatenate([np.zeros((len(fast), 1), bool), taken[:, 1:] < 0], axis=1)[:, None, :]
    later = np.where(barred, before[:, None, None], later).reshape(len(slow), -1)
    best = later.argmin(axis=1)
    gained = later[np.arange(len(slow)), best] < before
    for pair in np.flatnonzero(gained).tolist():
        row, at = divmod(int(best[pair]), taken.shape[1])
        _swap(seating, slow[pair], fast[pair], int(given[pair, row]), int(taken[pair, at]))
        for rank, sign in ((slow[pair], -1), (fast[pair], 1)):
            times[rank] += sign * shift[pair, row, at]
            seating.load[rank] += sign * int(shift[pair, row, at])
            room[rank] -= sign * more[pair, row, at]
    return bool(gained.any())


def _shortest(seating: Seating, ranks: list[int]) -> np.ndarray:
    """int64[ranks, LOOKED]: the last whole documents of each rank, which are its shortest; -1 where it has fewer."""
    width = max(1, min(LOOKED, max(len(seating.whole[rank]) for rank in ranks)))
    rows = [seating.whole[rank][-width:] for rank in ranks]
    return np.array([row + [-1] * (width - len(row)) for row in rows], np.int64)


def _swap(seating: Seating, slow: int, fast: int, gift: int, back: int) -> None:
    """Give ``gift`` to the fast rank and take ``back`` (-1: nothing) for it."""
    seating.whole[slow].remove(gift)
    seating.whole[fast].append(gift)
    if back >= 0:
        seating.whole[fast].remove(back)
        seating.whole[slow].append(back)
