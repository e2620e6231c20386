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

from seqloom.cost import CostModel, Variant
from seqloom.cost.reach import Reach
from seqloom.cost.relaying import relay_times
from seqloom.plan import Pipeline, Plan, Reduce
from seqloom.planners.bounds.prices import ROUNDED, every_rate
from seqloom.planners.bounds.roundings import PRECISION
from seqloom.simulate.price import slowest_end


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
    if any(work.linear is not None for current in rounds for work in current.work):
        return None
    lengths = np.array(plan.documents, dtype=np.int64)
    found = [_pipeline(cost, pipeline, lengths) for pipeline in plan.pipelines]
    work, chain = (np.stack(each).min(axis=0) for each in zip(*found, strict=True))
    ranks = sum(len(pipeline.ranks) for pipeline in plan.pipelines)
    best = max(float(work.sum()) / ranks, float(chain.max()))
    relay = relay_times(cost, plan.pipelines)
    return int(best * (1 - PRECISION)) + slowest_end(plan, cost)[0] + int(relay.first + relay.last)


def _pipeline(cost: CostModel, pipeline: Pipeline, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(float64[n] rank-ns of every document on all hosts, float64[n] ns on the slowest of them)."""
    work, chain = np.zeros((2, len(lengths)))
    for host, ranks in enumerate(pipeline.hosts):
        least_work, least_time = np.zeros((2, len(lengths)))
        for stage in pipeline.stages_of(host):
            part = pipeline.parts[stage]
            whole = _priced(cost.with_tensor(pipeline.stages[stage].tensor), tuple(lengths.tolist()))
            fits = whole.degree <= len(ranks)
            time = (part.stop - part.first) / part.of * whole.layers[fits] + (whole.head[fits] if part.ends else 0.0)
            least_work += (whole.degree[fits, None] * time).min(axis=0)
            least_time += time.min(axis=0)
        work += least_work
        chain = np.maximum(chain, least_time)
    return work, chain


@lru_cache(maxsize=16)
def _priced(cost: CostModel, lengths: tuple[int, ...]) -> Whole:
    """Everything kept, at the least that any place of a shape costs."""
    engine = cost.engine
    variant = Variant(engine.variants[0].checkpoint, Reduce.STEP, resident=True)
    tokens = cost.tokens(np.array(lengths)).astype(np.float64)
    rates = every_rate(cost, variant)
    attention = {ring: engine.attention(tokens, ring, variant) for ring in {rate.shape.ring for rate in rates}}
    degree, layers, head = [], [], []
    for shape, token, _ in rates:
        each = engine.rates(shape, variant, Reach()).get("head", 0.0)
        calls = engine.document_calls(tokens, shape.kernels, variant)
        computing = attention[shape.ring] * engine.attention_share(shape) + calls
        degree.append(shape.degree)
        head.append(np.maximum(each * tokens - 1.0, 0.0))
        layers.append(np.maximum((token[0] - each) * tokens + computing - ROUNDED, 0.0))
    return Whole(np.array(degree), np.stack(layers), np.stack(head))
