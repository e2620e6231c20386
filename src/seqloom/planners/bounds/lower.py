"""The bound of a batch: the best of its parts, over every choice that a plan may make."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.planners.bounds.lock_step import lock_step_bound
from seqloom.planners.bounds.mixture import mixture_bound
from seqloom.planners.bounds.options import Options
from seqloom.planners.bounds.prices import price_all
from seqloom.planners.bounds.roundings import PRECISION
from seqloom.planners.bounds.throughput import throughput_bound
from seqloom.planners.bounds.timeline import timeline_bound
from seqloom.planners.problem import fitting_problems


def lower_bound(lengths: np.ndarray, cost: CostModel) -> int:
    """A time in ns that no plan of one stage for these documents beats, including what a step costs once.

    SeqloomError if no plan can hold them.
    """
    possible = {problem.variant.reduce for problem in fitting_problems(lengths, cost)}
    return min(variants_bound(lengths, cost, [v for v in cost.variants if v.reduce == reduce]) for reduce in possible)


def variants_bound(lengths: np.ndarray, cost: CostModel, variants: Sequence[Variant]) -> int:
    """The bound for plans whose rounds use any of these variants (which differ in checkpointing only)."""
    prices = price_all(np.asarray(lengths, np.int64), cost, variants)
    lanes = [0] + [1] * any(p.rings for p in prices) + [2] * any(p.cost[2].any() or p.once[2] > 0 for p in prices)
    used = [Options.of(prices, cost.ranks, lane) for lane in lanes]
    best = used[0].longest
    for lane in used:
        best = max(best, throughput_bound(lane, best))
        best = max(best, timeline_bound(lane, best))
    if cost.island_size == cost.ranks:
        best = max(best, lock_step_bound(used))
        if len(variants) > 1:
            best = max(best, mixture_bound(prices, cost.ranks))
    return int(best * (1 - PRECISION)) + min(cost.step_overhead_ns(v) for v in variants)
