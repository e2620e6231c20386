"""Plans of one stage: times, waiting, communication, events."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, StageMicroBatch
from seqloom.planners.registry import PlannerChoice
from seqloom.simulate import EventKind, predicted_ns, simulate
from seqloom.simulate.memory import peak_memory

POLICY = MemoryPolicy(Checkpoint.SELECTIVE, Reduce.ROUND)
DOCUMENTS = [60000, 1000, 30000, 20000, 5000]
ROUNDS = [[(0, 4, [0]), (4, 1, [1])], [(4, 4, [2])], [(0, 2, [3]), (4, 1, [4])]]


def build(sharding="full", profile=None, cluster="2x4xH200", model="qwen3-4b"):
    return CostModel(Cluster.parse(cluster), ModelSpec.load(model), profile, sharding=sharding)


def plan_of(cost, documents, rounds, policy=POLICY):
    """``rounds``: lists of (first rank, degree, documents) with pure Ulysses groups."""
    built = []
    for entries in rounds:
        groups = tuple(
            Group(tuple(range(a, a + d)), d, 1, tuple(Span(k, 0, documents[k]) for k in held)) for a, d, held in entries
        )
        built.append(Round((StageMicroBatch(groups, policy.checkpoint),)))
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, built, policy.reduce)
    limits = cost.limits(policy.reduce)
    return Plan(limits, cost.sharding, policy.reduce, tuple(documents), (pipeline,), "test")


def group_ns(cost, plan, policy=POLICY):
    return [
        [cost.group_cost(group, policy).total_ns for group in current.groups] for current in plan.pipelines[0].rounds
    ]


@pytest.mark.parametrize("planner", ["flex", "pipeline:2"])
def test_a_forward_that_counts_routing_is_added(planner):
    """It is about a third of the rounds, in stages a bit more."""
    model = ModelSpec.load("qwen3-4b")
    plain, counting = (
        CostModel(Cluster.parse("2x8xH200"), replace(model, counts_routing=counts), stages=2)
        for counts in (False, True)
    )
    plan = PlannerChoice(planner).plan(np.array(DOCUMENTS), plain)
    before, after = (simulate(plan, cost) for cost in (plain, counting))
    added = after.step_ns - before.step_ns
    assert 0.2 < added / (before.step_ns - before.end_ns) < 0.45
    assert predicted_ns(plan, counting) == after.step_ns and after.end_ns == before.end_ns + added
    assert np.array_equal(after.busy_ns, before.busy_ns + added)


@pytest.mark.parametrize("sharding", ["full", "hybrid"])
def test_step_is_the_closed_form(sharding):
    cost = build(sharding)
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    found = simulate(plan, cost)
    assert found.step_ns == cost.plan_ns(plan)
    assert found.end_ns == cost.step_overhead_ns(POLICY)
    assert (found.peak_memory == peak_memory(plan, cost)).all()


def test_the_end_of_the_step_counts_as_what_it_is():
    cost, policy = build("hybrid"), MemoryPolicy(Checkpoint.SELECTIVE, Reduce.STEP)
    found = simulate(plan_of(cost, [1000], [[(0, 1, [0])]], policy), cost)
    exchange = round(cost.engine.step_overhead(policy)[1])
    assert 0 < exchange < found.end_ns  # gradients are reduced and summed, then the optimiser steps
    assert (found.comm_ns[1:] == exchange).all() and (found.busy_ns[1:] == found.end_ns - exchange).all()


def test_every_rank_adds_up():
    cost = build("hybrid")
    found = simulate(plan_of(cost, DOCUMENTS, ROUNDS), cost)
    assert (found.busy_ns + found.comm_ns + found.idle_ns == found.step_ns).all()
    assert min(found.busy_ns.min(), found.comm_ns.min(), found.idle_ns.min()) >= 0
    total = found.ranks * found.step_ns
    assert found.idle_share == pytest.approx(found.idle_ns.sum() / total)
    assert found.comm_share == pytest.approx(found.comm_ns.sum() / total)


def test_who_works_when_under_full_sharding():
    cost = build()
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    (a, b), (c,), (d, e) = group_ns(cost, plan)
    found = simulate(plan, cost)
    work = found.step_ns - found.end_ns
    waits = {0: work - a - d, 2: work - a, 4: work - b - c - e, 7: work - c}
    assert {rank: int(found.idle_ns[rank]) for rank in waits} == waits
    second = found.events.where((found.events.round == 1) & (found.events.kind == EventKind.F))
    assert second.rank.tolist() == [4, 5, 6, 7] and set(second.start.tolist()) == {a}


def test_forward_and_backward_fill_a_group_exactly():
    cost = build()
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    events = simulate(plan, cost).events
    for number, row in enumerate(group_ns(cost, plan)):
        for g, expected in enumerate(row):
            mine = events.where((events.round == number) & (events.group == g))
            spent = np.bincount(mine.rank, weights=mine.stop - mine.start)
            assert set(spent[spent > 0].astype(int).tolist()) == {expected}
            assert len(set(mine.degree.tolist())) == 1


def test_rounds_are_summed_up():
    cost = build()
    plan = plan_of(cost, DOCUMENTS, ROUNDS)
    found = simulate(plan, cost)
    times = group_ns(cost, plan)
    assert [entry.time_ns for entry in found.rounds] == [max(row) for row in times]
    assert [entry.held_ns for entry in found.rounds] == [8 * max(row) for row in times]
    first = found.rounds[0]
    assert first.busy_ns + first.comm_ns == 4 * times[0][0] + times[0][1]
    held = sum(entry.held_ns * entry.idle_share for entry in found.rounds)
    assert held == pytest.approx(found.idle_ns.sum())


def test_a_round_holds_only_the_shard_groups_that_it_touches():
    cost = build("hybrid")
    found = simulate(plan_of(cost, DOCUMENTS, ROUNDS), cost)
    assert found.rounds[1].held_ns == 4 * found.rounds[1].time_ns


def test_a_rank_in_two_groups_runs_them_in_turn():
    cost = build()
    plan = plan_of(cost, [4000, 3000], [[(0, 2, [0]), (1, 1, [1])]])
    found = simulate(plan, cost)
    ((a, b),) = group_ns(cost, plan)
    once = cost.group_cost(Group((0,), 1, 1, ()), POLICY).fixed
    assert found.step_ns == a + b - once + found.end_ns == cost.plan_ns(plan)
    mine = found.events.where(found.events.rank == 1)
    assert mine.group.tolist() == [0, 1, 0, 1, -1]  # forward of both, backward of both, end of the step
    assert (mine.start[1:] == mine.stop[:-1]).all()


def test_communication_of_the_additive_profile_is_ulysses():
    cost = build("full", "flexsp-a100", "2x8xA100-40G", "gpt-7b")
    policy = cost.policies[0]
    plan = plan_of(cost, [30000, 4000, 2000], [[(0, 8, [0]), (8, 4, [1])], [(0, 1, [2])]], policy)
    found = simulate(plan, cost)
    groups = [group for current in plan.pipelines[0].rounds for group in current.groups]
    expected = sum(group.degree * cost.group_cost(group, policy).ulysses for group in groups)
    assert found.comm_ns.sum() == expected > 0
    assert found.end_ns == 0 and EventKind.STEP not in found.events.kind


def test_pieces_of_a_document_stay_open():
    cost = build()
    whole = plan_of(cost, [8000], [[(0, 4, [0])], [(0, 4, [0])]])
    groups = [Group((0, 1, 2, 3), 4, 1, (Span(0, a, a + 4000),)) for a in (0, 4000)]
    rounds = [Round((StageMicroBatch((group,), POLICY.checkpoint),)) for group in groups]
    pipeline = Pipeline.single(range(8), cost.model.layers, rounds, POLICY.reduce)
    plan = replace(whole, pipelines=(pipeline,))
    plan.validate()
    found = simulate(plan, cost)
    first = found.events.where(found.events.rank == 0)
    order = [(int(r), EventKind(k).name) for r, k in zip(first.round, first.kind, strict=True)]
    assert order == [(0, "F"), (1, "F"), (1, "B"), (0, "B"), (-1, "STEP")]
    assert found.step_ns == cost.plan_ns(plan)


def test_a_plan_for_another_cluster_is_refused():
    plan = plan_of(build(), DOCUMENTS, ROUNDS)
    with pytest.raises(SeqloomError, match=r"it has 8 ranks, not 16; 4 ranks per node, not 8"):
        simulate(plan, build(cluster="2x8xH200"))
    with pytest.raises(SeqloomError, match="hybrid"):
        simulate(plan, build("hybrid"))


def test_summary():
    cost = build()
    text = repr(simulate(plan_of(cost, DOCUMENTS, ROUNDS), cost))
    assert text.startswith("Simulation(") and "8 ranks, 3 rounds" in text
