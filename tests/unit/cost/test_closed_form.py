"""Step time of whole plans: lock step inside a shard group, no barrier between shard groups."""

import pytest

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, Sharding, Stage, StageMicroBatch
from seqloom.simulate.memory import peak_memory

VARIANT = MemoryPolicy(Checkpoint.SELECTIVE, Reduce.ROUND)


def build(sharding):
    return CostModel(Cluster.parse("2x4xH200"), ModelSpec.load("qwen3-4b"), sharding=sharding)


def plan_of(cost, documents, rounds):
    """``rounds``: lists of (first rank, degree, documents) with pure Ulysses groups."""
    built = []
    for entries in rounds:
        groups = [
            Group(tuple(range(first, first + degree)), degree, 1, tuple(Span(k, 0, documents[k]) for k in held))
            for first, degree, held in entries
        ]
        built.append(Round((StageMicroBatch(tuple(groups), VARIANT.checkpoint),)))
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, built, VARIANT.reduce)
    limits = cost.limits(VARIANT.reduce)
    return Plan(limits, cost.sharding, VARIANT.reduce, tuple(documents), (pipeline,), "test")


def times(cost, plan):
    return [
        [cost.group_cost(group, VARIANT).total_ns for group in current.groups] for current in plan.pipelines[0].rounds
    ]


DOCUMENTS = [60000, 1000, 30000, 20000, 5000]
ROUNDS = [[(0, 4, [0]), (4, 1, [1])], [(4, 4, [2])], [(0, 2, [3]), (4, 1, [4])]]


def test_full_sharding_is_lock_step():
    cost = build(Sharding.FULL)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    plan.validate()
    expected = sum(max(row) for row in times(cost, plan)) + cost.step_overhead_ns(VARIANT)
    assert cost.plan_ns(plan) == expected


def test_hybrid_nodes_do_not_wait_for_each_other():
    cost = build(Sharding.HYBRID)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    (a, b), (c,), (d, e) = times(cost, plan)
    assert cost.plan_ns(plan) == max(a + d, b + c + e) + cost.step_overhead_ns(VARIANT)


def test_a_wide_group_joins_nodes():
    cost = build(Sharding.HYBRID)
    plan = plan_of(cost, DOCUMENTS, [[(0, 4, [0]), (4, 1, [1])], [(0, 8, [2])], [(0, 2, [3]), (4, 1, [4])]])
    (a, b), (c,), (d, e) = times(cost, plan)
    assert cost.plan_ns(plan) == max(a, b) + c + max(d, e) + cost.step_overhead_ns(VARIANT)


def test_replicated_ranks_run_alone():
    cost = CostModel(Cluster.parse("2x4xH200"), ModelSpec.load("qwen3-1.7b"), sharding="none")
    policy = MemoryPolicy(Checkpoint.SELECTIVE, Reduce.STEP)
    groups = [Group((rank,), 1, 1, (Span(rank, 0, 1000 * (rank + 1)),)) for rank in range(2)]
    rounds = [Round((StageMicroBatch((group,), policy.checkpoint),)) for group in groups]
    pipeline = Pipeline.single(range(8), 28, rounds, policy.reduce)
    plan = Plan(cost.limits(), cost.sharding, policy.reduce, (1000, 2000), (pipeline,), "test")
    slower = cost.group_cost(groups[1], policy).total_ns
    assert cost.plan_ns(plan) == slower + cost.step_overhead_ns(policy)


def test_a_rank_in_two_groups_runs_both():
    cost = build(Sharding.FULL)
    plan = plan_of(cost, [4000, 3000], [[(0, 2, [0]), (1, 1, [1])]])
    ((a, b),) = times(cost, plan)
    once = cost.group_cost(Group((0,), 1, 1, ()), VARIANT).fixed
    assert cost.plan_ns(plan) == a + b - once + cost.step_overhead_ns(VARIANT)


def test_memory_of_a_plan():
    cost = build(Sharding.FULL)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    memory = peak_memory(plan, cost)
    fixed, token = cost.memory.fixed_bytes(VARIANT), cost.memory.token_bytes(VARIANT)
    assert memory.tolist() == [fixed + int(15000 * token)] * 4 + [fixed + int(7500 * token)] * 4
    assert memory.max() <= cost.budget_bytes


def test_stages_have_no_closed_form():
    cost = build(Sharding.FULL)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    only = plan.pipelines[0]
    stages = (Stage(tuple(range(4)), (0, 18)), Stage(tuple(range(4, 8)), (18, 36)))
    staged = Plan(
        plan.limits,
        plan.sharding,
        plan.reduce,
        plan.documents,
        (Pipeline(stages, only.rounds, only.actions),),
        "x",
    )
    with pytest.raises(SeqloomError, match="simulate"):
        cost.plan_ns(staged)
