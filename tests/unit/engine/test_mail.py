"""Messages of a step: received early, within bounds and in order; sent ones are let go as soon as that is known."""

import gc
import weakref

import pytest
import torch

from seqloom.dist import P2PDirection, run_ranks
from seqloom.engine.stage_p2p import Arrival, Progress, RowSlice, StageP2P, other_end
from seqloom.plan import Action, Pipeline, Stage

LINE = Pipeline((Stage((0,), (0, 1)), Stage((1,), (1, 2))), (), ((), ()))


def act(text):
    return Action.parse(text)


def room(tokens):
    return torch.zeros(tokens, 2)


class Recorder:
    """A transport that notes what is started; messages are done when the test says so."""

    rank, ranks = 0, 2

    def __init__(self):
        self.started, self.finished, self.waited = [], False, []

    def receive(self, tensor, peer, lane):
        self.started.append(("receive", len(tensor), peer, lane))
        return _Note(self, self.started[-1])

    def send(self, tensor, peer, lane):
        self.started.append(("send", len(tensor), peer, lane))
        return _Note(self, self.started[-1])


class _Note:
    def __init__(self, owner, what):
        self.owner, self.what = owner, what

    def wait(self):
        self.owner.waited.append(self.what)

    def done(self):
        return self.owner.finished


def mail_of(transport, arrivals, **options):
    return StageP2P(transport, room, arrivals, Progress(LINE, transport.rank), **options)


def arrival(text, tokens, peer=1):
    return Arrival(act(text), tokens, (RowSlice(peer, slice(0, tokens), tokens),))


def test_receives_are_started_in_the_order_of_the_row_as_far_as_there_is_room():
    transport = Recorder()
    mail = mail_of(transport, [arrival("0RECV_B0", 4), arrival("0RECV_B1", 3), arrival("0RECV_B2", 3)], ahead=2)
    mail.look_after()
    assert [size for _, size, _, _ in transport.started] == [4, 3], "8 rows of room, the third needs 10"
    mail.look_after()
    assert len(transport.started) == 2
    mail.take(act("0RECV_B0"))
    mail.look_after()
    assert [size for _, size, _, _ in transport.started] == [4, 3, 3]
    assert {lane for _, _, _, lane in transport.started} == {P2PDirection.BACKWARD}


def test_a_receive_that_is_due_needs_no_room():
    transport = Recorder()
    mail = mail_of(transport, [arrival("0RECV_B0", 4), arrival("0RECV_B1", 3)], ahead=0)
    mail.look_after()
    assert not transport.started
    mail.receive(act("0RECV_B1"))
    assert [size for _, size, _, _ in transport.started] == [4, 3], "those before it come first"


def test_a_sent_tensor_is_freed_when_it_is_known_to_have_arrived():
    transport = Recorder()
    mail = mail_of(transport, [arrival("0RECV_B0", 4)])
    seen = []
    for number in (0, 1):
        tensor = room(4)
        seen.append(weakref.ref(tensor.untyped_storage()))
        mail.put(act(f"0SEND_F{number}"), tensor)
        mail.send(act(f"0SEND_F{number}"), (RowSlice(1, slice(0, 4), 4),))
        del tensor
    mail.look_after()
    assert all(each() is not None for each in seen)
    mail.take(act("0RECV_B0"))  # the answer to message 0
    gc.collect()
    assert seen[0]() is None and seen[1]() is not None
    transport.finished = True
    mail.look_after()
    assert seen[1]() is None
    mail.close()
    assert [what[0] for what in transport.waited] == ["receive", "send", "send"], "each once"


def test_what_stays_on_the_rank_is_put_and_taken():
    mail = mail_of(Recorder(), [])
    tensor = room(3)
    mail.put(act("1RECV_F0"), tensor)
    assert mail.take(act("1RECV_F0")) is tensor
    assert mail.take(act("1RECV_F1")).shape == (0, 2), "a stage before without work here"


@pytest.mark.parametrize("strict", [False, True])
def test_rows_that_are_scattered_and_rows_that_stay(strict):
    """Two ranks of one host deal rows anew: odd ones change places."""
    even, odd = torch.tensor([0, 2]), torch.tensor([1, 3])

    def body(transport):
        me = transport.rank
        shares = (RowSlice(me, even, 2), RowSlice(1 - me, odd, 2))
        receive = Arrival(act("1RECV_F0"), 4, shares)
        mail = mail_of(transport, [receive])
        mail.look_after()
        mail.put(act("0SEND_F0"), torch.arange(4.0)[:, None].expand(4, 2) + 10 * me)
        mail.send(act("0SEND_F0"), shares)
        mail.receive(act("1RECV_F0"))
        found = mail.take(act("1RECV_F0"))
        mail.close()
        return found[:, 0].tolist()

    assert run_ranks(2, body, strict=strict) == [[0, 11, 2, 13], [10, 1, 12, 3]]


def test_the_other_end_of_a_message():
    assert other_end(act("2RECV_F3")) == act("1SEND_F3") and other_end(act("2RECV_B3")) == act("3SEND_B3")
