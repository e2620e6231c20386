"""Rounds in which ranks are in several groups: rank composition, NICs and links, routes, remapping."""

import math
from collections import defaultdict
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.communication import Communication, group_traffic, remap_exchanges
from seqloom.cost.plan_cost import round_times
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Layout, Span
from seqloom.plan import Checkpoint, Method, Reduce, Remap, StageMicroBatch

FULL = MemoryPolicy(Checkpoint.FULL, Reduce.STEP)
MODELS = ("llama3-8b", "qwen3-30b-a3b")


@cache
def cost_of(spelling, model="llama3-8b"):
    return CostModel(Cluster.parse(spelling), ModelSpec.load(model), sharding="full", budget_gib=1000)


def part(times, name):
    """int64[ranks] ns of one part of the cost breakdown."""
    return times.parts[:, COST_COLUMNS.index(name)]


@st.composite
def rounds(draw):
    """Draw a cost model and a round: groups of any shape anywhere, sharing ranks, some routed."""
    cost = cost_of(
        draw(st.sampled_from(["2x4xH200", "3x2xA800", "2x8xA800", "2x1xH200"])), draw(st.sampled_from(MODELS))
    )
    cost = cost.with_expert(draw(st.sampled_from(cost.expert_degrees)))
    groups, documents = [], 0
    for _ in range(draw(st.integers(1, 6))):
        shape = draw(st.sampled_from(cost.engine.shapes))
        first = draw(st.integers(0, cost.ranks - shape.degree))
        lengths = draw(st.lists(st.integers(1, 60_000), min_size=1, max_size=3))
        spans = [Span(documents + k, 0, length) for k, length in enumerate(lengths)]
        documents += len(lengths)
        groups.append(cost.group(shape, range(first, first + shape.degree), spans))
    policy = draw(st.sampled_from(cost.policies))
    return cost, StageMicroBatch(tuple(groups), policy.checkpoint), policy


def composed(cost, work, policy):
    """The formula, rank by rank, in plain Python."""
    own = defaultdict(list)
    for group in work.groups:
        parts = cost.group_cost(group, policy)
        for rank in group.ranks:
            own[rank].append((group, parts))
    times, size = [0] * cost.ranks, cost.expert
    for rank, entries in own.items():
        peers = [own.get(peer, []) for peer in range(rank // size * size, rank // size * size + size)]
        routed, expert, far = (served(peers, own[rank], name, cost) for name in ("routed", "expert", "expert_network"))
        lane0 = sum(p.linear + p.head + p.attention + p.steps + p.ulysses + p.kv_gather for _, p in entries)
        lane0 += max(routed, routed + read_ns(cost, routed, policy)) + expert
        exposed = sum(max(0, p.ring - p.attention - p.steps) for _, p in entries)
        filler = sum(p.attention for group, p in entries if len(group.ranks) == 1)
        once = max(p.fixed for _, p in entries) + max(p.expert_latency for _, p in entries)
        network = sum(p.network for _, p in entries) + far
        behind = max(p.gather for _, p in entries) + max(p.reduce for _, p in entries) + network
        times[rank] = max(once + lane0 + max(0, exposed - filler), behind)
    return times


def served(peers, own, name, cost):
    """ns of the experts of a rank: the mean of its EP group, or what it sends itself; `peers` has itself."""
    every = [sum(getattr(parts, name) for _, parts in entries) for entries in peers]
    if len(peers) == 1:
        return every[0]
    sent = 0 if name == "routed" else sum(getattr(parts, name) for _, parts in own) / cost.profile.expert_imbalance
    return max(math.ceil(sent), -(-sum(every) // len(every)))


def read_ns(cost, routed, policy):
    """ns by which reading weights takes longer than the products, for experts that compute so long."""
    model, compute = cost.model, cost.engine.compute
    if not routed:
        return 0
    passes = 4 if policy.checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL) else 3
    layers, imbalance = len(model.moe_layers), cost.profile.expert_imbalance if cost.expert > 1 else 1
    met = round(imbalance * layers * model.active_experts * 3 * model.hidden * model.expert_ffn)
    products = passes * 2 * met / compute.matmul_tflops / 1e3
    width = 3 * math.ceil(imbalance * model.active_experts * model.expert_ffn)
    moves = passes * 2 * layers * (width + 2 * math.ceil(imbalance * 2 * model.active_experts * model.hidden))
    tokens = routed / (products + moves / compute.memory_gb_s)
    experts = layers * model.experts / cost.expert
    one = passes * 2 * 3 * model.hidden * model.expert_ffn / compute.memory_gb_s
    chosen = tokens * met / (3 * model.hidden * model.expert_ffn)
    return round(max(0, min(chosen, experts) * one - products * tokens))


@given(rounds())
def test_ranks_compose_their_groups(drawn):
    cost, work, policy = drawn
    times = round_times(cost, work, policy)
    assert times.rank_ns.tolist() == composed(cost, work, policy)
    sums = np.zeros(cost.ranks, dtype=np.int64)
    np.add.at(sums, times.member_rank, times.member_ns)
    assert (sums == times.rank_ns).all() and (times.member_ns >= 0).all()
    alone = round_times(cost, replace(work, groups=work.groups[:1]), policy)
    total = cost.group_cost(work.groups[0], policy).total_ns
    if cost.model.experts:  # those of a rank may wait for weights, those of an EP group have work for each other
        total = max(composed(cost, replace(work, groups=work.groups[:1]), policy))
    else:
        assert (alone.rank_ns[list(work.groups[0].ranks)] == total).all()
    assert alone.nic_ns.max() <= total and alone.link_ns.max() <= total  # occupancy never binds one group
    assert alone.busy_ns[list(work.groups[0].ranks)].max() == total


@given(rounds())
def test_cards_carry_all_bytes_that_leave(drawn):
    """Occupancy x bandwidth over all nics = bytes counted message by message, within rounding."""
    cost, work, policy = drawn
    cluster, links = cost.cluster, cost.engine.links
    expected = 0.0
    for group in work.groups:
        tokens = group.tokens
        shape = GroupShape(group.ulysses, group.ring, group.method)
        node = [rank // cluster.gpus_per_node for rank in group.ranks]
        u, r = group.ulysses, group.ring
        pairs = [(i, i - i % u + k) for i in range(u * r) for k in range(u)]
        far = sum(node[i] != node[k] for i, k in pairs)
        message = links.ulysses_bytes(shape, work.checkpoint) / u * tokens
        expected += far * message / rate(cost, "all_to_all") if u > 1 else 0.0
        expected += shared_ns(cost, group, node, shape, work.checkpoint)
    expected += dispatched_ns(cost, work)
    found = int(round_times(cost, work, policy).nic_ns.sum())
    rounding = sum(len(group.ranks) * (len(group.spans) + 1) for group in work.groups) * 8 + cost.ranks * cost.expert
    assert found == pytest.approx(expected, rel=1e-6, abs=rounding)


def shared_ns(cost, group, node, shape, checkpoint):
    """ns of keys and values on nics, all nics together."""
    u, r, links = group.ulysses, group.ring, cost.engine.links
    if r == 1:
        return 0.0
    if group.method == Method.RING:
        far = sum(node[i] != node[(i + u) % (u * r)] for i in range(u * r))
        return far * links.ring_bytes(shape, checkpoint) * group.tokens / rate(cost, "p2p")
    held = links.model.layers * links._kv_values(shape) / r * group.tokens
    peers = [[node[k] for k in range(i % u, u * r, u) if node[k] != node[i]] for i in range(u * r)]
    passes = 3 if checkpoint == Checkpoint.FULL else 2
    copies = sum(len(set(far) if group.route else far) for far in peers)
    return (2 * passes * copies + 4 * sum(map(len, peers))) * held / rate(cost, "collective")


def dispatched_ns(cost, work):
    """ns of tokens to experts of other nodes and back on nics: what a rank sends, or what the busiest receives."""
    model, size, node = cost.model, cost.expert, cost.cluster.gpus_per_node
    if size == 1:
        return 0.0
    others = math.comb(model.experts - model.experts // size, model.active_experts)
    reached = 1 - others / math.comb(model.experts, model.active_experts)
    moves = 6 if work.checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL) else 4
    tokens = [0.0] * cost.ranks
    for group in work.groups:
        for rank in group.ranks:
            tokens[rank] += group.tokens / len(group.ranks)
    total = 0.0
    for first in range(0, cost.ranks, size):
        peers = range(first, first + size)
        received = cost.profile.expert_imbalance * sum(tokens[peer] for peer in peers) / size
        for rank in peers:
            far = sum(peer // node != rank // node for peer in peers)
            total += far * max(tokens[rank], received)
    return 2 * total * reached * moves * len(model.moe_layers) * model.hidden / rate(cost, "all_to_all")


def rate(cost, kind):
    return cost.cluster.nic.gb_s * getattr(cost.profile.network, kind).efficiency


@pytest.mark.parametrize("spelling", ["2x8xA800", "4x8xH800", "4x8xH200"])
def test_a_route_pays_above_a_size_and_the_tables_say_so(spelling):
    """Once a routed ring is faster it stays so; far below, its latencies make it slower."""
    cost = cost_of(spelling, "gpt-7b")
    lengths = [2**power for power in range(6, 20)]
    plain = GroupShape(1, 16)
    for method in Method:
        pair = (plain._replace(method=method), plain._replace(method=method, routed=True))
        tables = cost.tables(lengths, FULL, pair)
        streams = tables.fixed[:, :, None] + tables.cost
        shown = streams[1] if method == Method.RING else streams[0]
        faster = shown[1] < shown[0]
        assert not faster[0] and faster[-1]
        assert (np.diff(faster.astype(int)) >= 0).all()


def test_the_break_even_is_that_of_the_alpha_beta_model():
    """Without slices a route costs two hops on NVLink more, and a message on the network takes 1/x of the time."""
    cost = cost_of("2x8xH200", "gpt-7b")
    links: Communication = cost.engine.links
    shape = GroupShape(1, 2, routed=True)
    route = replace(cost.route(shape, (0, 8)), slices=1)
    plain, routed = (group_traffic((0, 8), shape, cost.cluster.nic_of_gpu, r) for r in (None, route))
    x, nvlink, network, hop = 8, 450 * 0.8, 50 * 0.9, 10_000
    flow = [links.kv(shape, reach, Checkpoint.NONE).time for reach in (plain, routed)]
    late = [links.kv_latency(shape, reach, Checkpoint.NONE) for reach in (plain, routed)]
    exchanges_of_a_step = links.model.layers * 4
    message = links.ring_bytes(shape, Checkpoint.NONE) / exchanges_of_a_step  # mean bytes per token and exchange
    expected = 2 * hop / ((1 - 1 / x) * (1 / network - 2 / nvlink))  # bytes
    tokens = (late[1] - late[0]) / (flow[0] - flow[1])
    assert tokens * message == pytest.approx(expected)


@given(rounds(), st.data())
def test_a_linear_layout_moves_linear_work(drawn, data):
    cost, work, policy = drawn
    home = work.attention_layout()
    shift = data.draw(st.integers(0, cost.ranks - 1))
    linear = Layout((home.rank + shift) % cost.ranks, home.item, home.start, home.stop)
    plain = round_times(cost, work, policy)
    for remap in Remap:
        moved = round_times(cost, replace(work, linear=linear, remap=remap), policy)
        held = np.bincount(linear.rank, linear.sizes, cost.ranks)
        if remap == Remap.ATTENTION:
            experts = cost.engine.expert_times(policy).token_ns
            rate = cost.engine.compute.linear(policy.checkpoint) - experts
            assert part(moved, "linear").tolist() == np.rint(held * rate).tolist()
            if cost.expert > 1:  # tokens for all experts: a mean that nothing but its EP group changes
                mean = np.repeat((held * experts).reshape(-1, cost.expert).mean(axis=1), cost.expert)
                assert (part(moved, "routed") >= np.floor(mean)).all()
        assert part(moved, "linear").sum() == pytest.approx(part(plain, "linear").sum(), rel=1e-6, abs=1000)
        assert (part(moved, "attention") == part(plain, "attention")).all()
        assert (part(moved, "remap").max() > 0) == (shift > 0)
        sums = np.zeros(cost.ranks, dtype=np.int64)
        np.add.at(sums, moved.member_rank, moved.member_ns)
        assert (sums == moved.rank_ns).all() and ((moved.rank_ns > 0) >= (held > 0)).all()


def test_remapping_by_hand():
    """One rank of a node hands 1000 tokens to a neighbour, and another 600 to the other node."""
    cost = cost_of("2x4xH200")
    groups = tuple(cost.group(GroupShape(1, 1), [rank], [Span(rank, 0, 2000)]) for rank in (0, 1))
    linear = Layout.of([(0, 0, 0, 1000), (3, 0, 1000, 2000), (1, 1, 0, 1400), (5, 1, 1400, 2000)])
    model, layers = cost.model, cost.model.layers
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    values = {Remap.ATTENTION: 3 * (2 * query + 2 * kv), Remap.MLP: 5 * model.hidden}
    for remap, calls in ((Remap.ATTENTION, 6), (Remap.MLP, 5)):
        assert remap_exchanges(model, remap, Checkpoint.FULL) == (values[remap], calls)
        work = StageMicroBatch(groups, Checkpoint.FULL, linear=linear, remap=remap)
        times = round_times(cost, work, FULL)
        size = layers * 2 * values[remap]
        slower = max(1000 * size / (450 * 0.73), 600 * size / (50 * 0.76))
        latency = layers * calls * (20 + 10 + 2 * 5) * 1e3
        assert part(times, "remap")[[0, 1, 3, 5]].tolist() == [round(slower + latency)] * 4
        assert part(times, "remap")[[2, 4, 6, 7]].tolist() == [0] * 4
        half = round(300 * size / (50 * 0.76))
        assert times.nic_ns[0, 1] == times.nic_ns[1, 1] == half and times.nic_ns.sum() == 2 * half
