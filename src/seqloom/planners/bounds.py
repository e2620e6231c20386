"""A proven lower bound on the time of a step: one number for all planners.

Whatever the plan, three things hold, and the bound is the best of what follows from them.

*Work.* A document at degree ``d`` keeps ``d`` ranks busy for its cost, and only degrees that hold it and finish in time
are open to it. All ranks together have ``ranks x step`` rank-nanoseconds.

*Rounds.* A round costs something before its first document and holds only so many tokens, so every document also pays
for the part of a round's memory that it fills. Dual feasible functions round these parts up without ever counting a
round twice: two documents that each fill more than half of a group cannot share it.

*Lock step.* Where all ranks run all rounds together (full sharding), the longest round is at least as long as its
longest document, and holds only one round's worth of tokens; what it cannot hold takes further rounds. A long round is
cheap for long documents and idle for the rest, and the bound is the best compromise.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.planners.fill import NEVER

Rounding = Callable[[np.ndarray], np.ndarray]

PRECISION = 1e-7
"""Relative slack against rounding in floating point; the bound stays below the truth."""


def identity(share: np.ndarray) -> np.ndarray:
    """Count every part as it is."""
    return share


def steps(count: int) -> Rounding:
    """The dual feasible function ``floor((count + 1) x) / count``, which is exact at multiples of ``1 / (count + 1)``."""

    def rounding(share: np.ndarray) -> np.ndarray:
        scaled = share * (count + 1)
        whole = np.abs(scaled - np.rint(scaled)) < PRECISION
        return np.where(whole, share, np.floor(scaled) / count)

    return rounding


def without_small(least: float) -> Rounding:
    """The dual feasible function that ignores parts below ``least`` and rounds parts above ``1 - least`` up to one."""

    def rounding(share: np.ndarray) -> np.ndarray:
        kept = np.where(share < least + PRECISION, 0.0, share)
        return np.where(share > 1 - least + PRECISION, 1.0, kept)

    return rounding


ROUNDINGS: tuple[Rounding, ...] = (
    identity,
    steps(1),
    steps(2),
    steps(3),
    without_small(0.15),
    without_small(0.25),
    without_small(0.35),
    without_small(0.45),
)


@dataclass(frozen=True, eq=False)
class Options:
    """Every way to run a document, of all variants that one plan may mix: ``O`` ways, ``n`` documents, one lane. ns."""

    degree: np.ndarray
    """float64[O, 1]"""
    cost: np.ndarray
    """float64[O, n]: what the document adds to its group."""
    fixed: np.ndarray
    """float64[O, 1]: what the group costs before it."""
    alone: np.ndarray
    """float64[O, n]: time of a group with this document only, over all lanes; NEVER where memory does not hold it."""
    share: np.ndarray
    """float64[O, n]: part of the group's memory that the document fills."""
    tokens: np.ndarray
    """float64[n]"""
    capacity: float
    """Tokens a rank holds in one round, in the variant that holds most."""
    ranks: int
    island: int

    @classmethod
    def of(cls, lengths: np.ndarray, cost: CostModel, variants: Sequence[Variant], lane: int) -> Options:
        """Price the documents in every shape under each of the variants."""
        tables = [cost.tables(lengths, variant) for variant in variants]
        degrees = np.unique(tables[0].degree)
        degree = np.tile(degrees, len(tables)).astype(float)[:, None]
        room = degree * np.repeat([float(t.capacity) for t in tables], len(degrees))[:, None]
        tokens = tables[0].tokens.astype(float)

        def cheapest(values: list[np.ndarray]) -> np.ndarray:
            """The best shape of every degree, variant by variant: one row for what was one per shape."""
            return np.concatenate(
                [[v[t.degree == d].min(axis=0) for d in degrees] for v, t in zip(values, tables, strict=True)]
            ).astype(float)

        alone = cheapest([(t.cost + t.fixed[:, :, None]).max(axis=0) for t in tables])
        return cls(
            degree=degree,
            cost=cheapest([t.cost[lane] for t in tables]),
            fixed=cheapest([t.fixed[lane][:, None] for t in tables]),
            alone=np.where(tokens <= room, alone, float(NEVER)),
            share=tokens / room,
            tokens=tokens,
            capacity=float(max(t.capacity for t in tables)),
            ranks=cost.ranks,
            island=cost.island_size,
        )


def lower_bound(lengths: np.ndarray, cost: CostModel) -> int:
    """A time in ns that no plan for these documents beats, including what a step costs once."""
    return min(
        variants_bound(lengths, cost, [v for v in cost.variants if v.reduce == reduce])
        for reduce in {v.reduce for v in cost.variants}
    )


def variants_bound(lengths: np.ndarray, cost: CostModel, variants: Sequence[Variant]) -> int:
    """The bound for plans whose rounds use any of these variants (which differ in checkpointing only)."""
    best = 0.0
    for lane in range(3):
        options = Options.of(np.asarray(lengths, np.int64), cost, variants, lane)
        if not options.cost.any() and not options.fixed.any():
            continue
        best = max(best, longest_bound(options))
        best = max(best, throughput_bound(options, best))
        best = max(best, timeline_bound(options, best))
        if options.island == options.ranks:
            best = max(best, lock_step_bound(options))
    return int(best * (1 - PRECISION)) + min(cost.step_overhead_ns(v) for v in variants)


def longest_bound(options: Options) -> float:
    """No step is shorter than its most demanding document, run as fast as it can be."""
    return float(options.alone.min(axis=0).max())


def timeline_bound(options: Options, start: float) -> float:
    """The shortest step in which the documents fit side by side and one after another on the ranks' timelines."""
    bound = max(start, longest_bound(options))
    tuned = tuned_share(options, bound)
    for share in (tuned, options.share):
        paid = options.cost + options.fixed * share
        for time in ROUNDINGS:
            bound = first_feasible(lambda step: _overfull(options, paid, time, step), bound)  # noqa: B023
    return bound


def tuned_share(options: Options, step: float) -> np.ndarray:
    """float64[O, n]: parts of a group's memory, rounded by the function that suits each degree best.

    Groups of one degree are filled by documents at that degree only, so every degree may have its own function:
    a long document in a wide group often keeps others out, while short ones fill small groups to the last token.
    """
    share = options.share.copy()
    reachable = options.alone <= max(step, longest_bound(options)) * (1 + PRECISION)

    def total(candidate: np.ndarray) -> float:
        work = options.degree * (options.cost + options.fixed * candidate)
        return float(np.where(reachable, work, np.inf).min(axis=0).sum())

    best = total(share)
    for degree in np.unique(options.degree)[::-1]:
        rows = options.degree[:, 0] == degree
        for rounding in ROUNDINGS[1:]:
            candidate = share.copy()
            candidate[rows] = np.minimum(rounding(options.share[rows]), 1.0)
            value = total(candidate)
            if value > best:
                best, share = value, candidate
    return share


def _overfull(options: Options, paid: np.ndarray, time: Rounding, step: float) -> bool:
    """Whether the documents need more than all ranks for a step of this length."""
    need = options.degree * time(paid / step)
    need = np.where(options.alone <= step * (1 + PRECISION), need, np.inf).min(axis=0)
    return bool(need.sum() > options.ranks * (1 + PRECISION))


def first_feasible(impossible: Callable[[float], bool], low: float) -> float:
    """Bisect for the shortest step that is not impossible; returns its lower end, ``low`` or more."""
    if not impossible(low * (1 + 1e-3)):
        return low
    high = 2 * low
    while impossible(high):
        low, high = high, 2 * high
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        if impossible(middle):
            low = middle
        else:
            high = middle
    return low


def throughput_bound(options: Options, start: float) -> float:
    """The shortest step in which the ranks get through all tokens and all work in whole rounds.

    A rank that runs ``r`` rounds holds at most ``r`` times its capacity and has ``step - r x fixed`` left to work. Half
    a round is no use, which a count of rounds in fractions does not see.
    """
    fixed, tokens = float(options.fixed.min()), float(options.tokens.sum())
    fits = options.alone < float(NEVER)
    density = float(np.where(fits, options.degree * options.cost / options.tokens, np.inf).min())
    if fixed <= 0 or density <= 0:
        return start

    def impossible(step: float) -> bool:
        work = (
            np.where(options.alone <= step * (1 + PRECISION), options.degree * options.cost, np.inf).min(axis=0).sum()
        )
        rounds = np.arange(1, min(step / fixed, len(options.tokens)) + 1)
        time = np.maximum(step - rounds * fixed, 0.0)
        held = np.minimum(rounds * options.capacity, time / density)
        if tokens > options.ranks * held.max() * (1 + PRECISION):
            return True
        for price in fixed / options.capacity * 2.0 ** np.arange(-3, 5):
            if price * tokens + work > options.ranks * (price * held + time).max() * (1 + PRECISION):
                return True
        return False

    return first_feasible(impossible, max(start, longest_bound(options)))


def rounds_needed(options: Options) -> int:
    """Rounds that the whole cluster needs at least, by memory."""
    least = options.tokens.sum() / (options.ranks * options.capacity)
    fits = options.alone < float(NEVER)
    for rounding in ROUNDINGS:
        filled = np.where(fits, options.degree * np.minimum(rounding(options.share), 1.0), np.inf).min(axis=0)
        least = max(least, filled.sum() / options.ranks)
    return max(1, int(np.ceil(least * (1 - PRECISION))))


def lock_step_bound(options: Options) -> float:
    """The bound where every rank takes part in every round.

    Let the longest round take ``T`` beyond its fixed cost. Documents then run only at degrees that finish in ``T``;
    that round does at most ``ranks x T`` of the work, and at most the densest work that fits into one round's memory;
    the other rounds do the rest. The best ``T`` is found by branch and bound over the intervals between the times at
    which a document gains a degree.
    """
    base = float(options.fixed.min())
    least = longest_bound(options)
    times = np.unique(options.alone[(options.alone >= least) & (options.alone < float(NEVER))])
    ranges = [(0, len(times))]  # the longest round ends at one of times[first:last]
    queue: list[tuple[float, int, int]] = []
    while True:
        for first, last in ranges:
            heapq.heappush(queue, (_compromise(options, times[first] - base, times[last - 1]), first, last))
        bound, first, last = heapq.heappop(queue)
        if last - first == 1:
            return rounds_needed(options) * base + bound
        middle = (first + last) // 2
        ranges = [(first, middle), (middle, last)]


def _compromise(options: Options, longest: float, allowed: float) -> float:
    """Net time of all rounds if the longest takes ``longest`` or more and documents may use what ends by ``allowed``."""
    work = np.where(options.alone <= allowed, options.degree * options.cost, np.inf).min(axis=0)
    density = work / options.tokens
    order = np.argsort(-density, kind="stable")
    room = options.ranks * options.capacity
    filled = np.cumsum(options.tokens[order])
    part = np.clip(1 - (filled - room) / options.tokens[order], 0.0, 1.0)
    densest = float((part * work[order]).sum())
    rest = work.sum() - min(options.ranks * longest, densest)
    return longest + max(0.0, float(rest)) / options.ranks
