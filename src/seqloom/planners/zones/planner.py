"""Planner ``zones``: deal the batch into rounds, fill each in overlapping groups, keep the best variant."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.planners.problem import Problem
from seqloom.planners.remapping import with_remapping
from seqloom.planners.zones.build import build_plan
from seqloom.planners.zones.deal import deal_apart, deal_together
from seqloom.planners.zones.prices import Alone, Prices
from seqloom.planners.zones.search import best_filling
from seqloom.planners.zones.seating import Seating

EVALUATIONS = 1_200
"""Documents seated, over all fillings of the batch, where no budget is given."""
LEAST, MOST = 2, 128
"""Fillings of each round then, at least and at most."""
ONCE_FROM = 4_096
"""Documents from which on every round is filled once: a second filling gains less than one part in 300 there."""
QUICK_FROM = 512
"""Documents from which on, where no budget is given, one number of rounds is tried."""
SPARE = 16
"""One part in this many of a round's memory is room to place documents."""
WORTH = 200
"""What can gain less than one part in this many is not tried."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A partition of the batch under one variant, and the step it leads to."""

    ns: int
    prices: Prices
    rounds: list[Seating]


def plan_zones(
    lengths: np.ndarray, cost: CostModel, *, evaluations: int | None = None, only: Variant | None = None
) -> Plan:
    """Plan a batch with groups that may share ranks.

    Args:
        lengths: int64[n] tokens.
        evaluations: fillings of each round; None chooses by size.
        only: the one variant to plan for; None tries all that can still win.
    """
    if cost.tensor > 1:
        raise SeqloomError(
            f"planner zones keeps short sequences on single ranks, tensor degree {cost.tensor} on none; "
            "use planner flex, static or pipeline"
        )
    array = Batch.of(lengths).lengths
    variants = [variant for variant in cost.variants if only in (None, variant)]
    holding = [Alone.of(array, cost, variant) for variant in variants if holds(array, cost, variant)]
    if not holding:
        widest = max(variants, key=cost.capacity)
        raise Problem(array, cost, widest, cost.tables(array, widest)).too_long()
    best: Answer | None = None
    quick = evaluations is None and len(array) >= QUICK_FROM
    least = 1 if len(array) >= ONCE_FROM else LEAST
    fillings = max(least, min(MOST, EVALUATIONS // len(array))) if evaluations is None else max(1, evaluations)
    for alone in sorted(holding, key=lambda alone: alone.least_ns(alone.rounds)):
        if best is not None and not _worth(alone.least_ns(alone.rounds), best.ns):
            break
        prices = Prices.of(alone)
        for rounds in rounds_to_try(alone, quick):
            for deal in (deal_together,) if quick or rounds == 1 else (deal_together, deal_apart):
                if best is None or _worth(alone.least_ns(rounds), best.ns):
                    answer = partition(prices, deal(prices, rounds), fillings)
                    best = answer if best is None or answer.ns < best.ns else best
    assert best is not None
    plan = build_plan(best.prices, best.rounds, array)
    return plan if quick else with_remapping(plan, cost)


def holds(lengths: np.ndarray, cost: CostModel, variant: Variant) -> bool:
    """Whether the largest group holds the longest document."""
    most = max(shape.degree for shape in cost.shapes) * cost.capacity(variant)
    return int(cost.tokens(lengths.max(keepdims=True))[0]) <= most


def rounds_to_try(alone: Alone, quick: bool) -> list[int]:
    """Numbers of rounds: as few as leave some room to place documents, which is quickly filled; and those around it."""
    tokens, room = int(alone.tables.tokens.sum()), alone.tables.capacity * alone.cost.ranks
    roomy = max(1, -(-tokens * SPARE // (room * (SPARE - 1))))
    return [roomy] if quick else sorted({alone.rounds, alone.rounds + 1, roomy})


def _worth(least: int, best: int) -> bool:
    """Whether a step that takes at least this long may still be noticeably faster than the best one."""
    return least + least // WORTH < best


def partition(prices: Prices, dealt: list[list[int]], evaluations: int) -> Answer:
    """Fill rounds one after another; what finds no room goes to the next one, or makes further rounds.

    Args:
        dealt: the documents of every round, each by falling time.
        evaluations: fillings of each round.
    """
    ready = np.zeros(prices.cost.ranks // prices.cost.island_size, np.int64)
    seated: list[Seating] = []
    waiting = list(dealt)
    while waiting:
        documents = waiting.pop(0)
        if not documents:
            continue
        seating, ready = best_filling(prices, documents, ready, evaluations)
        seated.append(seating)
        if seating.left:
            if waiting:
                waiting[0] = sorted([*waiting[0], *seating.left], key=lambda k: (-int(prices.whole[k]), k))
            else:
                waiting.append(seating.left)
    return Answer(int(ready.max()) + prices.cost.step_overhead_ns(prices.variant), prices, seated)
