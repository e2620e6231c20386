"""Step time of plans: lock step inside a shard group, no barrier between them; pieces and stages add up."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.plan_cost import scale_to_layers
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, LayerRange, Pipeline, Plan, Reduce, Round, Sharding, Stage, StageMicroBatch
from seqloom.simulate.memory import peak_memory

POLICY = MemoryPolicy(Checkpoint.SELECTIVE, Reduce.ROUND)


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
        built.append(Round((StageMicroBatch(tuple(groups), POLICY.checkpoint),)))
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, built, POLICY.reduce)
    limits = cost.limits(POLICY.reduce)
    return Plan(limits, cost.sharding, POLICY.reduce, tuple(documents), (pipeline,), "test")


def times(cost, plan):
    return [
        [cost.group_cost(group, POLICY).total_ns for group in current.groups] for current in plan.pipelines[0].rounds
    ]


DOCUMENTS = [60000, 1000, 30000, 20000, 5000]
ROUNDS = [[(0, 4, [0]), (4, 1, [1])], [(4, 4, [2])], [(0, 2, [3]), (4, 1, [4])]]


def test_full_sharding_is_lock_step():
    cost = build(Sharding.FULL)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    plan.validate()
    expected = sum(max(row) for row in times(cost, plan)) + cost.step_overhead_ns(POLICY)
    assert cost.plan_ns(plan) == expected


def test_hybrid_nodes_do_not_wait_for_each_other():
    cost = build(Sharding.HYBRID)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    (a, b), (c,), (d, e) = times(cost, plan)
    assert cost.plan_ns(plan) == max(a + d, b + c + e) + cost.step_overhead_ns(POLICY)


def test_a_wide_group_joins_nodes():
    cost = build(Sharding.HYBRID)
    plan = plan_of(cost, DOCUMENTS, [[(0, 4, [0]), (4, 1, [1])], [(0, 8, [2])], [(0, 2, [3]), (4, 1, [4])]])
    (a, b), (c,), (d, e) = times(cost, plan)
    assert cost.plan_ns(plan) == max(a, b) + c + max(d, e) + cost.step_overhead_ns(POLICY)


def test_replicated_ranks_do_not_wait():
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
    once = cost.group_cost(Group((0,), 1, 1, ()), POLICY).fixed
    assert cost.plan_ns(plan) == a + b - once + cost.step_overhead_ns(POLICY)


def test_memory_of_a_plan():
    cost = build(Sharding.FULL)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    memory = peak_memory(plan, cost)
    fixed, token = cost.memory.fixed_bytes(POLICY), cost.memory.token_bytes(POLICY)
    assert memory.tolist() == [fixed + int(15000 * token)] * 4 + [fixed + int(7500 * token)] * 4
    assert memory.max() <= cost.budget_bytes


def test_stages_have_no_closed_form():
    cost = build(Sharding.FULL)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    only = plan.pipelines[0]
    stages = (Stage(tuple(range(4)), (0, 18)), Stage(tuple(range(4, 8)), (18, 36)))
    staged = replace(plan, pipelines=(replace(only, stages=stages),))
    with pytest.raises(SeqloomError, match="simulate"):
        cost.plan_ns(staged)


LENGTH = 20_000


@cache
def small():
    spec = ModelSpec("small", 9, 1024, 8, 4, 128, 4096, True, 32000, False)
    return CostModel(Cluster.parse("2x4xH100"), spec)


def resident(checkpoint=Checkpoint.NONE):
    return MemoryPolicy(checkpoint, Reduce.STEP, resident=True)


edges = st.lists(st.integers(1, LENGTH - 1), max_size=5, unique=True).map(lambda inner: [0, *sorted(inner), LENGTH])
checkpoints = st.sampled_from([Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE])


@settings(max_examples=30)
@given(edges, st.sampled_from([(1, 1), (4, 1), (2, 2), (1, 4), (2, 4)]), checkpoints)
def test_pieces_add_up_to_their_document_and_to_what_a_ring_sends_again(edges, shape, checkpoint):
    cost, own = small(), resident(checkpoint)
    ranks = tuple(range(shape[0] * shape[1]))

    def parts(*spans):
        return cost.group_costs([Group(ranks, *shape, (span,)) for span in spans], own)

    fixed = np.array(cost.group_cost(Group(ranks, *shape, ()), own))
    whole = parts(Span(0, 0, LENGTH))[0] - fixed
    pieces = parts(*(Span(0, a, b) for a, b in pairwise(edges))) - fixed
    again = pieces.sum(axis=0) - whole
    prefix = sum(edges[1:-1])
    added = {name: again[COST_COLUMNS.index(name)] for name in COST_COLUMNS}
    dearer = {name for name, value in added.items() if value}
    assert dearer <= {"attention", "ring", "steps", "network", "link", "kv_gather"}
    forwards = 1.5 if checkpoint in (Checkpoint.FULL, Checkpoint.STAGE) else 1.0
    mib = prefix * 2 * 4 // shape[0] * 128 * 4 / 2**20
    calls = (len(edges) - 2) * forwards * cost.profile.piece_us
    assert added["attention"] == pytest.approx(9 * (calls + mib * cost.profile.prefix_us) * 1e3, abs=len(edges))
    place = cost.shape_and_traffic(Group(ranks, *shape, ()))
    share = cost.engine.links.kv(place[0], place[1], Checkpoint.FULL if checkpoint == "stage" else checkpoint)
    assert added["ring"] == pytest.approx(prefix * share.time, abs=len(edges))
    assert added["network"] == pytest.approx(prefix * share.network, abs=len(edges))


@cache
def nine_layers():
    model = replace(ModelSpec.load("qwen3-4b"), layers=9, windows=())
    return CostModel(Cluster.parse("1x4xH200"), model)


@given(st.integers(1, 7), st.integers(1, 8))
def test_stages_add_up_to_the_model(first, second):
    cost = nine_layers()
    table = np.random.default_rng(first).integers(0, 10**9, (5, len(COST_COLUMNS)))
    cuts = [0, *sorted({first, second}), 9]
    shares = [LayerRange(a, b, 9) for a, b in pairwise(cuts)]
    total = sum(scale_to_layers(cost, share, table) for share in shares)
    assert ((table - total >= 0) & (table - total < len(shares))).all()
    assert (total[:, COST_COLUMNS.index("head")] == table[:, COST_COLUMNS.index("head")]).all()
    assert all((scale_to_layers(cost, share, table)[:, COST_COLUMNS.index("head")] == 0).all() for share in shares[:-1])


def test_rounds_of_stages_gather_and_reduce_nothing():
    cost = small()
    group = Group((0, 1), 2, 1, (Span(0, 0, 4096),))
    stays, gathered = (cost.group_cost(group, v) for v in (resident(), MemoryPolicy(Checkpoint.NONE, Reduce.ROUND)))
    assert (stays.gather, stays.reduce) == (0, 0) and gathered.gather > 0 and gathered.reduce > 0
    assert (stays.linear, stays.attention, stays.head) == (gathered.linear, gathered.attention, gathered.head)


def test_the_end_of_a_step_grows_with_a_stages_parameters_and_shrinks_with_its_shard_groups():
    cost = small()
    few, many = LayerRange(0, 2, 9), LayerRange(0, 6, 9)
    assert cost.stage_overhead_ns([few], 4, 4)[0] < cost.stage_overhead_ns([many], 4, 4)[0]
    assert cost.stage_overhead_ns([few, LayerRange(6, 9, 9)], 4, 4)[0] > cost.stage_overhead_ns([few], 4, 4)[0]
    sharded, apart = cost.stage_overhead_ns([few], 4, 4), cost.stage_overhead_ns([few], 4, 1)
    assert sharded[0] - sharded[1] < apart[0] - apart[1]  # the optimiser runs on a part
    assert cost.stage_overhead_ns([few], 1, 1)[1] == 0  # nobody to talk to
    additive = CostModel(Cluster.parse("1x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100", max_length=192 * 1024)
    assert additive.stage_overhead_ns([few], 4, 4) == (0, 0)
