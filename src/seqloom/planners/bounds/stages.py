"""The bound of plans with several pipelines: what no plan on the same stages beats, wherever the documents go.

*Work.* A document runs in one of the pipelines, on all of its hosts: there it keeps the ranks of its group busy for its
computing and its exposed exchanges, whatever the pieces, packs and order. All ranks of all pipelines together have
``ranks x step``, so the step is at least the sum over documents of their least work, each in the pipeline and shapes
that are cheapest for it.

*A document's chain.* It takes at least its time on the slowest host of a pipeline, in the pipeline where that is least.

Both take everything kept, which is fastest, any shape of at most a host's ranks that `places` knows, at the least of
its reaches, and by the tensor degree of each stage. What a unit costs before its first document is left out. The step's
end is added, and of what free sharding moves the part that nothing can hide: it depends on the stages alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.communication import GroupTraffic
from seqloom.cost.resharding import reshard_times, unshard_times_by_stage
from seqloom.cost.shapes import STREAMS
from seqloom.cost.stages import stage_overhead_ns
from seqloom.plan import Pipeline, Plan, Reduce
from seqloom.planners.bounds.lower import lower_bound
from seqloom.planners.bounds.options import PRECISION
from seqloom.planners.bounds.prices import ROUNDED, every_rate
from seqloom.simulate.windows import stage_layers, step_overhead


class Whole(NamedTuple):
    """Documents in every shape of a tensor degree, the whole model on one host. ``S`` shapes, ``n`` documents."""

    degree: np.ndarray  # int64[S]
    layers: np.ndarray  # float64[S, n] ns
    head: np.ndarray  # float64[S, n] ns


def side_by_side_bound(plan: Plan, cost: CostModel) -> int | None:
    """ns that no plan for the documents of `plan` on the stages of its pipelines beats.

    None where nothing is proven: where tokens have another layout in linear layers.
    """
    rounds = [current for pipeline in plan.pipelines for current in pipeline.rounds]
    if any(work.linear is not None for current in rounds for work in current.by_stage):
        return None
    lengths = np.array(plan.documents, dtype=np.int64)
    found = [_pipeline(cost, pipeline, lengths) for pipeline in plan.pipelines]
    work, chain = (np.stack(each).min(axis=0) for each in zip(*found, strict=True))
    ranks = sum(len(pipeline.ranks) for pipeline in plan.pipelines)
    best = max(float(work.sum()) / ranks, float(chain.max()))
    relay = reshard_times(cost, plan.pipelines)
    return int(best * (1 - PRECISION)) + step_overhead(plan, cost)[0] + int(relay.first + relay.last)


def _pipeline(cost: CostModel, pipeline: Pipeline, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float64[n] rank-ns of every document on all hosts, float64[n] ns on the slowest of them)."""
    work, chain = np.zeros((2, len(lengths)))
    for host, ranks in enumerate(pipeline.ranks_by_pp_rank):
        least_work, least_time = np.zeros((2, len(lengths)))
        for stage in pipeline.stages_of(host):
            part = pipeline.layer_ranges[stage]
            whole = _priced(cost.with_tensor(pipeline.stages[stage].tensor), tuple(lengths.tolist()))
            fits = whole.degree <= len(ranks)
            time = (part.stop - part.first) / part.model_layers * whole.layers[fits] + (
                whole.head[fits] if part.has_head else 0.0
            )
            least_work += (whole.degree[fits, None] * time).min(axis=0)
            least_time += time.min(axis=0)
        work += least_work
        chain = np.maximum(chain, least_time)
    return work, chain


@lru_cache(maxsize=16)
def _priced(cost: CostModel, lengths: tuple[int, ...]) -> Whole:
    """Everything kept, at the least that any place of a shape costs."""
    engine = cost.engine
    policy = MemoryPolicy(engine.policies[0].checkpoint, Reduce.STEP, resident=True)
    tokens = cost.padded_lengths(np.array(lengths)).astype(np.float64)
    rates = every_rate(cost, policy)
    attention = {ring: engine.attention_ns(tokens, ring, policy) for ring in {rate.shape.ring for rate in rates}}
    degree, layers, head = [], [], []
    for shape, token, _ in rates:
        each = engine.token_ns(shape, policy, GroupTraffic()).get("head", 0.0)
        calls = engine.kernel_call_ns(tokens, shape.kernel_calls, policy)
        computing = attention[shape.ring] * engine.attention_share(shape) + calls
        degree.append(shape.degree)
        head.append(np.maximum(each * tokens - 1.0, 0.0))
        layers.append(np.maximum((token[0] - each) * tokens + computing - ROUNDED, 0.0))
    return Whole(np.array(degree), np.stack(layers), np.stack(head))


# ---- merged: planners.bounds.stages
# The bound of plans with several stages: what no plan on the same stages beats.
#
# *Work of a host.* A host runs its layers for every document, whatever the pieces, packs and order. A document in a
# group
# of ``d`` ranks takes at least its computing and its exposed exchanges there, on each of the ``d``; pieces add up
# to
# their document, and what they add beyond it, what a unit costs before its first document and all waiting are left
# out.
# So ``width x step`` is at least the sum over documents of the least ``d x time`` over all shapes of at most
# ``width``
# ranks, of the host's layers, and on the last host of the head.
#
# *A document's chain.* All pieces of a document sit in one group of at most ``width`` ranks on a host, which runs
# them
# one after the other, forward and backward. So the step is at least the document's least time there, in the shape
# that
# is fastest for it.
#
# Both hold for every choice of what is kept, because keeping everything is fastest. The step's end follows the last
# unit, so the slowest host's is added. Groups are those that planners make: candidate shapes on blocks of the
# family, one
# layout for attention and linear layers. Stages round their parts down, less than a nanosecond for each part of a
# group;
# what a unit costs before its first document, which is left out, is more than that.
#
# A bound for plans of one stage does not hold here: those gather parameters in every round, which stages do once
# per
# step; and the other way round, layers may not change hosts here.


def plan_bound(plan: Plan, cost: CostModel) -> int | None:
    """ns that no plan for the same documents on the same stages beats; None where nothing is proven.

    Plans of one stage: `lower_bound`, over all plans of one stage with its tensor degree; nothing is proven for
    documents in pieces there. Several pipelines, stages that split weights, and parameters that are gathered for every
    pass, which leaves more memory: `side_by_side_bound`.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if len(stages) == 1 and not unshard_times_by_stage(cost, plan.pipelines[0]):
        spans = sum(len(group.spans) for entry in plan.pipelines[0].rounds for group in entry.groups)
        own = cost.with_tensor(stages[0].tensor)
        return None if spans > len(plan.documents) else lower_bound(np.array(plan.documents), own)
    if len(plan.pipelines) == 1 and len(stages) > 1 and all(stage.tensor == 1 for stage in stages):
        return stages_bound(plan, plan.pipelines[0], cost)
    return side_by_side_bound(plan, cost)


def stages_bound(plan: Plan, pipeline: Pipeline, cost: CostModel) -> int:
    """ns that no plan for the documents of `plan` on the stages of `pipeline` beats."""
    layers, head, degree = _prices(np.array(plan.documents, dtype=np.int64), cost)
    shares = stage_layers(pipeline)
    best, end = 0.0, 0
    for host, ranks in enumerate(pipeline.ranks_by_pp_rank):
        own = [share for stage in pipeline.stages_of(host) if (share := shares[stage]) is not None]
        part = sum(share.stop - share.first for share in own) / cost.model.layers
        fits = degree <= len(ranks)
        time = part * layers[fits] + (head[fits] if any(share.has_head for share in own) else 0.0)
        work = (degree[fits, None] * time).min(axis=0).sum() / len(ranks)
        best = max(best, float(work), float(time.min(axis=0).max()))
        shard_groups = plan.limits.shard_groups(plan.sharding, ranks)
        end = max(end, stage_overhead_ns(cost, own, len(ranks), min(map(len, shard_groups)))[0])
    return int(best * (1 - PRECISION)) + end


def _prices(lengths: np.ndarray, cost: CostModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(layers, head, degree): float64[S, n] ns of every document in every shape, everything kept; int64[S]."""
    checkpoint = cost.engine.policies[0].checkpoint
    policy = MemoryPolicy(checkpoint, Reduce.STEP, resident=True)
    shapes = cost.engine.shapes
    tokens = cost.padded_lengths(lengths)
    parts = cost.document_ns(tokens, [(shape, cost.aligned_traffic(shape)) for shape in shapes], policy)
    zero = np.zeros((len(shapes), len(lengths)))
    head = parts.get("head", zero)
    layers = sum((values for name, values in parts.items() if name in STREAMS[0] and name != "head"), zero)
    degree = np.array([shape.degree for shape in shapes], dtype=np.int64)
    return layers.astype(np.float64), head.astype(np.float64), degree
