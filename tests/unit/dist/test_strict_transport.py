"""Every rule of the strict transport, broken once."""

import pytest
import torch

from seqloom.dist import Channel, P2PTensor, run_ranks
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily


def strictly(ranks, body, **options):
    return run_ranks(ranks, body, strict=True, **options)


def refused(ranks, body, **options):
    with pytest.raises(SeqloomError) as caught:
        strictly(ranks, body, **options)
    return str(caught.value)


def test_sends_that_cross_in_separate_exchanges_deadlock():
    def body(transport):
        peer = 1 - transport.rank
        transport.exchange([P2PTensor(peer, torch.ones(2))], [P2PTensor(peer, torch.ones(2))]).wait()
        sending = transport.exchange([P2PTensor(peer, torch.ones(12))], [])
        receiving = transport.exchange([], [P2PTensor(peer, torch.ones(12))])
        receiving.wait()
        sending.wait()

    message = refused(2, body)
    assert "rank 0 waits for exchange #1: sends 12 float32 to rank 1" in message
    assert "rank 1 waits for exchange #1: sends 12 float32 to rank 0" in message
    assert "sends that cross must be in one exchange" in message


def test_a_crossing_over_three_ranks_deadlocks():
    def body(transport):
        after, before = (transport.rank + 1) % 3, (transport.rank - 1) % 3
        transport.exchange([P2PTensor(after, torch.ones(1))], []).wait()
        transport.exchange([], [P2PTensor(before, torch.ones(1))]).wait()

    message = refused(3, body)
    for rank in range(3):
        assert f"rank {rank} waits for exchange #0: sends 1 float32 to rank {(rank + 1) % 3}" in message


def early_and_late(transport):
    """Rank 0 starts to receive on one channel before an exchange on another, rank 1 sends there after its own."""
    peer, received, other = 1 - transport.rank, [torch.zeros(1), torch.zeros(1)], transport.on(Channel.PARAMETERS)
    early = [other.exchange([], [P2PTensor(peer, received[0])])] if transport.rank == 0 else []
    transport.exchange([P2PTensor(peer, torch.ones(1))], [P2PTensor(peer, received[1])]).wait()
    late = [other.exchange([P2PTensor(peer, torch.full((1,), 2.0))], [])] if transport.rank == 1 else []
    for handle in early + late:
        handle.wait()
    return [each.item() for each in received]


def test_channels_do_not_wait_for_each_other_but_calls_need_one_order():
    assert run_ranks(2, early_and_late) == [[2.0, 1.0], [0.0, 1.0]]
    message = refused(2, early_and_late)
    assert "rank 0 waits for exchange of PARAMETERS #0: receives 1 float32 from rank 1" in message
    assert "rank 1 waits for exchange #0: sends 1 float32 to rank 0, receives 1 float32 from rank 0" in message


def test_one_exchange_or_one_order_does_not_deadlock():
    def together(transport):
        peer, received = 1 - transport.rank, torch.zeros(1)
        transport.exchange([P2PTensor(peer, torch.ones(1))], [P2PTensor(peer, received)]).wait()
        return received.item()

    def in_turn(transport):
        peer, received = 1 - transport.rank, torch.zeros(1)
        parts = [([P2PTensor(peer, torch.ones(1))], []), ([], [P2PTensor(peer, received)])]
        for sends, receives in parts if transport.rank else reversed(parts):
            transport.exchange(sends, receives).wait()
        return received.item()

    assert strictly(2, together) == strictly(2, in_turn) == [1.0, 1.0]


def test_exchanges_of_other_pairs_do_not_wait_for_each_other():
    def body(transport):
        received = torch.zeros(1)
        if transport.rank == 0:
            for peer in (1, 2):
                transport.exchange([P2PTensor(peer, torch.ones(1))], []).wait()
        else:
            transport.exchange([], [P2PTensor(0, received)]).wait()
        return received.item()

    assert strictly(3, body) == [0.0, 1.0, 1.0]


def test_an_exchange_without_tensors_takes_part_in_nothing():
    def body(transport):
        if transport.rank:
            transport.exchange([], []).wait()
        return transport.rank

    assert strictly(2, body) == [0, 1]


def test_verbs_of_a_block_and_exchanges_need_one_order_too():
    def body(transport):
        peer, received = 1 - transport.rank, torch.zeros(1)
        handle = (
            transport.exchange([P2PTensor(peer, torch.ones(1))], [P2PTensor(peer, received)])
            if transport.rank
            else None
        )
        transport.all_reduce(torch.ones(1), (0, 1))
        handle = handle or transport.exchange([P2PTensor(peer, torch.ones(1))], [P2PTensor(peer, received)])
        handle.wait()
        return received.item()

    assert run_ranks(2, body) == [1.0, 1.0], "they have communicators of their own"
    assert "rank 0 waits for all_reduce #0 on ranks (0, 1): no word from rank 1" in refused(2, body)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
)
def test_what_is_received_is_poisoned_until_wait(dtype):
    def body(transport):
        peer = 1 - transport.rank
        received = torch.zeros(2, dtype=dtype)
        handle = transport.exchange([P2PTensor(peer, torch.zeros(2, dtype=dtype))], [P2PTensor(peer, received)])
        transport.all_reduce(torch.ones(1), (0, 1))  # the tensors are matched by now
        early = received.clone()
        handle.wait()
        return early, received

    for early, late in strictly(2, body):
        assert bool(torch.isnan(early).all()) if early.is_floating_point() or early.is_complex() else bool(early.all())
        assert not late.any()


def test_what_is_sent_must_not_be_written_before_wait():
    def body(transport):
        peer = 1 - transport.rank
        sent = torch.ones(2)
        handle = transport.exchange([P2PTensor(peer, sent)], [P2PTensor(peer, torch.zeros(2))])
        sent += 1
        handle.wait()

    assert "sends 2 float32 to rank" in refused(2, body)
    assert "written before wait()" in refused(2, body)


def test_one_buffer_cannot_be_sent_and_received_into():
    def body(transport):
        peer = 1 - transport.rank
        buffer = torch.ones(2)
        transport.exchange([P2PTensor(peer, buffer)], [P2PTensor(peer, buffer)]).wait()

    assert "written before wait()" in refused(2, body)


def test_nan_may_be_sent():
    def body(transport):
        received = torch.zeros(1)
        transport.exchange([P2PTensor(0, torch.tensor([float("nan")]))], [P2PTensor(0, received)]).wait()
        return bool(received.isnan())

    assert strictly(1, body) == [True]


def test_every_handle_is_waited_for():
    def body(transport):
        peer = 1 - transport.rank
        transport.exchange([P2PTensor(peer, torch.ones(1))], [P2PTensor(peer, torch.ones(1))])
        transport.all_reduce(torch.ones(1), (0, 1))

    message = refused(2, body)
    assert "ended without wait() for exchange #0; call wait() on every handle" in message


def test_what_is_never_matched_is_reported():
    def body(transport):
        if transport.rank == 0:
            transport.exchange([P2PTensor(1, torch.ones(3))], [])

    assert "rank 0 waits for exchange #0: sends 3 float32 to rank 1\n  rank 1 has ended" in refused(2, body)


def test_sizes_dtypes_and_verbs_must_match():
    def sizes(transport):
        tensors = [P2PTensor(1 - transport.rank, torch.ones(12 - 4 * transport.rank))]
        transport.exchange(*((tensors, []) if transport.rank == 0 else ([], tensors))).wait()

    message = refused(2, sizes)
    assert (
        "rank 0 exchange #0 sends 12 float32 to rank 1, but rank 1 exchange #0 receives 8 float32 from rank 0"
        in message
    )

    def dtypes(transport):
        tensors = [P2PTensor(1 - transport.rank, torch.ones(2, dtype=(torch.float32, torch.bfloat16)[transport.rank]))]
        transport.exchange(*((tensors, []) if transport.rank == 0 else ([], tensors))).wait()

    assert "sends 2 float32 to rank 1, but rank 1 exchange #0 receives 2 bfloat16 from rank 0" in refused(2, dtypes)

    def pieces(transport):
        own = [[1, 2], [3, 1]][transport.rank]
        transport.all_to_all(torch.ones(3 if transport.rank == 0 else 4), torch.ones(sum(own)), own, own, (0, 1))

    assert "all_to_all #0 on ranks (0, 1)" in refused(2, pieces)

    def order(transport):
        verbs = [
            lambda: transport.all_reduce(torch.ones(2), (0, 1)),
            lambda: transport.all_gather(torch.ones(4), torch.ones(2), (0, 1)),
        ]
        for verb in verbs if transport.rank else reversed(verbs):
            verb()

    assert "all ranks of a block must call the same verbs in the same order" in refused(2, order)


def test_tensors_must_be_contiguous():
    assert "not contiguous" in refused(1, lambda t: t.exchange([P2PTensor(0, torch.ones(2, 3).t())], []))


def test_blocks_outside_the_family_are_refused():
    family = GroupFamily(4, node_size=2, budget=16)
    strictly(4, lambda t: t.all_reduce(torch.ones(1), (0, 1) if t.rank < 2 else (2, 3)), family=family)
    message = refused(
        4, lambda t: t.all_reduce(torch.ones(1), (1, 2) if t.rank in (1, 2) else (t.rank,)), family=family
    )
    assert "block (1, 2) is not in the family of 4 ranks" in message
    assert "the nearest is (0, 1)" in message
