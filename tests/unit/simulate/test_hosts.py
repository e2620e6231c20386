"""Stages that share their ranks: interleaved and V-shaped tables in time, memory and deadlock."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Span
from seqloom.plan import Action, Group, Pipeline, Plan, Round, Sharding, Stage, StageMicroBatch
from seqloom.simulate import DeadlockError, EventKind, simulate
from support.tables import completed, rows_with_messages

A, B = tuple(range(8)), tuple(range(8, 16))
LOOP, VEE = (A, B, A, B), (A, B, B, A)
INTERLEAVED = (
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
)
ZERO_BUBBLE_V = (
    "0F0 0F1 0F2 3F0 3I0 3F1 3I1 0I0 3W0 3F2 3I2 0I1 3W1 0W0 0I2 0W1 3W2 0W2",
    "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2F2 2I1 1I1 1W0 2I2 1I2 2W1 1W1 2W2 1W2",
)


def free_messages(sharding=Sharding.HYBRID):
    """Published constants have no figures for links, and no vocabulary projection: stages are alike."""
    return CostModel(Cluster.parse("2x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100", sharding=sharding)


def with_links():
    return CostModel(Cluster.parse("2x8xH200"), ModelSpec.load("llama3-8b"), sharding="hybrid")


def plan_of(cost, hosts, rows, degree=8):
    """One document of 16,000 tokens per round, on the first `degree` ranks of every stage."""
    policy = cost.policies[0]
    layers = cost.model.layers // len(hosts)
    stages = tuple(Stage(ranks, (s * layers, (s + 1) * layers)) for s, ranks in enumerate(hosts))
    count = 1 + max(Action.parse(word).round for word in rows[0].split())
    rounds = []
    for r in range(count):
        groups = [Group(stage.ranks[:degree], degree, 1, (Span(r, 0, 16000),)) for stage in stages]
        rounds.append(Round(tuple(StageMicroBatch((group,), policy.checkpoint) for group in groups)))
    table = completed(stages, rows_with_messages(stages, rows), policy.reduce)
    line = Pipeline(stages, tuple(rounds), table)
    return Plan(cost.limits(policy.reduce), cost.sharding, policy.reduce, (16000,) * count, (line,), "hand")


def chunk_ns(cost, plan):
    """Forward and backward of a round on one of four equal stages."""
    total = cost.group_cost(plan.pipelines[0].rounds[0].groups[0], cost.policies[0])
    return sum(value // 4 for name, value in total._asdict().items() if name != "kv_gather")


@pytest.mark.parametrize("sharding", [Sharding.HYBRID, Sharding.FULL])
def test_interleaved_takes_its_closed_form(sharding):
    """p hosts, v stages each, M rounds: the bubble is (p - 1) / (p - 1 + M v)."""
    cost = free_messages(sharding)
    plan = plan_of(cost, LOOP, INTERLEAVED)
    plan.validate()
    found = simulate(plan, cost)
    time = chunk_ns(cost, plan)
    assert found.step_ns == (2 - 1 + 4 * 2) * time
    assert found.idle_share == pytest.approx(1 / 9)


def test_a_v_runs_and_turns_round_without_a_message():
    cost = with_links()
    plan = plan_of(cost, VEE, ZERO_BUBBLE_V)
    plan.validate()
    found = simulate(plan, cost)
    sends = found.events.where(found.events.kind == EventKind.SEND_F)
    assert set(zip(sends.stage.tolist(), (sends.rank // 8).tolist(), strict=True)) == {(0, 0), (2, 1)}
    assert (found.busy_ns + found.comm_ns + found.idle_ns == found.step_ns).all()
    inside = found.events.where(~found.events.is_message)
    same = inside.rank[1:] == inside.rank[:-1]
    assert (inside.start[1:] >= inside.stop[:-1])[same].all()  # one action of a host at a time
    assert set(inside.stage[inside.rank == 0].tolist()) == {0, 3, -1}
    assert set(inside.stage[inside.rank == 8].tolist()) == {1, 2, -1}


def times(found, stage, kind):
    """(start, stop) of the only event of this stage and kind on any of its ranks."""
    own = found.events.where((found.events.stage == stage) & (found.events.kind == kind))
    return int(own.start.min()), int(own.stop.max())


def test_a_document_that_changes_ranks_inside_its_host_waits_for_itself():
    cost = CostModel(Cluster.parse("2x8xH200"), ModelSpec.load("qwen2.5-0.5b"), sharding="none")
    plan = plan_of(cost, (A, B, B), ("0F0 0B0", "1F0 2F0 2B0 1B0"), degree=1)
    (line,) = plan.pipelines
    (current,) = line.rounds
    moved = replace(current.by_stage[2], groups=(replace(current.by_stage[2].groups[0], ranks=(9,)),))
    other = replace(line, rounds=(Round((*current.by_stage[:2], moved)),))
    plan = replace(plan, pipelines=(other,))
    plan.validate()
    found = simulate(plan, cost)
    assert times(found, 2, EventKind.F)[0] == times(found, 1, EventKind.F)[1]
    assert times(found, 1, EventKind.B)[0] == times(found, 2, EventKind.B)[1]


def test_activations_of_all_stages_of_a_host_count():
    cost = with_links()
    apart = plan_of(cost, (A, B), ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"))
    looped = plan_of(cost, LOOP, ("0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1"))
    one, two = (simulate(plan, cost).peak_memory for plan in (apart, looped))
    assert np.allclose(one[:8], two[:8])  # half the layers for both rounds, in one stage or in two
    assert (two[8:] > one[8:]).all()


@pytest.mark.parametrize(
    ("rows", "circle"),
    [
        (("3F0 0F0 3B0 0B0", "1F0 2F0 2B0 1B0"), {"3F0", "0F0", "0SEND_F0", "1F0", "2F0", "2SEND_F0"}),
        (("0F0 3F0 3B0 0B0", "2F0 1F0 2B0 1B0"), {"1F0", "2F0"}),
        (("0F0 3F0 3B0 0B0", "1F0 2F0 1B0 2B0"), {"1B0", "2B0"}),
    ],
)
def test_a_wrong_order_is_a_deadlock_and_its_circle_is_named(rows, circle):
    cost = with_links()
    with pytest.raises(DeadlockError) as caught:
        simulate(plan_of(cost, VEE, rows), cost)
    assert {name.split()[0] for name in caught.value.cycle} == circle


def test_islands_of_stages_inside_a_node():
    """Two hosts in one node: under hybrid sharding each half waits only for itself."""
    cost = with_links()
    halves = (tuple(range(4)), tuple(range(4, 8)))
    plan = plan_of(cost, halves, ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), degree=4)
    plan.validate()
    assert plan.shard_groups == halves
    events = simulate(plan, cost).events
    first, second = (events.where((events.stage == s) & (events.kind == EventKind.F)) for s in range(2))
    assert first.stop.max() > second.start.min()  # round 1 on one half beside round 0 on the other
