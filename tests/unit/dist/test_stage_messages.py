"""Messages between stages: order, independence, and what is said of a mistake."""

import pytest
import torch

from seqloom.dist import P2PChannel, P2PDirection, SingleRankTransport, run_ranks
from seqloom.errors import SeqloomError
from support.transports import CountingTransport

BOTH = pytest.mark.parametrize("strict", [False, True])
F, B = P2PDirection.FORWARD, P2PDirection.BACKWARD


@BOTH
def test_messages_of_a_channel_arrive_in_order_and_channels_do_not_wait_for_each_other(strict):
    def body(transport):
        me, peer = transport.rank, 1 - transport.rank
        transport.connect([P2PChannel(direction, *pair) for direction in P2PDirection for pair in ((0, 1), (1, 0))])
        rooms = [(direction, torch.empty(k + 1)) for k in range(3) for direction in (B, F)]
        waiting = [
            transport.receive(room, peer, direction) for direction, room in rooms
        ]  # long before anything is sent
        total = torch.ones(2)
        transport.all_reduce(total, (0, 1))  # is not held up
        sent = [torch.full((k + 1,), 100.0 * me + 10 * (direction == B) + k) for direction in (F, B) for k in range(3)]
        directions = [direction for direction in (F, B) for _ in range(3)]
        handles = [transport.send(each, peer, direction) for each, direction in zip(sent, directions, strict=True)]
        for handle in (*handles, *waiting):
            handle.wait()
        assert all(handle.done() for handle in handles)
        return [(float(room[0]), len(room), float(total[0])) for _, room in rooms]

    for me, found in enumerate(run_ranks(2, body, strict=strict)):
        other = 100.0 * (1 - me)
        assert found == [(other + 10 * backward + k, k + 1, 2.0) for k in range(3) for backward in (1, 0)]


@BOTH
def test_a_message_of_another_size_is_reported_with_both_sides(strict):
    def body(transport):
        if transport.rank == 0:
            transport.send(torch.zeros(3), 1, F).wait()
            transport.send(torch.zeros(5), 1, F).wait()
        else:
            transport.receive(torch.zeros(3), 0, F).wait()
            transport.receive(torch.zeros(4), 0, F).wait()

    words = r"rank 0 forward message #1 sends 5 float32 to rank 1, but rank 1 forward message #1 receives 4 float32"
    with pytest.raises(SeqloomError, match=words):
        run_ranks(2, body, strict=strict)


@BOTH
def test_another_dtype_is_reported(strict):
    def body(transport):
        tensor = torch.zeros(3, dtype=torch.float64 if transport.rank else torch.float32)
        (transport.receive(tensor, 0, B) if transport.rank else transport.send(tensor, 1, B)).wait()

    with pytest.raises(SeqloomError, match=r"sends 3 float32 to rank 1, but .* receives 3 float64 from rank 0"):
        run_ranks(2, body, strict=strict)


@BOTH
def test_a_receive_that_nobody_answers_is_a_deadlock_with_its_direction(strict):
    def body(transport):
        if transport.rank == 1:
            transport.receive(torch.zeros(3), 0, B).wait()

    with pytest.raises(SeqloomError, match="rank 1 waits for backward message #0: receives 3 float32 from rank 0"):
        run_ranks(2, body, strict=strict)


def test_under_strict_rules_a_sent_tensor_is_not_written_and_a_received_one_not_read():
    def early(transport):
        if transport.rank == 0:
            transport.send(torch.ones(2), 1, F).wait()
            return 0.0
        room = torch.zeros(2)
        message = transport.receive(room, 0, F)
        before = float(room[0])
        message.wait()
        return before

    assert torch.tensor(run_ranks(2, early, strict=True)[1]).isnan()

    def written(transport):
        tensor = torch.ones(2)
        message = transport.receive(tensor, 0, F) if transport.rank else transport.send(tensor, 1, F)
        if transport.rank == 0:
            tensor += 1
        message.wait()

    with pytest.raises(SeqloomError, match="forward message #0 sends 2 float32 to rank 1, and the tensor was written"):
        run_ranks(2, written, strict=True)


def test_messages_need_another_rank():
    def body(transport):
        transport.send(torch.zeros(1), transport.rank, F)

    with pytest.raises(SeqloomError, match="rank 0 has a forward message with rank 0"):
        run_ranks(1, body)
    with pytest.raises(SeqloomError, match="messages join two of the ranks"):
        SingleRankTransport().receive(torch.zeros(1), 1, B)
    SingleRankTransport().connect([])


def test_messages_are_counted():
    def body(transport):
        counting = CountingTransport(transport)
        if transport.rank == 0:
            counting.send(torch.zeros(6), 1, F).wait()
        else:
            counting.receive(torch.zeros(6), 0, F).wait()
        return counting.traffic("send"), counting.traffic("receive"), counting.bytes_to(1)

    (sent, _, there), (_, received, _) = run_ranks(2, body)
    assert (sent.calls, sent.bytes, received.calls, received.bytes, there) == (1, 24, 1, 0, 24)
