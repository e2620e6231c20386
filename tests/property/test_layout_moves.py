"""The interval arithmetic against a dictionary of single elements."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.errors import PlanError
from seqloom.layout import Layout, Move, move_between
from seqloom.plan import Group
from support.strategies import layouts
from support.strategies_groups import groups

relaxed = settings(max_examples=100, deadline=None)


def elements(layout: Layout) -> set[tuple[int, ...]]:
    """Every (rank, item, position...) that a layout holds."""
    found = set()
    for rank, item, *edges in zip(*(column.tolist() for column in layout.columns()), strict=True):
        found |= {
            (rank, item, *at) for at in product(*(range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)))
        }
    return found


def deliveries(move: Move) -> list[tuple[int, ...]]:
    """Every (sender, receiver, item, position...) that a move carries."""
    found = []
    for sender, receiver, item, *edges in zip(*(column.tolist() for column in move.columns()), strict=True):
        ranges = (range(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True))
        found += [(sender, receiver, item, *at) for at in product(*ranges)]
    return found


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    axes = draw(st.sampled_from((1, 2)))
    return draw(layouts(axes=axes, complete=True)), draw(layouts(axes=axes))


@relaxed
@given(pairs(), st.sampled_from((None, 1, 2, 3)))
def test_a_move_turns_the_source_into_the_target(pair: tuple[Layout, Layout], node_size: int | None) -> None:
    source, target = pair
    held, carried = elements(source), deliveries(move_between(source, target, node_size=node_size))
    received = [(receiver, *rest) for _, receiver, *rest in carried]
    assert len(received) == len(set(received)), "something is received twice"
    assert set(received) == elements(target)
    assert all((sender, *rest) in held for sender, _, *rest in carried), "somebody sends what it does not hold"


@relaxed
@given(pairs(), st.sampled_from((None, 2, 3)))
def test_senders_are_local_then_near(pair: tuple[Layout, Layout], node_size: int | None) -> None:
    source, target = pair
    held = elements(source)
    holders: dict[tuple[int, ...], set[int]] = {}
    for rank, *rest in held:
        holders.setdefault(tuple(rest), set()).add(rank)
    for sender, receiver, *rest in deliveries(move_between(source, target, node_size=node_size)):
        if (receiver, *rest) in held:
            assert sender == receiver
        elif node_size is not None:
            near = {rank for rank in holders[tuple(rest)] if rank // node_size == receiver // node_size}
            assert not near or sender in near


@relaxed
@given(layouts(axes=1, complete=True), layouts(axes=1))
def test_one_axis_is_two_axes_with_a_trivial_second(source: Layout, target: Layout) -> None:
    flat = move_between(source, target)
    deep = move_between(source.with_axis(0, 7), target.with_axis(0, 7))
    assert np.array_equal(flat.sizes * 7, deep.sizes)
    assert all(map(np.array_equal, flat.columns(), deep.columns()[:5]))


@relaxed
@given(layouts(complete=True))
def test_nothing_travels_to_where_it_is(layout: Layout) -> None:
    assert not move_between(layout, layout).remote.any()


@relaxed
@given(layouts(), layouts())
def test_a_target_beyond_the_source_is_refused(source: Layout, target: Layout) -> None:
    missing = {tuple(rest) for _, *rest in elements(target)} - {tuple(rest) for _, *rest in elements(source)}
    if len(source) and len(target) and source.axes != target.axes:
        with pytest.raises(PlanError, match="axes"):
            move_between(source, target)
    elif missing:
        with pytest.raises(PlanError, match="nobody holds"):
            move_between(source, target)
    else:
        assert sum(move_between(source, target).sizes) == sum(target.sizes)


@relaxed
@given(layouts())
def test_layouts_are_canonical(layout: Layout) -> None:
    boxes = list(zip(*(column.tolist() for column in layout.columns()), strict=True))
    again = Layout.of(reversed(boxes)) if boxes else Layout.empty(layout.axes)
    assert again == layout
    assert hash(again) == hash(layout)
    assert boxes == sorted(boxes, key=lambda box: (box[:3], box[4:]))
    assert len(elements(layout)) == sum(layout.sizes)


@relaxed
@given(groups())
def test_a_group_holds_its_tokens_once_and_evenly(group: Group) -> None:
    held = elements(group.token_layout())
    wanted = {(s.document, t) for s in group.spans for t in range(s.start, s.stop)}
    assert len(held) == len(wanted)
    assert {(document, token) for _, document, token in held} == wanted
    loads = [sum(1 for rank, *_ in held if rank == own) for own in group.ranks]
    by_ring_index = [sum(span.tokens for span in group.ring_spans(k)) for k in range(group.ring)]
    assert max(loads) == -(-max(by_ring_index) // group.ulysses)
    assert max(loads) - min(loads) <= 1 if group.ring == 1 else max(loads) - min(loads) <= len(group.spans) + 1
    for block in group.ulysses_groups():
        inside = [loads[group.ranks.index(rank)] for rank in block]
        assert max(inside) - min(inside) <= 1


@relaxed
@given(groups(), st.integers(1, 3), st.integers(1, 4))
def test_heads_are_spread_and_the_exchange_is_a_move(group: Group, kv_heads: int, shared: int) -> None:
    heads = kv_heads * shared
    if heads < group.ulysses:
        with pytest.raises(PlanError, match="needs a head"):
            group.head_layout(heads)
        return
    queries, keys = group.head_layout(heads), group.head_layout(heads, kv_heads)
    assert len(elements(queries)) == group.tokens * heads
    assert len({rest for _, *rest in map(tuple, elements(queries)) for rest in [tuple(rest)]}) == group.tokens * heads
    needed = {(rank, document, token, head // shared) for rank, document, token, head in elements(queries)}
    assert elements(keys) == needed, "a rank holds exactly the key/value heads that its query heads read"
    tokens = group.token_layout()
    for target, width in ((queries, heads), (keys, kv_heads)):
        move = move_between(tokens.with_axis(0, width), target)
        blocks = {rank: k for k, block in enumerate(group.ulysses_groups()) for rank in block}
        assert all(blocks[a] == blocks[b] for a, b in zip(move.sender.tolist(), move.receiver.tolist(), strict=True))


@relaxed
@given(groups())
def test_a_ring_pairs_early_with_late_chunks(group: Group) -> None:
    for k in range(group.ring):
        for span in group.spans:
            mine = [piece for piece in group.ring_spans(k) if piece.document == span.document]
            distance = sum(
                (2 * t + 1) for piece in mine for t in range(piece.start - span.start, piece.stop - span.start)
            )
            fair = span.tokens**2 / group.ring
            assert abs(distance - fair) <= 4 * span.tokens
