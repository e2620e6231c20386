"""When the ranks of a seated round are done, as the cost model counts it for groups that share ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np

from seqloom.cost import CostModel, CostTables, MemoryPolicy
from seqloom.cost.plan_cost import finish_round, join_shard_groups
from seqloom.planners.loops import NEVER
from seqloom.planners.zones.fill import Aim, Seating, fill, level
from seqloom.planners.zones.prices import Prices


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
    """int64[shard groups] ns: when every shard group is done after this round.

    Shard groups that a group joins meet in it: they start together and end together.

    Args:
        times: int64[ranks] ns that each rank takes in the round.
        ready: int64[shard groups] ns at which each shard group is free.
    """
    size = prices.cost.shard_group_size
    slowest = times.reshape(-1, size).max(axis=1)
    joined = join_shard_groups({rank // size for rank in members} for members, _ in seating.cut)
    return finish_round(ready, slowest, joined)


# ---- merged: planners.zones.bounds
# From which length on a document may be cut inside a node, and across nodes: from prices, never from constants.
#
# A cut costs rank-time: exchanges, shorter kernels, more launches. It *pays* where that is no more than the break-
# even,
# the share of rank-time that would otherwise be lost; it is *forced* where one rank (or one node) has not enough
# memory,
# or would still be at work when the round ends. Routed shapes are in the tables: a faster network lowers the
# bounds.


SHORTEST, OCTAVES, STEPS = 128, 14, 16
"""Lengths at which prices are compared: so many steps per octave."""


@dataclass(frozen=True, slots=True)
class ZoneBounds:
    """Bounds in tokens; None where no document on this cluster may be, or has to be, cut that far."""

    break_even: float
    """What a cut may cost, as a share of the uncut document's rank-time."""
    intra_pays: int | None
    intra_forced: int | None
    inter_pays: int | None
    inter_forced: int | None

    def as_dict(self) -> dict[str, Any]:
        """The bounds for a report in JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


def zone_bounds(cost: CostModel, policy: MemoryPolicy, round_ns: int, break_even: float) -> ZoneBounds:
    """The bounds of one cost model and policy.

    Args:
        round_ns: when the round ends.
        break_even: share of the rank-time of an uncut document that a cut may cost.
    """
    steps = SHORTEST * 2 ** (np.arange(OCTAVES * STEPS) / STEPS)
    lengths = np.unique(cost.padded_lengths(np.rint(steps).astype(np.int64)))
    tables = cost.tables(lengths, policy)
    local = tables.degree == 1
    inside = (tables.degree > 1) & (tables.degree <= cost.node_size)
    across = tables.degree > cost.node_size
    narrow = local | inside
    return ZoneBounds(
        break_even=break_even,
        intra_pays=_pays(tables, inside, local, break_even),
        intra_forced=_forced(tables, local, round_ns) if inside.any() else None,
        inter_pays=_pays(tables, across, narrow, break_even),
        inter_forced=_forced(tables, narrow, round_ns) if across.any() else None,
    )


def _pays(tables: CostTables, wide: np.ndarray, narrow: np.ndarray, break_even: float) -> int | None:
    """The shortest length whose cheapest wide shape costs no more than the break-even above its cheapest narrow one."""
    if not wide.any():
        return None
    spent = tables.cost[:2].max(axis=0) * tables.degree[:, None]
    pays = spent[wide].min(axis=0) <= (1 + break_even) * spent[narrow].min(axis=0)
    return int(tables.tokens[pays.argmax()]) if pays.any() else None


def _forced(tables: CostTables, narrow: np.ndarray, round_ns: int) -> int | None:
    """The shortest length that no narrow shape holds, or ends in time."""
    fits = tables.tokens[None, :] <= tables.degree[:, None] * tables.capacity
    ends = (tables.cost[:2] + tables.fixed[:2, :, None]).max(axis=0) <= round_ns
    held = (fits & ends)[narrow].any(axis=0)
    return None if held.all() else int(tables.tokens[(~held).argmax()])


# ---- merged: planners.zones.search
# Fill a round towards several aims, then change the degree of one document at a time; keep what is done first.


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
    """int64[shard groups] ns at which each shard group is free again."""
    score: tuple[int, int, int]
    """Tokens without room; ns at which the last shard group is done; rank-ns of all ranks: less is better."""


class Search:
    """The fillings of one round."""

    def __init__(self, prices: Prices, documents: Sequence[int], ready: np.ndarray) -> None:
        """See ``best_filling``."""
        self.prices, self.documents, self.ready = prices, documents, ready
        self.begin = np.repeat(ready - ready.min(), prices.cost.shard_group_size)
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
        ready: int64[shard groups] ns at which each shard group is free.

    Returns:
        the seating, and int64[shard groups] ns at which the shard groups are done.
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
