import threading
import time

import pytest
import torch

from seqloom.dist import P2PTensor, Ranks, run_ranks
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily
from support.programs import DTYPES, every_verb, expected_of, run_program


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_verb_moves_what_it_says(dtype, strict):
    program = every_verb(dtype)
    results = run_ranks(4, lambda transport: run_program(transport, program), strict=strict)
    for rank, received in enumerate(results):
        expected = expected_of(program, rank)
        assert len(received) == len(expected)
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(received, expected, strict=True))


def test_a_sent_tensor_keeps_its_size_not_its_shape():
    def body(transport):
        received = torch.zeros(6)
        transport.exchange([P2PTensor(0, torch.arange(6.0).view(2, 3))], [P2PTensor(0, received)]).wait()
        return received.tolist()

    assert run_ranks(1, body) == [[0, 1, 2, 3, 4, 5]]


def test_what_was_sent_may_change_after_wait_and_what_needs_grad_may_travel():
    def body(transport):
        peer = 1 - transport.rank
        sent = torch.full((3,), float(transport.rank), requires_grad=True)
        received = torch.zeros(3)
        handle = transport.exchange([P2PTensor(peer, sent)], [P2PTensor(peer, received)])
        handle.wait()
        handle.wait()  # twice is fine
        with torch.no_grad():
            sent.fill_(9.0)
        transport.all_reduce(torch.zeros(1), (0, 1))
        return received.tolist()

    assert run_ranks(2, body) == [[1.0] * 3, [0.0] * 3]


def test_all_reduce_is_the_same_to_the_bit_on_all_ranks():
    values = torch.randn(4, 1000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 1).view(4, 1)

    def body(transport):
        own = values[transport.rank].clone()
        transport.all_reduce(own, range(4))
        return own

    first, *others = run_ranks(4, body)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first, values.sum(0))


def test_exchanges_need_not_be_waited_for_in_order():
    def body(transport):
        peer = 1 - transport.rank
        buffers = [torch.zeros(1) for _ in range(3)]
        handles = [
            transport.exchange([P2PTensor(peer, torch.full((1,), float(k)))], [P2PTensor(peer, buffer)])
            for k, buffer in enumerate(buffers)
        ]
        for handle in reversed(handles):
            handle.wait()
        return [buffer.item() for buffer in buffers]

    for strict in (False, True):
        assert run_ranks(2, body, strict=strict) == [[0, 1, 2]] * 2


def test_sends_may_cross_in_separate_exchanges_here():
    def body(transport):
        peer = 1 - transport.rank
        received = torch.zeros(1)
        sending = transport.exchange([P2PTensor(peer, torch.ones(1))], [])
        transport.exchange([], [P2PTensor(peer, received)]).wait()
        sending.wait()
        return received.item()

    assert run_ranks(2, body) == [1.0, 1.0]


def test_an_error_of_one_rank_stops_all_and_names_the_rank():
    def body(transport):
        if transport.rank == 2:
            raise KeyError("lost")
        transport.all_reduce(torch.ones(1), range(4))

    before = time.monotonic()
    with pytest.raises(KeyError, match="lost") as caught:
        run_ranks(4, body)
    assert time.monotonic() - before < 2
    assert caught.value.__notes__ == ["on rank 2 of 4"]


def test_a_rank_cannot_catch_that_another_failed():
    def body(transport):
        if transport.rank == 0:
            raise ValueError("mine")
        while True:
            try:
                transport.all_reduce(torch.ones(1), (0, 1))
            except Exception:
                continue

    with pytest.raises(ValueError, match="mine"):
        run_ranks(2, body)


@pytest.mark.parametrize("strict", [False, True])
def test_a_message_that_nobody_sends_is_an_error_at_once(strict):
    def body(transport):
        if transport.rank == 0:
            transport.exchange([], [P2PTensor(1, torch.zeros(4))]).wait()
        if transport.rank == 2:
            transport.all_gather(torch.zeros(6), torch.zeros(2), (0, 1, 2))

    before = time.monotonic()
    with pytest.raises(SeqloomError) as caught:
        run_ranks(3, body, strict=strict, timeout_s=30)
    assert time.monotonic() - before < 2
    message = str(caught.value)
    assert "rank 0 waits for exchange #0: receives 4 float32 from rank 1" in message
    assert "rank 1 has ended" in message
    assert "rank 2 waits for all_gather #0 on ranks (0, 1, 2): no word from ranks 0, 1" in message


def test_blocks_in_different_order_are_a_deadlock():
    def body(transport):
        for block in ((0, 1), (0, 1, 2)) if transport.rank == 0 else ((0, 1, 2), (0, 1)):
            if transport.rank in block:
                transport.all_reduce(torch.ones(1), block)

    with pytest.raises(SeqloomError, match=r"rank 0 waits for all_reduce #0 on ranks \(0, 1\): no word from rank 1"):
        run_ranks(3, body)


def test_a_body_that_takes_too_long_says_where_it_is():
    gate = threading.Event()

    def body(transport):
        if transport.rank == 1:
            gate.wait(20)
        transport.all_reduce(torch.ones(1), (0, 1))

    with Ranks(2) as ranks, pytest.raises(SeqloomError) as caught:
        threading.Timer(0.6, gate.set).start()
        ranks.run(body, timeout_s=0.3)
    assert "not done after 0.3 s" in str(caught.value)
    assert "rank 0 waits for all_reduce #0" in str(caught.value)
    assert "rank 1 runs" in str(caught.value)


def test_both_sides_of_a_mismatch_are_named():
    def sizes(transport):
        peer = 1 - transport.rank
        count = 3 + transport.rank
        transport.exchange([P2PTensor(peer, torch.ones(count))], [P2PTensor(peer, torch.ones(count))]).wait()

    with pytest.raises(SeqloomError, match=r"exchange #0 sends [34] float32 to rank \d, but rank \d exchange #0 rec"):
        run_ranks(2, sizes)

    def dtypes(transport):
        transport.all_reduce(torch.ones(2, dtype=(torch.float32, torch.int64)[transport.rank]), (0, 1))

    with pytest.raises(SeqloomError, match=r"float32.*int64|int64.*float32"):
        run_ranks(2, dtypes)

    def verbs(transport):
        if transport.rank:
            transport.all_gather(torch.ones(4), torch.ones(2), (0, 1))
        else:
            transport.all_reduce(torch.ones(2), (0, 1))

    with pytest.raises(SeqloomError, match="must call the same verbs in the same order") as caught:
        run_ranks(2, verbs)
    assert "all_gather #0 on ranks (0, 1)" in str(caught.value)
    assert "all_reduce #0 on ranks (0, 1)" in str(caught.value)


def test_ranks_keep_their_threads_and_survive_a_failure():
    def fails(transport):
        if transport.rank == 1:
            raise ValueError("once")
        transport.all_reduce(torch.ones(1), (0, 1))

    with Ranks(2) as ranks:
        idents = ranks.run(lambda transport: threading.get_ident())
        with pytest.raises(ValueError, match="once"):
            ranks.run(fails)
        assert ranks.run(lambda transport: threading.get_ident()) == idents
    assert len(set(idents)) == 2


def test_ranks_that_do_not_come_back_are_not_used_again(monkeypatch):
    monkeypatch.setattr("seqloom.dist.thread_transport.GRACE_S", 0.05)
    gate = threading.Event()
    with Ranks(2) as ranks:
        with pytest.raises(SeqloomError, match="not done after"):
            ranks.run(lambda transport: gate.wait(20), timeout_s=0.05)
        with pytest.raises(SeqloomError, match="make new Ranks"):
            ranks.run(lambda transport: None)
        gate.set()


def test_backward_stays_in_the_thread_of_the_rank():
    assert run_ranks(2, lambda transport: torch._C._is_multithreading_enabled()) == [False, False]
    assert torch._C._is_multithreading_enabled()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: t.exchange([P2PTensor(2, torch.ones(1))], []), r"exchanges with rank 2; ranks are 0 \.\. 1"),
        (lambda t: t.exchange([P2PTensor(1, torch.ones(3, 2).t())], []), "not contiguous"),
        (lambda t: t.exchange([], [P2PTensor(1, torch.ones(4)[::2])]), "not contiguous"),
        (lambda t: t.all_reduce(torch.ones(3, 2).t(), (0, 1)), "not contiguous"),
        (lambda t: t.all_to_all(torch.ones(4), torch.ones(4), [2, 2], [2, 1], (0, 1)), r"input of 4 .* \[2, 1\]"),
        (lambda t: t.all_to_all(torch.ones(4), torch.ones(4), [4], [2, 2], (0, 1)), "for 2 ranks"),
        (lambda t: t.all_to_all(torch.ones(4), torch.ones(4), [5, -1], [2, 2], (0, 1)), "0 or more"),
        (lambda t: t.all_gather(torch.ones(5), torch.ones(2), (0, 1)), r"output of 5 .* \[2, 2\]"),
        (lambda t: t.all_gather(torch.ones(4), torch.ones(2).long(), (0, 1)), "sends 2 int64 to rank 0, but rank 0"),
        (lambda t: t.all_reduce(torch.ones(2), (1, 0)), r"block \(1, 0\) called by rank 0 of 2: .* ascending"),
        (lambda t: t.all_reduce(torch.ones(2), (1,)), "the caller in it"),
        (lambda t: t.all_reduce(torch.ones(2), (0, 1, 2)), r"rank 0 of 2"),
        (lambda t: t.all_reduce(torch.ones(2), ()), r"block \(\)"),
    ],
)
def test_bad_arguments_are_refused_before_anything_moves(call, message):
    with pytest.raises(SeqloomError, match=message):
        run_ranks(2, lambda transport: call(transport) if transport.rank == 0 else None)


@pytest.mark.parametrize("block", [(1, 2), (0, 1, 2, 3), (0, 2)])
def test_blocks_outside_the_family_are_refused_with_the_nearest(block):
    family = GroupFamily(4, node_size=4, budget=1)  # sizes 1 and 2

    def body(transport):
        if transport.rank in block:
            transport.all_reduce(torch.ones(1), block)

    with pytest.raises(SeqloomError) as caught:
        run_ranks(4, body, family=family)
    assert f"block {block} is not in the family of 4 ranks with sizes (1, 2); the nearest is (0, 1)" in str(
        caught.value
    )


def test_no_ranks_is_an_error():
    with pytest.raises(SeqloomError, match="0 ranks: a run needs at least 1"):
        run_ranks(0, lambda transport: None)
