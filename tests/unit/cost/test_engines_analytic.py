"""The analytic model: traffic formulas, streams, memory, and that its tokens per second are believable."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.communication import Communication, GroupTraffic, MessageCounts, group_traffic
from seqloom.cost.compute import LengthCurve, causal_area, forward_flops, layer_values
from seqloom.cost.profile import Curve, Profile
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Method, Reduce

NONE = MemoryPolicy(Checkpoint.NONE, Reduce.ROUND)
FULL = MemoryPolicy(Checkpoint.FULL, Reduce.ROUND)
SELECTIVE = MemoryPolicy(Checkpoint.SELECTIVE, Reduce.ROUND)
EIGHT = tuple(range(8))  # a NIC near each of a node's eight GPUs


@pytest.fixture(scope="module")
def llama():
    return CostModel(Cluster.parse("8x8xH200"), ModelSpec.load("llama3-8b"))


def mfu(cost, policy, length):
    """Model FLOPs per second of one GPU packed with documents of one length, over its peak."""
    tables = cost.tables([length], policy)
    copies = tables.capacity // length
    seconds = (tables.fixed[:, 0] + copies * tables.cost[:, 0, 0]).max() * 1e-9
    model = cost.model
    flops = 6 * model.matmul_parameters + 6 * length * model.heads * model.head_dim * model.layers
    return copies * length * flops / seconds / (cost.cluster.device.peak_tflops * 1e12)


@pytest.mark.parametrize("policy", [NONE, SELECTIVE, FULL])
@pytest.mark.parametrize("length", [512, 2048, 8192, 16384])
def test_believable_speed(llama, policy, length):
    assert 0.25 < mfu(llama, policy, length) < 0.65


@pytest.mark.parametrize("name", ["8x8xH100", "8x8xA100-80G", "4x8xA800", "8x8xB200", "8xL40S"])
def test_every_profile_is_believable(name):
    cost = CostModel(Cluster.parse(name), ModelSpec.load("llama3-8b"))
    assert 0.1 < mfu(cost, FULL, 4096) < 0.65


def test_profile_of_the_device():
    picks = {"H200": "h200", "H100": "h100", "H800": "h800", "A100-40G": "a100", "A800": "a800", "CPU": "cpu"}
    assert {device: Profile.for_device(device).name for device in picks} == picks
    with pytest.raises(SeqloomError, match="no profile knows"):
        Profile.for_device("TPU")


def test_ulysses_traffic_by_hand():
    cluster, model = Cluster.parse("8x8xH200"), ModelSpec.load("llama3-8b")
    links = Communication(Profile.load("h200"), cluster, model)
    # 32 layers, both directions, 128 wide, bf16: 2 * 32 query and 2 * kv' heads, over the degree
    for u, kv in ((2, 8), (8, 8), (16, 16)):
        assert links.ulysses_bytes(GroupShape(u, 1), Checkpoint.NONE) == 32 * 2 * 128 * 2 * (2 * 32 + 2 * kv) / u
    inside, network, link = links.ulysses(
        GroupShape(8, 1), group_traffic(range(8), GroupShape(8, 1), EIGHT), Checkpoint.NONE
    )
    assert inside == pytest.approx(links.ulysses_bytes(GroupShape(8, 1), Checkpoint.NONE) * 7 / 8 / (450 * 0.73))
    assert network == 0 and link == inside
    shape = GroupShape(16, 1)
    across, network, _ = links.ulysses(shape, group_traffic(range(shape.degree), shape, EIGHT), Checkpoint.NONE)
    assert across == network == pytest.approx(links.ulysses_bytes(shape, Checkpoint.NONE) / 2 / (50 * 0.76))
    assert links.ulysses(GroupShape(1, 8), GroupTraffic(), Checkpoint.NONE) == (0, 0, 0)


def test_ring_traffic_by_hand():
    links = Communication(Profile.load("h200"), Cluster.parse("8x8xH200"), ModelSpec.load("llama3-8b"))
    keys = 2 * 8 * 128  # K and V, 8 heads
    assert links.ring_bytes(GroupShape(1, 4), Checkpoint.NONE) == 32 * keys * (2 * 3 / 4 * 2 + 4)
    assert links.ring_bytes(GroupShape(1, 4), Checkpoint.FULL) == 32 * keys * (3 * 3 / 4 * 2 + 4)
    assert (
        links.ring_bytes(GroupShape(8, 4), Checkpoint.NONE) == links.ring_bytes(GroupShape(1, 4), Checkpoint.NONE) / 8
    )
    assert links.kv(GroupShape(8, 1), GroupTraffic(), Checkpoint.NONE) == (0, 0, 0)


def test_shared_nics():
    model, profile = ModelSpec.load("llama3-8b"), Profile.load("a100")
    two = Communication(profile, Cluster.parse("8x8xA100-40G"), model)  # 2 NICs for 8 GPUs
    eight = Communication(profile, Cluster.parse("8x8xA100-80G"), model)  # 8
    wide, ring = GroupShape(16, 1), GroupShape(1, 16)
    slow, fast = (
        c.ulysses(wide, group_traffic(range(wide.degree), wide, c.cluster.nic_of_gpu), Checkpoint.NONE)[0]
        for c in (two, eight)
    )
    assert slow == pytest.approx(4 * fast)
    slow, fast = (
        c.kv(ring, group_traffic(range(ring.degree), ring, c.cluster.nic_of_gpu), Checkpoint.NONE)[0]
        for c in (two, eight)
    )
    assert slow == fast  # one GPU of the node has a NIC to itself


def test_messages_are_counted_at_the_busiest_place():
    paired = (0, 0, 1, 1, 2, 2, 3, 3)  # two GPUs per NIC
    assert group_traffic(range(8), GroupShape(8, 1), EIGHT).ulysses == MessageCounts(intra=7)
    assert group_traffic(range(16), GroupShape(16, 1), EIGHT).ulysses == MessageCounts(7, 8, 64, 8)
    assert group_traffic(range(16), GroupShape(16, 1), paired).ulysses == MessageCounts(7, 8, 64, 16)
    assert group_traffic(range(16), GroupShape(8, 2), EIGHT).ring == MessageCounts(0, 1, 8, 1)
    assert group_traffic(range(16), GroupShape(2, 8), EIGHT).ring == MessageCounts(1, 1, 2, 1)
    assert group_traffic(range(16), GroupShape(2, 8), paired).ring == MessageCounts(1, 1, 2, 2)
    assert group_traffic(range(16), GroupShape(2, 8), EIGHT).gather == MessageCounts(3, 4, 32, 4)
    assert group_traffic(range(16), GroupShape(2, 8), EIGHT).gather_once == MessageCounts(3, 1, 8, 1)
    assert group_traffic((6, 7, 8, 9), GroupShape(4, 1), EIGHT).ulysses == MessageCounts(1, 2, 4, 2)
    assert group_traffic((6, 7, 8, 9), GroupShape(2, 2), paired).ring == MessageCounts(0, 1, 2, 2)
    assert group_traffic((3,), GroupShape(1, 1), EIGHT) == GroupTraffic()


def test_tables_agree_with_parts(llama):
    lengths = np.array([300, 5000, 40000])
    for policy in llama.policies:
        tables = llama.tables(lengths, policy)
        for s, shape in enumerate(tables.shapes):
            spans = tuple(Span(i, 0, int(length)) for i, length in enumerate(lengths))
            parts = llama.group_cost(llama.group(shape, range(shape.degree), spans), policy)
            assert parts.stream_ns == tuple(tables.fixed[:, s] + tables.cost[:, s].sum(axis=1))
            assert parts.total_ns == tables.group_ns(s, np.arange(3))
            assert (parts.ring > 0) == shape.overlaps_kv and (parts.ulysses > 0) == (shape.ulysses > 1)
            assert (parts.kv_gather > 0) == (shape.ring > 1 and not shape.overlaps_kv)


def test_astride_two_nodes_costs_more(llama):
    inside = Group((0, 1, 2, 3), 4, 1, (Span(0, 0, 30000),))
    astride = Group((6, 7, 8, 9), 4, 1, (Span(0, 0, 30000),))
    near, far = llama.group_cost(inside, NONE), llama.group_cost(astride, NONE)
    assert far.ulysses > near.ulysses and far.network > near.network == 0
    assert far.attention == near.attention


def test_all_gather_instead_of_a_ring(llama):
    for length, cheaper in ((4096, Method.GATHER), (200000, Method.RING)):
        ring, gather = (
            llama.group_cost(llama.group(GroupShape(1, 8, method), range(8), [Span(0, 0, length)]), NONE)
            for method in (Method.RING, Method.GATHER)
        )
        assert (max(gather.stream_ns[:2]) < max(ring.stream_ns[:2])) == (cheaper == Method.GATHER)
        assert gather.kv_gather > 0 == gather.ring == gather.steps == ring.kv_gather
        assert gather.stream_ns[0] > gather.kv_gather and gather.stream_ns[1] == 0


def test_memory_of_a_token_by_hand(llama):
    """bf16; 32 layers, hidden 4096 = 32 heads x 128, 8 kv heads, feed-forward 14336; the attention output twice."""
    hidden, query, kv, lse = 4096, 4096, 1024, 4 * 32
    whole = 2 * (4 * hidden + query + 2 * kv + 2 * query + 3 * 14336) + lse
    others = 2 * 3 * hidden + 8 * (query + kv) + 24 * kv
    assert llama.memory.token_bytes(NONE) == 32 * whole + others
    assert llama.memory.token_bytes(SELECTIVE) == 32 * (2 * (hidden + 2 * query) + lse) + whole + others
    assert llama.memory.token_bytes(FULL) == 32 * 2 * hidden + whole + others


def test_recomputation_trades_time_for_memory(llama):
    assert llama.capacity(NONE) < llama.capacity(SELECTIVE) < llama.capacity(FULL)
    assert llama.memory.token_bytes(NONE) > llama.memory.token_bytes(SELECTIVE) > llama.memory.token_bytes(FULL)
    time = [llama.group_cost(Group((0,), 1, 1, (Span(0, 0, 20000),)), v).total_ns for v in (NONE, SELECTIVE, FULL)]
    assert time == sorted(time) and time[0] < time[1] < time[2]


def test_reducing_once_per_step(llama):
    later = MemoryPolicy(Checkpoint.NONE, Reduce.STEP)
    parameters = llama.model.parameters()
    assert llama.capacity(later) < llama.capacity(NONE)
    assert llama.memory.fixed_bytes(later) - llama.memory.fixed_bytes(NONE) > 3.5 * parameters
    group = Group((0,), 1, 1, (Span(0, 0, 100),))
    assert llama.group_cost(group, later).reduce == 0 < llama.group_cost(group, NONE).reduce
    assert llama.step_overhead_ns(later) > llama.step_overhead_ns(NONE) > 0


def test_sharding_moves_the_traffic():
    def build(sharding, **options):
        return CostModel(Cluster.parse("8x8xH200"), ModelSpec.load("qwen3-4b"), None, sharding, **options)

    full, hybrid, alone = build("full"), build("hybrid"), build("none")
    later = MemoryPolicy(Checkpoint.NONE, Reduce.STEP)
    gather = [c.group_cost(Group((0,), 1, 1, ()), later).gather for c in (full, hybrid, alone)]
    assert gather[0] > gather[1] > gather[2] == 0
    assert full.memory.fixed_bytes(NONE) < hybrid.memory.fixed_bytes(NONE) < alone.memory.fixed_bytes(later)
    assert full.step_overhead_ns(NONE) < hybrid.step_overhead_ns(NONE)
    assert {v.reduce for v in alone.policies} == {Reduce.STEP}
    with pytest.raises(SeqloomError, match=r"need .* GiB per GPU .* the budget is 2.0 GiB; shard wider"):
        build("hybrid", budget_gib=2)


def test_experts_are_held_but_not_all_used():
    cluster = Cluster.parse("8x8xH200")
    sparse, dense = (CostModel(cluster, ModelSpec.load(name)) for name in ("qwen3-30b-a3b", "qwen3-32b"))
    group = Group((0,), 1, 1, (Span(0, 0, 2000),))
    assert sparse.group_cost(group, FULL).linear < 0.2 * dense.group_cost(group, FULL).linear
    assert sparse.group_cost(group, FULL).gather > 0.8 * dense.group_cost(group, FULL).gather


def test_windows_cap_the_area():
    lengths = np.array([0.0, 10.0, 100.0])
    area, width = causal_area(lengths, 10)
    assert area.tolist() == [0, 50, 950] and width.tolist() == [1, 10, 20]
    assert causal_area(lengths, None)[0].tolist() == [0, 50, 5000]


def test_a_document_in_attention_chunks_is_priced_as_so_many_documents():
    lengths = np.array([0.0, 10.0, 100.0, 104.0])
    area, width = causal_area(lengths, None, 10)
    assert area.tolist() == [0, 50, 500, 508] and width.tolist() == [1, 10, 10, 10]
    assert causal_area(lengths, 4, 10)[0].tolist() == [0, 32, 320, 328]
    cluster, full = Cluster.parse("1x8xH200"), ModelSpec.load("llama3-8b")
    chunked = replace(full, attention_chunks=(8192, 8192, 8192, None) * 8)
    one, eight = (Group((0,), 1, 1, tuple(Span(k, 0, n) for k in range(65536 // n))) for n in (65536, 8192))
    prices = [
        CostModel(cluster, spec).group_cost(group, FULL).attention for spec in (full, chunked) for group in (one, eight)
    ]
    assert prices[2] == pytest.approx(prices[0] / 4 + prices[1] * 3 / 4, rel=1e-6)
    assert prices[3] == prices[1]


def test_bidirectional_documents_are_full_squares():
    causal = ModelSpec.load("llama3-8b")
    both = replace(causal, causal=False)
    lengths = np.array([100, 4000])
    attention = [forward_flops(lengths, spec) - 2.0 * spec.matmul_parameters * lengths for spec in (causal, both)]
    assert attention[1].tolist() == (2 * attention[0]).tolist()
    group = Group((0,), 1, 1, (Span(0, 0, 65536),))
    one, two = (CostModel(Cluster.parse("1x8xH200"), spec).group_cost(group, FULL).attention for spec in (causal, both))
    assert 1.5 * one < two < 2.5 * one  # tiles without a mask run faster than causal squares


def test_layers_with_wider_heads_compute_and_keep_more():
    """Half of the layers like those of one model, half like those of another: the mean of both."""
    narrow = ModelSpec.load("llama3-8b")
    wide = replace(narrow, head_dim=256, kv_heads=4)
    mixed = replace(narrow, head_shapes=((8, 128), (4, 256)) * 16)
    lengths, group = np.array([100, 40_000]), Group((0,), 1, 1, (Span(0, 0, 65536),))
    flops = [forward_flops(lengths, spec) for spec in (narrow, wide, mixed)]
    assert flops[2].tolist() == ((flops[0] + flops[1]) / 2).tolist()
    costs = [CostModel(Cluster.parse("1x8xH200"), spec).group_cost(group, FULL) for spec in (narrow, wide, mixed)]
    assert costs[2].attention == pytest.approx((costs[0].attention + costs[1].attention) / 2, rel=1e-3)
    assert costs[2].linear == pytest.approx((costs[0].linear + costs[1].linear) / 2, rel=1e-6)
    saved = [sum(each.saved for each in layer_values(spec)) for spec in (narrow, wide, mixed)]
    assert saved[2] == (saved[0] + saved[1]) / 2


def test_curve_keeps_flat_throughput():
    curve = LengthCurve.of(Curve((1024, 2048, 4096), (100.0, 200.0, 200.0), (100.0, 200.0, 200.0)), 1)
    lengths = np.array([512.0, 1024.0, 2048.0, 3000.0, 9000.0])
    expected = [1024 * 0.035, 1024 * 0.035, 2048 * 0.0175, 3000 * 0.0175, 9000 * 0.0175]
    assert curve(lengths).tolist() == pytest.approx(expected)


def test_shapes_are_a_handful(llama):
    degrees = [shape.degree for shape in llama.shapes]
    assert degrees == sorted(degrees) and set(degrees) == set(llama.family.sizes)
    assert max(degrees.count(degree) for degree in set(degrees)) <= 4
    assert all(shape.ulysses <= llama.model.heads for shape in llama.shapes)
    for a, b in zip(llama.shapes, llama.shapes[1:], strict=False):
        assert a.degree < b.degree or a.ulysses > b.ulysses


def test_what_a_document_and_a_step_cost_however_short():
    cluster, model, policy = (
        Cluster.parse("1x4xCPU"),
        ModelSpec.load("qwen3-0.6b"),
        MemoryPolicy(Checkpoint.NONE, Reduce.STEP),
    )
    plain = replace(Profile.load("cpu"), document_us=0.0, step_us=0.0)
    before = CostModel(cluster, model, plain, "none", budget_gib=100)
    after = CostModel(cluster, model, replace(plain, document_us=30.0, step_us=700.0), "none", budget_gib=100)
    assert after.step_overhead_ns(policy) - before.step_overhead_ns(policy) == 700_000
    for shape in (GroupShape(1, 1), GroupShape(2, 1), GroupShape(1, 4), GroupShape(2, 2)):
        group = Group(tuple(range(shape.degree)), shape.ulysses, shape.ring, (Span(0, 0, 100), Span(1, 0, 900)))
        added = after.group_cost(group, policy).attention - before.group_cost(group, policy).attention
        assert added == 2 * model.layers * shape.ring * 30_000
        empty = replace(group, spans=())
        assert after.group_cost(empty, policy) == before.group_cost(empty, policy)


@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.FULL])
def test_products_are_what_is_left_of_linear_layers_when_memory_is_fast(checkpoint):
    cluster, model, own = Cluster.parse("1x8xCPU"), ModelSpec.load("qwen3-0.6b"), Profile.load("cpu")
    plain, fast = (
        CostModel(cluster, model, replace(own, memory_efficiency=own.memory_efficiency * factor), "none", 100).engine
        for factor in (1.0, 1e9)
    )
    left = fast.compute.linear(checkpoint) / plain.compute.linear(checkpoint)
    assert 0 < plain.matmul_share < 1 and plain.matmul_share == pytest.approx(left, rel=1e-6)


def test_gathered_keys_cost_every_rank_what_the_whole_group_holds():
    cluster, model = Cluster.parse("1x8xCPU"), ModelSpec.load("qwen3-0.6b")
    policy, plain = MemoryPolicy(Checkpoint.NONE, Reduce.STEP), replace(Profile.load("cpu"), gathered_us=0.0)
    before, after = (
        CostModel(cluster, model, profile, "none", budget_gib=100)
        for profile in (plain, replace(plain, gathered_us=500.0))
    )
    for ulysses, ring in ((1, 1), (1, 2), (1, 4), (2, 2), (8, 1)):
        for method in Method:
            spans = (Span(0, 0, 300), Span(1, 0, 724))
            group = Group(tuple(range(ulysses * ring)), ulysses, ring, spans, method)
            added = after.group_cost(group, policy).kv_gather - before.group_cost(group, policy).kv_gather
            mib = 1024 * 2 * model.kv_heads // ulysses * model.head_dim * 4 / 2**20
            expected = model.layers * mib * 500e3 if method == Method.GATHER and ring > 1 else 0
            assert added == pytest.approx(expected, abs=2)


def test_traffic_that_does_not_hide_adds_up():
    cluster, model = Cluster.parse("1x4xCPU"), ModelSpec.load("qwen3-0.6b")
    group = Group((0, 1, 2, 3), 1, 4, (Span(0, 0, 4000),))
    hidden, half, exposed = (
        CostModel(cluster, model, replace(Profile.load("cpu"), overlap=share), budget_gib=100).group_cost(group, NONE)
        for share in (1.0, 0.5, 0.0)
    )
    assert hidden.gather == exposed.gather and hidden.ring == exposed.ring
    assert exposed.steps - hidden.steps == pytest.approx(hidden.ring, abs=2)
    assert exposed.fixed - hidden.fixed == pytest.approx(hidden.gather + hidden.reduce, abs=2)
    assert half.stream_ns[0] == pytest.approx((hidden.stream_ns[0] + exposed.stream_ns[0]) / 2, abs=4)
    assert exposed.total_ns == exposed.stream_ns[0]
