"""Scans over documents on several ranks: which heads a rank gets, what it sends, and states between pieces."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from seqloom.attention import KVCache
from seqloom.attention.context_parallel.scan_states import DocumentPiece, ScanStates, StateKey
from seqloom.attention.context_parallel.state_passing import ScannedRuns, StateShape
from seqloom.attention.halo import convolve_documents
from seqloom.attention.linear_attention import decayed_linear_attention
from seqloom.attention.scan import PackedDocuments, StateScan, scan_documents
from seqloom.cost import CostModel, GroupShape
from seqloom.cost.communication import GroupTraffic
from seqloom.cost.compute import SCAN_EFFICIENCY
from seqloom.cost.plan_cost import round_times
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist import SingleRankTransport, bind, bind_single_rank, run_ranks
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Remap, StageMicroBatch
from seqloom.planners.bounds import lower_bound
from seqloom.planners.registry import PlannerChoice
from support.transports import CountingTransport

torch.set_num_threads(1)
PIECE = DocumentPiece(StateKey(3, "sum", 0), 0, last=False)
MIXERS = {"mixer_layers": (1,), "mixer_parameters": 1}
SIZES = {"layers": 2, "hidden": 64, "heads": 8, "kv_heads": 8, "head_dim": 8, "ffn": 64, "gated": True}


def running_sum(given):
    """Scan: a token's output is the sum of its head so far, times the factor of the group that its head reads."""
    x, factor = given.tensors
    shared = x.shape[1] // factor.shape[1] if factor.shape[1] == 1 else 1
    outs, states = [], []
    for rows, scale, state in zip(x.split(given.lengths), factor.split(given.lengths), given.states, strict=True):
        total = rows.cumsum(0) if state is None else rows.cumsum(0) + state
        outs.append(total * scale.repeat_interleave(shared, 1))
        states.append(total[-1])
    return torch.cat(outs), states


@pytest.mark.parametrize(("ulysses", "ring"), [(1, 1), (2, 1), (1, 3), (2, 2), (1, 6)])
def test_every_rank_gets_its_tokens_of_all_heads_back(ulysses, ring):
    """Four heads that share one factor, on up to six ranks; x is float64, the factor float32."""
    ranks, lengths = ulysses * ring, (9, 1, 14)
    x, factor = torch.randn(24, 4, 3, dtype=torch.float64), torch.randn(24, 1, 1)
    x.requires_grad_(), factor.requires_grad_()
    truth = torch.cat([each.cumsum(0) for each in x.split(lengths)]) * factor
    (truth**2).sum().backward()
    starts = torch.tensor([0, 9, 10])
    work = StageMicroBatch(
        (Group(tuple(range(ranks)), ulysses, ring, tuple(Span(k, 0, n) for k, n in enumerate(lengths))),),
        Checkpoint.NONE,
    )

    def body(transport):
        context = bind(work, transport)
        rows = starts[context.documents] + context.positions
        own = [each.detach()[rows].requires_grad_() for each in (x, factor)]
        out = scan_documents(running_sum, own, context, layer=0, name="sum")
        (out**2).sum().backward()
        return rows, out.detach(), *(each.grad for each in own)

    for rows, out, *grads in run_ranks(ranks, body, strict=True):
        assert torch.allclose(out, truth[rows].detach(), rtol=1e-12)
        assert torch.allclose(grads[0], x.grad[rows], rtol=1e-12)
        assert torch.allclose(grads[1], factor.grad[rows], rtol=1e-5, atol=1e-6)


def test_the_cost_model_counts_the_bytes_that_are_sent():
    """Of 8 heads of 4 values in and out: 64 values of a token, half of the layers."""
    sizes = {"layers": 2, "hidden": 8, "heads": 4, "kv_heads": 4, "head_dim": 2, "ffn": 8, "gated": True}
    spec = ModelSpec("m", **sizes, vocabulary=9, tied=True, **MIXERS, mixer_values=64, mixer_exchange=64)
    cost, shape, tokens = CostModel(Cluster.parse("1x4xH200"), spec), GroupShape(1, 4), 32
    flow = cost.links.mixers(shape, cost.aligned_traffic(shape), Checkpoint.NONE)
    near, _ = cost.links.message_ns(1.0, "all_to_all")
    work = StageMicroBatch((Group((0, 1, 2, 3), 1, 4, (Span(0, 0, tokens),)),), Checkpoint.NONE)

    def body(transport):
        counting = CountingTransport(transport)
        x = torch.randn(tokens // 4, 8, 4).bfloat16().requires_grad_()
        out = scan_documents(
            lambda given: (given.tensors[0] * 2, [None]), (x,), bind(work, counting), layer=0, name="x"
        )
        out.sum().backward()
        return counting.traffic("exchange").bytes

    assert {round(flow.link / near * tokens)} == set(run_ranks(4, body))
    plain = CostModel(Cluster.parse("1x4xH200"), ModelSpec("m", **sizes, vocabulary=9, tied=True))
    more = cost.tables([tokens], cost.policies[0]).cost - plain.tables([tokens], plain.policies[0]).cost
    assert (more >= 0).all() and more.any()


def test_every_nic_of_a_group_carries_what_its_ranks_exchange():
    plain = ModelSpec("m", **SIZES, vocabulary=9, tied=True)
    with_mixer = replace(plain, **MIXERS, mixer_values=10_000, mixer_exchange=10_000)
    work = StageMicroBatch((Group(tuple(range(4)), 2, 2, (Span(0, 0, 4096),)),), Checkpoint.NONE)
    taken = []
    for spec in (plain, with_mixer):
        cost = CostModel(Cluster.parse("2x2xH200"), spec)
        taken.append(round_times(cost, work, cost.policies[0]).nic_ns)
    assert (taken[1] > taken[0]).all(), taken


def mixed(**fields):
    """A model with one mixer."""
    return ModelSpec("m", **SIZES, vocabulary=9, tied=True, **MIXERS, mixer_values=64, **fields)


@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (1, 4), (2, 2)])
def test_the_cost_model_counts_the_rows_before_runs_of_tokens(ulysses, ring):
    """A convolution of four tokens over 8 channels: three rows before each run, and their gradients back."""
    tokens, group = 64, Group(tuple(range(4)), ulysses, ring, (Span(0, 0, 64),))
    cost, shape = CostModel(Cluster.parse("1x4xH200"), mixed(mixer_halo=3 * 8)), GroupShape(ulysses, ring)
    flow = cost.links.halo(shape, cost.aligned_traffic(shape), Checkpoint.NONE)
    near, _ = cost.links.message_ns(1.0, "all_to_all")

    def body(transport):
        counting = CountingTransport(transport)
        x = torch.randn(tokens // 4, 8).bfloat16().requires_grad_()
        context = bind(StageMicroBatch((group,), Checkpoint.NONE), counting)
        convolve_documents(lambda rows: rows * 2, x, 3, context, layer=0, name="x").sum().backward()
        return counting.traffic("exchange").bytes

    assert round(flow.link / near) == max(run_ranks(4, body))
    plain = CostModel(Cluster.parse("1x4xH200"), mixed())
    policy, lengths = cost.policies[0], [0, 64, 4096]
    more = cost.tables(lengths, policy, (shape,)).cost - plain.tables(lengths, policy, (shape,)).cost
    assert more[0, 0].tolist() == [0, round(flow.time), round(flow.time)]  # however long a document is
    pieces = [cost.group(shape, range(4), (Span(0, a, b),)) for a, b in ((0, 2000), (2000, 4096))]
    whole, *parts = (
        cost.group_cost(g, policy).ulysses for g in (cost.group(shape, range(4), (Span(0, 0, 4096),)), *pieces)
    )
    latency = cost.group_cost(cost.group(shape, range(4), ()), policy).ulysses
    assert abs(sum(parts) - 2 * latency - (whole - latency + flow.time)) <= 2  # once more for the second piece


def test_a_scan_is_priced_by_the_rank_with_most_heads():
    cost = CostModel(Cluster.parse("1x8xH200"), mixed(mixer_exchange=64, mixer_heads=4, mixer_flops=10**6))
    compute = cost.engine.compute
    one = 3 * 10**6 / (SCAN_EFFICIENCY * compute.matmul_tflops * 1e3)
    for ulysses, ring, share in ((1, 1, 1), (2, 1, 1 / 2), (1, 3, 1 / 2), (4, 1, 1 / 4), (1, 8, 1 / 4)):
        assert compute.scan(GroupShape(ulysses, ring), Checkpoint.NONE) == pytest.approx(one * share)
    assert compute.scan(GroupShape(1, 1), Checkpoint.FULL) == pytest.approx(one * 4 / 3)
    plain = CostModel(Cluster.parse("1x8xH200"), mixed(mixer_exchange=64))
    rates = [
        each.engine.token_ns(GroupShape(1, 1), each.policies[0], GroupTraffic())["linear"] for each in (cost, plain)
    ]
    assert rates[0] - rates[1] == pytest.approx(one)
    moved = [each.engine.layout_token_ns(each.policies[0], Remap.ATTENTION)["linear"] for each in (cost, plain)]
    assert moved[0] == (moved[1][0], pytest.approx(one)) and moved[1][1] == 0  # a scan stays with attention's tokens
    assert cost.engine.matmul_share < plain.engine.matmul_share


@pytest.mark.parametrize("sharding", ["full", "none"])
def test_no_plan_is_below_the_bound(sharding):
    lengths = np.array([700, 90, 4000, 12_000, 300, 2500])
    fields = {"mixer_parameters": 10**7, "mixer_values": 40_000, "mixer_exchange": 16_000, "mixer_heads": 6}
    fields |= {"mixer_layers": tuple(range(0, 28, 2)), "mixer_flops": 10**7, "mixer_halo": 9000}
    fields |= {"mixer_state": 10**5, "mixer_run_flops": 2 * 10**7, "mixer_join_flops": 10**6}
    model = replace(ModelSpec.load("qwen3-0.6b"), **fields)
    cost = CostModel(Cluster.parse("2x4xH100"), model, sharding=sharding, capacity=4096)
    for name in ("static:4", "flex", "zones", "auto"):
        plan = PlannerChoice(name).plan(lengths, cost)
        assert lower_bound(lengths, cost) <= cost.plan_ns(plan)


@pytest.mark.parametrize("delta_rule", [True, False])
@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_linear_attention_in_chunks_is_that_of_token_by_token(delta_rule, tokens):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, tokens, dim, generator=generator, dtype=torch.float64) for dim in (3, 3, 5))
    k = k / k.norm(dim=-1, keepdim=True)
    g = -torch.rand(2, tokens, generator=generator, dtype=torch.float64)
    beta = torch.rand(2, tokens, generator=generator, dtype=torch.float64) if delta_rule else None
    first = state = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    outs = []
    for t in range(tokens):
        state = g[:, t].exp()[:, None, None] * state
        write = v[:, t] if beta is None else beta[:, t, None] * (v[:, t] - torch.einsum("hk,hkv->hv", k[:, t], state))
        state = state + k[:, t, :, None] * write[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q[:, t], state))
    found, after = decayed_linear_attention(q, k, v, g, beta, first)
    assert torch.allclose(found, torch.stack(outs, 1), rtol=1e-10, atol=1e-10)
    assert torch.allclose(after, state, rtol=1e-10, atol=1e-10)


def test_pieces_out_of_turn_are_refused():
    states, x = ScanStates(), torch.ones(2, requires_grad=True)
    with pytest.raises(SeqloomError, match="piece 1 of document 0 goes forward, but there is no state of piece 0"):
        states.take(PIECE._replace(number=1), x)
    assert states.take(PIECE, x) is None and states.take(None, x) is None
    out = states.leave(PIECE, x * 2, x * 3, backward=True)
    with pytest.raises(SeqloomError, match="layer 3: piece 0 of document 0 goes backward before piece 1"):
        out.sum().backward()


def test_a_state_that_is_left_is_reported():
    cache, x = KVCache(), torch.ones(2, requires_grad=True)
    cache.scan_states.leave(PIECE, x * 2, x * 3, backward=True)
    with pytest.raises(SeqloomError, match="states of 1 documents x scans are left, such as document 0 in layer 3"):
        cache.check_empty()
    cache.clear()
    cache.check_empty()


def test_evaluation_in_pieces_keeps_nothing():
    pieces, cache = (Span(0, 0, 3), Span(0, 3, 5)), KVCache(backward=False)
    found = []
    for piece in pieces:
        work = StageMicroBatch((Group((0,), 1, 1, (piece,)),), Checkpoint.NONE)
        context = bind(work, SingleRankTransport(), pieces={0: pieces}, kv_cache=cache)
        tensors = [torch.ones(piece.tokens, 1, 1), torch.ones(piece.tokens, 1, 1)]
        with torch.no_grad():
            found.append(scan_documents(running_sum, tensors, context, layer=0, name="sum"))
    assert torch.cat(found).flatten().tolist() == [1, 2, 3, 4, 5]
    cache.check_empty()


def decayed(given):
    """Scan: a token adds x to a state that its head's factor has decayed before, and reads it."""
    x, factor = given.tensors
    outs, states = [], []
    for rows, decay, state in zip(x.split(given.lengths), factor.split(given.lengths), given.states, strict=True):
        state, own = torch.zeros_like(rows[0]) if state is None else state, []
        for row, each in zip(rows, decay, strict=True):
            state = each * state + row
            own.append(state)
        outs.append(torch.stack(own))
        states.append(state)
    return torch.cat(outs) if outs else x, states


def decayed_runs(tensors, lengths):
    """The same of runs, with what their tokens read of a state before them: one key, a number as transition."""
    _, factor = tensors
    documents = PackedDocuments(tensors, slice(0, 4), lengths, (None,) * len(lengths), None)
    out, after = decayed(documents)
    reads = [each.cumprod(0) for each in factor.split(lengths)]
    return ScannedRuns(
        out, torch.cat(reads), [each[:, None] for each in after], [each[-1][..., None] for each in reads]
    )


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 3), (2, 2), (3, 2), (1, 6)])
@pytest.mark.parametrize("lengths", [(9, 1, 14), (3, 1, 1), (40,)])
def test_states_go_from_rank_to_rank(ulysses, ring, lengths):
    """Documents on one rank, on several, in runs of one token; ranks without tokens."""
    ranks, tokens = ulysses * ring, sum(lengths)
    x, factor = (torch.randn(tokens, 4, width, dtype=torch.float64).sigmoid().requires_grad_() for width in (3, 1))
    whole = PackedDocuments((x, factor), slice(0, 4), lengths, (None,) * len(lengths), None)
    truth, _ = decayed(whole)
    (truth**2).sum().backward()
    spans = tuple(Span(k, 0, n) for k, n in enumerate(lengths))
    work = StageMicroBatch((Group(tuple(range(ranks)), ulysses, ring, spans, states=True),), Checkpoint.NONE)
    starts, shape = torch.tensor([0, *lengths]).cumsum(0), StateShape(4, 1, 3, matrix=False)

    def body(transport):
        counting = CountingTransport(transport)
        context = bind(work, counting)
        rows = starts[context.documents] + context.positions
        own = [each.detach()[rows].requires_grad_() for each in (x, factor)]
        by_states = StateScan(shape, decayed_runs)
        out = scan_documents(decayed, own, context, layer=0, name="decayed", by_states=by_states)
        (out**2).sum().backward()
        sent = sum(counting.traffic(verb).bytes for verb in ("all_to_all", "exchange"))
        return rows, sent, out.detach(), *(each.grad for each in own)

    for rows, sent, out, *grads in run_ranks(ranks, body, strict=True):
        assert torch.allclose(out, truth[rows].detach(), rtol=1e-12)
        assert torch.allclose(grads[0], x.grad[rows], rtol=1e-12)
        assert torch.allclose(grads[1], factor.grad[rows], rtol=1e-12)
        runs = GroupShape(ulysses, ring).runs_per_rank
        assert sent <= 2 * len(lengths) * runs * shape.message * 8 * (ranks - 1)  # however long documents are


def test_the_cost_model_counts_the_states_that_are_sent():
    shape, tokens = StateShape(4, 2, 3, matrix=True), 64
    group = Group(tuple(range(4)), 1, 4, (Span(0, 0, tokens),), states=True)
    fields = {"mixer_exchange": 64, "mixer_state": shape.message, "mixer_run_flops": 1000, "mixer_join_flops": 10}
    cost, form = CostModel(Cluster.parse("1x4xH200"), mixed(**fields)), GroupShape(1, 4, states=True)
    flow = cost.links.states(form, cost.aligned_traffic(form), Checkpoint.NONE)
    near, _ = cost.links.message_ns(1.0, "all_to_all")

    def runs(tensors, lengths):
        out, sizes = tensors[0], (shape.shapes[0], shape.shapes[1])
        after, transitions = ([out.new_zeros(size) + out.sum() for _ in lengths] for size in sizes)
        return ScannedRuns(out, out[..., :2], after, transitions)

    def body(transport):
        counting = CountingTransport(transport)
        x = torch.randn(tokens // 4, 4, 3).requires_grad_()
        context = bind(StageMicroBatch((group,), Checkpoint.NONE), counting)
        scan_documents(None, (x,), context, layer=0, name="x", by_states=StateScan(shape, runs)).sum().backward()
        return counting.traffic("exchange").bytes

    sent, priced = run_ranks(4, body), round(flow.link / near)
    assert 0.9 * priced < max(sent) <= priced  # the last index of a ring has one run, its two chunks touch
    assert cost.links.mixers(form, cost.aligned_traffic(form), Checkpoint.NONE).time == 0
    assert form in cost.engine.shapes and GroupShape(1, 1, states=True) not in cost.engine.shapes
    assert CostModel(Cluster.parse("1x4xH200"), mixed()).engine.shapes == tuple(
        each for each in cost.engine.shapes if not each.states
    )


def test_states_of_a_document_in_pieces_are_refused():
    pieces = (Span(0, 0, 2), Span(0, 2, 4))
    work = StageMicroBatch((Group((0,), 1, 1, pieces[:1], states=True),), Checkpoint.NONE)
    context = bind(work, SingleRankTransport(), pieces={0: pieces}, kv_cache=KVCache())
    with pytest.raises(SeqloomError, match="states that go from rank to rank for document 0, which is in pieces"):
        scan_documents(running_sum, [torch.ones(2, 1, 1)] * 2, context, layer=0, name="sum")


def test_what_cannot_be_scanned_is_refused():
    tensors = [torch.ones(2, 1, 1), torch.ones(2, 1, 1)]
    pieces = (Span(0, 0, 2), Span(0, 2, 4))
    work = StageMicroBatch((Group((0,), 1, 1, pieces[:1]),), Checkpoint.NONE)
    with pytest.raises(SeqloomError, match="document 0 is in pieces, and the context has None"):
        scan_documents(running_sum, tensors, bind(work, SingleRankTransport(), pieces={0: pieces}), layer=0, name="sum")
    context = bind(work, SingleRankTransport(), pieces={0: pieces}, kv_cache=KVCache())
    with pytest.raises(SeqloomError, match="sum of document 0, which is in pieces: states are kept by layer"):
        scan_documents(running_sum, tensors, context, layer=None, name="sum")
    assert len(scan_documents(running_sum, tensors, bind_single_rank([2]), layer=None, name="sum")) == 2
