"""Routed transfers deliver every bit, through all proxies alike, and what goes wrong on the way is heard."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.dist.routed import Buffer, RoutedHandle, RoutedTransfer
from seqloom.dist.thread_transport import run_ranks
from seqloom.layout import Move, Route
from support.transports import CountingTransport

NODE, RANKS, UNIT = 4, 8, 12
CPU = torch.device("cpu")


def move_of(*boxes):
    return Move(*np.array(boxes, dtype=np.int64).reshape(-1, 5).T)


def message(item, length):
    """The bytes of a message: different everywhere."""
    drawn = torch.Generator().manual_seed(item)
    return torch.randint(256, (length, UNIT), dtype=torch.uint8, generator=drawn)


def deliver(move, route, *, strict=True, ranks=RANKS):
    """Run a move on threads; return what every rank got by item, and what it should, and bytes by peer."""
    length = int(move.stop.max())

    def body(transport):
        rank, counting = transport.rank, CountingTransport(transport)
        transfer = RoutedTransfer.of(move, route, NODE, rank)
        sent = {item: message(item, length) for item in np.unique(move.item[move.sender == rank]).tolist()}
        wanted, expected = {}, {}
        for item in np.unique(move.item[move.receiver == rank]).tolist():
            own = (move.item == item) & (move.receiver == rank)
            runs = zip(move.start[own].tolist(), move.stop[own].tolist(), strict=True)
            expected[item] = torch.cat([message(item, length)[start:stop] for start, stop in runs])
            wanted[item] = torch.empty_like(expected[item])
        RoutedHandle(transfer, counting, sent, wanted, unit=UNIT, device=CPU).wait()
        return wanted, expected, [counting.bytes_to(peer) for peer in range(ranks)]

    return run_ranks(ranks, body, strict=strict)


@st.composite
def moves(draw):
    """Messages of some ranks, each wanted by some others, whole or in parts."""
    boxes = []
    for item, sender in enumerate(draw(st.lists(st.integers(0, RANKS - 1), min_size=1, max_size=5))):
        for receiver in draw(st.sets(st.integers(0, RANKS - 1).filter(lambda r, s=sender: r != s), max_size=4)):
            edges = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=5)))
            boxes += [(sender, receiver, item, *run) for run in zip(edges[::2], edges[1::2], strict=False)]
    return boxes


@settings(max_examples=25)
@given(
    boxes=moves(), places=st.sets(st.integers(0, NODE - 1), min_size=1), slices=st.integers(1, 4), strict=st.booleans()
)
def test_every_receiver_gets_every_bit(boxes, places, slices, strict):
    if boxes:
        proxies = tuple(node * NODE + place for node in range(2) for place in sorted(places))
        for wanted, expected, _ in deliver(move_of(*boxes), Route(proxies, slices), strict=strict):
            assert all(torch.equal(wanted[item], expected[item]) for item in expected)


def test_proxies_share_what_crosses_and_what_many_want_crosses_once():
    everywhere = Route(tuple(range(RANKS)), slices=2)
    one = deliver(move_of((0, 5, 0, 0, 80)), everywhere)
    assert [sum(sent[NODE:]) for _, _, sent in one[:NODE]] == [20 * UNIT] * 4
    many = deliver(move_of(*((0, receiver, 0, 0, 80) for receiver in (1, 4, 5, 6, 7))), everywhere)
    assert [sum(sent[NODE:]) for _, _, sent in many[:NODE]] == [20 * UNIT] * 4


def test_a_rank_that_only_forwards_has_a_buffer_for_it():
    move, route = move_of((0, 4, 7, 0, 8)), Route((1, 5))
    parts = {rank: RoutedTransfer.of(move, route, NODE, rank) for rank in range(RANKS)}
    assert [len(parts[rank].steps) for rank in range(RANKS)] == [1, 2, 0, 0, 1, 2, 0, 0]
    assert [parts[rank].forwarded for rank in (0, 1, 4, 5)] == [0, 8, 0, 8]
    assert parts[1].steps[0][1][0].slices == ((Buffer.FORWARD, 0, 0, 8),)
    assert parts[1].received_elements == 8 and parts[0].received_elements == 0


def test_what_goes_wrong_in_a_step_is_raised_by_wait():
    move, route = move_of((0, 4, 0, 0, 8)), Route((1, 5))

    class Broken:
        waits_in_stream = False

        def exchange(self, sends, receives):
            return self

        def wait(self):
            raise ConnectionError("the cable is cut")

    handle = RoutedHandle(RoutedTransfer.of(move, route, NODE, 1), Broken(), {}, {}, unit=4, device=CPU)
    with pytest.raises(ConnectionError, match="cable"):
        handle.wait()


def test_a_rank_outside_sends_nothing():
    transfer = RoutedTransfer.of(move_of((0, 4, 0, 0, 8)), Route((1, 5)), NODE, 3)
    nowhere = None  # whoever sends or receives anything fails
    assert RoutedHandle(transfer, nowhere, {}, {}, unit=4, device=CPU).wait() is None
