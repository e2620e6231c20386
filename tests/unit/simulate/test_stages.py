"""Pipelines of several stages: schedules with a closed form, messages, deadlock."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, Profile
from seqloom.cost.profile import LinkRate, Links
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Action, Group, Pipeline, Plan, Reduce, Round, Stage, StageMicroBatch
from seqloom.planners import make_plan
from seqloom.planners.pipeline import plan_pipeline
from seqloom.simulate import DeadlockError, EventKind, predicted_ns, simulate

NODE = 8


def free_messages():
    """Published constants have no figures for links, and no vocabulary projection: stages are alike."""
    return CostModel(Cluster.parse("4x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100", sharding="hybrid")


def with_links():
    return CostModel(Cluster.parse("4x8xH200"), ModelSpec.load("llama3-8b"), sharding="hybrid")


def gpipe(stage, stages, rounds):
    return [("F", r) for r in range(rounds)] + [("B", r) for r in range(rounds)]


def one_f_one_b(stage, stages, rounds):
    warm = min(stages - stage - 1, rounds)
    order = [("F", r) for r in range(warm)]
    for r in range(rounds - warm):
        order += [("F", warm + r), ("B", r)]
    return order + [("B", r) for r in range(rounds - warm, rounds)]


def halves(order):
    """Every B as I and W."""
    for kind, r in order:
        yield from [(kind, r)] if kind == "F" else [("I", r), ("W", r)]


def row(stage, stages, order, reduce):
    """Put receives before, and sends behind, what needs and makes them."""
    text = []
    for kind, r in order:
        forward = kind == "F"
        receives = stage > 0 if forward else stage < stages - 1
        sends = stage < stages - 1 if forward else stage > 0
        way = "F" if forward else "B"
        text += [f"RECV_{way}{r}"] if receives and kind != "W" else []
        text += [f"{kind}{r}"]
        text += [f"SEND_{way}{r}"] if sends and kind != "W" else []
        text += [f"REDUCE{r}"] if kind in "BW" and reduce == Reduce.ROUND else []
    return tuple(Action.parse(f"{stage}{word}") for word in text)


def plan_of(cost, schedule, rounds, *, split=False, degree=NODE, stages=4):
    policy = cost.policies[0]
    layers = cost.model.layers // stages
    parts = [Stage(tuple(range(s * NODE, (s + 1) * NODE)), (s * layers, (s + 1) * layers)) for s in range(stages)]
    made = []
    for r in range(rounds):
        works = []
        for stage in parts:
            group = Group(stage.ranks[:degree], degree, 1, (Span(r, 0, 16000),))
            works.append(StageMicroBatch((group,), policy.checkpoint))
        made.append(Round(tuple(works)))
    orders = [schedule(s, stages, rounds) for s in range(stages)]
    orders = [list(halves(order)) if split else order for order in orders]
    rows = tuple(row(s, stages, order, policy.reduce) for s, order in enumerate(orders))
    pipeline = Pipeline(tuple(parts), tuple(made), rows)
    limits = cost.limits(policy.reduce)
    return Plan(limits, cost.sharding, policy.reduce, (16000,) * rounds, (pipeline,), "test")


def stage_ns(cost, plan, stages=4):
    """Forward and backward of a round on one stage, all stages being alike."""
    total = cost.group_cost(plan.pipelines[0].rounds[0].groups[0], cost.policies[0])
    assert total.head == 0
    return sum(value // stages for name, value in total._asdict().items() if name != "kv_gather")


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b])
@pytest.mark.parametrize("rounds", [1, 2, 4, 7])
@pytest.mark.parametrize("split", [False, True])
def test_equal_rounds_match_the_closed_form(schedule, rounds, split):
    cost = free_messages()
    plan = plan_of(cost, schedule, rounds, split=split)
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
    cost = with_links()
    plan = plan_of(cost, gpipe, 1)
    whole = cost.group_cost(plan.pipelines[0].rounds[0].groups[0], cost.policies[0])
    (entry,) = simulate(plan, cost).rounds
    assert entry.time_ns == pytest.approx(whole.total_ns, rel=0.05)  # lanes are compared stage by stage


def test_messages_take_time_and_run_beside_the_work():
    cost = with_links()
    plan = plan_of(cost, one_f_one_b, 6)
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
    cost = with_links()
    found = simulate(plan_of(cost, one_f_one_b, 2, degree=4), cost)
    assert (found.idle_ns[4:8] == found.step_ns - found.end_ns).all()
    assert (found.busy_ns[4:8] + found.comm_ns[4:8] == found.end_ns).all()


def test_activations_in_flight_count():
    cost = with_links()
    together, in_turn = (simulate(plan_of(cost, s, 8), cost).peak_memory for s in (gpipe, one_f_one_b))
    assert (together[:NODE] > in_turn[:NODE]).all()
    first = [int(in_turn[s * NODE]) for s in range(3)]  # the last stage has the head and its logits
    assert first == sorted(first, reverse=True) and len(set(first)) == 3  # 1F1B: stage s holds 4 - s rounds


def test_deadlock_is_named():
    cost = with_links()
    plan = plan_of(cost, one_f_one_b, 2, stages=2)
    (line,) = plan.pipelines
    first = ["0F0", "0SEND_F0", "0RECV_B0", "0B0", "0F1", "0SEND_F1", "0RECV_B1", "0B1"]
    second = ["1RECV_F0", "1RECV_F1", "1F0", "1F1", "1B0", "1SEND_B0", "1B1", "1SEND_B1"]
    rows = tuple(tuple(map(Action.parse, words)) for words in (first, second))
    stuck = Plan(
        plan.limits,
        plan.sharding,
        plan.reduce,
        plan.documents,
        (Pipeline(line.stages, line.rounds, rows),),
    )
    with pytest.raises(DeadlockError) as caught:
        simulate(stuck, cost)
    names = {name.split()[0] for name in caught.value.cycle}
    assert {"0B0", "1SEND_B0", "0F1", "0SEND_F1"} <= names


@pytest.mark.parametrize(
    ("lost", "message"), [("0SEND_F1", "1RECV_F1.*never sent"), ("1RECV_F1", "0SEND_F1.*never received")]
)
def test_messages_must_match(lost, message):
    cost = with_links()
    plan = plan_of(cost, gpipe, 2, stages=2)
    (line,) = plan.pipelines
    rows = tuple(tuple(action for action in row if str(action) != lost) for row in line.actions)
    broken = Plan(plan.limits, plan.sharding, plan.reduce, plan.documents, (Pipeline(line.stages, line.rounds, rows),))
    with pytest.raises(SeqloomError, match=message):
        simulate(broken, cost)


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
    busy = plan_pipeline(np.full(400, 64), plain, stages=4, schedule="1f1b", pieces=1)
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
