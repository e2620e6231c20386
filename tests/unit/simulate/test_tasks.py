"""Pipelines of several stages: closed forms, messages, waiting, stages that share their ranks, deadlocks."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, Profile
from seqloom.cost.profile import LinkRate, Links
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Action, Group, Pipeline, Plan, Round, Sharding, Stage, StageMicroBatch
from seqloom.planners import make_plan
from seqloom.planners.pipeline import plan_pipeline
from seqloom.simulate import DeadlockError, EventKind, predicted_ns, simulate
from support.tables import completed, rows_with_messages

NODE = 8
NODES = tuple(tuple(range(first, first + NODE)) for first in range(0, 32, NODE))
A, B = NODES[:2]
LOOP, VEE = (A, B, A, B), (A, B, B, A)
INTERLEAVED = (
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
)
ZERO_BUBBLE_V = (
    "0F0 0F1 0F2 3F0 3I0 3F1 3I1 0I0 3W0 3F2 3I2 0I1 3W1 0W0 0I2 0W1 3W2 0W2",
    "1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 2F2 2I1 1I1 1W0 2I2 1I2 2W1 1W1 2W2 1W2",
)


def free_messages(sharding=Sharding.HYBRID, nodes=2):
    """Published constants have none for links, and no vocabulary projection: stages are identical."""
    cluster = Cluster.parse(f"{nodes}x8xA100-40G")
    return CostModel(cluster, ModelSpec.load("gpt-7b"), "flexsp-a100", sharding=sharding)


def with_links(nodes=2):
    return CostModel(Cluster.parse(f"{nodes}x8xH200"), ModelSpec.load("llama3-8b"), sharding="hybrid")


def gpipe(stage, stages, rounds):
    return [("F", r) for r in range(rounds)] + [("B", r) for r in range(rounds)]


def one_f_one_b(stage, stages, rounds):
    warm = min(stages - stage - 1, rounds)
    order = [("F", r) for r in range(warm)]
    for r in range(rounds - warm):
        order += [("F", warm + r), ("B", r)]
    return order + [("B", r) for r in range(rounds - warm, rounds)]


def rows_of(schedule, rounds, stages=4, split=False):
    """The computations of every stage as text; every B as I and W if split."""
    kinds = {"F": "F", "B": "IW" if split else "B"}
    return [
        " ".join(f"{s}{each}{r}" for kind, r in schedule(s, stages, rounds) for each in kinds[kind])
        for s in range(stages)
    ]


def plan_of(cost, stage_ranks, rows, degree=8):
    """One document of 16,000 tokens per round, on the first `degree` ranks of every stage."""
    policy = cost.policies[0]
    layers = cost.model.layers // len(stage_ranks)
    stages = tuple(Stage(ranks, (s * layers, (s + 1) * layers)) for s, ranks in enumerate(stage_ranks))
    count = 1 + max(Action.parse(word).round for word in rows[0].split())
    rounds = []
    for r in range(count):
        groups = [Group(stage.ranks[:degree], degree, 1, (Span(r, 0, 16000),)) for stage in stages]
        rounds.append(Round(tuple(StageMicroBatch((group,), policy.checkpoint) for group in groups)))
    table = completed(stages, rows_with_messages(stages, rows), policy.reduce)
    pipeline = Pipeline(stages, tuple(rounds), table)
    return Plan(cost.limits(policy.reduce), cost.sharding, policy.reduce, (16000,) * count, (pipeline,), "test")


def stage_ns(cost, plan):
    """Forward and backward of a round on one of four equal stages."""
    total = cost.group_cost(plan.pipelines[0].rounds[0].groups[0], cost.policies[0])
    return sum(value // 4 for name, value in total._asdict().items() if name != "kv_gather")


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("rounds", [1, 3, 7])
@pytest.mark.parametrize("split", [False, True])
def test_equal_rounds_match_the_closed_form(schedule, rounds, split):
    cost = free_messages(nodes=4)
    plan = plan_of(cost, NODES, rows_of(schedule, rounds, split=split))
    plan.validate()
    found = simulate(plan, cost)
    time = stage_ns(cost, plan)
    if not split:
        assert found.step_ns == (4 - 1 + rounds) * time
        assert found.idle_share == pytest.approx((4 - 1) / (4 - 1 + rounds))
    else:  # the weight half delays nobody downstream of it: never slower than fused
        assert rounds * time < found.step_ns <= (4 - 1 + rounds) * time
    assert (found.busy_ns + found.comm_ns == rounds * time).all()


def test_stages_add_up_to_the_whole_model():
    cost = with_links(nodes=4)
    plan = plan_of(cost, NODES, rows_of(gpipe, 1))
    whole = cost.group_cost(plan.pipelines[0].rounds[0].groups[0], cost.policies[0])
    (entry,) = simulate(plan, cost).rounds
    assert entry.time_ns == pytest.approx(whole.total_ns, rel=0.05)  # streams are compared stage by stage


def test_messages_take_time_and_run_beside_the_work():
    cost = with_links(nodes=4)
    plan = plan_of(cost, NODES, rows_of(one_f_one_b, 6))
    found = simulate(plan, cost)
    sends = found.events.where(found.events.kind == EventKind.SEND_F)
    size = 2000 * cost.model.hidden * 2
    least = size / cost.cluster.nic.gb_s
    assert ((sends.stop - sends.start) > least).all() and ((sends.stop - sends.start) < 3 * least).all()
    assert set(sends.stage.tolist()) == {0, 1, 2}
    assert (found.busy_ns + found.comm_ns + found.idle_ns == found.step_ns).all()
    assert (found.idle_ns >= 0).all()
    inside = found.events.where(~found.events.is_message)
    exposed = found.comm_ns - np.bincount(inside.rank, weights=inside.comm, minlength=found.ranks)
    own = np.bincount(sends.rank, weights=sends.stop - sends.start, minlength=found.ranks)
    assert (exposed[:NODE] > 0).all() and (exposed[:NODE] < own[:NODE] * 2).all()


def test_ranks_without_tokens_wait():
    cost = with_links(nodes=4)
    found = simulate(plan_of(cost, NODES, rows_of(one_f_one_b, 2), degree=4), cost)
    assert (found.idle_ns[4:8] == found.step_ns - found.end_ns).all()
    assert (found.busy_ns[4:8] + found.comm_ns[4:8] == found.end_ns).all()


def test_activations_in_flight_count():
    cost = with_links(nodes=4)
    together, in_turn = (simulate(plan_of(cost, NODES, rows_of(s, 8)), cost).peak_memory for s in (gpipe, one_f_one_b))
    assert (together[:NODE] > in_turn[:NODE]).all()
    first = [int(in_turn[s * NODE]) for s in range(3)]  # the last stage has the head and its logits
    assert first == sorted(first, reverse=True) and len(set(first)) == 3  # 1F1B: stage s holds 4 - s rounds


def test_deadlock_is_named():
    cost = with_links()
    plan = plan_of(cost, (A, B), rows_of(one_f_one_b, 2, 2))
    (pipeline,) = plan.pipelines
    first = ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1", "0SEND_F1", "0RECV_B1", "0B1"]
    second = ["1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"]
    rows = tuple(tuple(map(Action.parse, words)) for words in (first, second))
    stuck = replace(plan, pipelines=(replace(pipeline, actions=rows),))
    with pytest.raises(DeadlockError) as caught:
        simulate(stuck, cost)
    names = {name.split()[0] for name in caught.value.cycle}
    assert {"0B0", "1SEND_B0", "0F1", "0SEND_F1"} <= names


@pytest.mark.parametrize(
    ("lost", "message"), [("0SEND_F1", "1RECV_F1.*never sent"), ("1RECV_F1", "0SEND_F1.*never received")]
)
def test_messages_must_match(lost, message):
    cost = with_links()
    plan = plan_of(cost, (A, B), rows_of(gpipe, 2, 2))
    (pipeline,) = plan.pipelines
    rows = tuple(tuple(action for action in row if str(action) != lost) for row in pipeline.actions)
    broken = replace(plan, pipelines=(replace(pipeline, actions=rows),))
    with pytest.raises(SeqloomError, match=message):
        simulate(broken, cost)


@pytest.mark.parametrize("sharding", [Sharding.HYBRID, Sharding.FULL])
def test_interleaved_takes_its_closed_form(sharding):
    """p pipeline ranks, v stages each, M rounds: the bubble is (p - 1) / (p - 1 + M v)."""
    cost = free_messages(sharding)
    plan = plan_of(cost, LOOP, INTERLEAVED)
    plan.validate()
    found = simulate(plan, cost)
    time = stage_ns(cost, plan)
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
    assert (inside.start[1:] >= inside.stop[:-1])[same].all()  # one action of a pipeline rank at a time
    assert set(inside.stage[inside.rank == 0].tolist()) == {0, 3, -1}
    assert set(inside.stage[inside.rank == 8].tolist()) == {1, 2, -1}


def times(found, stage, kind):
    """(start, stop) of the only event of this stage and kind on any of its ranks."""
    own = found.events.where((found.events.stage == stage) & (found.events.kind == kind))
    return int(own.start.min()), int(own.stop.max())


def test_a_document_that_changes_ranks_inside_its_pipeline_rank_waits_for_itself():
    cost = CostModel(Cluster.parse("2x8xH200"), ModelSpec.load("qwen2.5-0.5b"), sharding="none")
    plan = plan_of(cost, (A, B, B), ("0F0 0B0", "1F0 2F0 2B0 1B0"), degree=1)
    (pipeline,) = plan.pipelines
    (current,) = pipeline.rounds
    moved = replace(current.by_stage[2], groups=(replace(current.by_stage[2].groups[0], ranks=(9,)),))
    other = replace(pipeline, rounds=(Round((*current.by_stage[:2], moved)),))
    plan = replace(plan, pipelines=(other,))
    plan.validate()
    found = simulate(plan, cost)
    assert times(found, 2, EventKind.F)[0] == times(found, 1, EventKind.F)[1]
    assert times(found, 1, EventKind.B)[0] == times(found, 2, EventKind.B)[1]


def test_activations_of_all_stages_of_a_pipeline_rank_count():
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


def test_shard_groups_of_stages_inside_a_node():
    """Two pipeline ranks in one node: under hybrid sharding each half waits only for itself."""
    cost = with_links()
    halves = (tuple(range(4)), tuple(range(4, 8)))
    plan = plan_of(cost, halves, ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"), degree=4)
    plan.validate()
    assert plan.shard_groups == halves
    events = simulate(plan, cost).events
    first, second = (events.where((events.stage == s) & (events.kind == EventKind.F)) for s in range(2))
    assert first.stop.max() > second.start.min()  # round 1 on one half beside round 0 on the other


def sharing(ratio, split_us=0.0):
    """Ranks of one machine, whose messages take no time."""
    free = LinkRate(1e9, 0.0, 0.0)
    own = {"intra": Links(free, free, free), "solo_time_ratio": ratio, "split_us": split_us, "layer_us": 5_000.0}
    profile = replace(Profile.load("cpu"), **own, step_us=0.0)
    cluster = replace(Cluster.parse("1x4xCPU"), intra=replace(Cluster.parse("1x4xCPU").intra, latency_us=0.0))
    spec = ModelSpec("small", 8, 64, 4, 2, 16, 128, gated=True, vocabulary=256, tied=False)
    return CostModel(cluster, spec, profile, sharding="none")


def rounds_ns(plan, cost):
    found = simulate(plan, cost)
    assert predicted_ns(plan, cost) == found.step_ns
    return found.step_ns - found.end_ns


def test_a_rank_is_faster_while_others_wait():
    """One document through four stages: one rank works at a time, and three quarters of all rank-time are waiting."""
    plain, shared = sharing(1.0), sharing(0.6)
    plan = plan_pipeline(np.array([512]), plain, stages=4, schedule="1f1b", pieces=1)
    assert rounds_ns(plan, shared) == pytest.approx((1 - 0.4 * 3 / 4) * rounds_ns(plan, plain), rel=1e-3)
    busy = plan_pipeline(np.full(100, 64), plain, stages=4, schedule="1f1b", pieces=1)
    assert 0.97 * rounds_ns(busy, plain) < rounds_ns(busy, shared) < rounds_ns(busy, plain)
    single = make_plan("flex", np.full(4, 64), plain)
    assert simulate(single, shared).step_ns == simulate(single, plain).step_ns == shared.plan_ns(single)


def test_a_backward_in_halves_takes_longer_by_what_splitting_costs():
    plain, dear = sharing(1.0), sharing(1.0, split_us=700.0)
    for schedule, more in (("1f1b", 0), ("zb-h1", 2 * 700_000)):  # two layers a stage
        plan = plan_pipeline(np.array([512]), plain, stages=4, schedule=schedule, pieces=1)
        found, before = simulate(plan, dear), simulate(plan, plain)
        assert (found.busy_ns - before.busy_ns == more).all()
        assert found.step_ns - before.step_ns == more  # the last W of the first stage ends the rounds
