"""Pipelines of different shape side by side, under free sharding: simulated, weighed and bounded."""

from dataclasses import replace
from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Span
from seqloom.plan import Limits, Plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.flex import plan_flex
from seqloom.planners.pipeline import plan_pipeline
from seqloom.simulate import predicted_ns, simulate


@cache
def cost_of(cluster):
    return CostModel(Cluster.parse(cluster), ModelSpec.load("qwen3-0.6b"), sharding="free", budget_gib=40)


WAYS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 2), (4, 2, 2), (4, 1, 2), (4, 2, 1), (8, 4, 1), (8, 2, 4), (8, 8, 1)]
"""Ranks, tensor degree and stages of a pipeline."""


@st.composite
def plans(draw):
    """Pipelines planned each on its own ranks and put side by side; some ranks stay idle."""
    cost = cost_of(draw(st.sampled_from(["2x4xH100", "1x8xH100"])))
    parts, first, documents = [], 0, []
    while first < cost.ranks and (not parts or draw(st.booleans())):
        size, tensor, stages = draw(st.sampled_from([way for way in WAYS if way[0] <= cost.ranks - first]))
        first = -(-first // size) * size
        if first >= cost.ranks:
            break
        lengths = np.array(draw(st.lists(st.integers(2, 20_000), min_size=1, max_size=5)))
        own = cost.for_submesh(size, tensor)
        if stages == 1:
            made = plan_flex(lengths, own)
        else:
            order = draw(st.sampled_from(["1f1b", "seq1f1b-zb"]))
            made = plan_pipeline(lengths, own, stages=stages, schedule=order)
        parts.append(moved(made, first, len(documents)))
        documents += lengths.tolist()
        first += size
    limits = Limits(cost.ranks, cost.node_size, cost.model.heads, made.limits.capacity)
    capacity = {}
    for part in parts:
        for checkpoint, tokens in part.limits.capacity:
            capacity[checkpoint] = max(capacity.get(checkpoint, 0), tokens)
    pipelines = tuple(line for part in parts for line in part.pipelines)
    return replace(
        made, limits=replace(limits, capacity=tuple(capacity.items())), documents=tuple(documents), pipelines=pipelines
    ), cost


def moved(plan, ranks, documents):
    """The plan some ranks further on, its documents numbered from another one."""

    def work(own):
        groups = tuple(
            replace(
                group,
                ranks=tuple(rank + ranks for rank in group.ranks),
                spans=tuple(Span(span.document + documents, span.start, span.stop) for span in group.spans),
            )
            for group in own.groups
        )
        return replace(own, groups=groups)

    [line] = plan.pipelines
    stages = tuple(replace(stage, ranks=tuple(rank + ranks for rank in stage.ranks)) for stage in line.stages)
    rounds = tuple(replace(one, by_stage=tuple(map(work, one.by_stage))) for one in line.rounds)
    return replace(plan, pipelines=(replace(line, stages=stages, rounds=rounds),))


@settings(max_examples=15)
@given(plans())
def test_any_pipelines_run_side_by_side_on_paper(drawn):
    plan, cost = drawn
    plan.validate()
    assert Plan.from_json(plan.to_json()) == plan
    found = simulate(plan, cost)
    assert found.step_ns == predicted_ns(plan, cost)
    assert 0 < plan_bound(plan, cost) <= found.step_ns
    assert (found.busy_ns + found.comm_ns + found.idle_ns == found.step_ns).all()
    alone = [replace(plan, pipelines=(line,)) for line in plan.pipelines]
    rounds = [simulate(one, cost) for one in alone]
    assert found.step_ns - found.end_ns == max(one.step_ns - one.end_ns for one in rounds)
    assert (found.peak_memory == np.max([one.peak_memory for one in rounds], axis=0)).all()
    assert found.peak_memory.max() <= cost.budget_bytes
    busy = {rank for line in plan.pipelines for rank in line.ranks}
    owned = 16 * cost.model.parameters(384 * 1024) / cost.ranks
    assert (found.peak_memory >= owned).all()
    assert all(found.peak_memory[rank] == np.ceil(owned) for rank in range(cost.ranks) if rank not in busy)
