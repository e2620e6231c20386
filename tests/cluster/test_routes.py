"""Routed messages really use all nics: measured beside direct ones, counted nic by nic, compared bit by bit."""

import time

import numpy as np
import pytest
import torch

from seqloom.dist import P2PTensor
from seqloom.dist.routed import RoutedHandle, RoutedTransfer
from seqloom.layout import Move, Route
from support.hosts import fastest

pytestmark = pytest.mark.cluster

NODE = 4
SIZE = 4_000_000  # bytes
ROUTE = Route(tuple(range(8)), slices=4)


def content(item, size):
    """What a message holds, on every rank the same."""
    return torch.from_numpy(np.random.default_rng(item).integers(0, 256, size, dtype=np.uint8))


def deliver(transport, boxes, route):
    """Bring (sender, receiver, item, start, stop) to their receivers; seconds, and whether all arrived as it was."""
    rank, everyone = transport.rank, tuple(range(transport.ranks))
    sizes = {item: stop for _, _, item, _, stop in boxes}
    sent = {item: content(item, sizes[item]) for sender, _, item, _, _ in boxes if sender == rank}
    wanted = {item: torch.zeros(sizes[item], dtype=torch.uint8) for _, to, item, _, _ in boxes if to == rank}
    sends = [P2PTensor(to, sent[item]) for by, to, item, _, _ in boxes if by == rank]
    receives = [P2PTensor(by, wanted[item]) for by, to, item, _, _ in boxes if to == rank]
    passage = None if route is None else RoutedTransfer.of(Move(*np.array(boxes).T), route, NODE, rank)
    transport.all_reduce(torch.ones(1), everyone)
    start = time.perf_counter()
    if passage is None:
        transport.exchange(sends, receives).wait()
    else:
        RoutedHandle(passage, transport, sent, wanted, unit=1, device=torch.device("cpu")).wait()
    transport.all_reduce(torch.ones(1), everyone)
    seconds = time.perf_counter() - start
    return seconds, all(torch.equal(found, content(item, sizes[item])) for item, found in wanted.items())


def measured(hosts, pool, boxes, route):
    """Seconds of the slowest rank, and the bytes of every nic of every node; the payload was right."""
    before = hosts.bytes_sent()
    found = pool.run(deliver, boxes, route)
    after = hosts.bytes_sent()
    assert all(right for _, right in found)
    return max(seconds for seconds, _ in found), np.array(after) - np.array(before)


def side_by_side(hosts, pool, boxes, route, faster):
    """Run direct and routed; return how many times as fast routed is, and the bytes of both.

    A direct run takes at least as long as its busiest nic. Routed runs are repeated until one is `faster` than that.
    """
    _, direct = measured(hosts, pool, boxes, None)
    _, routed = measured(hosts, pool, boxes, route)
    least = hosts.seconds(direct.max())
    return least / fastest(lambda: measured(hosts, pool, boxes, route)[0], least / faster), direct, routed


def level(sent):
    """Whether every nic of every node carried the mean of its node, within 5 %."""
    return bool((abs(sent / sent.mean(axis=1, keepdims=True) - 1) < 0.05).all())


def test_a_routed_message_is_three_times_as_fast_over_four_cards(hosts, pool, figures):
    ratio, direct, routed = side_by_side(hosts, pool, [(1, 6, 0, 0, SIZE)], ROUTE, 3)
    figures["one message of 4 MB"] = ratio
    assert ratio >= 3
    assert direct[0, 1] >= SIZE and direct.sum() < 1.08 * SIZE
    assert level(routed[:1]) and SIZE <= routed[0].sum() < 1.06 * SIZE


def test_two_ranks_send_to_each_other_at_once(hosts, pool):
    """In turns the two messages would take a nic's time once and a half or twice."""
    both = [(2, 6, 0, 0, SIZE // 2), (6, 2, 1, 0, SIZE // 2)]
    once = hosts.seconds(SIZE // 2)
    assert fastest(lambda: measured(hosts, pool, both, None)[0], 1.3 * once) < 1.3 * once


def test_the_messages_of_a_ring_share_all_cards_in_both_directions(hosts, pool, figures):
    ratio, direct, routed = side_by_side(hosts, pool, [(3, 4, 0, 0, SIZE), (7, 0, 1, 0, SIZE)], ROUTE, 2.5)
    figures["a message of 4 MB in each direction"] = ratio
    assert ratio >= 2.5
    assert min(direct[0, 3], direct[1, 3]) >= SIZE and level(routed)


def test_what_a_whole_node_wants_crosses_once(hosts, pool, figures):
    """Direct, one nic carries it four times."""
    boxes = [(0, receiver, 0, 0, SIZE // 4) for receiver in (4, 5, 6, 7)]
    ratio, direct, routed = side_by_side(hosts, pool, boxes, ROUTE, 6)
    figures["1 MB that all ranks of a node want"] = ratio
    assert ratio >= 6
    assert direct[0, 0] >= SIZE and level(routed[:1]) and routed[0].sum() < 1.08 * SIZE // 4


def test_unequal_senders_fill_the_cards_evenly(hosts, pool):
    """By turns the nics near the senders would carry 1.5 MB, 0.5 MB and nothing."""
    boxes = [(0, 5, 0, 0, 1_500_000), (1, 7, 1, 0, 500_000), (2, 3, 2, 0, 500_000)]
    _, sent = measured(hosts, pool, boxes, ROUTE)
    assert level(sent[:1]) and 2_000_000 <= sent[0].sum() < 2_150_000


def test_two_proxies_use_two_cards(hosts, pool):
    _, sent = measured(hosts, pool, [(3, 4, 0, 0, 2_000_000)], Route((0, 2, 4, 6), slices=2))
    assert level(sent[:1, [0, 2]]) and sent[0, [1, 3]].sum() < 20_000
