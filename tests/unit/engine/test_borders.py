"""Between two stages: every row of the next one comes from where it lies, whatever the layouts."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.dist import P2PChannel, P2PDirection
from seqloom.engine.stage_p2p import alike, border, same_groups, states_layout, ways_of, whole
from seqloom.layout import Layout, Span
from seqloom.plan import Checkpoint, Group, Remap, StageMicroBatch


@st.composite
def dealt(draw, lengths, ranks):
    """Draw a layout: every token of every document on one of the ranks."""
    boxes = []
    for document, length in enumerate(lengths):
        edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
        boxes += [(draw(st.sampled_from(ranks)), document, a, b) for a, b in pairwise(edges)]
    return Layout(*np.array(boxes, dtype=np.int64).T)


def tokens_of(layout, rank):
    """The tokens of a rank in the order of its rows, as numbers that no other token has."""
    return torch.tensor([1000 * d + t for d, a, b in layout.spans(rank) for t in range(a, b)], dtype=torch.int64)


@given(st.data())
def test_what_is_sent_is_what_the_next_stage_needs(data):
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    before, after = (0, 1, 2), data.draw(st.sampled_from([(3, 4, 5), (0, 1, 2), (3,)]))
    source, target = data.draw(dealt(lengths, before)), data.draw(dealt(lengths, after))
    parcels = {}
    for rank in before:
        rows = tokens_of(source, rank)
        for peer, index, tokens in border(source, target, rank, sends=True):
            parcels[rank, peer] = rows[index]
            assert len(rows[index]) == tokens
    for rank in after:
        wanted = tokens_of(target, rank)
        found = torch.full_like(wanted, -1)
        for peer, index, _ in border(source, target, rank, sends=False):
            found[index] = parcels.pop((peer, rank))
        assert torch.equal(found, wanted)
    assert not parcels, "nobody receives these"


def test_stages_that_deal_alike_exchange_whole_buffers():
    group = Group((0, 1), 2, 1, (Span(0, 0, 9), Span(1, 0, 4)))
    work, other = (StageMicroBatch((replace(group, ranks=ranks),), Checkpoint.NONE) for ranks in ((0, 1), (2, 3)))
    assert same_groups(work, other, (0, 1), (2, 3)) and not same_groups(work, other, (0, 1), (3, 2))
    turned, moved = (
        StageMicroBatch((replace(group, ulysses=1, ring=2),), Checkpoint.NONE),
        replace(work, linear=Layout.empty()),
    )
    assert not any(same_groups(each, other, (0, 1), (2, 3)) for each in (turned, moved, replace(work, groups=())))
    source = states_layout(StageMicroBatch((group,), Checkpoint.NONE))
    target = states_layout(StageMicroBatch((Group((2, 3), 2, 1, group.spans),), Checkpoint.NONE))
    ring = states_layout(StageMicroBatch((Group((2, 3), 1, 2, group.spans),), Checkpoint.NONE))
    assert alike(source, target, (0, 1), (2, 3)) and not alike(source, target, (0, 1), (3, 2))
    assert not alike(source, ring, (0, 1), (2, 3)) and not alike(source, target, (0, 1), (2, 3, 4))
    assert [share[:2] for share in border(source, target, 1, sends=True)] == [(3, slice(0, 6))]
    assert whole(6, 3) == ((3, slice(0, 6), 6),) and whole(0, 3) == ()


@pytest.mark.parametrize("remap", Remap)
def test_hidden_states_lie_where_layers_leave_them(remap):
    linear = Layout(*np.array([(1, 0, 0, 9)], dtype=np.int64).T)
    work = StageMicroBatch((Group((0,), 1, 1, (Span(0, 0, 9),)),), Checkpoint.NONE, linear=linear, remap=remap)
    assert states_layout(work).rank.tolist() == [1 if remap == Remap.ATTENTION else 0]


def test_ways_of_both_borders():
    ahead, behind = whole(4, 3), (*whole(2, 0), *whole(2, 2))
    assert set(ways_of(2, ahead, behind)) == {
        P2PChannel(P2PDirection.FORWARD, 2, 3),
        P2PChannel(P2PDirection.BACKWARD, 3, 2),
        P2PChannel(P2PDirection.BACKWARD, 2, 0),
        P2PChannel(P2PDirection.FORWARD, 0, 2),
    }, "what stays on the rank itself needs none"
