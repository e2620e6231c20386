"""Tensor parallelism: exchanges and products by hand."""

from dataclasses import replace
from functools import cache

import pytest

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.communication import MessageCounts, group_traffic
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Reduce, Sharding

SPEC = ModelSpec("small", 9, 1024, 8, 4, 128, 4096, True, 32000, False)
NONE, FULL = (MemoryPolicy(kept, Reduce.STEP) for kept in (Checkpoint.NONE, Checkpoint.FULL))
SPAN = (Span(0, 0, 40_000),)


@cache
def cost_of(cluster="2x4xH100", sharding="free"):
    return CostModel(Cluster.parse(cluster), SPEC, sharding=sharding)


def parts(cost, ranks, ulysses, ring=1, spans=SPAN, policy=NONE):
    return cost.group_cost(Group(tuple(ranks), ulysses, ring, spans), policy)


@pytest.mark.parametrize("policy", [NONE, FULL])
def test_exchanges_by_hand(policy):
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
    assert found.ulysses == empty.ulysses == 0  # nothing beyond the tensor parallel group
    assert found.network == 0 and found.link == pytest.approx(calls * time, abs=1)
    assert found.stream_ns[0] == found.tensor + found.linear + found.head + found.attention + found.fixed


@pytest.mark.parametrize("policy", [NONE, FULL])
def test_an_embedding_and_a_head_that_are_cut_have_an_exchange_each(policy):
    """As much as a gather and a sum of a layer, spread over the layers; a vocabulary that is not cut has none."""
    cut, whole = (
        CostModel(cost_of().cluster, replace(SPEC, vocabulary=32_000 + odd), sharding="full", tensor=4)
        for odd in (0, 1)
    )
    calls = 9 * (6 if policy is FULL else 4)
    for spans in ((), SPAN):
        found, less = (
            parts(cut, range(4), 4, spans=spans, policy=policy),
            parts(whole, range(4), 4, spans=spans, policy=policy),
        )
        assert found.tensor / less.tensor == pytest.approx((calls + 2) / calls, rel=1e-6)
    few = cut.engine.of_layers(SPEC.with_layers((0, 1, 2))).links
    assert few.tensor_exchanges(policy.checkpoint) == pytest.approx((calls + 2) / 3)


def test_products_and_attention_are_those_of_as_many_ranks():
    """A rank has 1 / t of the weights for the tokens of all t ranks. Adding up partial rows is all it has more."""
    plain, split = parts(cost_of(), range(4), 4), parts(cost_of().with_tensor(2), range(4), 4)
    assert split.attention == plain.attention and split.head == plain.head and split.fixed == plain.fixed
    memory = cost_of().engine.compute.memory_gb_s
    added = 9 * 4 * (2 + 1) * 1024 * 2 / memory  # two rows read and one written, per token of a rank
    assert split.linear - plain.linear == pytest.approx(10_000 * added, abs=1)
    ring, whole = parts(cost_of().with_tensor(2), range(8), 2, 4), parts(cost_of(), range(8), 2, 4)
    assert (ring.ring, ring.steps, ring.attention) == (whole.ring, whole.steps, whole.attention)


def test_heads_are_exchanged_between_tensor_parallel_groups_only():
    plain, split = parts(cost_of(), range(4), 4), parts(cost_of().with_tensor(2), range(4), 4)
    empty = [parts(one, range(4), 4, spans=()) for one in (cost_of(), cost_of().with_tensor(2))]
    # 1 of 2 messages leaves a rank instead of 3 of 4, of as many values
    assert (split.ulysses - empty[1].ulysses) / (plain.ulysses - empty[0].ulysses) == pytest.approx(2 / 3, rel=1e-6)


def test_messages_of_tensor_parallel_groups_over_two_nodes():
    nics = (0, 1, 2, 3)
    inside = group_traffic(tuple(range(8)), GroupShape(8, 1), nics, None, 2)
    assert inside.tensor == MessageCounts(intra=1) and inside.ulysses == MessageCounts(
        intra=1, inter=2, node_out=8, nic=2
    )
    across = group_traffic(tuple(range(8)), GroupShape(8, 1), nics, None, 8)
    assert across.tensor == MessageCounts(3, 4, 16, 4) and across.ulysses == MessageCounts()
    assert group_traffic(tuple(range(8)), GroupShape(4, 2), nics, None, 1) == group_traffic(
        tuple(range(8)), GroupShape(4, 2), nics
    )
    wide = ModelSpec("w", 9, 1024, 8, 8, 128, 4096, True, 32000, False)
    found = parts(CostModel(cost_of().cluster, wide, sharding="free", tensor=8), range(8), 8)
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
        mib = 32_000 * 2 * 128 * 4 / 2**20  # of prefixes, of the one kv head that a rank of a tensor parallel group has
        own = 9 * (2 * cost.profile.piece_us + mib * cost.profile.prefix_us) * 1e3 if name == "attention" else 0
        assert more == pytest.approx(own, abs=1)


def test_free_sharding_runs_the_optimiser_on_an_even_part():
    free, full = cost_of(), cost_of(sharding="full")
    assert free.shard_group_size == 1 and {v.reduce for v in free.policies} == {Reduce.STEP}
    apart = full.step_overhead_ns(NONE) - round(full.engine.step_overhead(NONE)[1])
    assert free.step_overhead_ns(NONE) == pytest.approx(apart, abs=1) and round(free.engine.step_overhead(NONE)[1]) == 0
    assert free.sharding == Sharding.FREE
    large = CostModel(Cluster.parse("2x8xH100"), ModelSpec.load("qwen2.5-32b"), sharding="free")
    with pytest.raises(SeqloomError, match=r"does not fit in one stage.*larger tensor degree"):
        large.limits()
    assert large.with_tensor(8).limits().capacity
