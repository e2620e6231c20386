"""The bound of plans with several stages or pipelines: what no plan on the same stages beats.

*Work.* A pipeline rank runs its layers for every document it gets, whatever the pieces, packs and order. A document in
a group of ``d`` ranks takes at least its computing and its exposed exchanges there, on each of the ``d``. All ranks
together have ``ranks x step``, so the step is at least the sum over documents of their least ``d x time``, each in the
shape (and, of several pipelines, in the pipeline) that is cheapest for it.

*A document's chain.* All pieces of a document run one after another in one group of a pipeline rank. So the step is at
least the document's time on the slowest pipeline rank, in the shape and pipeline that are fastest for it.

Both price documents without recomputation, which is fastest, so they hold for every checkpoint. They leave out what a
micro-batch costs before its first document, which is more than the nanosecond by which stages round each part of a
group down. The overhead at the step's end follows the last micro-batch and is added.

The bound for plans of one stage does not hold here: those gather parameters in every round, which stages do once per
step. Nor does this one hold there: layers may not change ranks here.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.communication import GroupTraffic
from seqloom.cost.plan_cost import step_overhead
from seqloom.cost.resharding import reshard_times, unshard_times_by_stage
from seqloom.cost.shapes import STREAMS
from seqloom.plan import Pipeline, Plan, Reduce
from seqloom.planners.bounds.one_stage import PRECISION, lower_bound
from seqloom.planners.bounds.prices import ROUNDED, shape_rates


def plan_bound(plan: Plan, cost: CostModel) -> int | None:
    """ns that no plan for the same documents on the same stages beats; None where nothing is proven.

    Plans of one stage: `lower_bound`, over all plans of one stage with its tensor degree; nothing is proven for
    documents in pieces there. Several pipelines, stages that split weights, and parameters that are gathered for every
    pass, which leaves more memory: `pipelines_bound`.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if len(stages) == 1 and not unshard_times_by_stage(cost, plan.pipelines[0]):
        spans = sum(len(group.spans) for entry in plan.pipelines[0].rounds for group in entry.groups)
        if spans > len(plan.documents):
            return None
        return lower_bound(np.array(plan.documents), cost.with_tensor(stages[0].tensor))
    if len(plan.pipelines) == 1 and len(stages) > 1 and all(stage.tensor == 1 for stage in stages):
        return stages_bound(plan, plan.pipelines[0], cost)
    return pipelines_bound(plan, cost)


class ShapePrices(NamedTuple):
    """Documents through the whole model without recomputation: ``S`` shapes, ``n`` documents. ns."""

    degree: np.ndarray
    """int64[S]"""
    layers: np.ndarray
    """float64[S, n]"""
    head: np.ndarray
    """float64[S, n]"""

    def least(self, share: float, head: bool, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """(float64[n] rank-ns, float64[n] ns): least work and time on so many ranks of this share of the layers."""
        fits = self.degree <= ranks
        time = share * self.layers[fits] + (self.head[fits] if head else 0.0)
        return (self.degree[fits, None] * time).min(axis=0), time.min(axis=0)


def stages_bound(plan: Plan, pipeline: Pipeline, cost: CostModel) -> int:
    """ns that no plan for the documents of `plan` on the stages of `pipeline` beats, for groups on aligned blocks."""
    prices = _aligned_prices(np.array(plan.documents, dtype=np.int64), cost)
    layers = pipeline.layer_ranges
    best, end = 0.0, 0
    for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
        own = [layers[stage] for stage in pipeline.stages_of(pp_rank)]
        share = sum(part.stop - part.first for part in own) / cost.model.layers
        work, chain = prices.least(share, any(part.has_head for part in own), len(ranks))
        best = max(best, float(work.sum() / len(ranks)), float(chain.max()))
        shard_groups = plan.limits.shard_groups(plan.sharding, ranks)
        end = max(end, cost.stage_overhead_ns(own, len(ranks), min(map(len, shard_groups)))[0])
    return int(best * (1 - PRECISION)) + end


def pipelines_bound(plan: Plan, cost: CostModel) -> int | None:
    """ns that no plan for the documents of `plan` on the stages of its pipelines beats, for groups on any ranks.

    Free sharding adds the part of its resharding that nothing can hide: it depends on the stages alone. None where
    nothing is proven: where tokens have another layout in linear layers.
    """
    rounds = [current for pipeline in plan.pipelines for current in pipeline.rounds]
    if any(work.linear is not None for current in rounds for work in current.by_stage):
        return None
    bounds = [_pipeline_bounds(pipeline, plan.documents, cost) for pipeline in plan.pipelines]
    work, chain = (np.stack(each).min(axis=0) for each in zip(*bounds, strict=True))
    ranks = sum(len(pipeline.ranks) for pipeline in plan.pipelines)
    best = max(float(work.sum()) / ranks, float(chain.max()))
    reshard = reshard_times(cost, plan.pipelines)
    return int(best * (1 - PRECISION)) + step_overhead(plan, cost)[0] + int(reshard.first + reshard.last)


def _pipeline_bounds(pipeline: Pipeline, documents: tuple[int, ...], cost: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """(float64[n] rank-ns of every document on all pipeline ranks, float64[n] ns on the slowest of them)."""
    total, slowest = np.zeros((2, len(documents)))
    for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
        work, chain = np.zeros((2, len(documents)))
        for stage in pipeline.stages_of(pp_rank):
            part = pipeline.layer_ranges[stage]
            prices = _shape_prices(cost.with_tensor(pipeline.stages[stage].tensor), documents)
            share = (part.stop - part.first) / part.model_layers
            for sums, least in zip((work, chain), prices.least(share, part.has_head, len(ranks)), strict=True):
                sums += least
        total += work
        slowest = np.maximum(slowest, chain)
    return total, slowest


def _fastest_policy(cost: CostModel) -> MemoryPolicy:
    return MemoryPolicy(cost.engine.policies[0].checkpoint, Reduce.STEP, resident=True)


def _aligned_prices(lengths: np.ndarray, cost: CostModel) -> ShapePrices:
    """Price documents in the shapes that planners use, on aligned blocks."""
    shapes = cost.engine.shapes
    placed = [(shape, cost.aligned_traffic(shape)) for shape in shapes]
    parts = cost.document_ns(cost.padded_lengths(lengths), placed, _fastest_policy(cost))
    zero = np.zeros((len(shapes), len(lengths)))
    layers = sum((values for name, values in parts.items() if name in STREAMS[0] and name != "head"), zero)
    degree = np.array([shape.degree for shape in shapes], dtype=np.int64)
    return ShapePrices(degree, layers.astype(np.float64), parts.get("head", zero).astype(np.float64))


@lru_cache(maxsize=16)
def _shape_prices(cost: CostModel, lengths: tuple[int, ...]) -> ShapePrices:
    """Price documents in any shape, each at the least over all its placements."""
    engine, policy = cost.engine, _fastest_policy(cost)
    tokens = cost.padded_lengths(np.array(lengths)).astype(np.float64)
    rates = shape_rates(cost, policy)
    attention = engine.attention_ns(tokens, [rate.shape for rate in rates], policy)
    degree, layers, head = [], [], []
    for (shape, token_ns, _), computing in zip(rates, attention, strict=True):
        head_ns = engine.token_ns(shape, policy, GroupTraffic()).get("head", 0.0)
        degree.append(shape.degree)
        head.append(np.maximum(head_ns * tokens - 1.0, 0.0))
        layers.append(np.maximum((token_ns[0] - head_ns) * tokens + computing - ROUNDED, 0.0))
    return ShapePrices(np.array(degree), np.stack(layers), np.stack(head))
