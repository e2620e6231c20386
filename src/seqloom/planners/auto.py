"""Planner ``auto``: the fastest plan of the planners that answer at once, static included.

Those are ``static``, ``adaptive``, ``flex`` and ``zones``, and FlexSP's solver for small batches; ``exact`` and the
rivals are not asked. Pipelines take part only where a number of stages is given: a run keeps its layers where they
are, step after step. Under free sharding they may be anywhere at every step: there ``hydraulis`` takes part, and the
others only as far as the model fits in one stage. Where memory holds a document only with all its layers run forward
again or offloaded, or not at all, ``pieces`` takes part too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import MemoryBudgetError, SeqloomError
from seqloom.plan import Checkpoint, Plan, Sharding
from seqloom.planners.flex import plan_flex
from seqloom.planners.hydraulis import Strategy, plan_strategies
from seqloom.planners.pipeline import plan_pieces, plan_pipeline
from seqloom.planners.recompute import with_layer_choices, without_layer_choices
from seqloom.planners.remap import with_remapping
from seqloom.planners.uniform import adaptive_and_static
from seqloom.planners.zones import plan_zones
from seqloom.simulate import predicted_ns

SOLVER_LIMIT = 256
"""Documents times ranks up to which the published solver is quick enough to be asked as well."""


def plan_auto(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    evaluations: int | None = None,
    seed: int = 0,
    known: Iterable[Plan] = (),
    stages: int = 1,
    strategies: Sequence[Strategy] | None = None,
    pieces: bool = True,
) -> Plan:
    """Plan a batch with every planner that answers at once, keep the best, and remap its rounds where that pays.

    Plans ``known`` for this batch take part. With several ``stages``, a pipeline of so many takes part too; nobody else
    cuts the model. ``strategies`` are those to choose from under free sharding; None proposes some for this batch.
    Without ``pieces`` documents stay whole on one stage, for loops that run the rounds of a plan one by one.
    """
    cuts = pieces and cost.model.causal

    def one_stage() -> list[Plan]:
        """Plans of whole documents, and of pieces where memory asks for them."""
        try:
            plans = whole_documents()
        except MemoryBudgetError:
            with suppress(SeqloomError):
                if cuts:
                    return [plan_pieces(lengths, cost)]
            raise
        if cuts and recomputes(min(plans, key=lambda plan: predicted_ns(plan, cost))):
            with suppress(SeqloomError):
                plans.append(plan_pieces(lengths, cost))
        return plans

    def whole_documents() -> list[Plan]:
        flex = best_of([plan_flex(lengths, cost, evaluations=evaluations, seed=seed)], cost)
        zones = best_of([plan_zones(lengths, cost)], cost)
        fastest = min(predicted_ns(plan, cost) for plan in (flex, zones))
        return [flex, *adaptive_and_static(lengths, cost, fastest), zones]

    if stages > 1:
        known = [*known, plan_pipeline(lengths, cost, stages=stages)]
    candidates: list[Plan] = []
    if cost.sharding == Sharding.FREE:
        with suppress(SeqloomError):  # one stage may hold neither the model nor the batch
            candidates += one_stage()
        try:
            candidates.append(plan_strategies(lengths, cost, strategies=strategies, seed=seed))
        except SeqloomError:
            if not candidates:
                raise
        return best_of([*known, *candidates], cost)
    candidates = one_stage()
    if len(lengths) * cost.ranks <= SOLVER_LIMIT and find_spec("highspy"):
        from seqloom.planners.published.flexsp import plan_flexsp

        with suppress(SeqloomError):  # its degrees are powers of two: it may refuse what the others hold
            candidates.append(plan_flexsp(lengths, cost, seed=seed))
    best = best_of([*candidates, *known], cost)
    if best.has_pieces:
        return best
    return best_of([best, with_remapping(without_layer_choices(best), cost)], cost)


def best_of(plans: Iterable[Plan], cost: CostModel) -> Plan:
    """The fastest of these plans, whatever their stages, with layers that recompute as little as memory allows.

    The first of equals.
    """
    return min((with_layer_choices(plan, cost) for plan in plans), key=lambda plan: predicted_ns(plan, cost))


def recomputes(plan: Plan) -> bool:
    """Whether some round runs whole layers forward again, or offloads them."""
    works = (work for pipeline in plan.pipelines for current in pipeline.rounds for work in current.by_stage)
    return any(work.checkpoint == Checkpoint.FULL or work.offload for work in works)
