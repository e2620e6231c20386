"""TP groups: what the members of one gather and sum, what their column is, and what is refused."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.dist import (
    all_gather_rows,
    attention_context,
    bind,
    bind_single_rank,
    reduce_scatter_rows,
    run_ranks,
)
from seqloom.dist.tensor_parallel import all_gather_columns, split_parts
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Route, Span
from seqloom.plan import Checkpoint, Group, GroupFamily, Method, StageMicroBatch
from support.strategies_attention import cases, cases_of_many_groups
from support.transports import CountingTransport, RankOnly

torch.set_num_threads(1)
LONG, SHORT = Span(0, 0, 16), Span(1, 0, 5)
EIGHT = tuple(range(8))


def work_of(*groups, **options):
    return StageMicroBatch(groups, Checkpoint.NONE, **options)


def tokens(context):
    """(document, position) of a rank's rows."""
    return list(zip(context.documents.tolist(), context.positions.tolist(), strict=True))


def test_a_team_and_its_column():
    work = work_of(Group(EIGHT, 4, 2, (LONG,), Method.GATHER))
    tp_group = bind(work, RankOnly(5, 8), tensor=2).tp_group
    assert (tp_group.ranks, tp_group.index, tp_group.counts) == ((4, 5), 1, (2, 2))
    assert tp_group.cp_context.work.groups == (Group((1, 3, 5, 7), 2, 2, (LONG,), Method.GATHER),)
    (group,) = tp_group.cp_context.groups
    assert (group.block, group.ring_ranks, group.ulysses_index) == ((5, 7), (1, 5), 0)
    assert tokens(tp_group.cp_context) == tokens(bind(work, RankOnly(4, 8))) + tokens(bind(work, RankOnly(5, 8)))


def test_rows_of_members_are_sorted_by_an_index_where_the_plan_lists_documents_otherwise():
    """Rank 0 holds document 1 and the start of 0, rank 1 the rest of 0; each sorts its own rows."""
    tp_group = bind(work_of(Group((0, 1), 2, 1, (SHORT, LONG))), RankOnly(0, 8), tensor=2).tp_group
    held = [(0, p) for p in range(6)] + [(1, p) for p in range(5)] + [(0, p) for p in range(6, 16)]
    assert tp_group.counts == (11, 10)
    assert [held[row] for row in tp_group.order] == sorted(held) == tokens(tp_group.cp_context)
    assert tp_group.inverse_order[tp_group.order].tolist() == list(range(21))


def test_a_column_shares_pieces_and_carry():
    piece, kv_cache = Span(0, 4, 16), object()
    pieces = {0: (Span(0, 0, 4), piece)}
    context = bind(work_of(Group((0, 1), 2, 1, (piece,))), RankOnly(0, 8), tensor=2, pieces=pieces, kv_cache=kv_cache)
    assert (
        context.tp_group.cp_context.kv_cache is kv_cache
        and context.tp_group.cp_context.pieces == context.pieces == pieces
    )


def test_a_rank_without_a_group_is_a_team_of_its_own():
    context = bind(work_of(Group((0, 1), 2, 1, (LONG,))), RankOnly(6, 8), tensor=2)
    assert (context.tp_group.ranks, context.tp_group.counts, context.tp_group.cp_context.tokens) == ((6,), (0,), 0)
    assert (
        all_gather_rows(torch.ones(0, 3), context).shape
        == reduce_scatter_rows(torch.ones(0, 3), context).shape
        == (0, 3)
    )


def test_without_a_team_nothing_happens():
    context, x, handle = bind_single_rank([3]), torch.ones(3, 2), torch.ones(1, dtype=torch.int64)
    assert context.tp_group is None
    assert (
        all_gather_rows(x, context)
        is reduce_scatter_rows(x, context)
        is all_gather_rows(x, handle)
        is reduce_scatter_rows(x, handle)
        is x
    )
    assert attention_context(context) is context and attention_context(handle) is handle


@settings(max_examples=25)
@given(
    case=(cases() | cases_of_many_groups()).filter(lambda case: case.world <= 4),
    tensor=st.integers(2, 4),
    strict=st.booleans(),
    blocks=st.booleans(),
)
def test_gathering_and_summing_are_plain_torch(case, tensor, strict, blocks):
    """A row says which token it is; weights differ by member, token and column, so that no sum is right by chance."""
    case = case.in_tp_groups(tensor) if case.world * tensor <= 8 else case.in_tp_groups(2)
    tensor, family = case.tensor, GroupFamily(case.world, case.world) if blocks else None
    first = [sum(case.lengths[:k]) for k in range(len(case.lengths))]
    whole = torch.randn(sum(case.lengths), 3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights = torch.randn(tensor, *whole.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def body(transport):
        context = bind(case.work, transport, tensor=tensor, family=family)
        tp_group, column = context.tp_group, context.tp_group.cp_context
        own = torch.tensor([first[d] + p for d, p in tokens(context)], dtype=torch.int64)
        every = torch.tensor([first[d] + p for d, p in tokens(column)], dtype=torch.int64)
        x = whole[own].requires_grad_()
        together = all_gather_rows(x, context)
        assert torch.equal(together, whole[every])
        total = reduce_scatter_rows(together * weights[tp_group.index][every], context)
        wanted = whole[own] * weights.sum(0)[own]
        assert torch.allclose(total, wanted, rtol=1e-12, atol=1e-12)
        (gradient,) = torch.autograd.grad(total, x, whole[own])
        assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-12)

    run_ranks(case.world, body, strict=strict, family=family)


@pytest.mark.parametrize(
    "family, verbs",
    [
        (None, ("exchange", "exchange")),
        (GroupFamily(4, 4), ("all_gather", "all_to_all")),
        (GroupFamily(4, 4, 0), ("exchange", "exchange")),
    ],
)
def test_a_team_meets_on_its_communicator_where_it_has_one(family, verbs):
    """Every member sends its own rows to the others going in, and theirs to each coming out."""
    work = work_of(Group((2, 3), 2, 1, (SHORT,)), Group((2, 3), 2, 1, (LONG,)))

    def body(transport):
        counting = CountingTransport(transport)
        context = bind(work, counting, tensor=2, family=family)
        x = torch.ones(context.tokens, 7)
        one = all_gather_rows(x, context)
        gathered = counting.traffic(verbs[0])
        counting.reset()
        reduce_scatter_rows(one, context)
        summed = counting.traffic(verbs[1])
        others = sum(context.tp_group.counts) - context.tokens
        assert (gathered.bytes, summed.bytes) == (28 * len(x) * (others > 0), 28 * others)
        return gathered.calls, summed.calls

    assert run_ranks(4, body, strict=True, family=family) == [(0, 0), (0, 0), (1, 1), (1, 1)]


@pytest.mark.parametrize("degree", [2, 3, 4])
def test_columns_of_a_tp_group(degree):
    """All columns of all ranks; gradients go back, those of all ranks summed."""
    work = work_of(Group(tuple(range(degree)), degree, 1, (Span(0, 0, 5), Span(1, 0, 2))))
    whole = torch.arange(7 * 6 * degree, dtype=torch.float64).view(7, -1).requires_grad_()
    weights = torch.randn(7, 6 * degree, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def body(transport):
        tp_group = bind(work, transport, tensor=degree).tp_group
        k, mine = tp_group.index, whole.detach().chunk(degree, dim=1)[tp_group.index].clone().requires_grad_()
        every = all_gather_columns(mine, tp_group)
        assert torch.equal(every, whole)
        (found,) = torch.autograd.grad(every, mine, (k + 1) * weights)
        assert torch.allclose(found, sum(range(degree + 1)) * weights.chunk(degree, dim=1)[k], rtol=1e-12)

    run_ranks(degree, body, strict=True)


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("parts", [(3, 3), (4, 1, 1), (1, 5), (2,)])
def test_columns_of_parts_in_a_row(degree, parts):
    """Each rank's part of every part, such as its heads of queries, keys and values; gradients go back."""
    work = work_of(Group(tuple(range(degree)), degree, 1, (Span(0, 0, 5), Span(1, 0, 2))))
    widths = tuple(part * degree for part in parts)
    whole = torch.arange(7.0 * sum(widths), dtype=torch.float64).view(7, -1)
    weights = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def body(transport):
        tp_group = bind(work, transport, tensor=degree).tp_group
        mine = whole.chunk(degree, dim=1)[tp_group.index].clone().requires_grad_()
        found = split_parts(mine, widths, tp_group)
        wanted, seen = (
            torch.cat([part.chunk(degree, 1)[tp_group.index] for part in x.split(widths, 1)], 1)
            for x in (whole, weights)
        )
        assert torch.equal(found, wanted)
        gradient = weights.chunk(degree, dim=1)[tp_group.index]
        assert torch.equal(torch.autograd.grad(found, mine, seen)[0], gradient)

    run_ranks(degree, body, strict=True)


def test_partial_sums_are_rounded_once():
    """In bfloat16 a member's part would drown in the sum of the others, one by one; together they show."""

    def body(transport):
        context = bind(work_of(Group((0, 1, 2, 3), 4, 1, (Span(0, 0, 4),))), transport, tensor=4)
        part = torch.full((4, 1), 1.0 if transport.rank == 0 else 2**-9, dtype=torch.bfloat16)
        return reduce_scatter_rows(part, context)

    exact = torch.tensor(1 + 3 * 2**-9).to(torch.bfloat16)
    assert exact > 1 and all(found.item() == exact.item() for found in run_ranks(4, body))


@pytest.mark.parametrize(
    "work, tensor, words",
    [
        (work_of(Group((0, 1), 2, 1, (LONG,))), 4, ["tensor degree 4", "ulysses 2", "divides 2"]),
        (work_of(Group((0, 1), 2, 1, (LONG,))), 0, ["tensor degree 0"]),
        (work_of(Group((0, 1), 1, 2, (LONG,))), 2, ["tensor degree 2", "ulysses 1"]),
        (work_of(Group((0, 1, 4, 5), 2, 2, (LONG,), route=Route((0, 4)))), 2, ["with a route", "leave the route out"]),
        (
            work_of(Group((0, 1), 2, 1, (LONG,)), linear=Layout.of([(0, 0, 0, 16)])),
            2,
            ["linear layout", "use tensor degree 1"],
        ),
        (
            work_of(Group((0, 1, 2, 3), 4, 1, (LONG,)), Group((1, 2), 2, 1, (SHORT,))),
            2,
            ["rank 1 is in TP groups (0, 1) and (1, 2)", "same TP groups"],
        ),
    ],
)
def test_what_is_refused(work, tensor, words):
    with pytest.raises(SeqloomError) as error:
        bind(work, RankOnly(1, 8), tensor=tensor, node_size=4)
    assert all(word in str(error.value) for word in words), error.value
    assert bind(replace(work, linear=None), RankOnly(1, 8), node_size=4).tp_group is None
