"""Remapping: who holds what before and after, what travels, gradients, and layouts that are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.attention import attention, attention_with_lse
from seqloom.dist import bind, run_ranks
from seqloom.dist.rank_tokens import redistribute_tokens, run_in_mlp_layout
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Span
from seqloom.layout.move import move_between
from seqloom.plan import Checkpoint, Group, GroupFamily, Remap, StageMicroBatch
from support.attention_cases import Case
from support.transports import CountingTransport, RankOnly

torch.set_num_threads(1)
LONG, SHORT = Span(0, 0, 16), Span(1, 0, 5)
GROUPS = (Group((0, 1, 2, 3), 2, 2, (LONG,)), Group((1,), 1, 1, (SHORT,)))
LINEAR = Layout.of([(0, 0, 0, 5), (0, 1, 0, 1), (1, 0, 5, 10), (2, 0, 10, 16), (3, 1, 1, 5)])
WORK = StageMicroBatch(GROUPS, Checkpoint.NONE, linear=LINEAR)
WORLD = GroupFamily(4, 4)
SAME = WORK.attention_layout()
SWAPPED = Layout(np.where(SAME.rank < 2, 1 - SAME.rank, SAME.rank), SAME.item, SAME.start, SAME.stop)


def tokens(layout, rank):
    """(document, position) of a rank's rows."""
    return [(d, p) for d, start, stop in layout.spans(rank) for p in range(start, stop)]


def named(rows):
    """A tensor whose rows say which tokens they are, float64[rows, 2]."""
    return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


@pytest.mark.parametrize("remap", Remap)
def test_whose_tokens_the_model_sees(remap):
    context = bind(replace(WORK, remap=remap), RankOnly(1))
    wanted = LINEAR if remap == Remap.ATTENTION else WORK.attention_layout()
    assert context.spans == wanted.spans(1)
    found = list(zip(context.documents.tolist(), context.positions.tolist(), strict=True))
    assert found == tokens(wanted, 1)
    assert (context.attention_redistribute is None, context.mlp_redistribute is None) == (
        remap == Remap.MLP,
        remap != Remap.MLP,
    )


@st.composite
def moves(draw):
    """A work of four ranks in two nodes with any linear layout that stays inside shard groups, and these."""
    shard_groups = draw(st.sampled_from([((0, 1, 2, 3),), ((0, 1), (2, 3)), ((0, 2), (1, 3))]))
    boxes = []
    for rank, document, start, stop in zip(*(c.tolist() for c in WORK.attention_layout().columns()), strict=True):
        shard_group = next(each for each in shard_groups if rank in each)
        boxes += [(draw(st.sampled_from(shard_group)), document, p, p + 1) for p in range(start, stop)]
    return replace(WORK, linear=Layout.of(boxes), remap=draw(st.sampled_from(Remap))), shard_groups


@settings(max_examples=40)
@given(moves(), st.booleans())
def test_rows_and_gradients_go_where_the_layouts_say(case, blocks):
    """Also where a shard group is no block of the family, or there is none: then ranks send and receive."""
    work, shard_groups = case
    family = GroupFamily(4, 2) if blocks else None
    move, row = move_between(work.linear, work.attention_layout()), 3 * 8  # bytes of two tensors' rows

    def body(transport):
        counting = CountingTransport(transport)
        context = bind(work, counting, shard_groups=shard_groups, family=family)
        redistribute = context.attention_redistribute or context.mlp_redistribute
        travels = int(move.sizes[move.remote & (move.sender == transport.rank)].sum())
        if redistribute is None:
            assert not travels
            return
        redistribute = redistribute if work.remap == Remap.ATTENTION else redistribute.reversed()
        linear, wanted = (tokens(each, transport.rank) for each in (work.linear, work.attention_layout()))
        x = named(linear).requires_grad_()
        moved, first = redistribute_tokens(redistribute, x, x[:, :1, None].detach())
        assert moved.tolist() == named(wanted).tolist() and first.tolist() == [[[d]] for d, _ in wanted]
        verbs = [counting.traffic(verb) for verb in ("all_to_all", "exchange")]
        assert sum(each.bytes for each in verbs) == travels * row
        assert [each.calls for each in verbs][0 if redistribute.to_target.collective else 1] <= 1
        moved.backward(named(wanted) + 1)
        assert x.grad.tolist() == (named(linear) + 1).tolist()

    run_ranks(4, body, strict=True, family=family)


@pytest.mark.parametrize(
    "shard_group, family, known",
    [
        ((0, 1, 2, 3), WORLD, True),
        ((1, 0), WORLD, True),
        ((0, 1), GroupFamily(4, 4, budget=0), False),
        ((0, 1, 3), WORLD, False),
        ((0, 1), None, False),
    ],
)
def test_a_shard_group_is_one_collective_where_it_has_a_communicator(shard_group, family, known):
    context = bind(replace(WORK, linear=SWAPPED), RankOnly(0), shard_groups=[shard_group, (2,)], family=family)
    assert (
        context.attention_redistribute.to_target.collective
        == context.attention_redistribute.to_source.collective
        == known
    )
    assert context.attention_redistribute.to_target.ranks == tuple(sorted(shard_group))
    others = bind(replace(WORK, linear=SWAPPED), RankOnly(2), shard_groups=[shard_group, (2,)], family=family)
    assert (others.attention_redistribute is None) == (2 not in shard_group), "nothing of it moves"


@pytest.mark.parametrize("remap", Remap)
@pytest.mark.parametrize("kind", ["attention", "lse"])
def test_attention_in_the_layout_of_the_model(remap, kind):
    """q, k, v and the output have the model's rows; the numbers are those without a second layout."""
    case = Case.one_group((16, 5), 4, 2, 4)
    ids = {token: row for row, token in enumerate(tokens(Layout.of([(0, 0, 0, 16), (0, 1, 0, 5)]), 0))}
    drawn = [torch.randn(21, n, 4, dtype=torch.float64) for n in (4, 2, 2)]
    call = (
        attention
        if kind == "attention"
        else lambda *given: torch.cat(
            [attention_with_lse(*given)[0], attention_with_lse(*given)[1].T.unsqueeze(-1)], dim=-1
        )
    )

    def body(transport, work):
        context = bind(work, transport, family=WORLD)
        rows = [ids[d, p] for d, start, stop in context.spans for p in range(start, stop)]
        return rows, call(*(x[rows] for x in drawn), context)

    ((_, wanted),) = run_ranks(1, lambda transport: body(transport, case.work))
    for rows, found in run_ranks(4, lambda transport: body(transport, replace(WORK, remap=remap)), strict=True):
        assert torch.allclose(found, wanted[rows], rtol=1e-12)


def test_an_mlp_sees_the_tokens_of_the_linear_layout():
    def body(transport):
        context = bind(replace(WORK, remap=Remap.MLP), transport)
        seen = []
        x = named(tokens(SAME, transport.rank))
        y = run_in_mlp_layout(x, context, lambda inside: seen.append(inside) or 2 * inside)
        assert seen[0].tolist() == named(tokens(LINEAR, transport.rank)).tolist() and torch.equal(y, 2 * x)
        plain = bind(WORK, transport)
        assert run_in_mlp_layout(x, plain, lambda inside: seen.append(inside) or inside) is x and seen[1] is x

    run_ranks(4, body, strict=True)


@pytest.mark.parametrize(
    "linear, shard_groups, words",
    [
        (Layout.of([(0, 0, 0, 16), (0, 1, 0, 4)]), None, ["20 tokens on ranks 0 to 3", "21 in attention"]),
        (Layout.of([(0, 0, 0, 16), (0, 1, 0, 4), (1, 0, 0, 1)]), None, ["21 tokens", "every token once"]),
        (Layout.of([(0, 0, 0, 16), (4, 1, 0, 5)]), None, ["16 tokens on ranks 0 to 3"]),
        (Layout.of([(0, 0, 0, 16), (0, 1, 0, 5)]), ((0, 1), (2, 3)), ["share parameter shards", "leave it out"]),
        (SAME.with_axis(0, 2), None, ["2 axes", "use one axis"]),
    ],
)
def test_layouts_that_no_remap_leads_to(linear, shard_groups, words):
    for rank in range(4):
        with pytest.raises(SeqloomError) as error:
            bind(replace(WORK, linear=linear), RankOnly(rank), shard_groups=shard_groups)
        assert all(word in str(error.value) for word in words), error.value
