"""Static, adaptive and published plans over random clusters, models, shardings and batches."""

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.planners.published.flexsp import plan_flexsp
from seqloom.planners.uniform import plan_adaptive, plan_static
from seqloom.simulate.memory import peak_memory

MODELS = ("llama3-8b", "qwen2.5-0.5b", "gpt-7b")


@st.composite
def costs(draw, max_nodes=4, max_gpus=8):
    sharding = draw(st.sampled_from(["full", "hybrid", "none"]))
    try:
        if draw(st.booleans()):
            cluster = Cluster.of(draw(st.integers(1, max_nodes)), 8, "A100-40G")
            return CostModel(cluster, ModelSpec.load("gpt-7b"), "flexsp-a100", sharding, budget_gib=120)
        cluster = Cluster.of(draw(st.integers(1, max_nodes)), draw(st.integers(1, max_gpus)), "H200")
        return CostModel(cluster, ModelSpec.load(draw(st.sampled_from(MODELS))), None, sharding)
    except SeqloomError as error:
        assert "does not fit" in str(error)
        assume(False)


def check(plan, lengths, cost):
    plan.validate()  # every token once, in time and memory
    spans = [span for line in plan.pipelines for r in line.rounds for g in r.groups for span in g.spans]
    assert sorted(spans) == [(k, 0, n) for k, n in enumerate(lengths)]
    assert (peak_memory(plan, cost) <= cost.budget_bytes).all()


@given(costs(), st.lists(st.integers(1, 40_000), min_size=1, max_size=40), st.integers(1, 40_000))
def test_static_and_adaptive(cost, lengths, longest):
    batch = np.array(lengths)
    try:
        adaptive = plan_adaptive(batch, cost)
        static = plan_static(batch, cost, longest=longest)
    except SeqloomError as error:
        assert "holds" in str(error)
        return
    check(adaptive, lengths, cost)
    check(static, lengths, cost)
    assert cost.plan_ns(adaptive) <= cost.plan_ns(static)
    assert len({g.degree for r in static.pipelines[0].rounds for g in r.groups}) == 1
    assert adaptive.hash == plan_adaptive(batch, cost).hash


@settings(max_examples=15)
@given(costs(max_nodes=3, max_gpus=4), st.lists(st.integers(1, 30_000), min_size=1, max_size=12))
def test_flexsp(cost, lengths):
    batch = np.array(lengths)
    try:
        plan = plan_flexsp(batch, cost, counts=2)
    except SeqloomError as error:
        assert "holds" in str(error)
        return
    check(plan, lengths, cost)
    assert plan.hash == plan_flexsp(batch, cost, counts=2).hash
