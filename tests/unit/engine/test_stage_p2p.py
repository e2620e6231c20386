"""Messages between stages: the rows each rank exchanges, when messages start and end, and the report of a hang."""

import gc
import weakref
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.dist import P2PChannel, P2PDirection, run_ranks
from seqloom.engine.stage_p2p import (
    Progress,
    Receive,
    RowSlice,
    StageP2P,
    all_rows,
    channels_of,
    hidden_layout,
    row_slices,
    same_groups,
    same_layout,
    send_of,
)
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Span
from seqloom.plan import Action, Checkpoint, Group, Pipeline, Remap, Stage, StageMicroBatch
from seqloom.schedules import build_schedule

act = Action.parse
PIPELINE = Pipeline((Stage((0,), (0, 1)), Stage((1,), (1, 2))), (), ((), ()))


# Which rows a rank exchanges


@st.composite
def random_layouts(draw, lengths, ranks):
    """Draw a layout: every token of every document on one of the ranks."""
    boxes = []
    for document, length in enumerate(lengths):
        edges = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
        boxes += [(draw(st.sampled_from(ranks)), document, a, b) for a, b in pairwise(edges)]
    return Layout(*np.array(boxes, dtype=np.int64).T)


def token_ids(layout, rank):
    """The tokens of a rank in the order of its rows, as numbers that no other token has."""
    return torch.tensor([1000 * d + t for d, a, b in layout.spans(rank) for t in range(a, b)], dtype=torch.int64)


@given(st.data())
def test_what_is_sent_is_what_the_next_stage_needs(data):
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    before, after = (0, 1, 2), data.draw(st.sampled_from([(3, 4, 5), (0, 1, 2), (3,)]))
    source, target = data.draw(random_layouts(lengths, before)), data.draw(random_layouts(lengths, after))
    messages = {}
    for rank in before:
        rows = token_ids(source, rank)
        for peer, index, tokens in row_slices(source, target, rank, sends=True):
            messages[rank, peer] = rows[index]
            assert len(rows[index]) == tokens
    for rank in after:
        wanted = token_ids(target, rank)
        received = torch.full_like(wanted, -1)
        for peer, index, _ in row_slices(source, target, rank, sends=False):
            received[index] = messages.pop((peer, rank))
        assert torch.equal(received, wanted)
    assert not messages, "nobody receives these"


def test_stages_with_equal_layouts_exchange_all_rows_with_one_peer():
    group = Group((0, 1), 2, 1, (Span(0, 0, 9), Span(1, 0, 4)))
    work, other = (StageMicroBatch((replace(group, ranks=ranks),), Checkpoint.NONE) for ranks in ((0, 1), (2, 3)))
    assert same_groups(work, other, (0, 1), (2, 3)) and not same_groups(work, other, (0, 1), (3, 2))
    ring = StageMicroBatch((replace(group, ulysses=1, ring=2),), Checkpoint.NONE)
    moved = replace(work, linear=Layout.empty())
    assert not any(same_groups(each, other, (0, 1), (2, 3)) for each in (ring, moved, replace(work, groups=())))
    source, target = hidden_layout(work), hidden_layout(other)
    other_ring = hidden_layout(StageMicroBatch((Group((2, 3), 1, 2, group.spans),), Checkpoint.NONE))
    assert same_layout(source, target, (0, 1), (2, 3)) and not same_layout(source, target, (0, 1), (3, 2))
    assert not same_layout(source, other_ring, (0, 1), (2, 3))
    assert not same_layout(source, target, (0, 1), (2, 3, 4))
    assert [each[:2] for each in row_slices(source, target, 1, sends=True)] == [(3, slice(0, 6))]
    assert all_rows(6, 3) == ((3, slice(0, 6), 6),) and all_rows(0, 3) == ()


@pytest.mark.parametrize("remap", Remap)
def test_hidden_states_are_in_the_layout_of_the_last_layer(remap):
    linear = Layout(*np.array([(1, 0, 0, 9)], dtype=np.int64).T)
    work = StageMicroBatch((Group((0,), 1, 1, (Span(0, 0, 9),)),), Checkpoint.NONE, linear=linear, remap=remap)
    assert hidden_layout(work).rank.tolist() == [1 if remap == Remap.ATTENTION else 0]


def test_channels_with_both_neighbours():
    sent, received = all_rows(4, 3), (*all_rows(2, 0), *all_rows(2, 2))
    assert set(channels_of(2, sent, received)) == {
        P2PChannel(P2PDirection.FORWARD, 2, 3),
        P2PChannel(P2PDirection.BACKWARD, 3, 2),
        P2PChannel(P2PDirection.BACKWARD, 2, 0),
        P2PChannel(P2PDirection.FORWARD, 0, 2),
    }, "rows that stay on the rank itself need none"


# When messages start and end


def hidden(tokens):
    return torch.zeros(tokens, 2)


class Recorder:
    """A transport that notes what is started; messages are done when the test says so."""

    rank, ranks = 0, 2

    def __init__(self):
        self.started, self.finished, self.waited = [], False, []

    def receive(self, tensor, peer, direction):
        self.started.append(("receive", len(tensor), peer, direction))
        return RecordedMessage(self, self.started[-1])

    def send(self, tensor, peer, direction):
        self.started.append(("send", len(tensor), peer, direction))
        return RecordedMessage(self, self.started[-1])


class RecordedMessage:
    def __init__(self, recorder, started):
        self.recorder, self.started = recorder, started

    def wait(self):
        self.recorder.waited.append(self.started)

    def done(self):
        return self.recorder.finished


def p2p_of(transport, receives, **options):
    return StageP2P(transport, hidden, receives, Progress(PIPELINE, transport.rank), **options)


def receive(text, tokens, peer=1):
    return Receive(act(text), tokens, (RowSlice(peer, slice(0, tokens), tokens),))


def test_receives_are_posted_in_the_order_of_the_row_as_far_as_the_budget_allows():
    transport = Recorder()
    p2p = p2p_of(transport, [receive("0RECV_B0", 4), receive("0RECV_B1", 3), receive("0RECV_B2", 3)], ahead=2)
    p2p.poll()
    assert [size for _, size, _, _ in transport.started] == [4, 3], "a budget of 8 rows, the third needs 10"
    p2p.poll()
    assert len(transport.started) == 2
    p2p.wait(act("0RECV_B0"))
    p2p.poll()
    assert [size for _, size, _, _ in transport.started] == [4, 3, 3]
    assert {direction for _, _, _, direction in transport.started} == {P2PDirection.BACKWARD}


def test_a_receive_that_is_due_needs_no_budget():
    transport = Recorder()
    p2p = p2p_of(transport, [receive("0RECV_B0", 4), receive("0RECV_B1", 3)], ahead=0)
    p2p.poll()
    assert not transport.started
    p2p.receive(act("0RECV_B1"))
    assert [size for _, size, _, _ in transport.started] == [4, 3], "those before it come first"


def test_a_sent_tensor_is_freed_when_it_is_known_to_have_arrived():
    transport = Recorder()
    p2p = p2p_of(transport, [receive("0RECV_B0", 4)])
    seen = []
    for number in (0, 1):
        tensor = hidden(4)
        seen.append(weakref.ref(tensor.untyped_storage()))
        p2p.put(act(f"0SEND_F{number}"), tensor)
        p2p.send(act(f"0SEND_F{number}"), (RowSlice(1, slice(0, 4), 4),))
        del tensor
    p2p.poll()
    assert all(each() is not None for each in seen)
    p2p.wait(act("0RECV_B0"))  # the answer to message 0
    gc.collect()
    assert seen[0]() is None and seen[1]() is not None
    transport.finished = True
    p2p.poll()
    assert seen[1]() is None
    p2p.close()
    assert [started[0] for started in transport.waited] == ["receive", "send", "send"], "each once"


def test_rows_that_stay_on_the_rank_need_no_message():
    p2p = p2p_of(Recorder(), [])
    tensor = hidden(3)
    p2p.put(act("1RECV_F0"), tensor)
    assert p2p.wait(act("1RECV_F0")) is tensor
    assert p2p.wait(act("1RECV_F1")).shape == (0, 2), "the previous stage has no tokens here"


@pytest.mark.parametrize("strict", [False, True])
def test_scattered_rows_and_rows_that_stay(strict):
    """Two stages on two ranks: odd rows change ranks between them."""
    even, odd = torch.tensor([0, 2]), torch.tensor([1, 3])

    def body(transport):
        rank = transport.rank
        slices = (RowSlice(rank, even, 2), RowSlice(1 - rank, odd, 2))
        p2p = p2p_of(transport, [Receive(act("1RECV_F0"), 4, slices)])
        p2p.poll()
        p2p.put(act("0SEND_F0"), torch.arange(4.0)[:, None].expand(4, 2) + 10 * rank)
        p2p.send(act("0SEND_F0"), slices)
        p2p.receive(act("1RECV_F0"))
        received = p2p.wait(act("1RECV_F0"))
        p2p.close()
        return received[:, 0].tolist()

    assert run_ranks(2, body, strict=strict) == [[0, 11, 2, 13], [10, 1, 12, 3]]


def test_the_send_of_a_receive():
    assert send_of(act("2RECV_F3")) == act("1SEND_F3") and send_of(act("2RECV_B3")) == act("3SEND_B3")


# Where a rank is


def pipeline_of(name="1f1b", pp_ranks=2):
    schedule = build_schedule(name, pp_ranks, 2)
    stages = tuple(Stage((rank,), (k, k + 1)) for k, rank in enumerate(schedule.pp_ranks))
    return Pipeline(stages, (), schedule.pipeline_actions())


def test_a_transport_error_names_rank_action_and_peer_and_marks_the_grid():
    progress = Progress(pipeline_of(), 1)
    progress.start(act("1F1"))
    with pytest.raises(SeqloomError) as caught, progress.waiting(act("1RECV_F1"), 0):
        raise RuntimeError("[pair.cc:1] Timed out waiting 1000ms for recv\nmore")
    first, *grid = str(caught.value).splitlines()
    assert first.startswith("rank 1 is at action 1F1 and waits for 1RECV_F1 from rank 0 (Timed out waiting 1000ms for")
    assert first.endswith("recv):")
    assert len(grid) == 2 and ">1F1<" in grid[1] and ">" not in grid[0]
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_ours_keeps_its_message_and_gets_a_note():
    progress = Progress(pipeline_of(), 0)
    with pytest.raises(SeqloomError, match="deadlock") as caught, progress.waiting(act("0RECV_B0"), 1):
        raise SeqloomError("deadlock")
    assert "waits for 0RECV_B0 from rank 1" in caught.value.__notes__[0]


def test_progress_describes_the_action_and_what_it_waits_for():
    progress = Progress(pipeline_of(), 0)
    assert progress.describe() == "rank 0 is at the end of its row"
    progress.start(act("0B1"))
    with progress.waiting(act("0SEND_F0"), None):
        assert progress.describe() == "rank 0 is at action 0B1 and waits for 0SEND_F0"
    assert progress.describe() == "rank 0 is at action 0B1"
    assert ">0B1<" in progress.report()


def test_messages_between_two_stages_of_one_pp_rank_are_marked_at_what_produces_them():
    progress = Progress(pipeline_of("zb-v", 1), 0)
    for message, marked in (("0SEND_F0", ">0F0<"), ("1RECV_F0", ">0F0<"), ("1SEND_B1", ">1I1<"), ("0RECV_B1", ">1I1<")):
        progress.start(act(message))
        assert marked in progress.report()


def test_a_rank_of_no_stage_is_not_marked():
    assert ">" not in Progress(pipeline_of(), 7).report()
