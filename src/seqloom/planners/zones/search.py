"""Fill a round towards several aims, and keep the one that is done first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from seqloom.planners.fill import NEVER
from seqloom.planners.zones.clock import finish, rank_times
from seqloom.planners.zones.fill import Aim, fill
from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.repair import level
from seqloom.planners.zones.seating import Seating

SETTLED = 200
"""A round whose ranks wait less than one part in this many is not worth another filling."""


def best_filling(
    prices: Prices, documents: Sequence[int], ready: np.ndarray, evaluations: int
) -> tuple[Seating, np.ndarray]:
    """The best of so many fillings of one round.

    Args:
        documents: by falling time.
        ready: int64[islands] ns at which each island is free.

    Returns:
        the seating, and int64[islands] ns at which the islands are done.
    """
    size = prices.cost.island_size
    begin = np.repeat(ready - ready.min(), size).tolist()
    best: tuple[tuple[int, int], Seating, np.ndarray] | None = None
    aims = _Aims(prices, documents, begin)
    for _ in range(evaluations):
        seating = fill(prices, documents, begin, aims.next())
        times = rank_times(prices, seating)
        level(prices, seating, times, np.array(begin))
        done = finish(prices, seating, times, ready)
        left = sum(int(prices.tokens[k]) for k in seating.left)
        score = (left, int(done.max()))
        if best is None or score < best[0]:
            best = (score, seating, done)
        if not aims.learn(seating, int(done.max() - ready.min()) - prices.fixed, left):
            break
    assert best is not None
    return best[1], best[2]


class _Aims:
    """Aims to try: first what the average asks for; then, knowing how long ranks waited, what could gain from that."""

    def __init__(self, prices: Prices, documents: Sequence[int], begin: Sequence[int]) -> None:
        """The lowest target is the level at which all ranks would end together."""
        self.level = (int(prices.whole[documents].sum()) + sum(begin)) // len(begin) + 1
        columns = [prices.column[k] for k in documents if k in prices.column]
        shortest = prices.charges(False)[:, columns].min(axis=0) if columns else np.zeros(1, np.int64)
        shortest = shortest[shortest < NEVER]
        self.least = int(shortest.max()) if len(shortest) else 0
        """No document can be cut to less than this."""
        self.break_even = 0
        self._plan = self._sequence()

    def next(self) -> Aim:
        """The next aim."""
        return next(self._plan)

    def learn(self, seating: Seating, done: int, left: int) -> bool:
        """Take the share of time that ranks waited as break-even; False where nothing is left to gain."""
        loads = sum(seating.load) // len(seating.load)
        self.break_even = max(1, min(1000, (done - loads) * 1000 // max(1, loads)))
        self.level = max(self.level, min(loads, done))
        return left > 0 or done - loads > loads // SETTLED

    def _aim(self, target: int, limit: int, hidden: bool = False) -> Aim:
        target = max(target, self.least)
        return Aim(target, max(min(limit, target), self.least), self.break_even, hidden)

    def _sequence(self) -> Iterator[Aim]:
        yield self._aim(self.level, self.level)
        yield self._aim(self.level, self.level)
        while True:
            for percent in (50, 100, 25, 75, 12):
                for slack in (2, 0, 5, 10):
                    target = self.level + self.level * slack // 100
                    yield self._aim(target, target * percent // 100)
                    yield self._aim(target, target * percent // 100, hidden=True)
