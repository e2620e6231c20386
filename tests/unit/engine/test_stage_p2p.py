"""Messages between stages: the rows each rank exchanges, when messages start and end, and the report of a hang."""

import gc
import weakref
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.dist import Channel, run_ranks
from seqloom.engine.stage_p2p import (
    MESSAGES,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    UNREAD,
    B,
    F,
    I,
    Progress,
    RowSlice,
    StageBoundary,
    StageP2P,
    W,
    all_rows,
    hidden_layout,
    place_messages,
    row_slices,
    same_groups,
    same_layout,
    send_of,
)
from seqloom.errors import SeqloomError
from seqloom.layout import Layout, Span
from seqloom.plan import Action, Checkpoint, Group, Pipeline, Remap, Round, Stage, StageMicroBatch
from seqloom.schedules import build_schedule
from seqloom.schedules.registry import SCHEDULE_NAMES

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


# Where messages are placed


def pipeline_of(name="1f1b", pp_ranks=2, micro_batches=2, lengths=(5,)):
    """A pipeline of one rank per pp_rank; rounds are as long as `lengths` in turn."""
    schedule = build_schedule(name, pp_ranks, micro_batches)
    stages = tuple(Stage((rank,), (k, k + 1)) for k, rank in enumerate(schedule.pp_ranks))
    rounds = []
    for number, _ in enumerate(schedule.units):
        spans = (Span(number, 0, lengths[number % len(lengths)]),)
        groups = [Group(stage.ranks, 1, 1, spans) for stage in stages]
        rounds.append(Round(tuple(StageMicroBatch((group,), Checkpoint.NONE) for group in groups)))
    return Pipeline(stages, tuple(rounds), schedule.pipeline_actions())


def placed(pipeline):
    return place_messages(pipeline, pipeline.actions, StageBoundary(pipeline, 0, torch.device("cpu")))


def unfinished(rows):
    """Run rows in which both sides of a message must be next in their rows; return what is left of them."""
    left = [list(row) for row in rows]
    while True:
        first = {row[0] for row in left if row}
        ready = [row for row in left if row and (row[0].kind not in MESSAGES or other_side(row[0]) in first)]
        if not ready:
            return left
        pairs = {each for row in ready for each in (row[0], other_side(row[0]))}
        for row in left:
            if row and row[0] in pairs:
                row.pop(0)


def other_side(action):
    step, kind = {SEND_F: (1, RECV_F), RECV_F: (-1, SEND_F), SEND_B: (-1, RECV_B), RECV_B: (1, SEND_B)}.get(
        action.kind, (0, action.kind)
    )
    return Action(action.stage + step, kind, action.round)


@given(st.sampled_from(SCHEDULE_NAMES), st.integers(2, 5), st.integers(1, 9), st.lists(st.integers(1, 300), min_size=1))
def test_placed_messages_end_even_if_every_call_blocks(name, pp_ranks, micro_batches, lengths):
    pipeline = pipeline_of(name, pp_ranks, max(micro_batches, 2 * pp_ranks), lengths)
    rows = placed(pipeline)
    assert not any(unfinished(rows))
    for row, given_row in zip(rows, pipeline.actions, strict=True):
        assert sorted(map(str, row)) == sorted(map(str, given_row)), "the same actions"
        computing = [each for each in row if each.kind in (F, B, I, W)]
        assert computing == [each for each in given_row if each.kind in (F, B, I, W)], "in the same order"
        place = {action: index for index, action in enumerate(row)}
        unread = Counter()
        for action in row:
            kinds = {SEND_F: (F,), SEND_B: (B, I)}.get(action.kind, ())
            made = [place[each] for kind in kinds if (each := Action(action.stage, kind, action.round)) in place]
            assert all(index < place[action] for index in made) and len(made) == (1 if kinds else 0)
            if action.kind in (RECV_F, RECV_B):
                unread[action.stage, action.kind] += 1
            elif action.kind in (F, B, I):
                arrival = Action(action.stage, RECV_F if action.kind == F else RECV_B, action.round)
                if arrival in place:
                    assert place[arrival] < place[action]
                    unread[arrival.stage, arrival.kind] -= 1
            assert max(unread.values(), default=0) <= UNREAD


def test_the_messages_of_plans_would_block():
    """Why they are placed anew: 1F1B as it is written has sends that cross."""
    pipeline = pipeline_of("1f1b", 2, 4)
    assert any(unfinished(pipeline.actions)) and not any(unfinished(placed(pipeline)))


# When messages start and end


def hidden(tokens):
    return torch.zeros(tokens, 2)


class Recorder:
    """A transport that notes what is started; exchanges are done when the test says so."""

    rank, ranks = 0, 2

    def __init__(self):
        self.started, self.finished, self.waited = [], False, []

    def on(self, channel):
        self.channel = channel
        return self

    def exchange(self, sends, receives):
        tensors = [("send", peer, len(tensor)) for peer, tensor in sends]
        self.started.append((self.channel, *tensors, *(("receive", peer, len(tensor)) for peer, tensor in receives)))
        return RecordedExchange(self, self.started[-1])


class RecordedExchange:
    def __init__(self, recorder, started):
        self.recorder, self.started = recorder, started

    def wait(self):
        self.recorder.waited.append(self.started)

    def done(self):
        return self.recorder.finished


def p2p_of(transport, row=(), pipeline=PIPELINE):
    return StageP2P(transport, hidden, pipeline, row, Progress(pipeline, transport.rank), torch.device("cpu"))


def test_every_direction_and_neighbour_has_a_channel():
    transport = Recorder()
    p2p = p2p_of(transport, pipeline=pipeline_of(pp_ranks=3))
    for text in ("1SEND_F0", "1SEND_B0"):
        p2p.put(act(text), hidden(4))
        p2p.send(act(text), (RowSlice(1, slice(0, 4), 4),))
    for text in ("1RECV_F0", "1RECV_B0"):
        p2p.receive(act(text), 4, (RowSlice(1, slice(0, 4), 4),))
    assert [channel for channel, _ in transport.started] == [
        Channel.FORWARD_ODD,
        Channel.BACKWARD_ODD,
        Channel.FORWARD_EVEN,
        Channel.BACKWARD_EVEN,
    ]


def test_a_sent_tensor_is_freed_when_it_is_known_to_have_arrived():
    transport = Recorder()
    p2p = p2p_of(transport)
    seen = []
    for number in (0, 1):
        tensor = hidden(4)
        seen.append(weakref.ref(tensor.untyped_storage()))
        p2p.put(act(f"0SEND_F{number}"), tensor)
        p2p.send(act(f"0SEND_F{number}"), (RowSlice(1, slice(0, 4), 4),))
        del tensor
    p2p.receive(act("0RECV_B0"), 4, (RowSlice(1, slice(0, 4), 4),))
    p2p.poll()
    assert all(each() is not None for each in seen)
    p2p.wait(act("0RECV_B0"))  # the answer to message 0
    gc.collect()
    assert seen[0]() is None and seen[1]() is not None
    transport.finished = True
    p2p.poll()
    assert seen[1]() is None
    p2p.close()
    assert [kind for _, (kind, _, _) in transport.waited] == ["receive", "send", "send"], "each once"


def test_rows_that_stay_on_the_rank_need_no_message():
    p2p = p2p_of(Recorder())
    tensor = hidden(3)
    p2p.put(act("1RECV_F0"), tensor)
    assert p2p.wait(act("1RECV_F0")) is tensor
    assert p2p.wait(act("1RECV_F1")).shape == (0, 2), "the previous stage has no tokens here"


@pytest.mark.parametrize("strict", [False, True])
def test_scattered_rows_and_rows_that_stay(strict):
    """Two stages on two ranks: odd rows change ranks between them, in one exchange."""
    even, odd = torch.tensor([0, 2]), torch.tensor([1, 3])

    def body(transport):
        rank = transport.rank
        slices = (RowSlice(rank, even, 2), RowSlice(1 - rank, odd, 2))
        p2p = p2p_of(transport, row=(act("0SEND_F0"), act("1RECV_F0")))
        p2p.put(act("0SEND_F0"), torch.arange(4.0)[:, None].expand(4, 2) + 10 * rank)
        p2p.send(act("0SEND_F0"), slices)
        p2p.receive(act("1RECV_F0"), 4, slices)
        received = p2p.wait(act("1RECV_F0"))
        p2p.close()
        return received[:, 0].tolist()

    assert run_ranks(2, body, strict=strict) == [[0, 11, 2, 13], [10, 1, 12, 3]]


def test_the_send_of_a_receive():
    line = pipeline_of(pp_ranks=4)
    assert send_of(act("2RECV_F3"), line) == act("1SEND_F3") and send_of(act("2RECV_B3"), line) == act("3SEND_B3")
    heads = replace(line, stages=(*line.stages, *(Stage((rank,), (4, 4)) for rank in range(4))))
    assert send_of(act("6RECV_F1"), heads) == act("3SEND_F1") and send_of(act("3RECV_B1"), heads) == act("7SEND_B1")


# Where a rank is


def test_a_transport_error_names_rank_action_and_peer_and_marks_the_grid():
    progress = Progress(pipeline_of(), 1)
    progress.start(act("1F1"))
    with pytest.raises(SeqloomError) as caught, progress.waiting(act("1RECV_F1"), [0]):
        raise RuntimeError("[/gloo/pair.cc:1] Timed out waiting 1000ms for recv\nmore")
    first, *grid = str(caught.value).splitlines()
    assert first.startswith("rank 1 is at action 1F1 and waits for 1RECV_F1 with rank 0 (Timed out waiting 1000ms for")
    assert first.endswith("recv):")
    assert len(grid) == 2 and ">1F1<" in grid[1] and ">" not in grid[0]
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_an_error_of_ours_keeps_its_message_and_gets_a_note():
    progress = Progress(pipeline_of(), 0)
    with pytest.raises(SeqloomError, match="deadlock") as caught, progress.waiting(act("0RECV_B0"), [1]):
        raise SeqloomError("deadlock")
    assert "waits for 0RECV_B0 with rank 1" in caught.value.__notes__[0]


def test_progress_describes_the_action_and_what_it_waits_for():
    progress = Progress(pipeline_of(), 0)
    assert progress.describe() == "rank 0 is at the end of its row"
    progress.start(act("0B1"))
    with progress.waiting(act("0SEND_F0"), [1]):
        assert progress.describe() == "rank 0 is at action 0B1 and waits for 0SEND_F0 with rank 1"
    assert progress.describe() == "rank 0 is at action 0B1"
    assert ">0B1<" in progress.report()


def test_messages_between_two_stages_of_one_pp_rank_are_marked_at_what_produces_them():
    progress = Progress(pipeline_of("zb-v", 1), 0)
    for message, marked in (("0SEND_F0", ">0F0<"), ("1RECV_F0", ">0F0<"), ("1SEND_B1", ">1I1<"), ("0RECV_B1", ">1I1<")):
        progress.start(act(message))
        assert marked in progress.report()


def test_a_rank_of_no_stage_is_not_marked():
    assert ">" not in Progress(pipeline_of(), 7).report()
