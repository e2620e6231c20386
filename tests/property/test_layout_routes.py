"""Staged moves, replayed element by element on sets."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqloom.layout import Move, Route, route_move

Element = tuple[int, int]
"""Item and position."""


def deliveries(move: Move) -> list[tuple[int, int, Element]]:
    """Every (sender, receiver, element) that a move carries."""
    boxes = zip(*(column.tolist() for column in move.columns()), strict=True)
    return [(sender, receiver, (item, at)) for sender, receiver, item, low, high in boxes for at in range(low, high)]


@st.composite
def routed(draw: st.DrawFn) -> tuple[Move, Route, int]:
    """Draw a move whose items each have one sender, a route that fits it, and the ranks per node."""
    node_size, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    ranks = st.integers(0, node_size * nodes - 1)
    boxes = []
    for item in range(draw(st.integers(0, 5))):
        sender = draw(ranks)
        for receiver in draw(st.sets(ranks, max_size=6)):
            cuts = sorted(draw(st.sets(st.integers(0, 40), min_size=2, max_size=4)))
            boxes += [(sender, receiver, item, *edge) for edge in zip(cuts[::2], cuts[1::2], strict=False)]
    columns = np.array(boxes, dtype=np.int64).reshape(-1, 5).T
    places = sorted(draw(st.sets(st.integers(0, node_size - 1), min_size=1)))
    proxies = tuple(node * node_size + place for node in range(nodes) for place in places)
    return Move(*columns), Route(proxies, draw(st.integers(1, 4))), node_size


@given(routed())
def test_every_receiver_ends_with_its_boxes_and_nobody_sends_what_it_lacks(case: tuple[Move, Route, int]) -> None:
    move, route, node_size = case
    wanted = {(receiver, element) for _, receiver, element in deliveries(move)}
    held = {(sender, element) for sender, _, element in deliveries(move)}
    received: Counter[tuple[int, Element]] = Counter()
    stages = route_move(move, route, node_size)
    assert len(stages) <= route.slices + 2
    for stage in stages:
        carried = deliveries(stage)
        assert len(carried), "an empty stage"
        assert all((sender, element) in held for sender, _, element in carried), "somebody sends what it lacks"
        arrived = [(receiver, element) for _, receiver, element in carried]
        received.update(arrived)
        held.update(arrived)
    assert set(received) | {(s, e) for s, r, e in deliveries(move) if s == r} >= wanted
    own = {(receiver, element) for receiver, element in received if receiver not in route.proxies}
    assert own == {entry for entry in wanted if entry[0] not in route.proxies}
    assert max(received.values(), default=1) == 1, "an element reaches a rank twice"
    assert all(rank in route.proxies or (rank, element) in wanted for rank, element in received)


@given(routed())
def test_cells_cross_once_between_proxies_and_loads_are_even(case: tuple[Move, Route, int]) -> None:
    move, route, node_size = case
    needed = {
        (receiver // node_size, sender // node_size, element)
        for sender, receiver, element in deliveries(move)
        if sender // node_size != receiver // node_size
    }
    crossed: Counter[tuple[int, int, Element]] = Counter()
    carried: Counter[tuple[int, int]] = Counter()
    sent: Counter[int] = Counter()
    for stage in route_move(move, route, node_size):
        sliced: Counter[tuple[int, int]] = Counter()
        for sender, receiver, element in deliveries(stage):
            if sender // node_size == receiver // node_size:
                continue
            assert {sender, receiver} <= set(route.proxies)
            assert sender % node_size == receiver % node_size
            crossed[receiver // node_size, sender // node_size, element] += 1
            carried[sender, receiver // node_size] += 1
            sent[sender] += 1
            sliced[sender, receiver // node_size] += 1
        for source, target in {(rank // node_size, node) for rank, node in sliced}:
            shares = [sliced[rank, target] for rank in route.proxies if rank // node_size == source]
            assert max(shares) - min(shares) <= 1
    assert set(crossed) == needed
    assert set(crossed.values()) <= {1}
    for target in {node for _, node in carried}:
        senders = {rank // node_size for rank, node in carried if node == target}
        places = {rank % node_size for rank in route.proxies}
        loads = [sum(carried[node * node_size + place, target] for node in senders) for place in places]
        assert max(loads) - min(loads) <= len(senders)
    for source in {rank // node_size for rank, _ in carried}:
        proxies = [rank for rank in route.proxies if rank // node_size == source]
        totals = [sent[rank] for rank in proxies]
        assert max(totals) - min(totals) <= 1
        for target in {node for rank, node in carried if rank // node_size == source}:
            loads = [carried[rank, target] for rank in proxies]
            assert max(loads) - min(loads) <= 1


@given(routed())
def test_boxes_inside_a_node_go_beside_what_crosses_and_a_lone_node_changes_nothing(
    case: tuple[Move, Route, int],
) -> None:
    move, route, node_size = case
    inside = {entry for entry in deliveries(move) if entry[0] // node_size == entry[1] // node_size}
    stages = route_move(move, route, node_size)
    beside = stages[: route.slices + 1]  # the step after them only sends on what has crossed
    assert inside <= {entry for stage in beside for entry in deliveries(stage)}
    assert route_move(move, route, 10**6) == ((move,) if len(move) else ())
