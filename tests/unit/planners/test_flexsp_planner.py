"""FlexSP as a whole, on clusters small enough for the solver to be quick."""

import numpy as np
import pytest

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec, sample
from seqloom.planners.published.flexsp import plan_flexsp
from seqloom.planners.uniform import plan_adaptive
from seqloom.simulate.memory import peak_memory

MODEL = ModelSpec.load("gpt-7b")


def published(cluster="1x8xA100-40G", sharding="full", budget=60):
    return CostModel(Cluster.parse(cluster), MODEL, "flexsp-a100", sharding, budget_gib=budget)


def used(plan):
    return {degree for found in degrees(plan) for degree in found}


def degrees(plan):
    return [[group.degree for group in current.groups] for current in plan.pipelines[0].rounds]


def test_a_mix_of_degrees_beats_one_degree():
    cost = published()
    lengths = np.array([40_000, 12_000] + [3_000] * 10 + [800] * 20)
    plan = plan_flexsp(lengths, cost)
    plan.validate()
    assert plan.planner == "flexsp" and plan.hash == plan_flexsp(lengths, cost).hash
    assert len(used(plan)) > 1
    assert all(sum(found) == 8 for found in degrees(plan))  # no rank idles
    assert cost.plan_ns(plan) < cost.plan_ns(plan_adaptive(lengths, cost))


def test_the_released_solver_has_no_single_ranks():
    cost = published()
    lengths = np.full(40, 700)
    assert used(plan_flexsp(lengths, cost)) == {1}
    assert 1 not in used(plan_flexsp(lengths, cost, smallest=2))


def test_the_draw_is_seeded():
    lengths = sample("wikipedia", 60, seed=5, max_length=8_000)
    cost = published()
    few = {seed: plan_flexsp(lengths, cost, buckets=2, counts=1, seed=seed).hash for seed in (0, 1)}
    assert few[0] != few[1] == plan_flexsp(lengths, cost, buckets=2, counts=1, seed=1).hash


@pytest.mark.parametrize("lengths", [[1], [50_000], [7, 7], [80_000, 80_000, 1]])
def test_few_documents(lengths):
    cost = published()
    plan = plan_flexsp(np.array(lengths), cost)
    plan.validate()
    assert (peak_memory(plan, cost) <= cost.budget_bytes).all()


def test_ranks_idle_where_no_groups_use_them_all():
    cost = published("3x8xA100-40G", budget=30)  # no constants for 24 ranks: 16 and 8 at most
    plan = plan_flexsp(np.array([40_000]), cost)
    plan.validate()
    assert degrees(plan) in ([[8]], [[16]])
    assert [sum(found) for found in degrees(plan_flexsp(np.full(30, 900), cost))] == [24]


@pytest.mark.parametrize(("sharding", "budget"), [("hybrid", 60), ("none", 150)])
def test_lock_step_micro_batches_are_valid_under_other_shardings(sharding, budget):
    cost = published("2x8xA100-40G", sharding, budget)
    plan = plan_flexsp(np.array([30_000] + [2_000] * 25), cost)
    plan.validate()
    assert all(sum(found) == 16 for found in degrees(plan))


def test_lanes_shapes_and_variants_of_a_measured_profile():
    cost = CostModel(Cluster.parse("2x4xH100"), ModelSpec.load("llama3-8b"))
    lengths = sample("commoncrawl", 60, seed=2, max_length=60_000)
    plan = plan_flexsp(lengths, cost)
    plan.validate()
    assert (peak_memory(plan, cost) <= cost.budget_bytes).all()


def test_a_wall_limit_may_be_asked_for():
    plan = plan_flexsp(np.array([20_000, 900, 900, 900]), published(), time_limit_s=0.5)
    plan.validate()
