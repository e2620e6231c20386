"""The bound of plans with several stages: what no plan on the same stages beats.

*Work of a host.* A host runs its layers for every document, whatever the pieces, packs and order. A document in a group
of ``d`` ranks takes at least its computing and its exposed exchanges there, on each of the ``d``; pieces add up to
their document, and what they add beyond it, what a unit costs before its first document and all waiting are left out.
So ``width x step`` is at least the sum over documents of the least ``d x time`` over all shapes of at most ``width``
ranks, of the host's layers, and on the last host of the head.

*A document's chain.* All pieces of a document sit in one group of at most ``width`` ranks on a host, which runs them
one after the other, forward and backward. So the step is at least the document's least time there, in the shape that
is fastest for it.

Both hold for every choice of what is kept, because keeping everything is fastest. The step's end follows the last
unit, so the slowest host's is added. Groups are those that planners make: candidate shapes on blocks of the family, one
layout for attention and linear layers. Stages round their parts down, less than a nanosecond for each part of a group;
what a unit costs before its first document, which is left out, is more than that.

A bound for plans of one stage does not hold here: those gather parameters in every round, which stages do once per
step; and the other way round, layers may not change hosts here.
"""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.cost.passes import priced_passes
from seqloom.cost.stages import stage_end_ns
from seqloom.cost.values import LANES
from seqloom.plan import Pipeline, Plan, Reduce
from seqloom.planners.bounds.lower import lower_bound
from seqloom.planners.bounds.roundings import PRECISION
from seqloom.planners.bounds.side_by_side import side_by_side_bound
from seqloom.simulate.twins import stage_shares


def plan_bound(plan: Plan, cost: CostModel) -> int | None:
    """ns that no plan for the same documents on the same stages beats; None where nothing is proven.

    Plans of one stage: `lower_bound`, over all plans of one stage with its tensor degree; nothing is proven for
    documents in pieces there. Several pipelines, stages that split weights, and parameters that are gathered for every
    pass, which leaves more memory: `side_by_side_bound`.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if len(stages) == 1 and not priced_passes(cost, plan.pipelines[0]):
        spans = sum(len(group.spans) for entry in plan.pipelines[0].rounds for group in entry.groups)
        own = cost.with_tensor(stages[0].tensor)
        return None if spans > len(plan.documents) else lower_bound(np.array(plan.documents), own)
    if len(plan.pipelines) == 1 and len(stages) > 1 and all(stage.tensor == 1 for stage in stages):
        return stages_bound(plan, plan.pipelines[0], cost)
    return side_by_side_bound(plan, cost)


def stages_bound(plan: Plan, pipeline: Pipeline, cost: CostModel) -> int:
    """ns that no plan for the documents of `plan` on the stages of `pipeline` beats."""
    layers, head, degree = _prices(np.array(plan.documents, dtype=np.int64), cost)
    shares = stage_shares(pipeline)
    best, end = 0.0, 0
    for host, ranks in enumerate(pipeline.hosts):
        own = [share for stage in pipeline.stages_of(host) if (share := shares[stage]) is not None]
        part = sum(share.stop - share.first for share in own) / cost.model.layers
        fits = degree <= len(ranks)
        time = part * layers[fits] + (head[fits] if any(share.ends for share in own) else 0.0)
        work = (degree[fits, None] * time).min(axis=0).sum() / len(ranks)
        best = max(best, float(work), float(time.min(axis=0).max()))
        islands = plan.limits.islands(plan.sharding, ranks)
        end = max(end, stage_end_ns(cost, own, len(ranks), min(map(len, islands)))[0])
    return int(best * (1 - PRECISION)) + end


def _prices(lengths: np.ndarray, cost: CostModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(layers, head, degree): float64[S, n] ns of every document in every shape, everything kept; int64[S]."""
    checkpoint = cost.engine.variants[0].checkpoint
    variant = Variant(checkpoint, Reduce.STEP, resident=True)
    shapes = cost.engine.shapes
    tokens = cost.tokens(lengths)
    parts = cost.document_parts(tokens, [(shape, cost.aligned(shape)) for shape in shapes], variant)
    zero = np.zeros((len(shapes), len(lengths)))
    head = parts.get("head", zero)
    layers = sum((values for name, values in parts.items() if name in LANES[0] and name != "head"), zero)
    degree = np.array([shape.degree for shape in shapes], dtype=np.int64)
    return layers.astype(np.float64), head.astype(np.float64), degree
