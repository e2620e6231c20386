"""Fill a round towards several aims, then change the degree of one document at a time; keep what is done first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from seqloom.planners.fill import NEVER
from seqloom.planners.zones.clock import finish, rank_times
from seqloom.planners.zones.fill import Aim, fill
from seqloom.planners.zones.prices import Prices
from seqloom.planners.zones.repair import level
from seqloom.planners.zones.seating import Seating

SETTLED = 200
"""A round whose ranks wait less than one part in this many is not worth another filling."""
AIMS = 16
"""Fillings towards different aims at most; what is left of the budget goes to single degrees."""
LIMITS = (50, 100, 25, 75)
"""What a document may take of a rank, per cent of the target: cut finer, long ones leave room for short ones."""
MUCH = 30
"""Per mille of waiting that voluntary cuts may well remove, unless memory is tight: then finer cuts are tried first."""
TIGHT = 80
"""Per cent of the memory of a round from which on it is tight."""
EVERY = 100
"""Up to so many combinations of degrees, all are tried."""
SLOW_RANKS = 2
"""Slowest ranks whose documents are tried in other degrees."""
SLACKS = (2, 0, 5, 10)
"""What targets are above the level at which all ranks would end together, per cent."""


@dataclass(frozen=True, eq=False)
class Filling:
    """A seated round, how it was aimed at, and when it is done."""

    aim: Aim
    seating: Seating
    times: np.ndarray
    """int64[ranks] ns that each rank takes."""
    done: np.ndarray
    """int64[islands] ns at which each island is free again."""
    score: tuple[int, int, int]
    """Tokens without room; ns at which the last island is done; rank-ns of all ranks: less is better."""


class Search:
    """The fillings of one round."""

    def __init__(self, prices: Prices, documents: Sequence[int], ready: np.ndarray) -> None:
        """See ``best_filling``."""
        self.prices, self.documents, self.ready = prices, documents, ready
        self.begin = np.repeat(ready - ready.min(), prices.cost.island_size)
        self.level = (int(prices.whole[documents].sum()) + int(self.begin.sum())) // len(self.begin) + 1
        columns = [prices.column[k] for k in documents if k in prices.column]
        shortest = prices.charges(False)[:, columns].min(axis=0) if columns else np.zeros(1, np.int64)
        self.least = int(shortest[shortest < NEVER].max(initial=0))
        """No document can be cut to less than this."""
        self.break_even = 0
        """Per mille; at first nothing is cut for balance alone."""

    def filled(self, aim: Aim) -> Filling:
        """Fill towards an aim, level the ranks, and look at the clock."""
        prices, begin = self.prices, self.begin
        seating = fill(prices, self.documents, begin.tolist(), aim)
        times = rank_times(prices, seating)
        level(prices, seating, times, begin)
        done = finish(prices, seating, times, self.ready)
        left = sum(int(prices.tokens[k]) for k in seating.left)
        return Filling(aim, seating, times, done, (left, int(done.max()), int(times.sum())))

    def aim(self, slack: int, limit: int, hidden: bool = False, widths: Mapping[int, int] | None = None) -> Aim:
        """An aim in per cent: above the level of all ranks, and of that for a single document."""
        level = self.level + self.level * slack // 100
        target = max(level, self.least, self.prices.floor - self.prices.fixed)  # the round is never shorter
        return Aim(target, max(target * limit // 100, self.least), self.break_even, hidden, widths or {})

    def aims(self) -> Iterator[Aim]:
        """First what the average asks for; then, knowing how long ranks wait, what could gain from that."""
        yield self.aim(0, 100)
        tokens, room = int(self.prices.tokens[self.documents].sum()), self.prices.capacity * len(self.begin)
        if self.break_even > MUCH and tokens * 100 < room * TIGHT:
            yield self.aim(0, 100)
        for slack in SLACKS:
            for limit in LIMITS:
                yield self.aim(slack, limit)
                yield self.aim(slack, limit, hidden=True)

    def learn(self, filling: Filling) -> bool:
        """Take the share of time that ranks wait as break-even; False where nothing is left to gain."""
        ends = self.begin + np.maximum(filling.times - self.prices.fixed, 0)
        mean, last = int(ends.mean()), int(ends.max())
        self.break_even = max(1, min(1000, (last - mean) * 1000 // max(1, mean)))
        self.level = max(self.level, min(mean, last))
        waits = last - max(mean, self.prices.floor - self.prices.fixed)
        return filling.score[0] > 0 or waits > mean // SETTLED

    def changes(self, filling: Filling) -> Iterator[Mapping[int, int]]:
        """Other degrees for one document each: of the slowest ranks, longest documents first; then any narrower cut."""
        prices, seating = self.prices, filling.seating
        degree = {k: len(ranks) for (ranks, _), members in seating.cut.items() for k in members}
        widths = {k: degree.get(k, 1) for k in self.documents if k in prices.column}
        known = np.unique([shape.degree for shape in prices.shapes]).tolist()
        if len(known) ** len(widths) <= EVERY:
            yield from (dict(zip(widths, chosen, strict=True)) for chosen in product(known, repeat=len(widths)))
        for slow in np.argsort(-(self.begin + filling.times), kind="stable")[:SLOW_RANKS].tolist():
            here = [k for k in seating.whole[slow] if k in prices.column]
            here += [k for (ranks, _), members in seating.cut.items() if slow in ranks for k in members]
            for k in sorted(here, key=lambda k: (-int(prices.whole[k]), k)):
                at = known.index(widths[k])
                for other in (at + 1, at - 1, at + 2, at - 2):
                    if 0 <= other < len(known):
                        yield {**widths, k: known[other]}
        for k, width in widths.items():
            if width > 1:
                yield {**widths, k: known[known.index(width) - 1]}


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
    search = Search(prices, documents, ready)
    best: Filling | None = None
    spent, going = 0, True
    aims = search.aims()
    while going and spent < min(evaluations, AIMS):
        filling = search.filled(next(aims))
        spent += 1
        best = filling if best is None or filling.score < best.score else best
        going = search.learn(best if spent > 1 else filling)
    assert best is not None
    while going and spent < evaluations:
        going = False
        for widths in search.changes(best):
            filling = search.filled(best.aim._replace(widths=widths))
            spent += 1
            if filling.score < best.score:
                best, going = filling, True
                break
            if spent >= evaluations:
                break
    return best.seating, best.done
