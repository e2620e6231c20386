"""The bound from throughput: all tokens and all work must get through the ranks in whole rounds."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.planners.bounds.options import (
    PRECISION,
    ROUNDINGS,
    Block,
    Options,
    Rounding,
    densest_work,
    first_feasible,
    steps,
)
from seqloom.planners.bounds.prices import Prices, price_all
from seqloom.planners.loops import NEVER
from seqloom.planners.problem import fitting_problems


def throughput_bound(options: Options, start: float) -> float:
    """The shortest step in which the ranks get through all tokens and all work in whole rounds."""
    if options.once <= 0 or options.density <= 0:
        return start
    tokens = float(options.tokens.sum())

    def impossible(step: float) -> bool:
        return overloaded(options, step, tokens, float(options.least_work(step).sum()))

    return first_feasible(impossible, max(start, options.longest))


def overloaded(options: Options, step: float, tokens: float, work: float) -> bool:
    """Whether so many tokens and so much work are too much for the ranks.

    A rank that runs ``r`` rounds computes at most ``r`` times its capacity of tokens and has ``step - r x once`` left
    to work. Half a round is no use, which a count of rounds in fractions does not see.
    """
    rounds = np.arange(1, min(step / options.once, len(options.tokens)) + 1)
    if not len(rounds):
        return True
    time = step - rounds * options.once
    held = np.minimum(rounds * options.capacity, time / options.density)
    if tokens > options.ranks * held.max() * (1 + PRECISION):
        return True
    prices = options.once / options.capacity * 2.0 ** np.arange(-3, 5)
    room = options.ranks * (prices[:, None] * held + time).max(axis=1)
    return bool((prices * tokens + work > room * (1 + PRECISION)).any())


# ---- merged: planners.bounds.timeline
# The bound from the ranks' timelines: side by side and one after another, in shares of memory and of the step.


IDENTITY = ROUNDINGS[0]
OF_GROUPS = (steps(1), steps(2))
"""Functions that are tried, beside the identity, on what a group costs before its first document."""


def timeline_bound(options: Options, start: float) -> float:
    """The shortest step in which the documents fit side by side and one after another on the ranks' timelines."""
    bound = max(start, options.longest)
    groups = group_costs(options, bound)
    for memory in dict.fromkeys((tuned_rounding(options, bound), IDENTITY)):
        paid = [
            block.cost + block.once * np.minimum(memory(block.share), 1.0) + extra
            for block, extra in zip(options.blocks, groups, strict=True)
        ]
        for time in ROUNDINGS:
            bound = first_feasible(lambda step: _overfull(options, paid, time, step), bound)  # noqa: B023
    return bound


def places(block: Block, rounding: Rounding) -> np.ndarray:
    """float64[O, m]: rounds of ranks that a document fills, all its ranks together."""
    return block.degree * np.minimum(rounding(block.share), 1.0)


def tuned_rounding(options: Options, step: float) -> Rounding:
    """The function that makes the most of a rank's memory.

    One for all degrees, because documents of any degree may share it.
    """

    def total(rounding: Rounding) -> float:
        def value(block: Block) -> np.ndarray:
            return np.where(block.open_until(step), block.work + block.once * places(block, rounding), np.inf)

        return float(options.least(value).sum())

    return max(ROUNDINGS, key=total)


def group_costs(options: Options, step: float) -> list[np.ndarray]:
    """float64[O, m] per block: what each document pays of what its group costs before the first.

    A group has one degree, so every degree may have its own function: a long document in a wide group often keeps
    others out, while short ones fill small groups to the last token.
    """
    paid = [block.extra * block.share for block in options.blocks]

    def total(block: Block, extra: np.ndarray) -> float:
        value = block.work + block.degree * (block.once * block.share + extra)
        return float(np.where(block.open_until(step), value, np.inf).min(axis=0).sum())

    for index, block in enumerate(options.blocks):
        best = total(block, paid[index])
        for degree in np.unique(block.degree[block.extra > 0])[::-1]:
            rows = block.degree[:, 0] == degree
            for rounding in OF_GROUPS:
                candidate = paid[index].copy()
                candidate[rows] = block.extra[rows] * np.minimum(rounding(block.share[rows]), 1.0)
                value = total(block, candidate)
                if value > best:
                    best, paid[index] = value, candidate
    return paid


def _overfull(options: Options, paid: Sequence[np.ndarray], time: Rounding, step: float) -> bool:
    """Whether the documents need more than all ranks for a step of this length.

    What other ranks may take over is no part that could be rounded; it leaves so much less of the ranks' time to those
    that are.
    """
    need, pool = 0.0, 0.0
    for block, whole in zip(options.blocks, paid, strict=True):
        stays = whole if time is IDENTITY else np.maximum(whole - block.pool, 0.0)
        parts = np.where(block.open_until(step), block.degree * time(stays / step), np.inf)
        need += float(parts.min(axis=0).sum())
        if time is not IDENTITY:
            pool += float((block.degree * block.pool).min(axis=0).sum())
    room = options.ranks * time.most(1 - pool / (options.ranks * step))
    return need > room * (1 + PRECISION)


# ---- merged: planners.bounds.lock_step
# The bound where all ranks run all rounds together: the compromise between long rounds and slow links.


def rounds_needed(options: Options) -> int:
    """Rounds that the whole cluster needs at least, by memory."""
    least = float(options.tokens.sum()) / (options.ranks * options.capacity)
    for rounding in ROUNDINGS:

        def filled(block: Block) -> np.ndarray:
            return np.where(block.alone < float(NEVER), places(block, rounding), np.inf)  # noqa: B023

        least = max(least, float(options.least(filled).sum()) / options.ranks)
    return max(1, int(np.ceil(least * (1 - PRECISION))))


def lock_step_bound(lanes: Sequence[Options]) -> float:
    """The bound where every rank takes part in every round: the best number of rounds and the best longest round.

    Lanes are looked at together, since they share the number of rounds: few rounds crowd the memory, which costs
    recomputation or wider groups in one lane; many rounds gather parameters more often in another.
    """
    roundings = [tuned_rounding(lane, float(NEVER)) for lane in lanes]
    freely = [_best_compromise(lane, IDENTITY, None) for lane in lanes]
    bases = [lane.once for lane in lanes]
    best = np.inf
    rounds = max(rounds_needed(lane) for lane in lanes)
    while max(rounds * base + net for base, net in zip(bases, freely, strict=True)) < best:
        crowded = [_best_compromise(lane, rounding, rounds) for lane, rounding in zip(lanes, roundings, strict=True)]
        best = min(best, max(rounds * base + net for base, net in zip(bases, crowded, strict=True)))
        rounds += 1
        if rounds * max(bases) == 0:
            break  # rounds cost nothing: more of them change nothing
    return best


def _best_compromise(options: Options, rounding: Rounding, rounds: int | None) -> float:
    """Least net time of all rounds over every length of the longest one.

    Branch and bound over the times at which a document gains a degree: between two of them nothing changes.
    """
    times = np.unique(np.concatenate([block.alone.ravel() for block in options.blocks]))
    times = times[(times >= options.longest) & (times < float(NEVER))]
    ranges = [(0, len(times))]  # the longest round ends at one of times[first:last]
    queue: list[tuple[float, int, int]] = []
    while True:
        for first, last in ranges:
            bound = _long_round(options, times[last - 1], times[first] - options.once)
            if rounds is not None:
                bound = max(bound, _crowded_rounds(options, times[last - 1], rounding, rounds))
            heapq.heappush(queue, (bound, first, last))
        bound, first, last = heapq.heappop(queue)
        if last - first == 1:
            return bound
        middle = (first + last) // 2
        ranges = [(first, middle), (middle, last)]


def _long_round(options: Options, until: float, longest: float) -> float:
    """Net time of all rounds if the longest takes ``longest`` or more and documents run in ways that take ``until``.

    That round does at most ``ranks x longest`` of the work, and at most the densest work that fits into one round's
    memory; the other rounds do the rest.
    """
    work = options.least_work(until)
    densest = densest_work(work, options.tokens, options.ranks * options.capacity)
    rest = work.sum() - min(options.ranks * longest, densest)
    return longest + max(0.0, float(rest)) / options.ranks


def _crowded_rounds(options: Options, until: float, rounding: Rounding, rounds: int) -> float:
    """Net time of this many rounds, each of which has only the memory of ``ranks`` ranks.

    Lagrangian relaxation: at any price per rank's memory, work plus memory filled, less the memory there is, is a
    bound on the work.
    """
    mean = float(options.least_work(until).sum()) / (options.ranks * rounds)
    prices = np.concatenate([options.once * 2.0 ** np.arange(4), mean * 2.0 ** np.arange(-4, 3)])
    work = [np.where(block.open_until(until), block.work, np.inf) for block in options.blocks]
    filled = [places(block, rounding) for block in options.blocks]
    bound = 0.0
    for price in prices:
        priced = sum(float((w + price * f).min(axis=0).sum()) for w, f in zip(work, filled, strict=True))
        bound = max(bound, priced - price * options.ranks * rounds)
    return bound / options.ranks


# ---- merged: planners.bounds.mixture
# The bound from checkpointing: rounds that keep more are faster and hold less, and every round makes one choice.
#
# Under full sharding a plan has so many rounds of each policy. Rounds of a fast policy save at most so much per
# token
# that they hold; enumerating the numbers of rounds of each policy gives a bound that a free choice for every
# document
# would miss.


MOST_ROUNDS = 12
"""Plans of more rounds are left to the other parts of the bound."""


def mixture_bound(prices: Sequence[Prices], ranks: int) -> float:
    """ns that no plan beats whose rounds, all over the whole cluster, each use one of these policies."""
    tokens = float(prices[0].tokens.sum())
    held = np.array([p.capacity * ranks for p in prices])  # tokens of one round
    fixed = np.stack([p.once for p in prices], axis=1)  # [L, V]
    work = np.stack([(p.cost * p.degree[:, None]).min(axis=1) for p in prices])  # [V, L, n]
    slowest = work.max(axis=0)
    saved = ((slowest - work) / prices[0].tokens).max(axis=2).T  # [L, V] ns per token in a round of that policy
    best = np.inf
    for rounds in range(1, MOST_ROUNDS + 1):
        if rounds * fixed.min(axis=1).max() >= best:
            return best
        for choice in itertools.combinations_with_replacement(range(len(prices)), rounds):
            count = np.bincount(choice, minlength=len(prices))
            if count @ held < tokens:
                continue  # these rounds do not hold the batch
            kept = _most_saved(saved, count * held, tokens)
            best = min(best, float((fixed @ count + (slowest.sum(axis=1) - kept) / ranks).max()))
    return min(best, float((MOST_ROUNDS + 1) * fixed.min(axis=1).max()))


def _most_saved(saved: np.ndarray, room: np.ndarray, tokens: float) -> np.ndarray:
    """float64[L]: the most that can be saved in each lane if each policy's rounds hold so many tokens at most."""
    most = np.zeros(len(saved))
    for lane, rates in enumerate(saved):
        left = tokens
        for policy in np.argsort(-rates, kind="stable"):
            taken = min(left, room[policy])
            most[lane] += rates[policy] * taken
            left -= taken
    return most


# ---- merged: planners.bounds.lower
# The bound of a batch: the best of its parts, over every choice that a plan may make.


def lower_bound(lengths: np.ndarray, cost: CostModel) -> int:
    """A time in ns that no plan of one stage for these documents beats, including what a step costs once.

    SeqloomError if no plan can hold them.
    """
    possible = {problem.policy.reduce for problem in fitting_problems(lengths, cost)}
    return min(variants_bound(lengths, cost, [v for v in cost.policies if v.reduce == reduce]) for reduce in possible)


def variants_bound(lengths: np.ndarray, cost: CostModel, policies: Sequence[MemoryPolicy]) -> int:
    """The bound for plans whose rounds use any of these policies (which differ in checkpointing only)."""
    prices = price_all(np.asarray(lengths, np.int64), cost, policies)
    lanes = [0] + [1] * any(p.rings for p in prices) + [2] * any(p.cost[2].any() or p.once[2] > 0 for p in prices)
    used = [Options.of(prices, cost.ranks, lane) for lane in lanes]
    best = used[0].longest
    for lane in used:
        best = max(best, throughput_bound(lane, best))
        best = max(best, timeline_bound(lane, best))
    if cost.shard_group_size == cost.ranks:
        best = max(best, lock_step_bound(used))
        if len(policies) > 1:
            best = max(best, mixture_bound(prices, cost.ranks))
    return int(best * (1 - PRECISION)) + min(cost.step_overhead_ns(v) for v in policies)
