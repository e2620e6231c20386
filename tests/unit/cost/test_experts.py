"""Expert parallelism: exchanges, collectives and memory by hand; degrees that are refused."""

from dataclasses import replace
from functools import cache
from math import comb

import pytest

from seqloom.cost import CostModel, MemoryPolicy, Profile
from seqloom.cost.plan_cost import expert_shares, round_times
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, LayerRange, Reduce, StageMicroBatch
from seqloom.planners.problem import build_plan

SPEC = ModelSpec(
    **{"name": "small", "layers": 6, "hidden": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "ffn": 4096},
    **{"gated": True, "vocabulary": 32_000, "tied": False},
    **{"experts": 32, "active_experts": 4, "expert_ffn": 512, "shared_ffn": 256, "moe_layers": (1, 2, 3, 4, 5)},
)
EXPERTS = 5 * 32 * 3 * 1024 * 512
NONE, FULL = (MemoryPolicy(kept, Reduce.STEP) for kept in (Checkpoint.NONE, Checkpoint.FULL))


@cache
def cost_of(expert=1, cluster="2x4xH200", sharding="full"):
    return CostModel(Cluster.parse(cluster), SPEC, sharding=sharding, expert=expert)


def parts(cost, policy=NONE, tokens=40_000):
    return cost.group_cost(Group(tuple(range(4)), 4, 1, (Span(0, 0, tokens),) if tokens else ()), policy)


@pytest.mark.parametrize("expert", [2, 4, 8])
@pytest.mark.parametrize("policy", [NONE, FULL])
def test_a_token_goes_once_to_every_rank_with_some_of_its_experts(expert, policy):
    cost, empty = cost_of(expert), parts(cost_of(expert), policy, 0)
    found, calls = parts(cost, policy), 5 * (6 if policy is FULL else 4)
    reached = 1 - comb(32 - 32 // expert, 4) / comb(32, 4)
    message = 10_000 * reached * 1024 * 2 * cost.profile.expert_imbalance  # of a rank to a peer, bytes
    near, far = min(expert, 4) - 1, max(0, expert - 4)
    link = cost.cluster.intra.gb_s * cost.profile.intra.all_to_all.efficiency
    nic = cost.cluster.nic.gb_s * cost.profile.network.all_to_all.efficiency
    sharing = 4 // cost.cluster.nics_per_node or 1
    assert found.expert == pytest.approx(calls * message * max(near / link, far * sharing / nic), abs=1)
    assert found.expert_network == pytest.approx(calls * message * far / nic, abs=1)
    crossed, where = (cost.cluster.nic, cost.profile.network) if far else (cost.cluster.intra, cost.profile.intra)
    each = crossed.latency_us + where.all_to_all.call_us + (expert - 1).bit_length() * where.all_to_all.hop_us
    latency = 5 * (8 if policy is FULL else 5) * each * 1e3
    assert found.expert_latency == empty.expert_latency == pytest.approx(latency, abs=1)
    assert empty.expert == empty.expert_network == 0
    assert found.total_ns >= found.expert + found.expert_latency + found.linear + found.routed


def test_the_busiest_rank_computes_more_pairs():
    even = replace(Profile.for_device("H200"), expert_imbalance=1.0)
    plain, level, uneven = (
        parts(cost_of()),
        parts(CostModel(Cluster.parse("2x4xH200"), SPEC, even, expert=4)),
        parts(cost_of(4)),
    )
    assert (
        plain.linear == level.linear == uneven.linear
        and plain.routed == level.routed
        and plain.expert == plain.expert_latency == plain.expert_network == 0
    )
    compute = cost_of().engine.compute
    routed = 5 * 4 * 3 * 1024 * 512  # weights of the experts of a token
    products = 3 * 2 * 0.2 * routed / (compute.matmul_tflops * 1e3)
    touched = 5 * (0.2 * 4 * (3 * 512 + 2 * 2 * 1024))
    moves = 3 * 2 * touched / compute.memory_gb_s
    assert uneven.routed - level.routed == pytest.approx(10_000 * (products + moves), rel=1e-3)
    assert uneven.expert == pytest.approx(1.2 * level.expert, abs=1)


def work_of(tokens, checkpoint=Checkpoint.NONE):
    """A round in which rank k has a document of as many tokens as tokens[k] says."""
    documents = [Span(k, 0, count) for k, count in enumerate(tokens)]
    groups = [Group((k,), 1, 1, (document,)) for k, document in enumerate(documents) if document.stop]
    return StageMicroBatch(tuple(groups), checkpoint)


def columns_of(cost, tokens, *names):
    times = round_times(cost, work_of(tokens), NONE)
    return [times.parts[:, COST_COLUMNS.index(name)].tolist() for name in names]


def test_ranks_of_an_ep_group_share_its_work_and_send_no_less_than_their_own():
    """Ranks 0 to 3 divide the experts, and only ranks 0 and 1 have tokens; 4 to 7 have as many each."""
    tokens, cost = (60_000, 20_000, 0, 0, 20_000, 20_000, 20_000, 20_000), cost_of(4)
    routed, exchange = columns_of(cost, tokens, "routed", "expert")
    even, sent = columns_of(cost, (20_000,) * 8, "routed", "expert")
    assert routed == pytest.approx(even, abs=2) and routed[:4] == [routed[0]] * 4
    received = sent[0]  # of 20,000 tokens on average, 1.2 times as many
    assert exchange == pytest.approx([received * 3 / 1.2] + [received] * 7, abs=2)
    plain = columns_of(cost_of(1), tokens, "routed")[0]
    assert plain == pytest.approx([even[0] / 1.2 * count / 20_000 for count in tokens], rel=1e-3)
    busy = [round_times(cost_of(each), work_of(tokens), NONE).rank_ns[0] for each in (1, 4)]
    assert busy[1] < busy[0]  # two thirds of its pairs are computed elsewhere


def test_few_tokens_wait_for_the_weights_of_their_experts():
    """With 64 tokens on a rank each of 32 experts has 8 pairs: reading weights is what takes time."""
    for degree in (1, 4):
        cost = cost_of(degree)
        few, many = (columns_of(cost, (count,) * 8, "routed")[0][0] for count in (64, 40_000))
        weights = 3 * 2 * EXPERTS / degree / cost.engine.compute.memory_gb_s
        moves = few - weights
        assert 0 < moves < 0.2 * weights  # elementwise work
        assert many == pytest.approx(40_000 * cost.engine.expert_times(NONE).token_ns, abs=1)
    one = columns_of(cost_of(1), (1,) + (0,) * 7, "routed")[0][0]  # its 4 experts, and no other
    assert one == pytest.approx(3 * 2 * EXPERTS * 4 / 32 / cost_of(1).engine.compute.memory_gb_s, rel=0.1)


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_a_rank_has_its_part_of_the_experts(sharding):
    """A shard of them stays as large, but less is gathered; without sharding the rest is on other ranks."""
    plain, divided = cost_of(sharding=sharding), cost_of(4, sharding=sharding)
    before, after = (each.memory.fixed_bytes(NONE) for each in (plain, divided))
    if sharding == "none":
        assert before - after == 18 * EXPERTS * 3 // 4
        assert divided.shard_group_size == 4
    else:  # two gathered layers, and a whole gradient
        assert before - after == 2 * 2 * (EXPERTS // 5) * 3 // 4 + 4 * EXPERTS * 3 // 4
    stage, group = LayerRange(2, 4, 6), 4
    before, after = (each.memory.state_bytes(stage, group) for each in (plain, divided))
    own = EXPERTS * 2 // 5
    if sharding == "none":
        assert plain.memory.state_bytes(stage, 1) - after == 18 * own * 3 // 4
    else:  # copy and gradient; masters and scattered gradients are as many, but need no scattering
        assert before - after == 6 * own * 3 // 4 + 16 * own // 4 - 12 * own // 4


def test_experts_are_gathered_by_the_ranks_that_have_the_same():
    """In 8 parts, each is on one of 8 ranks: nothing to gather. In 4 parts, each is on one rank of both nodes."""
    gathers = {e: cost_of(e).engine.fixed_ns(cost_of(e).shapes[0], NONE, None)["gather"] for e in (1, 4, 8)}
    links, common = cost_of().engine.links, cost_of(8).memory.rank_parameters.common
    assert common == SPEC.parameters() - EXPERTS
    assert gathers[8] == pytest.approx(2 * links.collective(2 * common, 8, 6))
    rate = (
        cost_of().cluster.nic.gb_s * cost_of().profile.network.collective.efficiency * cost_of().cluster.nics_per_node
    )
    crossing = 2 * EXPERTS / 2 / rate  # half of every part comes from the other node
    more = gathers[4] - gathers[8]
    assert more > 2 * crossing and more == pytest.approx(2 * links.collective(2 * EXPERTS / 4, 2, 5, stride=4))
    assert more - 2 * crossing == pytest.approx(gathers_latency(links, 2, 5))


def gathers_latency(links, ranks, calls):
    """ns of two gathers of no bytes over ranks of as many nodes."""
    return 2 * links.collective(0, ranks, calls, stride=4)


def test_replicas_of_experts_are_summed_over_the_ranks_that_have_the_same():
    links = cost_of(sharding="none").engine.links
    assert links.replica_sum(1e9, 1, 5, 8, stride=8) == 0
    assert links.replica_sum(1e9, 1, 5, 8, stride=4) == 2 * links.collective(1e9, 2, 5, stride=4)
    whole, parted = links.replica_sum(4e9, 4, 5, 8), links.replica_sum(2e9, 2, 5, 8, stride=2)
    assert whole == parted  # hybrid: all NICs of a node carry all experts in either case


def test_a_step_updates_as_many_parameters():
    for sharding in ("full", "hybrid"):
        plain, divided = (cost_of(e, sharding=sharding) for e in (1, 4))
        computing = [each.engine.step_overhead(NONE) for each in (plain, divided)]
        plain_ns, divided_ns = (total - moved for total, moved in computing)
        assert plain_ns == pytest.approx(divided_ns, rel=1e-6)


@pytest.mark.parametrize(
    ("degree", "cluster", "sharding", "said"),
    [
        (3, "2x4xH200", "full", "expert degree 3 for 32 experts on 8 ranks in nodes of 4.*; use 2 or 4"),
        (16, "2x4xH200", "full", "whole nodes; use 8"),
        (8, "2x4xH200", "hybrid", "equal parts of a node; use 4"),
        (6, "2x6xH200", "full", "use 2"),
        (2, "2x4xH200", "free", "free sharding"),
        (0, "2x4xH200", "full", "use 1"),
    ],
)
def test_degrees_that_divide_nothing_are_refused(degree, cluster, sharding, said):
    with pytest.raises(SeqloomError, match=said):
        cost_of(degree, cluster, sharding)


def test_other_models_and_profiles_have_degree_1():
    assert cost_of().expert_degrees == (1, 2, 4, 8) and cost_of(cluster="3x4xH200").expert_degrees == (1, 2, 4)
    dense = CostModel(Cluster.parse("1x4xH200"), ModelSpec.load("llama3-8b"))
    assert dense.expert_degrees == (1,)
    with pytest.raises(SeqloomError, match="has no experts; use 1"):
        dense.with_expert(2)


def test_profiles_say_no_less_than_the_mean(tmp_path):
    profile = tmp_path / "own.json"
    replace(Profile.for_device("H200"), expert_imbalance=1.5).save(profile)
    assert Profile.load(profile).expert_imbalance == 1.5
    profile.write_text(profile.read_text().replace('"expert_imbalance": 1.5', '"expert_imbalance": 0.9'))
    with pytest.raises(SeqloomError, match="the busiest rank has no less than the mean"):
        Profile.load(profile)


@pytest.mark.parametrize("degree", [1, 4])
def test_shares_of_a_step_are_those_of_its_tokens(degree):
    """Eight ranks with 20,000 tokens each: what experts compute follows from the tokens alone, whoever has them."""
    cost = cost_of(degree)
    plan = build_plan(cost, [20_000] * 8, [work_of((20_000,) * 8)], Reduce.STEP, "static")
    found = expert_shares(cost, plan, step := cost.plan_ns(plan))
    assert found.compute == pytest.approx(20_000 * cost.engine.expert_times(NONE).token_ns / step, rel=1e-6)
    links = cost.engine.links
    moved = 20_000 * links.expert(degree, Checkpoint.NONE).time + links.expert_latency(degree, Checkpoint.NONE)
    assert found.exchange == pytest.approx(moved / step, rel=1e-6) and (moved > 0) == (degree > 1)


def test_a_tp_group_has_whole_experts_on_each_rank_and_exchanges_nothing_more():
    """The busiest rank computes more pairs, of its own experts, whose weights are half as many; no dispatch."""
    plain, tensor = (CostModel(Cluster.parse("2x4xH200"), SPEC, sharding="free", tensor=t) for t in (1, 2))
    group = Group(tuple(range(4)), 4, 1, (Span(0, 0, 40_000),))
    before, after = (each.group_cost(group, NONE) for each in (plain, tensor))
    assert after.routed == pytest.approx(1.2 * before.routed, rel=1e-3)
    assert after.expert == after.expert_latency == after.expert_network == 0 < after.tensor
    reads = [each.engine.expert_times(NONE).weights_ns for each in (plain, tensor)]
    assert reads[1] == pytest.approx(reads[0] / 2)
    whole, half = (each.memory.rank_parameters.total for each in (plain, tensor))
    assert half == pytest.approx((whole + 2 * 32_000 * 1024) / 2, rel=1e-3)  # embedding and head stay whole
