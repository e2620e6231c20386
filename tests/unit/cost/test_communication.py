"""Routes that the cost model gives to groups: proxies, slices, and which shapes are worth having."""

from dataclasses import replace

import pytest

from seqloom.cost import CostModel, GroupShape
from seqloom.cost.communication import MessageCounts, best_slices, direct_flow, nic_proxies, routed_flow
from seqloom.cost.shapes import with_methods
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Route, Span
from seqloom.plan import Method

RING, GATHER = Method.RING, Method.GATHER
PAIRED = (0, 0, 1, 1, 2, 2, 3, 3)


def build(cluster):
    return CostModel(Cluster.parse(cluster), ModelSpec.load("qwen2.5-0.5b"))


def test_proxies_stand_near_every_nic_of_every_node():
    assert nic_proxies(range(16), PAIRED) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert nic_proxies((6, 7, 8, 9), PAIRED) == (0, 2, 4, 6, 8, 10, 12, 14)
    assert nic_proxies((3, 5, 11, 13), PAIRED) == (0, 3, 5, 6, 8, 11, 13, 14)  # members come first
    assert nic_proxies((1, 3), (0, 0)) == (1, 3)


def test_what_is_not_routed():
    paired = build("2x8xA800")
    assert paired.route(GroupShape(1, 16), range(16)) is None
    assert paired.route(GroupShape(1, 8, routed=True), range(8)) is None  # stays in its node
    assert build("2x2xA800").route(GroupShape(1, 4, routed=True), range(4)) is None  # one NIC
    assert build("2x1xH200").route(GroupShape(1, 2, routed=True), range(2)) is None  # one GPU
    route = paired.route(GroupShape(1, 16, routed=True), range(16))
    assert isinstance(route, Route) and len(route.proxies) == 8 and route.slices >= 1
    group = paired.group(GroupShape(2, 8, GATHER, True), range(16), [Span(0, 0, 999)])
    assert (group.ulysses, group.ring, group.method, group.spans) == (2, 8, GATHER, (Span(0, 0, 999),))
    assert paired.shape_and_traffic(group)[0] == GroupShape(2, 8, GATHER, True)


def test_shapes_have_every_method_that_makes_sense():
    inside, across, whole = GroupShape(2, 2), GroupShape(2, 8), GroupShape(8, 1)
    assert with_methods([inside], 8, 4) == (inside, GroupShape(2, 2, GATHER))
    assert with_methods([whole], 8, 4) == (whole,)
    ways = (across, GroupShape(2, 8, GATHER), GroupShape(2, 8, RING, True), GroupShape(2, 8, GATHER, True))
    assert with_methods([across], 8, 4) == ways
    assert with_methods([across], 8, 1) == ways[:2]


def test_a_message_of_one_rank_by_hand():
    """One message, four proxies, NVLink 1 ns and NIC 8 ns: dispatch and combine 3/4 each, crossing 2."""
    one = MessageCounts(0, 1, 1, 1)
    assert direct_flow(one, 1.0, 8.0).time == 8.0
    assert routed_flow(one, one, 4, 1, 1.0, 8.0) == (0.75 + 2 + 0.75, 2, 1)
    # 4 slices: dispatch; dispatch and cross; all three twice; cross and combine; combine
    assert routed_flow(one, one, 4, 4, 1.0, 8.0).time == pytest.approx((0.75 + 2 + 2 * 2 + 2 + 0.75) / 4)
    near = one._replace(intra=1)  # a neighbour in the node: hidden behind what crosses
    assert routed_flow(near, near, 4, 4, 1.0, 8.0).time == pytest.approx((0.75 + 2 + 2 * 2 + 2 + 0.75) / 4)
    near = one._replace(intra=2)  # two: longer than what crosses
    assert routed_flow(near, near, 4, 4, 1.0, 8.0).time == pytest.approx((0.75 + 2.75 + 2 * 3 + 2.75 + 0.75) / 4)


def test_what_a_node_wants_twice_crosses_once():
    crossing, wanted = MessageCounts(inter=1, node_out=2), MessageCounts(inter=2, node_out=4)
    assert routed_flow(crossing, wanted, 2, 1, 0.0, 1.0).network == 1
    assert routed_flow(wanted, wanted, 2, 1, 0.0, 1.0).network == 2


def test_slices_trade_filling_for_latencies():
    assert best_slices(lambda m: 100 / m + 4 * m) == 5
    assert best_slices(lambda m: 1 / m + 4 * m) == 1
    assert best_slices(lambda m: 5 + 1e6 * (m < 2)) == 2  # no gain from a third


def test_slices_and_proxies_of_a_group_are_what_it_costs():
    cost = build("2x8xA800")
    group = cost.group(GroupShape(1, 16, routed=True), range(16), [Span(0, 0, 100_000)])
    policy = cost.policies[0]
    price = cost.group_cost(group, policy).ring
    assert price < cost.group_cost(replace(group, route=None), policy).ring
    assert price != cost.group_cost(replace(group, route=replace(group.route, slices=1)), policy).ring
