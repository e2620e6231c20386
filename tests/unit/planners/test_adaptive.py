"""The adaptive planner: the best single degree for each batch."""

import numpy as np
import pytest

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec, sample
from seqloom.planners.uniform import plan_adaptive, plan_static
from seqloom.simulate.memory import peak_memory

COST = CostModel(Cluster.parse("8x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100")


def test_it_is_the_fastest_of_all_degrees():
    lengths = sample("wikipedia", 300, seed=1, max_length=60_000)
    plan = plan_adaptive(lengths, COST)
    plan.validate()
    legal = [degree for degree in (1, 2, 4, 8, 16, 32, 64) if degree * 6_400 >= lengths.max() + 128]
    assert COST.plan_ns(plan) == min(COST.plan_ns(plan_static(lengths, COST, degree=d)) for d in legal)


def test_the_degree_follows_the_batch():
    def degree(lengths):
        return plan_adaptive(np.array(lengths), COST).pipelines[0].rounds[0].groups[0].degree

    assert degree([5_000] * 64) == 1
    assert degree([40_000] * 8) == 8
    assert degree([100_000]) in (16, 32, 64)


@pytest.mark.parametrize("sharding", ["full", "hybrid"])
def test_modern_clusters_choose_shape_and_variant(sharding):
    cost = CostModel(Cluster.parse("2x4xH100"), ModelSpec.load("llama3-8b"), None, sharding)
    lengths = sample("commoncrawl", 100, seed=0, max_length=50_000)
    plan = plan_adaptive(lengths, cost)
    plan.validate()
    assert plan.hash == plan_adaptive(lengths, cost).hash and plan.planner == "adaptive"
    assert (peak_memory(plan, cost) <= cost.budget_bytes).all()
