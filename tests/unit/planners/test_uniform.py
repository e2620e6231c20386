"""Planners static and adaptive: one degree for a run, one per batch."""

import numpy as np
import pytest

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec, sample
from seqloom.errors import SeqloomError
from seqloom.planners.packing import best_fit_decreasing
from seqloom.planners.problem import fitting_problems
from seqloom.planners.recompute import with_layer_choices
from seqloom.planners.uniform import (
    adaptive_and_static,
    fastest_static_degree,
    least_ns_of_degrees,
    plan_adaptive,
    plan_static,
    rounds_in_order,
    uniform_answers,
)
from seqloom.simulate.memory import peak_memory

CLUSTER, MODEL = Cluster.parse("8x8xA100-40G"), ModelSpec.load("gpt-7b")
LENGTHS = sample("wikipedia", 200, seed=3, max_length=100_000)


def published(sharding="full", **options):
    return CostModel(CLUSTER, MODEL, "flexsp-a100", sharding, **options)


def degrees_of(plan):
    return {group.degree for line in plan.pipelines for current in line.rounds for group in current.groups}


@pytest.mark.parametrize(("sharding", "budget"), [("full", None), ("hybrid", None), ("none", 150)])
def test_price_of_rounds_is_the_plan_s(sharding, budget):
    cost = published(sharding, budget_gib=budget)
    problem = fitting_problems(LENGTHS, cost, cost.policies[0])[0]
    for answer in uniform_answers([problem], problem.tables.degree.tolist()):
        plan = problem.plan(answer.rounds, "test")
        plan.validate()
        assert answer.ns == problem.step_ns(answer.rounds) == cost.plan_ns(plan)


@pytest.mark.parametrize("sharding", ["full", "hybrid"])
def test_price_follows_the_checkpoint_that_each_round_gets(sharding):
    cost = CostModel(Cluster.parse("2x4xH100"), ModelSpec.load("llama3-8b"), None, sharding)
    roomy = max(fitting_problems(LENGTHS, cost), key=lambda problem: problem.tables.capacity)
    upgraded = set()
    for shape in range(len(roomy.tables.shapes)):
        rounds = rounds_in_order(roomy, best_fit_decreasing(roomy.tables.tokens, int(roomy.tables.tokens.max())), shape)
        if int(roomy.tables.tokens.max()) <= roomy.tables.degree[shape] * roomy.tables.capacity:
            plan = roomy.plan(rounds, "test")
            assert roomy.step_ns(rounds) == cost.plan_ns(plan)
            upgraded |= {current.by_stage[0].checkpoint for current in plan.pipelines[0].rounds}
    assert upgraded - {roomy.policy.checkpoint}


def test_degree_is_the_fastest_that_holds_the_longest_allowed():
    cost = published()
    short = np.full(64, 5_000)
    assert degrees_of(plan_static(short, cost)) == {1}
    assert degrees_of(plan_static(short, cost, longest=100_000)) == {16}
    assert degrees_of(plan_static(short, cost, degree=32)) == {32}
    one, all_ = plan_static(LENGTHS, cost, degree=64), plan_static(LENGTHS, cost)
    assert cost.plan_ns(all_) <= cost.plan_ns(one)


def test_one_degree_for_a_run_holds_every_batch():
    cost = published()
    short, long = np.full(64, 5_000), np.array([150_000, 10])
    assert fastest_static_degree([short], cost, 1) == 1
    assert fastest_static_degree([short, long, short], cost, 1) in (32, 64)
    assert fastest_static_degree([short], cost, 150_000) in (32, 64)
    with pytest.raises(SeqloomError, match="at least one"):
        fastest_static_degree([], cost, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"degree": 5}, "choose one of 16, 32, 64"),
        ({"degree": 1}, "choose one of"),
        ({"longest": 10**7}, "no group holds"),
    ],
)
def test_refusals_name_the_way_out(options, message):
    with pytest.raises(SeqloomError, match=message):
        plan_static(np.array([90_000]), published(), **options)


def test_a_batch_that_fits_nowhere_is_refused():
    with pytest.raises(SeqloomError, match="--max-length"):
        plan_static(np.array([10**7]), published())


def test_bins_hold_nine_tenths_of_a_group():
    cost = published()
    problem = fitting_problems(np.full(2 * 64, 3_200), cost, cost.policies[0])[0]
    (answer,) = uniform_answers([problem], [1])  # two fill 6400 of 6436 tokens, above nine tenths
    assert {len(placement.documents) for placements in answer.rounds for placement in placements} == {1}
    assert [len(placements) for placements in answer.rounds] == [64, 64]


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


@pytest.mark.parametrize("sharding", ["full", "hybrid"])
@pytest.mark.parametrize("source", ["wikipedia", "commoncrawl"])
def test_no_plan_of_a_degree_is_below_what_its_work_takes(sharding, source):
    cost = CostModel(Cluster.parse("2x4xH100"), ModelSpec.load("qwen3-0.6b"), None, sharding)
    lengths = sample(source, 150, seed=5, max_length=60_000)
    least, problems = least_ns_of_degrees(lengths, cost), fitting_problems(lengths, cost)
    for answer in uniform_answers(problems, sorted(least)):
        plan = with_layer_choices(answer.plan("test"), cost)
        assert least[answer.degree] <= cost.plan_ns(plan) <= answer.ns
    fastest = plan_adaptive(lengths, cost)
    assert adaptive_and_static(lengths, cost, cost.plan_ns(fastest))[0] == fastest
    assert adaptive_and_static(lengths, cost, min(least.values()) - 1) == []
