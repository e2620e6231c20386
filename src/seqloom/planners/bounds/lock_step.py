"""The bound where all ranks run all rounds together: the compromise between long rounds and slow links."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from seqloom.planners.bounds.options import Options, densest_work, longest_bound, needs_all_ranks, whole_rounds
from seqloom.planners.bounds.roundings import PRECISION, ROUNDINGS
from seqloom.planners.bounds.timeline import tuned_share
from seqloom.planners.fill import NEVER


def rounds_needed(options: Options) -> int:
    """Rounds that the whole cluster needs at least, by memory."""
    least = options.tokens.sum() / (options.ranks * options.capacity)
    fits = options.alone < float(NEVER)
    for rounding in ROUNDINGS:
        filled = np.where(fits, options.degree * np.minimum(rounding(options.share), 1.0), np.inf).min(axis=0)
        least = max(least, filled.sum() / options.ranks)
    return max(1, int(np.ceil(least * (1 - PRECISION))))


def lock_step_bound(lanes: Sequence[Options]) -> float:
    """The bound where every rank takes part in every round: the best number of rounds and the best longest round.

    Lanes are looked at together, since they share the number of rounds: few rounds crowd the memory, which costs
    recomputation or wider groups in one lane; many rounds gather parameters more often in another.
    """
    shares = [tuned_share(lane, float(NEVER)) for lane in lanes]
    freely = [_best_compromise(lane, share, None) for lane, share in zip(lanes, shares, strict=True)]
    bases = [float(lane.fixed.min()) for lane in lanes]
    best = np.inf
    rounds = max(rounds_needed(lane) for lane in lanes)
    while max(rounds * base + net for base, net in zip(bases, freely, strict=True)) < best:
        crowded = [_best_compromise(lane, share, rounds) for lane, share in zip(lanes, shares, strict=True)]
        best = min(best, max(rounds * base + net for base, net in zip(bases, crowded, strict=True)))
        rounds += 1
        if rounds * max(bases) == 0:
            break  # rounds cost nothing: more of them change nothing
    return best


def _best_compromise(options: Options, share: np.ndarray, rounds: int | None) -> float:
    """Least net time of all rounds over every length of the longest one.

    Branch and bound over the times at which a document gains a degree: between two of them nothing changes.
    """
    base, least = float(options.fixed.min()), longest_bound(options)
    times = np.unique(options.alone[(options.alone >= least) & (options.alone < float(NEVER))])
    ranges = [(0, len(times))]  # the longest round ends at one of times[first:last]
    queue: list[tuple[float, int, int]] = []
    while True:
        for first, last in ranges:
            open_to = options.alone <= times[last - 1]
            bound = _long_round(options, open_to, times[first] - base)
            if rounds is not None:
                bound = max(bound, _crowded_rounds(options, open_to, share, rounds))
            heapq.heappush(queue, (bound, first, last))
        bound, first, last = heapq.heappop(queue)
        if last - first == 1:
            return bound
        middle = (first + last) // 2
        ranges = [(first, middle), (middle, last)]


def _long_round(options: Options, open_to: np.ndarray, longest: float) -> float:
    """Net time of all rounds if the longest takes ``longest`` or more and documents may run as ``open_to`` says.

    That round does at most ``ranks x longest`` of the work, and at most the densest work that fits into one round's
    memory; the other rounds do the rest.
    """
    work = np.where(open_to, options.degree * options.cost, np.inf).min(axis=0)
    densest = densest_work(work, options.tokens, options.ranks * options.capacity)
    rest = work.sum() - min(options.ranks * longest, densest)
    return longest + max(0.0, float(rest)) / options.ranks


def _crowded_rounds(options: Options, open_to: np.ndarray, share: np.ndarray, rounds: int) -> float:
    """Net time of this many rounds, each of which has only ``ranks`` places for groups.

    A document at degree ``d`` fills its share of ``d`` places. Documents that need the whole cluster take whole rounds;
    others may join those, but then at that degree and its price. Lagrangian relaxation: at any price per place, work
    plus places filled, less the places there are, is a bound on the work.
    """
    taken = whole_rounds(options, needs_all_ranks(options, open_to))
    filled = options.degree * share
    if taken:
        filled[options.degree[:, 0] == options.ranks] = 0.0
    work = np.where(open_to, options.degree * options.cost, np.inf)
    mean = float(work.min(axis=0).sum()) / (options.ranks * rounds)
    prices = np.concatenate([float(options.fixed.min()) * 2.0 ** np.arange(4), mean * 2.0 ** np.arange(-4, 3)])
    bound = 0.0
    for price in prices:
        priced = float((work + price * filled).min(axis=0).sum())
        bound = max(bound, priced - price * options.ranks * (rounds - taken))
    return bound / options.ranks
