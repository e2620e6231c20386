"""Peak memory of every rank of a plan."""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.plan import ActionKind, Pipeline, Plan
from seqloom.simulate.transfer import tokens_on_ranks


def peak_memory(plan: Plan, cost: CostModel) -> np.ndarray:
    """int64[ranks] bytes. Plans of one stage: the cost model's own figure. Stages: an estimate, see below."""
    if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return cost.plan_memory(plan)
    peak = np.zeros(cost.ranks, dtype=np.int64)
    for pipeline in plan.pipelines:
        for stage in range(len(pipeline.stages)):
            peak = np.maximum(peak, _stage_peak(plan, cost, pipeline, stage))
    return peak


def _stage_peak(plan: Plan, cost: CostModel, pipeline: Pipeline, stage: int) -> np.ndarray:
    """int64[ranks] bytes of one stage; ranks of other stages have 0.

    The stage's share of the layers, of what a rank holds before any token and of what tokens add; the
    activations of all rounds between their forward and the end of their backward are held together.
    """
    first, stop = pipeline.stages[stage].layers
    share = (stop - first) / pipeline.stages[-1].layers[1]
    added, fixed = [], 0
    for current in pipeline.rounds:
        work = current.work[stage]
        variant = Variant(work.checkpoint, plan.reduce)
        fixed = max(fixed, cost.fixed_bytes(variant))
        added.append(tokens_on_ranks(work, cost) * cost.token_bytes(variant))
    live, most = np.zeros(cost.ranks), np.zeros(cost.ranks)
    for action in pipeline.actions[stage]:
        if action.round is None:
            continue
        if action.kind == ActionKind.F:
            live += added[action.round]
            most = np.maximum(most, live)
        elif action.kind in (ActionKind.B, ActionKind.W):
            live -= added[action.round]
    used = np.zeros(cost.ranks, dtype=np.int64)
    ranks = list(pipeline.stages[stage].ranks)
    used[ranks] = np.ceil(share * (fixed + most[ranks])).astype(np.int64)
    return used
