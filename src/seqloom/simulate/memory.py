"""Peak memory of every rank of a plan."""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.cost.rounds import tokens_on_ranks
from seqloom.plan import ActionKind, Pipeline, Plan


def peak_memory(plan: Plan, cost: CostModel) -> np.ndarray:
    """int64[ranks] bytes. Plans of one stage: the cost model's own figure. Stages: an estimate, see below."""
    if all(len(pipeline.stages) == 1 for pipeline in plan.pipelines):
        return cost.plan_memory(plan)
    peak = np.zeros(cost.ranks, dtype=np.int64)
    for pipeline in plan.pipelines:
        for host in range(len(pipeline.hosts)):
            peak = np.maximum(peak, _host_peak(plan, cost, pipeline, host))
    return peak


def _host_peak(plan: Plan, cost: CostModel, pipeline: Pipeline, host: int) -> np.ndarray:
    """int64[ranks] bytes of one host; ranks of other hosts have 0.

    Of what a rank holds before any token: its stages' share of the layers, and more where an island is smaller
    than the cost model's shard group. Of what tokens add: every stage's share of the layers; all rounds between
    their forward and the end of their backward are held together.
    """
    layers = pipeline.stages[-1].layers[1]
    added, fixed = {}, np.zeros(cost.ranks)
    for stage in pipeline.stages_of(host):
        first, stop = pipeline.stages[stage].layers
        share = (stop - first) / layers
        variants = [Variant(current.work[stage].checkpoint, plan.reduce) for current in pipeline.rounds]
        fixed += share * max((cost.fixed_bytes(variant) for variant in variants), default=0)
        for r, variant in enumerate(variants):
            tokens = tokens_on_ranks(cost, pipeline.rounds[r].work[stage])
            added[stage, r] = share * cost.token_bytes(variant) * tokens
    for island in plan.limits.islands(plan.sharding, pipeline.hosts[host]):
        fixed[list(island)] *= max(1.0, cost.island_size / len(island))
    live, most = np.zeros(cost.ranks), np.zeros(cost.ranks)
    for action in pipeline.actions[host]:
        if action.round is None:
            continue
        if action.kind == ActionKind.F:
            live += added[action.stage, action.round]
            most = np.maximum(most, live)
        elif action.kind in (ActionKind.B, ActionKind.W):
            live -= added[action.stage, action.round]
    used = np.zeros(cost.ranks, dtype=np.int64)
    ranks = list(pipeline.hosts[host])
    used[ranks] = np.ceil(fixed[ranks] + most[ranks]).astype(np.int64)
    return used
