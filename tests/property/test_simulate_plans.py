"""The simulator against the closed form, over random plans of every sharding."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.plan_cost import round_times
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import PlanError
from seqloom.layout import Span
from seqloom.plan import ActionKind, Pipeline, Plan, Round, Sharding, StageMicroBatch
from seqloom.simulate import DeadlockError, simulate
from support.strategies import MIXTURE, plans
from support.strategies_groups import lighter_layers, offloaded_layers

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
WORKING = {F, B, ActionKind.I, W}
SMALL = ModelSpec.load("qwen2.5-0.5b")


@cache
def cost_of(nodes, gpus, sharding, spec):
    return CostModel(Cluster.of(nodes, gpus, "H200"), spec, sharding=sharding)


@cache
def splittable(nodes, gpus, sharding, layers):
    """A model that tensor ranks of any small number can split."""
    spec = ModelSpec("small", layers, 896, 840, 840, 1, 840, gated=True, vocabulary=151_936, tied=True)
    return CostModel(Cluster.of(nodes, gpus, "H200"), spec, sharding=sharding)


@cache
def published(nodes, sharding):
    return CostModel(Cluster.of(nodes, 8, "A100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100", sharding)


@st.composite
def one_stage(draw):
    """Draw a cost model and a plan that it can price: groups anywhere, also sharing ranks."""
    sharding = draw(st.sampled_from(Sharding))
    additive = sharding not in (Sharding.NONE, Sharding.FREE) and draw(st.booleans())
    nodes = draw(st.integers(1, 3))
    spec = draw(st.sampled_from((SMALL, MIXTURE)))
    cost = published(nodes, sharding) if additive else cost_of(nodes, draw(st.integers(1, 4)), sharding, spec)
    cost = cost.with_expert(draw(st.sampled_from(cost.expert_degrees)))
    reduce = draw(st.sampled_from(sorted({policy.reduce for policy in cost.policies})))
    kept = [policy.checkpoint for policy in cost.policies if policy.reduce == reduce]
    documents, rounds = [], []
    for _ in range(draw(st.integers(1, 4))):
        groups = []
        for _ in range(draw(st.integers(1, 4))):
            shape = draw(st.sampled_from([s for s in cost.shapes if s.degree <= cost.ranks]))
            first = draw(st.integers(0, cost.ranks - shape.degree))
            lengths = draw(st.lists(st.integers(1, 50_000), min_size=1, max_size=3))
            spans = tuple(Span(len(documents) + k, 0, length) for k, length in enumerate(lengths))
            documents += lengths
            groups.append(cost.group(shape, range(first, first + shape.degree), spans))
        rounds.append(Round((StageMicroBatch(tuple(groups), draw(st.sampled_from(kept))),)))
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, rounds, reduce, expert=cost.expert)
    limits = cost.limits(reduce)
    return Plan(limits, sharding, reduce, tuple(documents), (pipeline,), "drawn"), cost


@given(one_stage())
def test_one_stage_takes_exactly_the_closed_form(drawn):
    plan, cost = drawn
    found = simulate(plan, cost)
    assert found.step_ns == cost.plan_ns(plan)
    check(found)
    for entry in found.rounds:
        assert 0 <= entry.comm_share <= 1 and -1e-12 <= entry.idle_share <= 1
    groups = [
        (group, MemoryPolicy(current.by_stage[0].checkpoint, plan.reduce))
        for current in plan.pipelines[0].rounds
        for group in current.groups
    ]
    parts = [(group.degree, cost.group_cost(group, policy)) for group, policy in groups]
    works = [current.by_stage[0] for current in plan.pipelines[0].rounds]
    times = [round_times(cost, work, MemoryPolicy(work.checkpoint, plan.reduce)) for work in works]
    working = sum(each.rank_ns.sum() for each in times)
    assert found.busy_ns.sum() + found.comm_ns.sum() == working + cost.ranks * found.end_ns
    if not entry_has_streams(parts):
        slack = sum(degree for degree, _ in parts)  # a rank in several groups: at most 1 ns each
        ends = [cost.engine.step_overhead(policy) for _, policy in groups]
        computing = {round(ns) - round(communication) for ns, communication in ends}
        end = (found.end_ns - max(computing)) * cost.ranks
        exchanged = sum(degree * (entry.ulysses + entry.kv_gather + entry.expert) for degree, entry in parts)
        exchanged += sum(int(each.parts[:, COST_COLUMNS.index("expert_latency")].sum()) for each in times)
        assert abs(found.comm_ns.sum() - end - exchanged) <= slack


@given(one_stage(), st.data())
def test_lighter_layers_take_a_time_between_both_checkpoints(drawn, data):
    plan, cost = drawn
    layers, [line] = cost.model.layers, plan.pipelines
    known = dict(plan.limits.capacity)
    works = [current.by_stage[0] for current in line.rounds]
    able = [work.checkpoint.lighter in known for work in works]
    mixed = [data.draw(lighter_layers(work, layers)) if can else work for work, can in zip(works, able, strict=True)]
    light = [replace(w, checkpoint=w.checkpoint.lighter) if can else w for w, can in zip(works, able, strict=True)]
    plans = [
        replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in each)),))
        for each in (light, mixed, works)
    ]
    times = [simulate(each, cost).step_ns for each in plans]
    assert times == [cost.plan_ns(each) for each in plans]
    assert times[0] <= times[1] <= times[2]


@given(one_stage(), st.data())
def test_offloaded_layers_take_the_closed_form_and_never_less_than_those_that_stay(drawn, data):
    plan, cost = drawn
    [line] = plan.pipelines
    works = [current.by_stage[0] for current in line.rounds]
    away = [data.draw(offloaded_layers(work, cost.model.layers)) for work in works]
    more = [replace(work, offloaded_layers=cost.model.layers) for work in works]
    plans = [
        replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in each)),))
        for each in (works, away, more)
    ]
    found = [simulate(each, cost) for each in plans]
    for each in found:
        check(each)
    times = [each.step_ns for each in found]
    assert times == [cost.plan_ns(each) for each in plans]
    assert times[0] <= times[1] <= times[2]
    assert not found[0].peak_host_memory.any() and (found[1].peak_host_memory <= found[2].peak_host_memory).all()


def entry_has_streams(parts):
    return any(entry.stream_ns[1] or entry.stream_ns[2] for _, entry in parts)


@given(plans())
def test_any_valid_plan_runs_and_adds_up(plan):
    plan, cost = priced(plan)
    found = simulate(plan, cost)
    check(found)
    whole = all(len(line.stages) == 1 for line in plan.pipelines)
    if whole:
        exact = cost.plan_ns(plan)
        assert found.step_ns >= exact
        if plan.sharding == Sharding.FULL or all(map(in_turn, plan.pipelines)):
            assert found.step_ns == exact


@given(plans(), st.data())
def test_a_table_that_passes_the_rules_ends_and_one_that_does_not_is_stuck(plan, data):
    """Move one action of one row. Under full sharding a pipeline rank is one shard group: rule and simulator agree."""
    line = data.draw(st.sampled_from(plan.pipelines))
    rows = [list(row) for row in line.actions]
    row = data.draw(st.sampled_from(rows))
    action = row.pop(data.draw(st.integers(0, len(row) - 1))) if row else None
    if action is not None:
        row.insert(data.draw(st.integers(0, len(row))), action)
    other = replace(line, actions=tuple(map(tuple, rows)))
    lines = tuple(other if each is line else each for each in plan.pipelines)
    moved = replace(plan, sharding=Sharding.FULL, pipelines=lines)
    try:
        moved.validate()
    except PlanError as error:
        if error.rule == "deadlock":
            with pytest.raises(DeadlockError):
                simulate(*priced(moved))
    else:
        simulate(*priced(moved))


def priced(plan):
    """The same plan under a cost model of its cluster, with a checkpoint and reduction that it knows."""
    own = plan.limits
    # Cost models refuse others: TP groups of one degree fill the cluster.
    assume(all(own.ranks % stage.tensor == 0 for line in plan.pipelines for stage in line.stages))
    layers = plan.pipelines[0].stages[-1].layers[1]
    cost = splittable(own.ranks // own.node_size, own.node_size, plan.sharding, layers)
    policy = cost.policies[-1]
    lines = []
    for line in plan.pipelines:
        rounds = tuple(
            Round(tuple(replace(work, checkpoint=policy.checkpoint) for work in current.by_stage))
            for current in line.rounds
        )
        lines.append(replace(line, rounds=rounds))
    limits = replace(own, heads=cost.model.heads)
    return replace(plan, limits=limits, reduce=policy.reduce, pipelines=tuple(lines)), cost


def in_turn(line):
    """Whether every round's backward ends before the next round's forward begins."""
    (row,) = line.actions
    rounds = [action.round for action in row if action.kind in WORKING]
    return rounds == sorted(rounds)


def check(found):
    """Every rank's time adds up, and what follows each other does not overlap."""
    assert (found.busy_ns + found.comm_ns + found.idle_ns == found.step_ns).all()
    assert min(found.busy_ns.min(), found.comm_ns.min(), found.idle_ns.min()) >= 0
    events = found.events.where(~found.events.is_message)
    same = events.rank[1:] == events.rank[:-1]
    assert (events.start[1:] >= events.stop[:-1])[same].all()
    assert (found.events.stop > found.events.start).all() and found.events.stop.max() <= found.step_ns
    assert (found.events.comm <= found.events.stop - found.events.start).all()
    assert len(found.peak_memory) == found.ranks and np.issubdtype(found.peak_memory.dtype, np.integer)
