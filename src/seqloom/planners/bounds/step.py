"""Bounds of a step: of plans with one stage, and of plans on given stages.

Three facts hold for every plan of one stage:

*Work.* A document at degree ``d`` keeps ``d`` ranks busy for its cost, at a degree that holds it and finishes in time.
All ranks together have ``ranks x step`` rank-nanoseconds. Other ranks may take over the linear part of it, but some
rank has to do it.

*Rounds.* A round costs a rank something before its first document and holds only so many tokens, so every document also
pays for the part of a rank's memory that it fills. Dual feasible functions round these parts up so that parts that sum
to at most one still do: two documents that each fill more than half of a rank cannot share it.

*Lock step.* Where all ranks run all rounds together (full sharding), the longest round is at least as long as its
longest document, and holds only one round's worth of tokens; what it cannot hold takes further rounds. A long round is
cheap for long documents and idle for the rest, and the bound is the best compromise.

The bound is the best of four arguments. Each says whether a step of a given length is impossible; `first_feasible`
bisects for the shortest that is not.

    throughput    all tokens and all work pass through the ranks in whole rounds
    timeline      documents fit side by side, and one after another, on the ranks' timelines
    lock step     all ranks run all rounds together: long rounds against slow links (full sharding)
    mixture       every round has its checkpointing: fast ones hold less (full sharding)

Single layers of a round may recompute less than the others. All four hold for that too: see `price_mixes`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache, partial
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.communication import GroupTraffic
from seqloom.cost.plan_cost import step_overhead
from seqloom.cost.resharding import reshard_times, unshard_times_by_stage
from seqloom.cost.shapes import STREAMS
from seqloom.plan import Pipeline, Plan, Reduce
from seqloom.planners.bounds.prices import (
    ROUNDED,
    DegreePrices,
    SpeedScale,
    price_documents,
    price_mixes,
    shape_rates,
    shared_ns,
)
from seqloom.planners.loops import NEVER
from seqloom.planners.problem import fitting_problems

PRECISION = 1e-7
"""Relative slack against floating-point rounding; it keeps the bound below the truth."""
BISECTION_TOLERANCE = 1e-4
"""Bisections for the shortest step stop at this part of it."""
NEGLIGIBLE = 0.15
"""Parts below this count as nothing in every dual feasible function but the identity."""
LAYER_PARTS, MIXTURE_LAYER_PARTS = 3, 2
"""Parts into which shares of layers that recompute less are cut; `mixture_bound` enumerates them."""
MAX_MIXED_ROUNDS = 12
"""Rounds up to which `mixture_bound` enumerates the policies of a plan's rounds."""


def lower_bound(lengths: np.ndarray, cost: CostModel) -> int:
    """A time in ns, with the step's overhead, that no plan of one stage and whole documents beats.

    Plans that offload activations count where nothing else holds the documents, see `CostModel.holding`. SeqloomError
    if no plan can hold them.
    """
    cost = cost.holding(lengths)
    possible = sorted({problem.policy.reduce for problem in fitting_problems(lengths, cost)})
    kinds = [_rising_bounds(lengths, cost, [v for v in cost.policies if v.reduce == reduce]) for reduce in possible]
    lowest = [(0, kind) for kind in range(len(kinds))]  # what is proven so far of plans that reduce in each way
    while True:
        proven, kind = heapq.heappop(lowest)
        more = next(kinds[kind], None)
        if more is None:
            return proven
        heapq.heappush(lowest, (more, kind))


def policies_bound(lengths: np.ndarray, cost: CostModel, policies: Sequence[MemoryPolicy]) -> int:
    """The bound for plans whose rounds use any of these policies, which differ in checkpointing only."""
    return max(_rising_bounds(lengths, cost, policies))


def _rising_bounds(lengths: np.ndarray, cost: CostModel, policies: Sequence[MemoryPolicy]) -> Iterator[int]:
    """Bounds for these policies by one argument after another, none lower than the one before; the last is the best."""
    padded, count = np.unique(cost.padded_lengths(np.asarray(lengths, np.int64)), return_counts=True)
    tokens, overhead = padded.astype(float), min(cost.step_overhead_ns(v) for v in policies)

    def with_overhead(best: float) -> int:
        return int(best * (1 - PRECISION)) + overhead

    yield with_overhead(0.0)
    pure = [price_documents(tokens, cost, policy) for policy in policies]
    prices = price_mixes(pure, cost, LAYER_PARTS)
    options: list[BatchOptions] = []
    best = 0.0
    for stream in _streams_of(prices):
        options.append(BatchOptions.of(prices, count, cost.ranks, cost.ranks, stream))
        best = max(best, throughput_bound(options[-1], max(best, options[0].longest_ns)))
        yield with_overhead(best)
        best = max(best, timeline_bound(options[-1], best))
        yield with_overhead(best)
    if cost.shard_group_size == cost.ranks:
        if len(policies) > 1:
            best = max(best, mixture_bound(price_mixes(pure, cost, MIXTURE_LAYER_PARTS), count, cost.ranks, cost.ranks))
        yield with_overhead(best := max(best, lock_step_bound(options)))
    if cost.speeds:
        yield with_overhead(max(best, _weighted_bound(tokens, count, cost, policies, best)))


def _streams_of(prices: Sequence[DegreePrices]) -> list[int]:
    streams = [0] + [1] * any(p.overlaps for p in prices)
    return streams + [2] * any(p.cost[2].any() or p.round_fixed[2] > 0 for p in prices)


def _weighted_bound(
    tokens: np.ndarray, count: np.ndarray, cost: CostModel, policies: Sequence[MemoryPolicy], start: float
) -> float:
    """The bound of ranks of unequal speed where every rank's time is weighted by its speed, ns.

    The arguments that add up times over ranks hold with weights too; those that round each rank's time do not.
    """
    pace = cost.speeds.total(cost.ranks) * cost.speeds.classes[0]
    pure = [price_documents(tokens, cost, policy, SpeedScale.weighted(cost.speeds)) for policy in policies]
    if cost.shard_group_size == cost.ranks:
        prices = price_mixes(pure, cost, LAYER_PARTS)
        streams = _streams_of(prices)
        best = lock_step_bound([BatchOptions.of(prices, count, cost.ranks, pace, stream) for stream in streams])
        if len(policies) > 1:
            best = max(best, mixture_bound(price_mixes(pure, cost, MIXTURE_LAYER_PARTS), count, cost.ranks, pace))
        return max(start, best)
    least = min(cost.speeds.values) * cost.speeds.classes[0]
    prices = [replace(each, round_fixed=each.round_fixed * least) for each in price_mixes(pure, cost, LAYER_PARTS)]
    for stream in _streams_of(prices):
        start = timeline_bound(BatchOptions.of(prices, count, cost.ranks, pace, stream), start, (IDENTITY,))
    return start


def first_feasible(impossible: Callable[[float], bool], low: float) -> float:
    """Bisect for the shortest step that is not impossible; returns its lower end, ``low`` or more."""
    if not impossible(low * (1 + BISECTION_TOLERANCE)):
        return low
    high = 2 * low
    while impossible(high):
        low, high = high, 2 * high
    while high - low > BISECTION_TOLERANCE * low:
        middle = (low + high) / 2
        if impossible(middle):
            low = middle
        else:
            high = middle
    return low


# The options of every document: its degrees, under every policy a plan may mix.


@dataclass(frozen=True, eq=False)
class DocumentOptions:
    """Documents with the same options: ``O`` options, ``m`` lengths, one stream. ns."""

    degree: np.ndarray  # float64[O, 1]
    round_fixed: np.ndarray  # float64[O, 1]: what a round costs a rank before any group
    group_fixed: np.ndarray  # float64[O, 1]: what the group costs each of its ranks before any document
    cost: np.ndarray  # float64[O, m]: what the document adds to each of its ranks
    movable: np.ndarray  # float64[O, m]: of that, what other ranks may take over
    solo_ns: np.ndarray  # float64[O, m]: least time of a round with this document; NEVER where memory does not hold it
    memory_share: np.ndarray  # float64[O, m]: part of a rank's memory that the document fills, on each of its ranks
    tokens: np.ndarray  # float64[m]
    count: np.ndarray  # int64[m]: documents of this length

    @cached_property
    def work(self) -> np.ndarray:
        """float64[O, m]: what a document costs all its ranks together, rank-ns."""
        return self.degree * self.cost

    def finishes_within(self, step: float) -> np.ndarray:
        """bool[O, m]: options that finish in a step of this length."""
        return self.solo_ns <= step * (1 + PRECISION)

    def work_within(self, step: float) -> np.ndarray:
        """float64[O, m]: work of the options that finish in a step of this length; infinite for the others."""
        return np.where(self.finishes_within(step), self.work, np.inf)

    @classmethod
    def of(
        cls, prices: Sequence[DegreePrices], rows: slice, lengths: np.ndarray, count: np.ndarray, stream: int
    ) -> DocumentOptions:
        """Some degrees of every priced policy, for some lengths (bool[n])."""

        def stacked(values: Iterable[np.ndarray]) -> np.ndarray:
            return np.concatenate([each[rows][:, lengths] for each in values])

        return cls(
            degree=np.concatenate([p.degree[rows] for p in prices])[:, None],
            round_fixed=np.concatenate([np.full(len(p.degree[rows]), p.round_fixed[stream]) for p in prices])[:, None],
            group_fixed=np.concatenate([p.group_fixed[stream][rows] for p in prices])[:, None],
            cost=stacked(p.cost[stream] for p in prices),
            movable=stacked(_movable(p, stream) for p in prices),
            solo_ns=stacked(p.solo_ns for p in prices),
            memory_share=stacked(p.tokens / (p.degree[:, None] * p.capacity) for p in prices),
            tokens=prices[0].tokens[lengths],
            count=count[lengths],
        )


def _movable(prices: DegreePrices, stream: int) -> np.ndarray:
    """float64[D, n]: of the cost in this stream, what other ranks may take over."""
    return prices.movable if stream < 2 else np.zeros_like(prices.movable)


@dataclass(frozen=True, eq=False)
class BatchOptions:
    """The options of all documents of a batch, in one stream. ns."""

    blocks: tuple[DocumentOptions, ...]
    round_fixed: float  # Least that a round costs a rank
    token_ns: float  # Least that a token costs the rank that computes its linear part
    capacity: float  # Tokens a rank holds in one round, in the policy that holds most
    ranks: int
    pace: float  # Ranks as fast as the prices that work as much in any time; `ranks` where all are alike
    longest_ns: float  # Time of the most demanding document at its fastest: no step is shorter

    @classmethod
    def of(
        cls, prices: Sequence[DegreePrices], count: np.ndarray, ranks: int, pace: float, stream: int
    ) -> BatchOptions:
        """One stream of the priced policies, for so many documents of each length.

        Documents that are best on one rank in any case get no other option.
        """
        tokens = prices[0].tokens
        longest = float(np.min([p.solo_ns.min(axis=0) for p in prices], axis=0).max())
        work = [p.degree[:, None] * p.cost[stream] for p in prices]
        held = [np.where(p.solo_ns < float(NEVER), own, np.inf) for own, p in zip(work, prices, strict=True)]
        least = np.min([each.min(axis=0) for each in held], axis=0)
        token_ns = (least / tokens).min()
        if any(_movable(p, stream).any() for p in prices):
            token_ns = min(token_ns, *(p.linear for p in prices))
        single = np.logical_and.reduce(
            [
                _best_on_one_rank(p, own, stream, longest, max(longest, float(least @ count / pace)))
                for p, own in zip(prices, work, strict=True)
            ]
        )
        every = DocumentOptions.of(prices, slice(None), ~single, count, stream)
        blocks = DocumentOptions.of(prices, slice(1), single, count, stream), every
        return cls(
            blocks=tuple(block for block in blocks if len(block.tokens)),
            round_fixed=min(float(p.round_fixed[stream]) for p in prices),
            token_ns=float(token_ns),
            capacity=max(p.capacity for p in prices),
            ranks=ranks,
            pace=pace,
            longest_ns=longest,
        )

    @cached_property
    def tokens(self) -> np.ndarray:
        """float64[n]: those of all documents of a length, block after block."""
        return np.concatenate([block.tokens * block.count for block in self.blocks])

    @property
    def documents(self) -> int:
        """Documents of the batch."""
        return sum(int(block.count.sum()) for block in self.blocks)

    def least(self, value: Callable[[DocumentOptions], np.ndarray]) -> np.ndarray:
        """float64[n]: least value of each document over its options, summed over those of a length."""
        return np.concatenate([value(block).min(axis=0) * block.count for block in self.blocks])

    def least_work(self, step: float) -> np.ndarray:
        """float64[n]: `least` work in the cheapest option that finishes in a step of this length."""
        return self.least(lambda block: block.work_within(step))


def _best_on_one_rank(prices: DegreePrices, work: np.ndarray, stream: int, longest: float, step: float) -> np.ndarray:
    """bool[n]: lengths for which one rank (or tensor-parallel group) is best in every argument under this policy.

    It finishes in any step, does the least of float64[D, n] work, and every rounding ignores it in a step of this
    length.
    """
    memory_share = prices.tokens / (prices.degree[0] * prices.capacity)
    part = prices.cost[stream][0] + prices.round_fixed[stream] * memory_share
    small = (part < NEGLIGIBLE * step) & (memory_share < NEGLIGIBLE) & (prices.solo_ns[0] <= longest)
    return small & (work[0] <= work.min(axis=0))


# Dual feasible functions. All are superadditive: parts that sum to at most z sum to at most rounding(z) after rounding.


@dataclass(frozen=True)
class Rounding:
    """A dual feasible function of parts in [0, 1]."""

    function: Callable[[np.ndarray], np.ndarray]
    one_above: float  # Parts above this count as one; the function is nowhere above ``part / one_above``

    def __call__(self, share: np.ndarray) -> np.ndarray:
        """Parts after rounding."""
        return self.function(share)

    def mean_limit(self, mean: float) -> float:
        """The largest mean of ``rounding(z)`` over any ``z`` whose mean is at most ``mean``."""
        return min(1.0, max(0.0, mean) / self.one_above)


def steps(count: int) -> Rounding:
    """The dual feasible function ``floor((count + 1) x) / count``, exact at multiples of ``1 / (count + 1)``."""

    def rounding(share: np.ndarray) -> np.ndarray:
        scaled = share * (count + 1)
        exact = np.abs(scaled - np.rint(scaled)) < 1e-12  # a part just below must not count as if it reached
        return np.where(exact, share, np.floor(scaled) / count)

    return Rounding(rounding, count / (count + 1))


def without_small(least: float) -> Rounding:
    """The dual feasible function that ignores parts below ``least`` and rounds parts above ``1 - least`` up to one."""

    def rounding(share: np.ndarray) -> np.ndarray:
        large = np.where(share < least + PRECISION, 0.0, share)
        return np.where(share > 1 - least + PRECISION, 1.0, large)

    return Rounding(rounding, 1 - least)


IDENTITY = Rounding(lambda share: share, 1.0)
ROUNDINGS = (IDENTITY, steps(1), steps(2), steps(3), *map(without_small, (0.15, 0.25, 0.35, 0.45)))
GROUP_ROUNDINGS = (steps(1), steps(2))
"""Functions that `_group_costs` tries, beside the identity, on what a group costs before its first document."""


def rank_rounds(block: DocumentOptions, rounding: Rounding) -> np.ndarray:
    """float64[O, m]: rounds of ranks that a document fills, all its ranks together."""
    return block.degree * np.minimum(rounding(block.memory_share), 1.0)


def best_rounding(options: BatchOptions, step: float) -> Rounding:
    """The function that makes the most of a rank's memory, one for all degrees: any of them may share a rank."""

    def total(rounding: Rounding) -> float:
        def value(block: DocumentOptions) -> np.ndarray:
            paid = block.work + block.round_fixed * rank_rounds(block, rounding)
            return np.where(block.finishes_within(step), paid, np.inf)

        return float(options.least(value).sum())

    return max(ROUNDINGS, key=total)


def throughput_bound(options: BatchOptions, start: float) -> float:
    """The shortest step in which the ranks get through all tokens and all work in whole rounds.

    A rank that runs ``r`` rounds computes at most ``r`` times its capacity of tokens and has ``step - r x round_fixed``
    left to work. Half a round is of no use, which a fractional count of rounds does not see.
    """
    if options.round_fixed <= 0 or options.token_ns <= 0:
        return start
    tokens = float(options.tokens.sum())

    def impossible(step: float) -> bool:
        work = float(options.least_work(step).sum())
        rounds = np.arange(1, min(step / options.round_fixed, options.documents) + 1)
        if not len(rounds):
            return True
        time = step - rounds * options.round_fixed
        held = np.minimum(rounds * options.capacity, time / options.token_ns)
        if tokens > options.ranks * held.max() * (1 + PRECISION):
            return True
        prices = options.round_fixed / options.capacity * 2.0 ** np.arange(-3, 5)
        most = options.ranks * (prices[:, None] * held + time).max(axis=1)
        return bool((prices * tokens + work > most * (1 + PRECISION)).any())

    return first_feasible(impossible, max(start, options.longest_ns))


def timeline_bound(options: BatchOptions, start: float, roundings: Sequence[Rounding] = ROUNDINGS) -> float:
    """The shortest step in which the documents fit side by side and one after another on the ranks' timelines."""
    bound = max(start, options.longest_ns)
    groups = _group_costs(options, bound)
    for memory in dict.fromkeys((best_rounding(options, bound), IDENTITY)):
        paid = [
            block.cost + block.round_fixed * np.minimum(memory(block.memory_share), 1.0) + group
            for block, group in zip(options.blocks, groups, strict=True)
        ]
        for time in roundings:
            bound = first_feasible(lambda step: _overfull(options, paid, time, step), bound)  # noqa: B023
    return bound


def _group_costs(options: BatchOptions, step: float) -> list[np.ndarray]:
    """float64[O, m] per block: each document's share of what its group costs before the first.

    A group has one degree, so every degree may have its own function: a long document in a wide group often keeps
    others out, while short ones fill small groups to the last token.
    """
    return [_block_group_costs(block, step) for block in options.blocks]


def _block_group_costs(block: DocumentOptions, step: float) -> np.ndarray:
    """float64[O, m] of one block; the functions are chosen degree by degree, the widest first."""
    paid, within = block.group_fixed * block.memory_share, block.finishes_within(step)
    without = block.work + block.degree * block.round_fixed * block.memory_share
    rows_of = [np.flatnonzero(block.degree[:, 0] == degree) for degree in np.unique(block.degree)]

    def least_of(rows: np.ndarray, group: np.ndarray) -> np.ndarray:
        return np.where(within[rows], without[rows] + block.degree[rows] * group, np.inf).min(axis=0)

    least = np.stack([least_of(rows, paid[rows]) for rows in rows_of])  # float64[D, m]
    for index, rows in reversed(list(enumerate(rows_of))):
        if not (block.group_fixed[rows] > 0).any():
            continue
        others = np.delete(least, index, axis=0).min(axis=0, initial=np.inf)
        best = np.minimum(others, least[index]) @ block.count
        for rounding in GROUP_ROUNDINGS:
            candidate = block.group_fixed[rows] * np.minimum(rounding(block.memory_share[rows]), 1.0)
            own = least_of(rows, candidate)
            value = np.minimum(others, own) @ block.count
            if value > best:
                best, paid[rows], least[index] = value, candidate, own
    return paid


def _overfull(options: BatchOptions, paid: Sequence[np.ndarray], time: Rounding, step: float) -> bool:
    """Whether the documents need more than all ranks for a step of this length.

    What other ranks may take over cannot be rounded; it leaves so much less of the ranks' time to the rest.
    """
    need, movable = 0.0, 0.0
    for block, total in zip(options.blocks, paid, strict=True):
        stays = total if time is IDENTITY else np.maximum(total - block.movable, 0.0)
        parts = np.where(block.finishes_within(step), block.degree * time(stays / step), np.inf)
        need += float(parts.min(axis=0) @ block.count)
        if time is not IDENTITY:
            movable += float((block.degree * block.movable).min(axis=0) @ block.count)
    most = options.pace * time.mean_limit(1 - movable / (options.pace * step))
    return need > most * (1 + PRECISION)


# Lock step: the compromise between long rounds and slow links.


def rounds_needed(options: BatchOptions) -> int:
    """Rounds that the whole cluster needs at least, by memory."""
    least = float(options.tokens.sum()) / (options.ranks * options.capacity)
    for rounding in ROUNDINGS:

        def filled(block: DocumentOptions) -> np.ndarray:
            return np.where(block.solo_ns < float(NEVER), rank_rounds(block, rounding), np.inf)  # noqa: B023

        least = max(least, float(options.least(filled).sum()) / options.ranks)
    return max(1, int(np.ceil(least * (1 - PRECISION))))


def lock_step_bound(streams: Sequence[BatchOptions]) -> float:
    """The bound where every rank takes part in every round: the best number of rounds and the best longest round.

    All streams share the number of rounds: few rounds crowd the memory, which costs recomputation or wider groups in
    one stream; many rounds gather parameters more often in another.
    """
    roundings = [best_rounding(stream, float(NEVER)) for stream in streams]
    fixed = [stream.round_fixed for stream in streams]
    best = np.inf
    rounds = max(rounds_needed(stream) for stream in streams)

    @cache
    def uncrowded() -> list[float]:
        return [_best_longest_round(stream, IDENTITY, None) for stream in streams]

    def lasts(nets: Sequence[float]) -> float:
        return max(rounds * each + net for each, net in zip(fixed, nets, strict=True))

    work = [float(stream.least_work(float(NEVER)).sum()) / stream.pace for stream in streams]
    while best == np.inf or (lasts(work) < best and lasts(uncrowded()) < best):
        crowded = [_best_longest_round(stream, r, rounds) for stream, r in zip(streams, roundings, strict=True)]
        best = min(best, max(rounds * each + net for each, net in zip(fixed, crowded, strict=True)))
        rounds += 1
        if rounds * max(fixed) == 0:
            break  # rounds cost nothing: more of them change nothing
    return best


def _best_longest_round(options: BatchOptions, rounding: Rounding, rounds: int | None) -> float:
    """Least net time of all rounds over every length of the longest one.

    Branch and bound over the times at which a document gains a degree: between two of them nothing changes.
    """
    times = np.unique(np.concatenate([block.solo_ns.ravel() for block in options.blocks]))
    times = times[(times >= options.longest_ns) & (times < float(NEVER))]
    filled = [rank_rounds(block, rounding) for block in options.blocks]

    @cache
    def until(last: int) -> tuple[float, float, float]:
        """Of documents that take times[last - 1] or less: least work, the densest of a round, and crowded rounds."""
        within = [block.work_within(times[last - 1]) for block in options.blocks]
        least = [each.min(axis=0) * block.count for each, block in zip(within, options.blocks, strict=True)]
        work = np.concatenate(least)
        crowded = 0.0 if rounds is None else _crowded_rounds(options, within, float(work.sum()), filled, rounds)
        return float(work.sum()), _densest_round(options, work), crowded

    ranges = [(0, len(times))]  # the longest round ends at one of times[first:last]
    queue: list[tuple[float, int, int]] = []
    while True:
        for first, last in ranges:
            work, densest, crowded = until(last)
            longest = times[first] - options.round_fixed
            rest = work - min(options.pace * longest, densest)
            bound = max(float(longest + max(0.0, rest) / options.pace), crowded)
            heapq.heappush(queue, (bound, first, last))
        bound, first, last = heapq.heappop(queue)
        if last - first == 1:
            return bound
        middle = (first + last) // 2
        ranges = [(first, middle), (middle, last)]


def _densest_round(options: BatchOptions, work: np.ndarray) -> float:
    """The densest of this work, float64[n], that fits into one round's memory.

    The longest round does at most that, and at most ``ranks x longest``; the other rounds do the rest.
    """
    order = np.argsort(-work / options.tokens, kind="stable")  # fractional knapsack: the last document in part
    tokens = options.tokens[order]
    part = np.clip(1 - (np.cumsum(tokens) - options.ranks * options.capacity) / tokens, 0.0, 1.0)
    return float((part * work[order]).sum())


def _crowded_rounds(
    options: BatchOptions, within: Sequence[np.ndarray], least: float, filled: Sequence[np.ndarray], rounds: int
) -> float:
    """Net time of this many rounds, each of which has only the memory of ``ranks`` ranks.

    Lagrangian relaxation: at any price of a rank's memory, work plus memory filled, less the memory there is, bounds
    the work from below. ``within`` is the `DocumentOptions.work_within` of every block, with ``least`` its least sum;
    ``filled`` are their `rank_rounds`.
    """
    mean = least / (options.ranks * rounds)
    prices = np.concatenate([options.round_fixed * 2.0 ** np.arange(4), mean * 2.0 ** np.arange(-4, 3)])
    priced = np.empty(len(prices))
    scratch = [np.empty_like(each) for each in filled]  # to allocate it for every price takes longer than to fill it
    for row, price in enumerate(prices):
        priced[row] = -price * options.ranks * rounds
        for block, work, part, own in zip(options.blocks, within, filled, scratch, strict=True):
            np.multiply(part, price, out=own)
            np.add(own, work, out=own)
            priced[row] += float(own.min(axis=0) @ block.count)
    return max(0.0, float(priced.max())) / options.pace


# Mixture: under full sharding a plan has so many rounds of each policy, and a round of a fast policy saves at most so
# much per token that it holds. A free choice for every document would miss that.


def mixture_bound(prices: Sequence[DegreePrices], documents: np.ndarray, ranks: int, pace: float) -> float:
    """ns that no plan beats whose rounds, all over the whole cluster, each use one of these policies.

    The memory is that of ``ranks``, the work is done by as much as ``pace`` ranks.

    Args:
        documents: int64[n], of each length.
    """
    tokens = float(prices[0].tokens @ documents)
    capacity = np.array([p.capacity * ranks for p in prices])  # tokens of one round
    fixed = np.stack([p.round_fixed for p in prices], axis=1)  # [L, V]
    work = np.stack([(p.cost * p.degree[:, None]).min(axis=1) for p in prices])  # [V, L, n]
    slowest = work.max(axis=0)
    saved = ((slowest - work) / prices[0].tokens).max(axis=2).T  # [L, V] ns per token in a round of that policy
    best = np.inf
    for rounds in range(1, MAX_MIXED_ROUNDS + 1):
        if rounds * fixed.min(axis=1).max() >= best:
            return best
        for choice in itertools.combinations_with_replacement(range(len(prices)), rounds):
            count = np.bincount(choice, minlength=len(prices))
            if count @ capacity < tokens:
                continue  # these rounds do not hold the batch
            most = _most_saved(saved, count * capacity, tokens)
            best = min(best, float((fixed @ count + (slowest @ documents - most) / pace).max()))
    return min(best, float((MAX_MIXED_ROUNDS + 1) * fixed.min(axis=1).max()))


def _most_saved(saved: np.ndarray, capacity: np.ndarray, tokens: float) -> np.ndarray:
    """float64[L]: the most that each stream can save if each policy's rounds hold so many tokens at most."""
    most = np.zeros(len(saved))
    for stream, rates in enumerate(saved):
        left = tokens
        for policy in np.argsort(-rates, kind="stable"):
            taken = min(left, capacity[policy])
            most[stream] += rates[policy] * taken
            left -= taken
    return most


# Several stages or pipelines: what no plan on the same stages beats.
#
# *Work.* A pipeline rank runs its layers for every document it gets, whatever the pieces, packs and order. On each rank
# of its group a document takes at least its computing and its exposed exchanges there. All ranks together have
# ``ranks x step``, so the step is at least the sum over documents of their least ``degree x time``, each in the shape
# (and, of several pipelines, in the pipeline) that is cheapest for it.
#
# *A document's chain.* All pieces of a document run one after another in one group of a pipeline rank. So the step is
# at least the document's time on the slowest pipeline rank, in the shape and pipeline that are fastest for it.
#
# *A head on all stages.* A stage may have any part of it, so it counts for all ranks together, not for a stage.
#
# Both price documents without recomputation, which is fastest, so they hold for every checkpoint. They leave out what a
# micro-batch costs before its first document, which is more than the nanosecond by which stages round each part of a
# group down. The overhead at the step's end follows the last micro-batch and is added.
#
# The bound for plans of one stage does not hold here: those gather parameters in every round, which stages do once per
# step. Nor does this one hold there: layers may not change ranks here.


def plan_bound(plan: Plan, cost: CostModel) -> int | None:
    """ns that no plan for the same documents on the same stages beats; None where nothing is proven.

    Plans of one stage: `lower_bound`, over all plans of one stage with its tensor degree, those that offload among them
    where this one does, or where the cost model lets price decide; nothing is proven for documents in pieces there.
    Several pipelines, stages that split weights, and parameters that are gathered for every
    pass, which leaves more memory: `pipelines_bound`.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if cost.speeds and (len(stages) > 1 or unshard_times_by_stage(cost, plan.pipelines[0])):
        return None
    if len(stages) == 1 and not unshard_times_by_stage(cost, plan.pipelines[0]):
        if plan.has_pieces:
            return None
        own = cost.for_stage(stages[0])
        offloads = any(work.offload for entry in plan.pipelines[0].rounds for work in entry.by_stage)
        return lower_bound(np.array(plan.documents), own.with_offload() if offloads or cost.offload is True else own)
    if len(plan.pipelines) == 1 and len(stages) > 1 and all(stage.tensor == 1 for stage in stages):
        return stages_bound(plan, plan.pipelines[0], cost.for_stage(stages[0]))
    return pipelines_bound(plan, cost)


class ShapePrices(NamedTuple):
    """Documents through the whole model without recomputation: ``S`` shapes, ``n`` documents. ns."""

    degree: np.ndarray  # int64[S]
    layers: np.ndarray  # float64[S, n]
    head: np.ndarray  # float64[S, n]
    shared: np.ndarray  # float64[S, n]: of the layers, what other ranks of an EP group may take over

    @property
    def head_work(self) -> np.ndarray:
        """float64[n] rank-ns: least work of the head."""
        return (self.degree[:, None] * self.head).min(axis=0)

    def least(self, share: float, head: bool, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """(float64[n] rank-ns, float64[n] ns): least work and time on so many ranks of this share of the layers."""
        fits = self.degree <= ranks
        time = share * self.layers[fits] + (self.head[fits] if head else 0.0)
        return (self.degree[fits, None] * time).min(axis=0), (time - share * self.shared[fits]).min(axis=0)


def stages_bound(plan: Plan, pipeline: Pipeline, cost: CostModel) -> int:
    """ns that no plan for the documents of `plan` on the stages of `pipeline` beats, for groups on aligned blocks."""
    prices = lru_cache(partial(_aligned_prices, np.array(plan.documents, dtype=np.int64)))
    layers = pipeline.layer_ranges
    best, end = 0.0, 0
    if pipeline.chain.heads:  # stages have any parts of the head, so it counts for all of them together
        widest = max(map(len, pipeline.ranks_by_pp_rank))
        count: Counter[CostModel] = Counter()
        for part in layers[: pipeline.chain.last + 1]:
            count[cost.for_layers(part)] += part.stop - part.first
        work = prices(cost).head_work
        for each, own in count.items():
            work = prices(each).least(own / each.model.layers, False, widest)[0] + work
        best = float(work.sum()) / len(pipeline.ranks)
    for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
        own = [layers[stage] for stage in pipeline.stages_of(pp_rank)]
        priced = cost.for_layers(*own)
        share = sum(part.stop - part.first for part in own) / priced.model.layers
        with_head = any(part.has_head and part.first < part.stop for part in own)
        work, chain = prices(priced).least(share, with_head, len(ranks))
        best = max(best, float(work.sum() / len(ranks)), float(chain.max()))
        shard_groups = plan.shard_groups_of(pipeline, pp_rank)
        end = max(end, cost.stage_overhead_ns(own, len(ranks), min(map(len, shard_groups)))[0])
    return int(best * (1 - PRECISION)) + end


def pipelines_bound(plan: Plan, cost: CostModel) -> int | None:
    """ns that no plan for the documents of `plan` on the stages of its pipelines beats, for groups on any ranks.

    Free sharding adds the part of its resharding that nothing can hide: it depends on the stages alone. None where
    nothing is proven: where tokens have another layout in linear layers.
    """
    rounds = [current for pipeline in plan.pipelines for current in pipeline.rounds]
    if any(work.linear is not None for current in rounds for work in current.by_stage):
        return None
    bounds = [_pipeline_bounds(pipeline, plan.documents, cost) for pipeline in plan.pipelines]
    work, chain = (np.stack(each).min(axis=0) for each in zip(*bounds, strict=True))
    ranks = sum(len(pipeline.ranks) for pipeline in plan.pipelines)
    best = max(float(work.sum()) / ranks, float(chain.max()))
    reshard = reshard_times(cost, plan.pipelines)
    return int(best * (1 - PRECISION)) + step_overhead(plan, cost)[0] + int(reshard.first + reshard.last)


def _pipeline_bounds(pipeline: Pipeline, documents: tuple[int, ...], cost: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """(float64[n] rank-ns of every document on all pipeline ranks, float64[n] ns on the slowest of them)."""
    total, slowest = np.zeros((2, len(documents)))
    for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
        work, chain = np.zeros((2, len(documents)))
        for stage in pipeline.stages_of(pp_rank):
            part = pipeline.layer_ranges[stage]
            if part.first == part.stop:  # a head stage, with any part of the head
                continue
            own = cost.for_stage(pipeline.stages[stage]).for_layers(part)
            prices, share = _shape_prices(own, documents), (part.stop - part.first) / own.model.layers
            for sums, least in zip((work, chain), prices.least(share, part.has_head, len(ranks)), strict=True):
                sums += least
        total += work
        slowest = np.maximum(slowest, chain)
    if pipeline.chain.heads:
        total += _shape_prices(cost.for_stage(pipeline.stages[-1]), documents).head_work
    return total, slowest


def _fastest_policy(cost: CostModel) -> MemoryPolicy:
    return MemoryPolicy(cost.engine.policies[0].checkpoint, Reduce.STEP, resident=True)


def _aligned_prices(lengths: np.ndarray, cost: CostModel) -> ShapePrices:
    """Price documents in the shapes that planners use, on aligned blocks."""
    shapes = cost.engine.shapes
    placed = [(shape, cost.aligned_traffic(shape)) for shape in shapes]
    parts = cost.document_ns(cost.padded_lengths(lengths), placed, _fastest_policy(cost))
    zero = np.zeros((len(shapes), len(lengths)))
    layers = sum((values for name, values in parts.items() if name in STREAMS[0] and name != "head"), zero)
    degree = np.array([shape.degree for shape in shapes], dtype=np.int64)
    shared = shared_ns(cost, _fastest_policy(cost)) * cost.padded_lengths(lengths) / degree[:, None]
    return ShapePrices(degree, layers.astype(np.float64), parts.get("head", zero).astype(np.float64), shared)


@lru_cache(maxsize=16)
def _shape_prices(cost: CostModel, lengths: tuple[int, ...]) -> ShapePrices:
    """Price documents in any shape, each at the least over all its placements."""
    engine, policy = cost.engine, _fastest_policy(cost)
    tokens = cost.padded_lengths(np.array(lengths)).astype(np.float64)
    rates = shape_rates(cost, policy)
    attention = engine.attention_ns(tokens, [rate.shape for rate in rates], policy)
    degree, layers, head = [], [], []
    for (shape, token_ns, _, document_ns), computing in zip(rates, attention, strict=True):
        head_ns = engine.token_ns(shape, policy, GroupTraffic()).get("head", 0.0)
        degree.append(shape.degree)
        head.append(np.maximum(head_ns * tokens - 1.0, 0.0))
        own = (token_ns[0] - head_ns) * tokens + document_ns[0] + computing
        layers.append(np.maximum(own - ROUNDED, 0.0))
    degrees = np.array(degree)
    shared = shared_ns(cost, policy) * tokens / degrees[:, None]
    return ShapePrices(degrees, np.stack(layers), np.stack(head), shared)
