"""The search of flex: its shard groups, its counted budget, its determinism."""

import numpy as np
import pytest

from seqloom.describe import sample
from seqloom.planners.bounds import lower_bound
from seqloom.planners.flex import (
    FlexSearch,
    changed,
    default_evaluations,
    plan_flex,
    reordered,
    replaced,
    shifts,
    start_searches,
    tiles,
    virtual_shard_groups,
    work_bound,
)
from seqloom.planners.loops import NEVER
from seqloom.planners.problem import fitting_problems
from seqloom.simulate.memory import peak_memory
from support.strategies import roomy_cost_model

LENGTHS = sample("commoncrawl", 40, seed=2, max_length=40_000)


def published(sharding="full", cluster="1x8xA100-40G"):
    return roomy_cost_model(cluster, "gpt-7b", "flexsp-a100", sharding, 3)


def problem_of(cost, lengths=LENGTHS):
    return fitting_problems(lengths, cost, cost.policies[0])[0]


def test_which_degrees_tile_an_island():
    assert tiles(4, 8, 8) and tiles(3, 8, 8) and tiles(16, 8, 8)
    assert tiles(2, 4, 8) and not tiles(3, 4, 8)  # blocks of three lie otherwise in the second half of a node
    assert not tiles(6, 4, 8) and tiles(3, 1, 8)


def test_virtual_islands_by_size_of_the_cluster():
    assert virtual_shard_groups(problem_of(published()).batch_tables) == [8]
    assert virtual_shard_groups(problem_of(published("none")).batch_tables) == [1, 2, 4, 8]
    assert virtual_shard_groups(problem_of(published("hybrid", "2x8xA100-40G")).batch_tables) == [8, 16]
    assert virtual_shard_groups(problem_of(published("hybrid", "4x8xA100-40G")).batch_tables) == [8, 32]


def test_a_quick_plan_is_valid_and_no_faster():
    for seed in range(4):
        cost, lengths = published("none"), sample("commoncrawl", 14, seed=seed, max_length=20_000)
        quick, full = (plan_flex(lengths, cost, quick=quick) for quick in (True, False))
        quick.validate()
        assert quick.documents == full.documents and cost.plan_ns(quick) >= cost.plan_ns(full)


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_the_same_seed_gives_the_same_plan(sharding):
    cost = published(sharding, "2x8xA100-40G")
    plans = [plan_flex(LENGTHS, cost, seed=seed) for seed in (3, 3, 4)]
    assert plans[0].hash == plans[1].hash and plans[0].planner == "flex"
    assert min(map(cost.plan_ns, plans)) >= lower_bound(LENGTHS, cost)


@pytest.mark.parametrize("budget", [0, 1, 7, 50])
def test_the_budget_counts_decodings(budget):
    tables = problem_of(published()).batch_tables
    bound = work_bound(tables)
    (search,) = start_searches(tables, bound)
    before, found = search.evaluations, search.best_ns
    assert 0 < before <= 40 and found < NEVER
    search.climb(bound, budget, seed=0)
    assert search.evaluations - before <= budget + 3  # a last bisection may take three more
    assert search.best_ns <= found
    assert (search.evaluations > before) == (budget > 0 and found > bound + bound // 1000)


def test_the_budget_shrinks_with_the_batch():
    few, many = (problem_of(published(), LENGTHS[:n]).batch_tables for n in (2, 40))
    assert 8 <= default_evaluations(many, 8) <= default_evaluations(few, 8) <= 1_000


def test_changes_differ_in_one_respect():
    search = FlexSearch.over(problem_of(published()).batch_tables, 8)
    from itertools import islice
    from random import Random

    random = Random(1)
    for shift in islice(shifts(3), 200):
        other = changed(search.params, np.array([2, 0, 5]), shift, random)
        differs = [
            not np.array_equal(getattr(other, name), getattr(search.params, name))
            for name in ("limit_index", "extra_degrees")
        ]
        differs.append(other.order.tolist() != search.params.order.tolist())
        assert sum(differs) <= 1 and sorted(other.order.tolist()) == list(range(len(LENGTHS)))
        assert other.descending or differs[2] or other.order.tolist() == search.params.order.tolist()


def test_small_changes_leave_the_original_alone():
    from random import Random

    order = np.arange(9)
    assert replaced(order, 3, 7).tolist() == [0, 1, 2, 7, 4, 5, 6, 7, 8]
    assert sorted(reordered(order, Random(0)).tolist()) == order.tolist() == list(range(9))


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_the_work_bound_is_one(sharding):
    cost = published(sharding)
    problem = problem_of(cost)
    assert (
        0
        < work_bound(problem.batch_tables)
        <= cost.plan_ns(plan_flex(LENGTHS, cost)) - cost.step_overhead_ns(problem.policy)
    )


def test_islands_need_not_wait_for_each_other():
    lengths = np.array([30_000] + [4_000] * 30)
    times = {
        s: published(s, "2x8xA100-40G").plan_ns(plan_flex(lengths, published(s, "2x8xA100-40G")))
        for s in ("full", "hybrid")
    }
    assert times["hybrid"] <= times["full"]


def test_tight_memory_mixes_what_rounds_keep():
    from seqloom.cost import CostModel
    from seqloom.describe import Cluster, ModelSpec

    cost = CostModel(Cluster.parse("2x8xH200"), ModelSpec.load("llama3-70b"))
    lengths = sample("wikipedia", 64, seed=0, max_length=100_000)
    mixed = plan_flex(lengths, cost)
    mixed.validate()
    pure = min((plan_flex(lengths, cost, only=policy) for policy in cost.policies), key=cost.plan_ns)
    assert cost.plan_ns(mixed) < 0.97 * cost.plan_ns(pure)
    assert (peak_memory(mixed, cost) <= cost.budget_bytes).all()
