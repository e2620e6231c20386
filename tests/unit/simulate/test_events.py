"""NICs and NVLink ports in a simulated step: who uses them, how a route spreads it, when they are the limit."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.plan_cost import round_times
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Layout, Span
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Remap, Round, StageMicroBatch
from seqloom.simulate import simulate
from seqloom.simulate.memory import peak_memory

POLICY = MemoryPolicy(Checkpoint.FULL, Reduce.STEP)


def build(cluster="2x8xA800", sharding="full", model="qwen2.5-0.5b"):
    return CostModel(Cluster.parse(cluster), ModelSpec.load(model), sharding=sharding)


def plan_of(cost, *works):
    documents = {span.document: span.stop for work in works for span in work.spans()}
    rounds = [Round((work,)) for work in works]
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, rounds, POLICY.reduce)
    held = tuple(documents[k] for k in sorted(documents))
    return Plan(cost.limits(POLICY.reduce), cost.sharding, POLICY.reduce, held, (pipeline,), "test")


def ring_over_all(cost, routed):
    group = cost.group(GroupShape(1, cost.ranks, routed=routed), range(cost.ranks), [Span(0, 0, 40_000)])
    return StageMicroBatch((group,), POLICY.checkpoint)


def test_a_route_evens_out_the_nics():
    cost = build(model="gpt-7b")
    direct, routed = (simulate(plan_of(cost, ring_over_all(cost, routed)), cost) for routed in (False, True))
    assert np.count_nonzero(direct.nic_busy_ns) == 2  # the last rank of each node sends, through one NIC of four
    assert (routed.nic_busy_ns > 0).all() and np.ptp(routed.nic_busy_ns) == 0
    assert routed.nic_busy_ns.sum() == pytest.approx(direct.nic_busy_ns.sum(), rel=1e-6)
    busiest, mean = direct.nic_shares
    assert busiest == pytest.approx(4 * mean) and routed.nic_shares[0] == pytest.approx(routed.nic_shares[1])
    assert (routed.link_busy_ns > direct.link_busy_ns).all()
    assert routed.step_ns < direct.step_ns


def test_when_nics_are_in_use():
    cost = build()
    local = StageMicroBatch(
        tuple(cost.group(GroupShape(1, 1), [r], [Span(1 + r, 0, 4000)]) for r in range(4)), POLICY.checkpoint
    )
    plan = plan_of(cost, ring_over_all(cost, True), local)
    found = simulate(plan, cost)
    table = found.nics
    assert set(table.node.tolist()) == {0, 1} and (table.stop > table.start).all()
    first = found.rounds[0].time_ns
    assert table.stop.max() <= first  # the second round stays inside the nodes
    for node in range(2):
        assert table.busy[table.node == node].sum() == pytest.approx(found.nic_busy_ns[node].mean(), abs=2)


def test_groups_that_share_a_nic_take_turns():
    """Two rings leave both nodes through the same NIC: the round is no shorter than that NIC is taken."""
    cost = build("2x4xH200")
    network = replace(cost.profile.network, p2p=replace(cost.profile.network.p2p, efficiency=0.01))
    cost = CostModel(cost.cluster, cost.model, replace(cost.profile, network=network), sharding="full")
    groups = tuple(Group((3, 7), 1, 2, (Span(k, 0, 20_000),)) for k in range(2))
    apart = (groups[0], Group((2, 6), 1, 2, groups[1].spans))
    one, both = (round_times(cost, StageMicroBatch(some, POLICY.checkpoint), POLICY) for some in (groups[:1], groups))
    assert (both.nic_ns == 2 * one.nic_ns).all() and np.count_nonzero(one.nic_ns) == 2
    plan = plan_of(cost, StageMicroBatch(groups, POLICY.checkpoint))
    step = cost.plan_ns(plan)
    assert step == simulate(plan, cost).step_ns >= both.nic_ns.max()
    assert cost.plan_ns(plan_of(cost, StageMicroBatch(apart, POLICY.checkpoint))) < step


@pytest.mark.parametrize("sharding", ["full", "hybrid"])
@pytest.mark.parametrize("remap", list(Remap))
def test_ranks_with_tokens_in_linear_layers_only_take_part(sharding, remap):
    cost = build("2x4xH200", sharding)
    group = cost.group(GroupShape(1, 1), [0], [Span(0, 0, 8000)])
    linear = Layout.of([(rank, 0, 2000 * rank, 2000 * rank + 2000) for rank in range(4)])
    plan = plan_of(cost, StageMicroBatch((group,), POLICY.checkpoint, linear=linear, remap=remap))
    found = simulate(plan, cost)
    assert found.step_ns == cost.plan_ns(plan)
    assert found.busy_ns[:4].min() > found.busy_ns[4:].max() and found.comm_ns[:4].min() > found.comm_ns[4:].max()
    assert (found.busy_ns + found.comm_ns + found.idle_ns == found.step_ns).all()
    assert (found.link_busy_ns[:4] > 0).all() and not found.nic_busy_ns.any() and not len(found.nics)
    memory = peak_memory(plan, cost)
    assert memory[0] > memory[1] == memory[3] > memory[4]
