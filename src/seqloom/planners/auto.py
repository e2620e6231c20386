"""Planner ``auto``: the best of all. Never worse than any planner it knows, static included.

Pipelines take part only where a number of stages is given: a run keeps its layers where they are, step after step.
Under free sharding they may be anywhere at every step: there strategies take part, and the others only as far as the
model fits in one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.plan import Plan, Sharding
from seqloom.planners.flex import plan_flex
from seqloom.planners.hydraulis import Strategy, plan_strategies
from seqloom.planners.pipeline import plan_pipeline
from seqloom.planners.remap import with_remapping
from seqloom.planners.uniform import plan_adaptive, plan_static
from seqloom.planners.zones import plan_zones
from seqloom.simulate import predicted_ns

SOLVER_LIMIT = 256
"""Documents times ranks up to which the published solver is quick enough to be asked as well."""


def best_of(plans: Iterable[Plan], cost: CostModel) -> Plan:
    """The fastest of these plans, whatever their stages; the first of equals."""
    return min(plans, key=lambda plan: predicted_ns(plan, cost))


def plan_auto(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    evaluations: int | None = None,
    seed: int = 0,
    known: Iterable[Plan] = (),
    stages: int = 1,
    strategies: Sequence[Strategy] | None = None,
) -> Plan:
    """Plan a batch with every planner that answers at once, keep the best, and remap its rounds where that pays.

    Args:
        known: plans made for this batch before; they take part in the choice.
        stages: with more than one, a pipeline of so many stages takes part too; nobody else cuts the model.
        strategies: under free sharding, those to choose from; None proposes some for this batch alone.
    """
    if stages > 1:
        known = [*known, plan_pipeline(lengths, cost, stages=stages)]
    if cost.sharding == Sharding.FREE:
        return best_of([*known, *_free(lengths, cost, evaluations, seed, strategies)], cost)
    candidates = _whole(lengths, cost, evaluations, seed)
    if len(lengths) * cost.ranks <= SOLVER_LIMIT and find_spec("highspy"):
        from seqloom.planners.published.flexsp import plan_flexsp

        with suppress(SeqloomError):  # its degrees are powers of two: it may refuse what the others hold
            candidates.append(plan_flexsp(lengths, cost, seed=seed))
    return with_remapping(best_of([*candidates, *known], cost), cost)


def _whole(lengths: np.ndarray, cost: CostModel, evaluations: int | None, seed: int) -> list[Plan]:
    """Plans of one stage, over all ranks; SeqloomError if they hold neither the model nor the batch."""
    return [
        plan_flex(lengths, cost, evaluations=evaluations, seed=seed),
        plan_adaptive(lengths, cost),
        plan_static(lengths, cost),
        plan_zones(lengths, cost),
    ]


def _free(
    lengths: np.ndarray, cost: CostModel, evaluations: int | None, seed: int, strategies: Sequence[Strategy] | None
) -> list[Plan]:
    """Plans of one stage where that holds model and batch, and that of the best strategy."""
    candidates: list[Plan] = []
    with suppress(SeqloomError):
        candidates += _whole(lengths, cost, evaluations, seed)
    try:
        candidates.append(plan_strategies(lengths, cost, strategies=strategies, seed=seed))
    except SeqloomError:
        if not candidates:
            raise
    return candidates
