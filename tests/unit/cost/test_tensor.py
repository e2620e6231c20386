"""Teams that split weights: prices by hand, memory by counting, parts of a cluster."""

from functools import cache

import pytest

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.communication import MessageCounts, group_traffic
from seqloom.cost.memory import kv_cache_bytes, stage_parameters
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, LayerRange, Reduce, Sharding

SPEC = ModelSpec("small", 9, 1024, 8, 4, 128, 4096, True, 32000, False)
NONE, FULL = (MemoryPolicy(kept, Reduce.STEP) for kept in (Checkpoint.NONE, Checkpoint.FULL))
SPAN = (Span(0, 0, 40_000),)


@cache
def cost_of(cluster="2x4xH100", sharding="free"):
    return CostModel(Cluster.parse(cluster), SPEC, sharding=sharding)


def parts(cost, ranks, ulysses, ring=1, spans=SPAN, policy=NONE):
    return cost.group_cost(Group(tuple(ranks), ulysses, ring, spans), policy)


@pytest.mark.parametrize("policy", [NONE, FULL])
def test_what_a_team_exchanges_by_hand(policy):
    """2 gathers and 2 sums a layer and pass: each rank's 10,000 tokens of 1024 bf16 values, to 3 peers."""
    cost = cost_of().with_tensor(4)
    found, empty = parts(cost, range(4), 4, policy=policy), parts(cost, range(4), 4, spans=(), policy=policy)
    intra, links = cost.profile.intra, cost.cluster.intra
    calls = 9 * (6 if policy is FULL else 4)
    sent = 3 * 10_000 * 1024 * 2
    time = sent / (links.gb_s * intra.collective.efficiency) + sent / (links.gb_s * intra.all_to_all.efficiency)
    assert found.tensor - empty.tensor == pytest.approx(calls * time, abs=1)
    latency = 2 * links.latency_us + intra.collective.call_us + 3 * intra.collective.hop_us
    latency += intra.all_to_all.call_us + 2 * intra.all_to_all.hop_us
    assert empty.tensor == pytest.approx(calls * latency * 1e3, abs=1)
    assert found.ulysses == empty.ulysses == 0  # nothing beyond the team
    assert found.network == 0 and found.link == pytest.approx(calls * time, abs=1)
    assert found.stream_ns[0] == found.tensor + found.linear + found.head + found.attention + found.fixed


def test_products_and_attention_are_those_of_as_many_ranks():
    """A rank has 1 / t of the weights for the tokens of all t ranks. Adding up partial rows is all it has more."""
    plain, split = parts(cost_of(), range(4), 4), parts(cost_of().with_tensor(2), range(4), 4)
    assert split.attention == plain.attention and split.head == plain.head and split.fixed == plain.fixed
    memory = cost_of().engine.compute.memory_gb_s
    added = 9 * 4 * (2 + 1) * 1024 * 2 / memory  # two rows read and one written, per token of a rank
    assert split.linear - plain.linear == pytest.approx(10_000 * added, abs=1)
    ring, whole = parts(cost_of().with_tensor(2), range(8), 2, 4), parts(cost_of(), range(8), 2, 4)
    assert (ring.ring, ring.steps, ring.attention) == (whole.ring, whole.steps, whole.attention)


def test_heads_are_exchanged_between_teams_only():
    plain, split = parts(cost_of(), range(4), 4), parts(cost_of().with_tensor(2), range(4), 4)
    empty = [parts(one, range(4), 4, spans=()) for one in (cost_of(), cost_of().with_tensor(2))]
    # 1 of 2 messages leaves a rank instead of 3 of 4, of as many values
    assert (split.ulysses - empty[1].ulysses) / (plain.ulysses - empty[0].ulysses) == pytest.approx(2 / 3, rel=1e-6)


def test_messages_of_teams_that_lie_in_two_nodes():
    cards = (0, 1, 2, 3)
    inside = group_traffic(tuple(range(8)), GroupShape(8, 1), cards, None, 2)
    assert inside.tensor == MessageCounts(intra=1) and inside.ulysses == MessageCounts(
        intra=1, inter=2, node_out=8, nic=2
    )
    across = group_traffic(tuple(range(8)), GroupShape(8, 1), cards, None, 8)
    assert across.tensor == MessageCounts(3, 4, 16, 4) and across.ulysses == MessageCounts()
    assert group_traffic(tuple(range(8)), GroupShape(4, 2), cards, None, 1) == group_traffic(
        tuple(range(8)), GroupShape(4, 2), cards
    )
    wide = cost_of().with_tensor(1)
    found = parts(
        CostModel(wide.cluster, ModelSpec("w", 9, 1024, 8, 8, 128, 4096, True, 32000, False), tensor=8), range(8), 8
    )
    assert found.network > 0 and found.tensor >= found.network


def test_pieces_add_up_to_their_document():
    cost = cost_of().with_tensor(2)
    whole, empty = parts(cost, range(4), 4), parts(cost, range(4), 4, spans=())
    pieces = [
        parts(cost, range(4), 4, spans=(Span(0, *edges),)) for edges in ((0, 7_000), (7_000, 25_000), (25_000, 40_000))
    ]
    for name in COST_COLUMNS:
        again = sum(getattr(one, name) - getattr(empty, name) for one in pieces)
        more = again - getattr(whole, name) + getattr(empty, name)
        mib = 32_000 * 2 * 128 * 4 / 2**20  # of prefixes, of the one kv head that a rank of a team has
        own = 9 * (2 * cost.profile.piece_us + mib * cost.profile.prefix_us) * 1e3 if name == "attention" else 0
        assert more == pytest.approx(own, abs=1)


def test_degree_one_is_the_same_model_and_relatives_are_made_once():
    cost = cost_of()
    assert cost.with_tensor(1) is cost and cost.for_submesh(8) is cost
    two, part = cost.with_tensor(2), cost.for_submesh(4, 2)
    assert cost.with_tensor(2) is two is two.with_tensor(2) and two.with_tensor(1) is cost
    assert part is cost.for_submesh(4, 2) and part.cluster_cost is cost and part.for_submesh(8, 2) is two
    assert (part.ranks, part.node_size, part.tensor) == (4, 4, 2) and "tensor 2" in repr(part)
    assert all(shape.ulysses % 2 == 0 and not shape.routed for shape in (*two.shapes, *part.shapes))
    assert {shape.degree for shape in part.shapes} == {2, 4}
    again = CostModel(cost.cluster, SPEC, sharding="free", tensor=1)
    assert again.shapes == cost.shapes and parts(again, range(4), 2, 2) == parts(cost, range(4), 2, 2)


def test_a_part_knows_only_groups_that_the_cluster_knows_wherever_it_lies():
    cost = CostModel(Cluster.parse("4x8xH100"), SPEC, sharding="free")
    assert {shape.degree for shape in cost.for_submesh(6).shapes} == {1, 2, 3, 6}
    assert {shape.degree for shape in cost.for_submesh(16).shapes} == {1, 2, 4, 8, 16}
    assert cost.for_submesh(2).cluster.nics_per_node == 2 and cost.for_submesh(16).cluster.nodes == 2


@pytest.mark.parametrize(
    ("ranks", "tensor", "way"),
    [
        (8, 3, "model small: tensor degree 3.*4 kv heads.*use 2"),
        (8, 0, "tensor degree 0.*use 1"),
        (8, 8, "tensor degree 8.*use 4"),
        (3, 2, "tensor degree 2 on 3 ranks.*use 1"),
        (6, 2, "6 ranks of cluster 2x4xH100.*use 4 ranks"),
        (9, 1, "9 ranks of cluster.*use 8 ranks"),
    ],
)
def test_what_cannot_be_is_refused_with_the_nearest_choice(ranks, tensor, way):
    with pytest.raises(SeqloomError, match=way):
        cost_of().for_submesh(ranks, tensor)


def test_experts_and_published_constants_have_no_teams():
    experts = ModelSpec("e", 2, 64, 8, 8, 8, 0, True, 100, False, experts=4, active_experts=2, expert_ffn=64)
    assert experts.tensor_degrees == (1,) and SPEC.tensor_degrees == (1, 2, 4)
    with pytest.raises(SeqloomError, match="experts are not cut; use 1"):
        CostModel(Cluster.parse("8xH100"), experts, tensor=2)
    gpt = (Cluster.parse("2x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100")
    with pytest.raises(SeqloomError, match="no constants for tensor degree 2"):
        CostModel(*gpt, tensor=2)
    with pytest.raises(SeqloomError, match="no constants for sharding free"):
        CostModel(*gpt, sharding="free")


ATTENTION, FEED_FORWARD, TABLE = 2 * 1024 * 128 * 12, 3 * 1024 * 4096, 32000 * 1024
"""Weights of a layer that teams cut, and of embedding or head."""


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_state_under_free_sharding_by_counting(tensor):
    """2 + 4 bytes of what a rank computes with; 12 + 4 of an eighth of everything."""
    cost = cost_of().with_tensor(tensor)
    layer = (ATTENTION + FEED_FORWARD) // tensor + 2 * 1024
    assert stage_parameters(cost, LayerRange(2, 5, 9)) == 3 * layer
    assert stage_parameters(cost, LayerRange(0, 2, 9)) == 2 * layer + TABLE
    everything = 9 * (ATTENTION + FEED_FORWARD + 2 * 1024) + 2 * TABLE + 1024
    owned = -(-16 * everything // 8)
    memory, stage = cost.memory, LayerRange(2, 5, 9)
    everywhere = memory.working_bytes(LayerRange(0, 9, 9))
    assert memory.fixed_bytes(NONE) == 6 * (9 * layer + 2 * TABLE + 1024) + everywhere
    assert memory.idle_bytes == owned and memory.state_bytes(stage, 1) == 6 * 3 * layer
    assert memory.working_bytes(stage) - int(cost.profile.workspace_gib * 1024**3) == owned + 4 * 2 * layer
    on_four = cost.for_submesh(4, tensor).memory
    assert on_four.working_bytes(stage) == memory.working_bytes(stage)  # masters lie on all ranks, not on the part's


def test_what_tensor_ranks_keep_of_a_token():
    """Both norms of the whole team, 2 bytes a value; and while a layer runs, partial sums to and from the team."""
    one, two = (
        cost_of().with_tensor(t).memory.activation_bytes(LayerRange(2, 5, 9), Checkpoint.NONE, False) for t in (1, 2)
    )
    assert two.held - one.held == 3 * 2 * 2 * 1024
    assert two.forward - one.forward == 2 * 2 * 2 * 1024
    assert two.deferred - one.deferred == 3 * 2 * 4 * 1024  # and gradients of both halves' outputs
    few = [
        cost_of().with_tensor(t).memory.activation_bytes(LayerRange(2, 5, 9), Checkpoint.FULL, False).held
        for t in (1, 4)
    ]
    assert few[0] == few[1] == 3 * 2 * 1024
    tokens = [cost_of().with_tensor(t).memory.token_bytes(NONE) for t in (1, 2)]
    assert tokens[1] - tokens[0] == 9 * 2 * 2 * 1024 + 2 * 2 * 2 * 1024


def test_keys_of_a_document_in_pieces_are_those_of_a_ranks_heads():
    group = Group(tuple(range(4)), 4, 1, ())
    kept = {kv_cache_bytes(cost_of().with_tensor(t), LayerRange(2, 5, 9), group, 1000) for t in (1, 2, 4)}
    assert kept == {(2 * 2 * 1 * 128 * 1000 * 3, 4 * 2 * 1 * 128 * 1000 * 3)}


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_other_shardings_split_what_they_shard(sharding):
    """Half of a team has half of the layers' matrices, and shares them with its like in the other teams."""
    split = cost_of(sharding=sharding).with_tensor(2)
    held = 9 * ((ATTENTION + FEED_FORWARD) // 2 + 2 * 1024) + 2 * TABLE + 1024
    teams = {"full": 4, "hybrid": 2, "none": 1}[sharding]
    policy = NONE if sharding == "none" else NONE._replace(reduce=Reduce.ROUND)
    two = 2 * ((ATTENTION + FEED_FORWARD) // 2 + 2 * 1024)  # layers gathered at a time, with their gradients
    gathered = 0 if sharding == "none" else 2 * (two + 2 * TABLE) + 4 * two
    working = split.memory.working_bytes(LayerRange(0, 9, 9))
    assert split.memory.fixed_bytes(policy) == 18 * held // teams + gathered + working
    assert split.shard_group_size == {"full": 8, "hybrid": 4, "none": 2}[sharding]
    stage = split.memory.state_bytes(LayerRange(2, 5, 9), 1 if sharding == "none" else 4)
    assert stage == 3 * ((ATTENTION + FEED_FORWARD) // 2 + 2 * 1024) * (18 if sharding == "none" else 6 + 16 // 2)


def test_free_sharding_runs_the_optimiser_on_an_even_part():
    free, full = cost_of(), cost_of(sharding="full")
    assert free.shard_group_size == 1 and {v.reduce for v in free.policies} == {Reduce.STEP}
    apart = full.step_overhead_ns(NONE) - full.step_communication_ns(NONE)
    assert free.step_overhead_ns(NONE) == pytest.approx(apart, abs=1) and free.step_communication_ns(NONE) == 0
    assert free.sharding == Sharding.FREE
    large = CostModel(Cluster.parse("2x8xH100"), ModelSpec.load("qwen2.5-32b"), sharding="free")
    with pytest.raises(SeqloomError, match=r"does not fit in one stage.*larger tensor degree"):
        large.limits()
    assert large.with_tensor(8).limits().capacity
