"""The head exchange: who gets which heads, exact positions, replicated kv heads."""

import pytest
import torch

from seqloom.attention.context_parallel.ulysses import HeadSplit, UlyssesExchange
from seqloom.dist.rank_tokens import BoundGroup
from seqloom.dist.thread_transport import run_ranks
from seqloom.layout import Span
from seqloom.plan import Group

torch.set_num_threads(1)
SPLITS = [  # heads, kv heads, ulysses
    *((8, 8, 4), (8, 4, 4), (8, 2, 4), (8, 1, 4)),
    *((7, 7, 4), (7, 1, 4), (3, 3, 2), (5, 5, 5)),
    *((9, 3, 4), (8, 2, 3), (6, 3, 4)),
]


def exchange_of(transport, counts, split, order=None):
    places, ranks = None if order is None else torch.argsort(order), tuple(range(len(counts)))
    group = Group(ranks, len(ranks), 1, (Span(0, 0, 50),))
    rows = slice(0, counts[transport.rank])
    bound = BoundGroup(group, transport.rank, 0, ranks, ranks[:1], (), tuple(counts), rows, order, places)
    return UlyssesExchange(transport, bound, split)


def stamp(rows, heads, dim, what):
    """A tensor whose every element says where it is: row, head and dim."""
    row, head, place = torch.meshgrid(torch.as_tensor(rows), torch.arange(heads), torch.arange(dim), indexing="ij")
    return (((what * 1000 + row) * 100 + head) * 10 + place).double()


@pytest.mark.parametrize("heads, kv_heads, ulysses", SPLITS)
def test_the_split_is_the_plans_head_layout(heads, kv_heads, ulysses):
    group = Group(tuple(range(ulysses)), ulysses, 1, (Span(0, 0, 50),))
    split = HeadSplit.of(heads, kv_heads, ulysses)
    for own, layout in ((split.query, group.head_layout(heads)), (split.kv, group.head_layout(heads, kv_heads))):
        assert list(own) == list(zip(layout.start2.tolist(), layout.stop2.tolist(), strict=True))
    assert split.replicated == (sum(high - low for low, high in split.kv) > kv_heads)


def test_kv_index_only_where_heads_are_shared_unequally():
    assert [HeadSplit.of(8, 2, 4).kv_index(rank) for rank in range(4)] == [None] * 4
    assert [HeadSplit.of(8, 2, 3).kv_index(rank) for rank in range(3)] == [None, (0, 1, 1), None]
    assert [HeadSplit.of(9, 3, 2).kv_index(rank) for rank in range(2)] == [(0, 0, 0, 1, 1), (0, 1, 1, 1)]


@pytest.mark.parametrize("heads, kv_heads, ulysses", SPLITS)
@pytest.mark.parametrize("shuffled", [False, True])
def test_every_element_arrives_where_it_belongs(heads, kv_heads, ulysses, shuffled):
    """Unequal rows per rank, one rank without any: heads of all rows come in, in the order asked for, and go back."""
    counts = [3, 0, 2, 4, 1][:ulysses]
    split = HeadSplit.of(heads, kv_heads, ulysses)
    total = sum(counts)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(1)) if shuffled else None
    rows_of = torch.arange(total).split(counts)

    def body(transport):
        exchange = exchange_of(transport, counts, split, order)
        own = rows_of[transport.rank]
        inputs = [stamp(own, n, 4, what) for what, n in enumerate((heads, kv_heads, kv_heads))]
        q, k, v = exchange.to_heads(*inputs)
        rows = torch.arange(total) if order is None else order
        (low, high), (kv_low, kv_high) = split.query[transport.rank], split.kv[transport.rank]
        assert torch.equal(q, stamp(rows, heads, 4, 0)[:, low:high])
        assert torch.equal(k, stamp(rows, kv_heads, 4, 1)[:, kv_low:kv_high])
        assert torch.equal(v, stamp(rows, kv_heads, 4, 2)[:, kv_low:kv_high])
        (alone,) = exchange.to_heads(inputs[0])
        assert torch.equal(alone, q)
        assert torch.equal(exchange.to_tokens(q), inputs[0])
        copies = torch.tensor([sum(low <= head < high for low, high in split.kv) for head in range(kv_heads)])
        dq, dk, dv = exchange.gradients_to_tokens(q, k, v, torch.float64)
        assert torch.equal(dq, inputs[0])
        assert torch.equal(dk, inputs[1] * copies[:, None]) and torch.equal(dv, inputs[2] * copies[:, None])

    run_ranks(ulysses, body, strict=True)


def test_q_k_and_v_are_views_of_one_buffer():
    def body(transport):
        exchange = exchange_of(transport, (2, 2), HeadSplit.of(4, 2, 2))
        received = exchange.to_heads(torch.zeros(2, 4, 8), torch.zeros(2, 2, 8), torch.zeros(2, 2, 8))
        assert len({tensor.untyped_storage().data_ptr() for tensor in received}) == 1

    run_ranks(2, body)


def test_replicated_gradients_are_summed_in_float32_and_rounded_once():
    """1 + 2^-8 + 2^-8 + 2^-8: in bfloat16 every partial sum would round back to 1."""

    def body(transport):
        exchange = exchange_of(transport, (1, 1, 1, 1), HeadSplit.of(4, 1, 4))
        part = torch.full((4, 1, 2), 1.0 if transport.rank == 0 else 2.0**-8)
        _, dk, _ = exchange.gradients_to_tokens(torch.zeros(4, 1, 2), part, part, torch.bfloat16)
        assert dk.dtype == torch.bfloat16
        assert dk.flatten().tolist() == [torch.tensor(1 + 3 * 2.0**-8).bfloat16().item()] * 2
        assert dk[0, 0, 0] > 1

    run_ranks(4, body)


def test_a_block_without_rows_says_nothing():
    class Silent:
        rank = 0

        def all_to_all(self, *arguments):
            raise AssertionError("nothing to exchange")

    exchange = exchange_of(Silent(), (0, 0), HeadSplit.of(4, 2, 2))
    q, k, v = exchange.to_heads(torch.zeros(0, 4, 8), torch.zeros(0, 2, 8), torch.zeros(0, 2, 8))
    assert q.shape == (0, 2, 8) and k.shape == v.shape == (0, 1, 8)
    assert exchange.to_tokens(q).shape == (0, 4, 8)
    assert [x.shape[1] for x in exchange.gradients_to_tokens(q, k, v, q.dtype)] == [4, 2, 2]
