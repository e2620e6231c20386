"""Collectives and bytes of one layer, forward and backward, are those the cost model prices."""

from dataclasses import replace

import pytest
import torch

from seqloom.attention import attention
from seqloom.cost import GroupShape
from seqloom.cost.communication import Communication, GroupTraffic
from seqloom.cost.profile import Profile
from seqloom.describe import Cluster, ModelSpec
from seqloom.dist.rank_tokens import bind
from seqloom.dist.thread_transport import run_ranks
from seqloom.layout import Route, Span
from seqloom.plan import Checkpoint, Group, Method
from support.attention_cases import Case
from support.transports import CountingTransport

torch.set_num_threads(1)
TOKENS = 96  # a multiple of 2 * ring * ulysses for all shapes below
SHAPES = [(1, 1), (2, 1), (4, 1), (1, 2), (1, 4), (1, 3), (2, 2), (2, 3), (4, 2), (2, 4)]
HEADS = [(8, 8), (8, 4), (8, 2), (8, 1)]


def priced(heads, kv_heads, dim):
    """The links of a cluster as the cost model sees them, for one layer."""
    spec = ModelSpec(
        name="one layer",
        layers=1,
        hidden=heads * dim,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=dim,
        ffn=4,
        gated=True,
        vocabulary=8,
        tied=True,
    )
    return Communication(Profile.for_device("H100"), Cluster.parse("1x8xH100"), spec)


def priced_calls(links, shape):
    """(Ulysses exchanges, ring exchanges, gather exchanges) of a layer, from what the model adds up as latencies."""
    near, none = GroupTraffic(), Checkpoint.NONE
    one, gathered = links.latency, shape._replace(method=Method.GATHER)
    return (
        round(links.ulysses_latency(shape, near, none) / one("all_to_all", False, (shape.ulysses - 1).bit_length())),
        round(links.kv_latency(shape, near, none) / one("p2p", False, 0)),
        round(links.kv_latency(gathered, near, none) / one("collective", False, shape.ring - 1)),
    )


def counted(case):
    """[(traffic of forward, traffic of backward)] by rank, each {verb: Traffic}."""

    def body(transport):
        counting = CountingTransport(transport)
        context = bind(case.work, counting)
        verbs = ("all_to_all", "exchange", "all_gather", "all_reduce")
        q, k, v = (
            torch.randn(context.tokens, n, case.dim, dtype=torch.bfloat16, requires_grad=True)
            for n in (case.heads, case.kv_heads, case.kv_heads)
        )
        assert all(counting.traffic(verb).calls == 0 for verb in verbs), "binding does not communicate"
        out = attention(q, k, v, context, causal=case.causal, window=case.window)
        forward = {verb: counting.traffic(verb) for verb in verbs}
        counting.reset()
        out.sum().backward()
        return forward, {verb: counting.traffic(verb) for verb in verbs}

    return run_ranks(case.world, body)


def sums(pair, verb):
    """Calls and bytes of a verb, forward and backward together."""
    return sum(part[verb].calls for part in pair), sum(part[verb].bytes for part in pair)


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("ulysses, ring", SHAPES)
def test_ulysses_and_ring(ulysses, ring, heads, kv_heads):
    case = Case.one_group((TOKENS,), heads, kv_heads, 8, ulysses, ring)
    links, shape = priced(heads, kv_heads, 8), GroupShape(ulysses, ring)
    exchanges, hops, _ = priced_calls(links, shape)
    assert exchanges == (4 if ulysses > 1 else 0)  # in and out, forward and backward
    for pair in counted(case):
        calls, sent = sums(pair, "all_to_all")
        assert calls == exchanges
        assert sent == links.ulysses_bytes(shape, Checkpoint.NONE) * TOKENS * (ulysses - 1) / ulysses
        assert pair[0]["exchange"].calls == ring - 1
        assert sums(pair, "exchange") == (hops, links.ring_bytes(shape, Checkpoint.NONE) * TOKENS if ring > 1 else 0)
        assert sums(pair, "all_gather") == sums(pair, "all_reduce") == (0, 0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("ulysses, ring", [shape for shape in SHAPES if shape[1] > 1])
def test_gather(ulysses, ring, causal):
    """Full attention gathers what the cost model prices; under a causal mask a quarter of it is never seen."""
    case = Case.one_group((TOKENS,), 8, 4, 8, ulysses, ring, method="gather", causal=causal)
    kv = 2 * max(4, ulysses) * 8 / ulysses * TOKENS  # elements of keys and values in the ring of one Ulysses index
    bytes_of_all = kv * (2 * 2 + 4) * (ring - 1) / ring  # two passes in bfloat16, gradients in float32
    _, _, calls = priced_calls(priced(8, 4, 8), GroupShape(ulysses, ring))
    for pair in counted(case):
        assert pair[0]["exchange"].calls == 1 and sums(pair, "exchange")[0] == calls
        assert sums(pair, "exchange")[1] == bytes_of_all * (0.75 if causal else 1)
        assert sums(pair, "all_to_all")[0] == (4 if ulysses > 1 else 0)


def test_a_window_gathers_neighbours_only():
    """12 chunks of 8 tokens and a window of 5: four keys before each chunk, wherever they are."""
    case = Case.one_group((TOKENS,), 2, 2, 8, 1, 6, method="gather", window=5)
    row = 2 * 2 * 8  # elements of keys and values
    for rank, pair in enumerate(counted(case)):
        # Chunk 0 has nobody before it, chunk 11 nobody behind it, and chunks 5 and 6 are on one rank.
        elements = (4 if rank in (0, 5) else 8) * row
        assert pair[0]["exchange"].bytes == elements * 2
        assert pair[1]["exchange"].bytes == elements * (2 + 4)


@pytest.mark.parametrize("heads, kv_heads, ulysses", [(7, 7, 4), (7, 1, 4), (5, 5, 3), (6, 3, 4), (8, 2, 3), (9, 3, 4)])
def test_uneven_heads_send_no_more_than_priced(heads, kv_heads, ulysses):
    case = Case.one_group((TOKENS,), heads, kv_heads, 8, ulysses)
    limit = priced(heads, kv_heads, 8).ulysses_bytes(GroupShape(ulysses, 1), Checkpoint.NONE) * TOKENS
    for pair in counted(case):
        calls, sent = sums(pair, "all_to_all")
        assert calls == 4 and sent <= limit * (ulysses - 1) / ulysses


def test_documents_of_a_few_tokens_send_only_what_exists():
    """One token on four ring indices: its owner sends its key along, nobody sends anything empty."""
    forward = [pair[0]["exchange"] for pair in counted(Case.one_group((1,), 2, 2, 8, 1, 4))]
    assert [traffic.bytes for traffic in forward] == [2 * 2 * 8 * 2] * 3 + [0]


def sent_bytes(case):
    return sum(each["exchange"].bytes for both in counted(case) for each in both)


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_a_window_within_a_chunk_fetches_only_what_it_sees(method):
    """Four ring indices, chunks of 12 tokens: every index sees 4 keys before each of its chunks."""
    case = Case.one_group((TOKENS,), 2, 2, 4, 1, 4, window=5, method=method)
    fetched = 6 * 4  # chunks whose neighbour before them is on another index, times the keys seen there
    per_row = 2 * 2 * 4  # keys and values, heads, dim
    assert sent_bytes(case) == fetched * per_row * (2 + 2 + 4)


def test_a_window_beyond_a_chunk_goes_round_if_the_plan_says_so():
    case = Case.one_group((TOKENS,), 2, 2, 4, 1, 4, window=13)
    assert sent_bytes(case) == sent_bytes(Case.one_group((TOKENS,), 2, 2, 4, 1, 4))


def crossing(case):
    """Bytes that every rank sends to other nodes, forward and backward."""

    def body(transport):
        counting = CountingTransport(transport)
        context = bind(case.work, counting, node_size=case.node_size)
        sizes = (case.heads, case.kv_heads, case.kv_heads)
        q, k, v = (torch.ones(context.tokens, n, case.dim, dtype=torch.bfloat16, requires_grad=True) for n in sizes)
        attention(q, k, v, context, causal=case.causal).sum().backward()
        node = transport.rank // case.node_size
        return sum(counting.bytes_to(peer) for peer in range(case.world) if peer // case.node_size != node)

    return run_ranks(case.world, body)


def across_nodes(method, ulysses, ranks, route, tokens=128):
    group = Group(ranks, ulysses, len(ranks) // ulysses, (Span(0, 0, tokens),), method, route)
    return Case((tokens,), 8, 4, 8, world=8, groups=(group,), node_size=4)


ALL, HALF = tuple(range(8)), (1, 2, 5, 6)


@pytest.mark.parametrize("proxies, slices", [(ALL, 1), (HALF, 3)], ids=["all", "half"])
@pytest.mark.parametrize("ulysses, ranks", [(1, ALL), (2, ALL), (2, (0, 1, 4, 5)), (1, (3, 7))])
def test_a_routed_ring_crosses_as_often_as_a_direct_one_through_all_proxies_alike(ulysses, ranks, proxies, slices):
    direct = crossing(across_nodes(Method.RING, ulysses, ranks, None))
    routed = crossing(across_nodes(Method.RING, ulysses, ranks, Route(proxies, slices)))
    assert sum(routed) == sum(direct)
    for rank, sent in enumerate(routed):
        even = sum(routed) / len(proxies) if rank in proxies else 0
        assert abs(sent - even) <= 0.05 * even


def test_what_several_ranks_of_a_node_see_crosses_once():
    """Full attention over 4 + 4 ranks: every key is wanted by all four ranks of the other node."""
    group = across_nodes(Method.GATHER, 1, ALL, None)
    direct = crossing(replace(group, causal=False))
    routed = crossing(replace(across_nodes(Method.GATHER, 1, ALL, Route(ALL, 2)), causal=False))
    keys, gradients = 2 * 2, 4  # bytes of both passes, and of what returns, which is not joined on the way
    assert sum(routed) * (4 * keys + 4 * gradients) == sum(direct) * (keys + 4 * gradients)
    assert max(routed) - min(routed) <= 0.05 * min(routed)
