"""The lower bound against the optimum: never above it, and near it."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from brute_force import shortest_step

from seqloom.api import cost_model
from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec, sample
from seqloom.errors import SeqloomError
from seqloom.planners import make_plan
from seqloom.planners.bounds import lower_bound, policies_bound
from seqloom.planners.bounds.prices import price_documents
from seqloom.planners.bounds.step import (
    BatchOptions,
    first_feasible,
    lock_step_bound,
    rounds_needed,
    throughput_bound,
    timeline_bound,
)
from support.strategies import roomy_cost_model

CLUSTERS = ("1x8xA100-40G", "1x4xA100-40G", "1x2xA100-40G")
SHARDINGS = ("full", "hybrid", "none")


def case(seed):
    """Seeded small case: lengths and a cost model with a single policy, so that the oracle sees every plan."""
    random = np.random.default_rng(seed)
    cost = roomy_cost_model(CLUSTERS[seed // 3 % 3], "gpt-7b", "flexsp-a100", SHARDINGS[seed % 3], seed // 9 % 3)
    count = int(random.integers(10, 13))
    room = cost.ranks * cost.capacity(cost.policies[0]) // cost.pad_multiple * cost.pad_multiple
    lengths = random.lognormal(np.log(room / 12), random.uniform(0.4, 1.4), count).astype(np.int64) + 1
    return np.minimum(lengths, room), cost


@cache
def measured(seed):
    """Bound, optimum and flex of a seeded case, ns."""
    lengths, cost = case(seed)
    optimum = shortest_step(lengths, cost, cost.policies[0]) + cost.step_overhead_ns(cost.policies[0])
    return lower_bound(lengths, cost), optimum, cost.plan_ns(make_plan("flex", lengths, cost))


LOOSE = {8: 0.78}
"""Where the bound is known to be below 0.8 of the optimum: memory of one rank for little more than one document."""


@pytest.mark.parametrize("seed", range(20))
def test_bound_optimum_and_flex_stand_in_this_order(seed):
    bound, optimum, flex = measured(seed)
    assert LOOSE.get(seed, 0.8) * optimum < bound <= optimum <= flex <= 1.06 * optimum


@pytest.mark.slow
def test_quality_on_many_small_cases():
    bound, optimum, flex = np.array([measured(seed) for seed in range(250)]).T
    assert (bound <= optimum).all() and (optimum <= flex).all()
    assert (flex / optimum).mean() <= 1.02
    assert (flex / optimum).max() <= 1.06
    assert (bound / optimum).mean() >= 0.93


def test_memory_filled_to_the_brim_is_packed():
    _, optimum, flex = measured(187)  # two GPUs, 98 % full: only a few of the divisions in two fit
    assert flex <= 1.02 * optimum


def batch_options(tokens, count, cost, stream=0):
    prices = [price_documents(tokens.astype(float), cost, policy) for policy in cost.policies]
    return BatchOptions.of(prices, count, cost.ranks, cost.ranks, stream)


@pytest.mark.parametrize("seed", range(6))
def test_equal_documents_count_as_often_as_they_are_there(seed):
    lengths, cost = case(seed)
    repeated = np.repeat(lengths, np.arange(len(lengths)) % 3 + 1)
    apart = batch_options(cost.padded_lengths(repeated), np.ones_like(repeated), cost)
    together = batch_options(*np.unique(cost.padded_lengths(repeated), return_counts=True), cost)
    start = together.longest_ns
    assert start == apart.longest_ns and together.documents == len(repeated)
    assert rounds_needed(together) == rounds_needed(apart)
    for part in (throughput_bound, timeline_bound):
        assert part(together, start) == pytest.approx(part(apart, start), rel=1e-9)
    assert lock_step_bound([together]) == pytest.approx(lock_step_bound([apart]), rel=1e-9)


@pytest.mark.parametrize("seed", range(0, 18, 3))
def test_every_part_of_the_bound_is_one(seed):
    lengths, cost = case(seed)
    optimum = shortest_step(lengths, cost, cost.policies[0])
    options = batch_options(cost.padded_lengths(lengths), np.ones_like(lengths), cost)
    longest = options.longest_ns
    parts = [throughput_bound(options, longest), timeline_bound(options, longest), lock_step_bound([options])]
    assert longest > 0 and all(longest <= part * (1 + 1e-9) and part <= optimum * (1 + 1e-9) for part in parts)
    plan = make_plan("flex", lengths, cost)
    assert 1 <= rounds_needed(options) <= len(plan.pipelines[0].rounds)


def test_one_document_needs_its_own_time():
    _, cost = case(0)
    tables = cost.tables(np.array([9_000]), cost.policies[0])
    fits = tables.degree * tables.capacity >= tables.tokens[0]
    alone = int((tables.cost[:, :, 0] + tables.fixed).max(axis=0)[fits].min())
    assert 0.999 * alone <= lower_bound(np.array([9_000]), cost) <= alone


def test_bisection_finds_the_end_of_the_impossible():
    assert first_feasible(lambda step: False, 7.0) == 7.0
    assert 999 <= first_feasible(lambda step: step < 1_000, 7.0) <= 1_000


@pytest.mark.filterwarnings("error")
def test_an_impossible_batch_is_refused():
    with pytest.raises(SeqloomError, match="--max-length"):
        lower_bound(np.array([10**7]), case(0)[1])


@pytest.mark.filterwarnings("error")
def test_a_way_to_reduce_that_does_not_hold_the_batch_is_left_out():
    cost = roomy_cost_model("1x4xH100", "qwen3-4b", None, "full", 1)
    lengths = np.array([4 * max(cost.capacity(policy) for policy in cost.policies)])
    assert 0 < lower_bound(lengths, cost) <= cost.plan_ns(make_plan("flex", lengths, cost))


@pytest.mark.parametrize("mask", [{"attention_chunks": (8192, 8192, 8192, None) * 8}, {"causal": False}])
def test_it_holds_whatever_tokens_see(mask):
    cost = CostModel(Cluster.parse("1x8xH200"), replace(ModelSpec.load("llama3-8b"), **mask))
    lengths = np.array([100_000, 30_000, 8_000, *[1_000] * 60, *[300] * 100])
    bound = lower_bound(lengths, cost)
    for planner in ("flex", "zones"):
        found = cost.plan_ns(make_plan(planner, lengths, cost))
        assert 0.8 * found < bound <= found


@pytest.mark.parametrize("source", ["wikipedia", "commoncrawl"])
@pytest.mark.parametrize("cluster", ["1x8xH100", "4x8xH100"])
def test_the_bound_is_the_lower_one_of_both_ways_to_reduce(source, cluster):
    cost = cost_model(cluster, "llama3-8b", max_length=65_536)
    lengths = sample(source, 120, seed=2, max_length=65_536)
    ways = {policy.reduce for policy in cost.policies}
    bounds = [policies_bound(lengths, cost, [each for each in cost.policies if each.reduce == way]) for way in ways]
    assert len(bounds) == 2 and lower_bound(lengths, cost) == min(bounds)
