"""KV cache of documents in pieces: how much memory, in which dtype, for how long; and what is refused."""

from dataclasses import replace

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from seqloom.attention import attention
from seqloom.attention.context_parallel import KVCache
from seqloom.attention.kernels.cpu import Reference
from seqloom.dist import SingleRankTransport, bind, run_ranks
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Route, Span
from seqloom.plan import Checkpoint, Group, Method, StageMicroBatch
from support.attention_cases import Case, assemble, worst
from support.held_memory import kv_cache_bytes
from support.kv_cache_cases import PiecesCase, attend_pieces
from support.transports import CountingTransport

torch.set_num_threads(1)
HEADS, KV_HEADS, DIM = 4, 2, 8
PIECES = (Span(0, 0, 12), Span(0, 12, 20), Span(0, 20, 30))
ROW = 2 * KV_HEADS * DIM
"""Elements of a key and a value, all heads."""


def case(ulysses=1, ring=1, rounds=None, lengths=(30,), **options):
    whole = Case(lengths, HEADS, KV_HEADS, DIM, ulysses * ring, ())
    return PiecesCase.on_one_group(whole, rounds or [[piece] for piece in PIECES], ulysses, ring, **options)


def tensors(context, dtype=torch.float64):
    drawn = torch.Generator().manual_seed(0)
    sizes = [(context.tokens, count, DIM) for count in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(size, generator=drawn, dtype=torch.float64).to(dtype).requires_grad_() for size in sizes]


def forward(context, dtype=torch.float64, **options):
    return attention(*tensors(context, dtype), context, **{"layer": 0} | options)


# -- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, wide", [(torch.bfloat16, 4), (torch.float32, 4), (torch.float64, 8)], ids=str)
def test_one_buffer_per_document_and_gradients_in_wide_numbers(dtype, wide):
    """Keys and values of all 30 tokens from the first piece on; gradients of the 20 before the last."""
    kv_cache = KVCache()
    keys = 30 * ROW * dtype.itemsize
    outs = []
    for context in case().bind(SingleRankTransport(), kv_cache):
        outs.append(forward(context, dtype))
        assert kv_cache_bytes(kv_cache) == keys
    for n, out in zip((2, 1, 0), reversed(outs), strict=True):
        out.sum().backward()
        assert kv_cache_bytes(kv_cache) == (keys + 20 * ROW * wide if n else 0)
    kv_cache.check_empty()


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_keys_and_values_of_pieces_are_held_once(shape):
    """All that a graph saves of a round: q, out and log-sum-exp of all rows, keys and values of the whole document."""
    rounds = [[PIECES[0]], [PIECES[1], Span(1, 0, 4)], [PIECES[2]]]

    def body(transport):
        found = []
        for context in case(*shape, rounds, (30, 4)).bind(transport, KVCache()):
            storages = {}

            def pack(tensor, storages=storages):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 8
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                forward(context)
            found.append(sum(storages.values()))
        return found

    ulysses, ring = shape
    heads, row = HEADS // ulysses, ROW // ulysses
    for found in run_ranks(ulysses * ring, body):
        queries = [tokens // ring * heads * (2 * DIM + 1) for tokens in (12, 12, 10)]
        assert found == [queries[0], queries[1] + 4 // ring * row, queries[2]]


def test_the_prefix_is_read_where_it_lies():
    """Kernels get views of the cache: no copy of the prefix is made for a piece."""
    seen = []

    class Watching(Reference):
        def prepare(self, segments, shape):
            prepared = super().prepare(segments, shape)

            class Watched:
                def forward(self, q, k, v):
                    seen.append((len(k), k.untyped_storage().data_ptr(), v.untyped_storage().data_ptr()))
                    return prepared.forward(q, k, v)

            return Watched()

    kv_cache = KVCache()
    for context in case().bind(SingleRankTransport(), kv_cache):
        forward(context, kernels=Watching())
    assert [rows for rows, _, _ in seen] == [12, 8, 12, 10, 20]
    assert len({pointer for _, *pointers in seen for pointer in pointers}) == 1


def test_evaluation_frees_a_document_after_its_last_piece():
    kv_cache, held = KVCache(backward=False), []
    for context in case().bind(SingleRankTransport(), kv_cache):
        forward(context)
        held.append(kv_cache_bytes(kv_cache))
    assert held == [30 * ROW * 8, 30 * ROW * 8, 0]


def test_a_ring_sends_the_prefix_beside_the_piece():
    """The second piece: 4 rows of its own and 6 before them go round, gradients in float32 one hop more."""
    pieces = [[Span(0, 0, 12)], [Span(0, 12, 20)]]

    def body(transport):
        counting, outs, sent = CountingTransport(transport), [], []
        for context in case(1, 2, pieces, (20,)).bind(counting, KVCache()):
            outs.append(forward(context, torch.bfloat16))
        for out in reversed(outs):
            counting.reset()
            out.sum().backward()
            sent.append((counting.traffic("exchange").calls, counting.traffic("exchange").bytes))
        return sent

    last, first = (4 + 6) * ROW * (2 + 2 * 4), 6 * ROW * (2 + 2 * 4)
    assert run_ranks(2, body, strict=True) == [[(3, last), (3, first)]] * 2


# -- numbers ------------------------------------------------------------------------------------------------------


def test_several_pieces_side_by_side_in_one_group_and_in_others():
    lengths = (21, 17, 9, 5)
    one, two = Group((0, 1, 2, 3), 2, 2, ()), Group((2, 3), 2, 1, ())
    rounds = (
        (replace(one, spans=(Span(0, 0, 9), Span(1, 0, 1))),),
        (replace(one, spans=(Span(1, 1, 12), Span(3, 0, 5), Span(0, 9, 10))), replace(two, spans=(Span(2, 0, 4),))),
        (replace(one, spans=(Span(0, 10, 21), Span(1, 12, 17))), replace(two, spans=(Span(2, 4, 9),))),
    )
    order = (("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0))
    many = PiecesCase(Case(lengths, HEADS, 1, DIM, 4, ()), rounds, order, layers=2)
    inputs = many.inputs(torch.float64)
    parts = run_ranks(4, lambda transport: attend_pieces(transport, many, inputs), strict=True)
    for own, given in zip(zip(*parts, strict=True), inputs, strict=True):
        assert worst(assemble(own), many.truth(given)) < 1e-9


def test_a_round_that_remaps_around_attention():
    """Rank 0 has all tokens outside attention, both ranks have them inside."""
    given = [
        StageMicroBatch((Group((0, 1), 1, 2, (piece,)),), Checkpoint.NONE, linear=Layout.of([(0, *piece)]))
        for piece in PIECES
    ]
    whole = Case((30,), HEADS, KV_HEADS, DIM, 2, ())
    inputs = whole.inputs(torch.float64)

    def body(transport):
        kv_cache, outs = KVCache(), []
        for work in given:
            context = bind(work, transport, shard_groups=[(0, 1)], pieces={0: PIECES}, kv_cache=kv_cache)
            own = [x[context.positions].requires_grad_() for x in inputs[:3]]
            outs.append((own, attention(*own, context, layer=0), inputs.dout[context.positions]))
        found = [torch.autograd.grad(out, own, dout) for own, out, dout in reversed(outs)]
        kv_cache.check_empty()
        return [torch.cat(parts) for parts in zip(*reversed(found), strict=True)]

    dq, dk, dv = run_ranks(2, body, strict=True)[0]
    truth = whole.truth(inputs)
    assert max((a - b).abs().max() for a, b in zip((dq, dk, dv), truth[2:], strict=True)) < 1e-9


# -- refusals -----------------------------------------------------------------------------------------------------


def bound(spans=PIECES, *, at=0, kv_cache=None, group=None, **options):
    group = replace(group or Group((0,), 1, 1, ()), spans=(spans[at],))
    work = StageMicroBatch((group,), Checkpoint.NONE)
    return bind(work, SingleRankTransport(), pieces={0: tuple(spans)}, kv_cache=kv_cache or KVCache(), **options)


def test_a_layer_must_be_named():
    with pytest.raises(SeqloomError, match=r"document 0 is in pieces.*without a layer.*call attention\(\.\.\., layer="):
        forward(bound(), layer=None)
    assert (
        forward(
            bind(StageMicroBatch((Group((0,), 1, 1, (Span(0, 0, 5),)),), Checkpoint.NONE), SingleRankTransport()),
            layer=None,
        ).shape[0]
        == 5
    )


def test_a_kv_cache_must_be_given():
    work = StageMicroBatch((Group((0,), 1, 1, (PIECES[0],)),), Checkpoint.NONE)
    with pytest.raises(SeqloomError, match=r"document 0 is in pieces.*None.*kv_cache=one KVCache\(\)"):
        forward(bind(work, SingleRankTransport(), pieces={0: PIECES}))
    late = StageMicroBatch((Group((0,), 1, 1, (PIECES[1],)),), Checkpoint.NONE)
    with pytest.raises(SeqloomError, match=r"from token 12 on: .*pieces_of_plan\(plan\)"):
        forward(bind(late, SingleRankTransport(), kv_cache=KVCache()))


def test_what_pieces_cannot_be_combined_with():
    with pytest.raises(SeqloomError, match=r"causal=False for document 0.*set causal=True"):
        forward(bound(), causal=False)

    def body(transport):
        for group in (
            Group((0, 1), 1, 2, PIECES[:1], Method.GATHER),
            Group((0, 1), 1, 2, PIECES[:1], route=Route((0, 1), 1)),
        ):
            context = bind(
                StageMicroBatch((group,), Checkpoint.NONE),
                transport,
                node_size=1,
                pieces={0: PIECES},
                kv_cache=KVCache(),
            )
            with pytest.raises(SeqloomError, match=r"(method gather|a route) for document 0.*needs method ring"):
                forward(context)

    run_ranks(2, body)


def test_pieces_out_of_turn():
    kv_cache = KVCache()
    first, second, third = (bound(at=n, kv_cache=kv_cache) for n in range(3))
    with pytest.raises(SeqloomError, match=r"layer 0: piece 1 of document 0.*piece 0 has not been forward"):
        forward(second)
    outs = [forward(first)]
    with pytest.raises(SeqloomError, match=r"layer 0 computes attention twice for piece 0 .*plan whole documents"):
        forward(first)
    outs.append(forward(second))
    with pytest.raises(SeqloomError, match=r"piece 1.*goes backward, but 2 of 3 pieces have been forward"):
        outs[1].sum().backward()
    outs.append(forward(third))
    with pytest.raises(SeqloomError, match=r"piece 0.*goes backward.*the backward of piece 2 is next"):
        outs[0].sum().backward()
    outs[2].sum().backward()
    with pytest.raises(SeqloomError, match=r"piece 2.*goes forward, but its backward is done"):
        forward(third)
    with pytest.raises(SeqloomError, match=r"document 0 in layer 0, whose piece 1 has not gone backward"):
        kv_cache.check_empty()
    kv_cache.clear()
    kv_cache.check_empty()


def test_a_kv_cache_of_evaluation_has_no_backward():
    kv_cache = KVCache(backward=False)
    outs = [forward(bound(at=n, kv_cache=kv_cache)) for n in range(3)]
    with pytest.raises(SeqloomError, match=r"no keys of document 0 for the backward of piece 2.*backward=False"):
        outs[2].sum().backward()


@pytest.mark.parametrize(
    "pieces, words",
    [
        ((PIECES[0], PIECES[2]), "without gaps"),
        ((PIECES[1], PIECES[2]), "begin at token 0"),
        ((Span(0, 0, 10), Span(0, 10, 30)), "at tokens 0 to 12 in this round"),
    ],
)
def test_pieces_that_cannot_be_true(pieces, words):
    work = StageMicroBatch((Group((0,), 1, 1, (PIECES[0],)),), Checkpoint.NONE)
    with pytest.raises(SeqloomError, match=words):
        bind(work, SingleRankTransport(), pieces={0: pieces}, kv_cache=KVCache())
