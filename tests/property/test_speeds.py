"""Ranks of unequal speed: one price for planners, plans and the simulator, and a bound below every plan."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel
from seqloom.describe import MODELS, SAMPLERS, Cluster
from seqloom.errors import SeqloomError
from seqloom.planners import make_plan
from seqloom.planners.bounds import lower_bound, policies_bound
from seqloom.planners.compiled import kernels
from seqloom.planners.flex import FlexSearch, placed_rounds, virtual_shard_groups
from seqloom.planners.problem import fitting_problems
from seqloom.simulate import predicted_ns, simulate
from support.overlapping import shortest_overlapping_step
from support.strategies import batches, cost_models, roomy_cost_model
from support.strategies_overlap import overlapping_plans

SPEEDS = (0.5, 0.7, 1.0, 1.4)


@st.composite
def unequal(draw, **limits):
    """Draw a cost model of a small cluster whose ranks, or nodes, differ in speed."""
    cost = draw(cost_models(**limits))
    count = draw(st.sampled_from((cost.ranks, cost.ranks // cost.node_size)))
    return cost.with_speeds(draw(st.lists(st.sampled_from(SPEEDS), min_size=count, max_size=count)))


@settings(max_examples=10)
@given(unequal(max_nodes=3, max_ranks=16), batches(max_documents=40))
def test_every_plan_is_valid_priced_and_above_the_bound(cost, lengths):
    held = cost.holding(lengths)
    if not held.holds(lengths):
        return
    bound = lower_bound(lengths, held)
    for name in ("static", "adaptive", "flex", "zones"):
        plan = make_plan(name, lengths, cost)
        plan.validate()
        assert simulate(plan, cost).step_ns == cost.plan_ns(plan) >= bound > 0


@settings(max_examples=25)
@given(st.data(), unequal(max_ranks=8), batches(max_documents=20))
def test_no_drawn_plan_is_below_the_bound(data, cost, lengths):
    """Groups that share ranks, on any ranks; layouts of their own in linear layers; experts that EP groups divide."""
    lengths = np.minimum(lengths, max(map(cost.capacity, cost.policies)) // cost.pad_multiple * cost.pad_multiple)
    plan = data.draw(overlapping_plans(cost, lengths))
    assert lower_bound(lengths, cost) <= cost.plan_ns(plan) == simulate(plan, cost).step_ns


@settings(max_examples=20)
@given(unequal(max_nodes=2, max_ranks=16), batches(max_documents=30), st.data())
def test_the_price_of_placed_groups_is_that_of_their_plan(cost, lengths, data):
    if not cost.holds(lengths):
        return
    problem = data.draw(st.sampled_from(fitting_problems(lengths, cost)))
    tables = problem.batch_tables
    assert virtual_shard_groups(tables)[0] == cost.shard_group_size
    search = FlexSearch.over(tables, cost.shard_group_size)
    target = int(tables.solo_ns.min(axis=0).max()) * data.draw(st.integers(100, 400)) // 100
    while kernels().decode(search.tables, target, search.params, search.rounds):
        target *= 2
    ns, overhead = search.assign_ranks(), cost.step_overhead_ns(problem.policy)
    placed = placed_rounds(problem, search.rounds, search.ranks)
    if not cost.model.moe_layers:
        assert problem.step_ns(placed) == cost.plan_ns(problem.plan(placed, "flex"))
        assert problem.step_ns(placed) <= ns + overhead  # rounds recompute no more than their memory asks for


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
@pytest.mark.parametrize("seed", range(1))
def test_the_bound_is_below_the_best_of_all_placements(sharding, seed):
    random = np.random.default_rng(seed)
    cost = roomy_cost_model("2x2xH200", "qwen3-0.6b", None, sharding, 1)
    cost = cost.with_speeds(random.choice(SPEEDS, cost.ranks).tolist())
    policy = cost.policies[0]
    lengths = np.minimum(random.lognormal(9, 1.2, 3).astype(np.int64) + 1, 2 * cost.capacity(policy))
    if sharding != "none":  # where no token may move: no plan has a second layout
        cost = roomy_cost_model("1x4xA100-40G", "gpt-7b", "flexsp-a100", sharding, 1)
        cost = cost.with_speeds(random.choice(SPEEDS, cost.ranks).tolist())
        policy = cost.policies[0]
        lengths = np.minimum(lengths, 2 * cost.capacity(policy))
    optimum = shortest_overlapping_step(lengths, cost, policy)
    bound = policies_bound(lengths, cost, [policy]) - cost.step_overhead_ns(policy)
    assert 0.5 * optimum < bound <= optimum
    zones = cost.plan_ns(make_plan("zones", lengths, cost, only=policy)) - cost.step_overhead_ns(policy)
    assert optimum - 1000 <= zones


def test_equal_speeds_change_nothing():
    cost = roomy_cost_model("2x4xH100", "qwen3-0.6b", None, "hybrid", 1)
    assert cost.with_speeds([1.0] * 8) is cost is cost.with_speeds([1, 1]) is cost.with_speeds(None)
    assert not cost.speeds and CostModel(Cluster.parse("8xH100"), MODELS.lookup("qwen3-0.6b"), speeds=(1.0,)).ranks == 8


def test_speeds_are_refused_with_the_way_out():
    cost = roomy_cost_model("2x4xH100", "qwen3-0.6b", None, "hybrid", 1)
    with pytest.raises(SeqloomError, match="3 speeds for 8 ranks; give one for each rank, or one for each node"):
        cost.with_speeds([1, 1, 0.5])
    with pytest.raises(SeqloomError, match=r"rank 4 has a speed of 0; .* give 0.05 to 20"):
        cost.with_speeds([1, 0])


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_planners_give_slow_ranks_less(sharding):
    """One rank of eight is slower by 30 %: at least 80 % of what that costs an unaware plan is won back."""
    lengths = SAMPLERS.lookup("wikipedia").sample(64, seed=0, max_length=32_768)
    even = CostModel(Cluster.parse("8xH200"), MODELS.lookup("qwen3-4b"), sharding=sharding)
    slow = even.with_speeds([1, 1, 1, 0.7, 1, 1, 1, 1])
    unaware = make_plan("auto", lengths, even)
    lost = slow.plan_ns(unaware) - even.plan_ns(unaware)
    won = slow.plan_ns(unaware) - predicted_ns(make_plan("auto", lengths, slow), slow)
    assert lost > 0.2 * even.plan_ns(unaware) and won > 0.8 * lost
