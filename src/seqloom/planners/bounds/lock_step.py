"""The bound where all ranks run all rounds together: the compromise between long rounds and slow links."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from seqloom.planners.bounds.options import Block, Options, densest_work
from seqloom.planners.bounds.roundings import PRECISION, ROUNDINGS, Rounding
from seqloom.planners.bounds.timeline import IDENTITY, places, tuned_rounding
from seqloom.planners.fill import NEVER


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
