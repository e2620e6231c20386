from __future__ import annotations

import numpy as np
import pytest

from seqloom.errors import PlanError
from seqloom.layout import Layout, Move, Route, route_move


def move(*boxes: tuple[int, ...]) -> Move:
    return Move(*np.array(boxes, dtype=np.int64).T)


def rows(own: Move) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in own.columns()), strict=True))


def test_a_message_crosses_through_every_proxy() -> None:
    stages = route_move(move((1, 2, 0, 0, 100)), Route((0, 1, 2, 3)), 2)
    # Rank 1 carries a half itself; rank 2 receives the other half itself, from rank 0.
    assert [rows(stage) for stage in stages] == [
        [(1, 0, 0, 50, 100)],
        [(0, 2, 0, 50, 100), (1, 3, 0, 0, 50)],
        [(3, 2, 0, 0, 50)],
    ]


def test_slices_follow_each_other() -> None:
    stages = route_move(move((0, 4, 0, 0, 120)), Route((1, 2, 5, 6), slices=3), 4)
    assert [{(s, r): b - a for s, r, _, a, b in rows(stage)} for stage in stages] == [
        {(0, 1): 20, (0, 2): 20},
        {(0, 1): 20, (0, 2): 20, (1, 5): 20, (2, 6): 20},
        {(0, 1): 20, (0, 2): 20, (1, 5): 20, (2, 6): 20, (5, 4): 20, (6, 4): 20},
        {(1, 5): 20, (2, 6): 20, (5, 4): 20, (6, 4): 20},
        {(5, 4): 20, (6, 4): 20},
    ]


def test_what_a_whole_node_wants_crosses_once() -> None:
    everything = [(sender, receiver, sender, 0, 800) for sender in range(4) for receiver in range(8)]
    stages = route_move(move(*everything), Route(tuple(range(8))), 4)
    crossing = [(s, b - a) for stage in stages for s, r, _, a, b in rows(stage) if s // 4 != r // 4]
    assert sum(size for _, size in crossing) == 4 * 800
    # Every sender carries its own item, and its mates have it for themselves: nothing is dispatched.
    assert sorted(crossing) == [(sender, 800) for sender in range(4)]
    assert sum(stage.remote.sum() for stage in stages) == 4 * 3 + 4 + 4 * 3


def test_traffic_of_a_realistic_gather_is_even() -> None:
    random = np.random.default_rng(5)
    boxes = []
    for sender in range(16):
        for receiver in random.permutation(32)[:20].tolist():
            low = int(random.integers(0, 200_000))
            boxes.append((sender, receiver, sender, low, low + int(random.integers(1, 300_000))))
    stages = route_move(move(*boxes), Route(tuple(range(0, 32, 2)), slices=4), 8)
    sent = np.zeros(32, dtype=np.int64)
    for stage in stages:
        across = stage.sender // 8 != stage.receiver // 8
        np.add.at(sent, stage.sender[across], stage.sizes[across])
    for node in (0, 1):
        loads = sent[8 * node : 8 * node + 8 : 2]
        assert loads.max() <= loads.min() + 1
        assert loads.min() > 0


def test_the_result_does_not_depend_on_the_order_of_boxes() -> None:
    boxes = [(0, 2, 0, 0, 9), (0, 3, 0, 4, 12), (1, 0, 1, 0, 7), (2, 1, 2, 0, 5)]
    assert route_move(move(*boxes), Route((0, 2), 2), 2) == route_move(move(*boxes[::-1]), Route((0, 2), 2), 2)


@pytest.mark.parametrize(
    ("route", "words"),
    [
        (Route((0,)), "none in node 1"),
        (Route((0, 3)), r"places \[0\] of node 0, \[1\] of node 1.*use \[2\]"),
        (Route((0, 2), slices=0), "0 slices"),
    ],
)
def test_routes_that_do_not_fit_are_refused(route: Route, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        route_move(move((0, 2, 0, 0, 9)), route, 2)


def test_two_axes_are_refused() -> None:
    layout = Layout.of([(0, 0, 0, 4, 0, 2)])
    own = Move(layout.rank, layout.rank + 2, *layout.columns()[1:])
    with pytest.raises(PlanError, match="flatten"):
        route_move(own, Route((0, 2)), 2)
