from __future__ import annotations

import pytest

from seqloom.errors import PlanError
from seqloom.layout import Layout, Span
from seqloom.plan import Group


def test_ulysses_shares_are_contiguous_runs_of_the_packed_tokens() -> None:
    group = Group((4, 5, 6), 3, 1, (Span(7, 0, 4), Span(2, 10, 16)))
    layout = group.token_layout()
    assert layout.spans(4) == (Span(7, 0, 4),)
    assert layout.spans(5) == (Span(2, 10, 13),)
    assert layout.spans(6) == (Span(2, 13, 16),)
    assert (group.tokens, group.degree) == (10, 3)


def test_a_ring_deals_in_zigzag() -> None:
    layout = Group((0, 1), 1, 2, (Span(0, 0, 8),)).token_layout()
    assert layout.spans(0) == (Span(0, 0, 2), Span(0, 6, 8))
    assert layout.spans(1) == (Span(0, 2, 6),)


def test_a_ring_of_ulysses_blocks() -> None:
    group = Group((0, 1, 4, 5), 2, 2, (Span(0, 0, 16),))
    assert group.ulysses_groups() == ((0, 1), (4, 5))
    layout = group.token_layout()
    assert [layout.spans(rank) for rank in (0, 1)] == [(Span(0, 0, 4),), (Span(0, 12, 16),)]
    assert [layout.spans(rank) for rank in (4, 5)] == [(Span(0, 4, 8),), (Span(0, 8, 12),)]
    heads = group.head_layout(4)
    assert heads.spans(0) == heads.spans(1) == (Span(0, 0, 4), Span(0, 12, 16))


def test_fewer_tokens_than_ranks() -> None:
    group = Group((0, 1, 2, 3), 2, 2, (Span(0, 0, 3),))
    layout = group.token_layout()
    found = [layout.spans(rank) for rank in range(4)]
    assert found == [(Span(0, 0, 1),), (), (Span(0, 1, 2),), (Span(0, 2, 3),)]


def heads_of(group: Group, rank: int, heads: int, kv_heads: int | None = None) -> tuple[int, int]:
    layout = group.head_layout(heads, kv_heads)
    k = layout.rank.tolist().index(rank)
    return int(layout.start2[k]), int(layout.stop2[k])


def test_heads_are_uneven_where_they_must_be() -> None:
    group = Group((0, 1, 2), 3, 1, (Span(0, 0, 8),))
    assert [heads_of(group, rank, 8) for rank in range(3)] == [(0, 3), (3, 6), (6, 8)]


def test_kv_heads_are_replicated_only_where_queries_share_them() -> None:
    group = Group((0, 1, 2, 3), 4, 1, (Span(0, 0, 8),))
    assert [heads_of(group, rank, 8, 2) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [heads_of(group, rank, 8, 8) for rank in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    with pytest.raises(PlanError, match="must divide"):
        group.head_layout(8, 3)
    with pytest.raises(PlanError, match="use ulysses 3"):
        group.head_layout(3)


def test_neighbours_hold_together_what_fewer_ranks_would_be_dealt() -> None:
    spans = (Span(3, 0, 7), Span(1, 2, 6))
    for tokens in range(1, 8):
        given = (*spans, Span(5, 0, tokens))
        fine, coarse = (Group(tuple(range(ranks)), ranks, 1, given).token_layout() for ranks in (8, 2))
        for rank in (0, 1):
            held = Layout.union([Layout.of((0, *span) for span in fine.spans(4 * rank + k)) for k in range(4)])
            assert held.spans(0) == coarse.spans(rank)
