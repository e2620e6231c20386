from __future__ import annotations

import numpy as np
import pytest

from seqloom.errors import PlanError
from seqloom.layout import Layout, Span, move_between


def test_boxes_are_sorted_and_joined() -> None:
    layout = Layout.of([(1, 0, 5, 9), (0, 2, 0, 4), (1, 0, 0, 5), (0, 1, 3, 4)])
    assert list(layout) == [Span(1, 3, 4), Span(2, 0, 4), Span(0, 0, 9)]
    assert layout.rank.tolist() == [0, 0, 1]
    assert layout.spans(0) == (Span(1, 3, 4), Span(2, 0, 4))
    assert layout.spans(5) == ()
    assert layout[2].tokens == 9


def test_columns_are_read_only_copies() -> None:
    rank = np.array([0])
    layout = Layout(rank, [0], [0], [4])
    rank[0] = 7
    assert layout.rank[0] == 0
    with pytest.raises(ValueError, match="read-only"):
        layout.rank[0] = 1


def test_replication_is_allowed_but_nobody_holds_a_thing_twice() -> None:
    assert len(Layout.of([(0, 0, 0, 4), (1, 0, 0, 4)])) == 2
    with pytest.raises(PlanError, match="rank 0 holds item 0 twice"):
        Layout.of([(0, 0, 0, 4), (0, 0, 3, 5)])
    with pytest.raises(PlanError, match="twice"):
        Layout.of([(0, 0, 0, 9, 0, 1), (0, 0, 1, 2, 1, 2), (0, 0, 5, 6, 0, 2)])
    assert len(Layout.of([(0, 0, 0, 9, 0, 1), (0, 0, 1, 2, 1, 2), (0, 0, 5, 6, 1, 2)])) == 3


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (([0], [0], [3], [3]), "is empty"),
        (([0], [0], [-1], [3]), "negative"),
        (([-1], [0], [0], [3]), "numbered from 0"),
        (([0], [0, 1], [0], [3]), "same length"),
        (([0.5], [0], [0], [3]), "whole numbers"),
        (([0], [0], [0], [3], [0]), "give both or neither"),
    ],
)
def test_bad_columns_are_refused(columns: tuple[list, ...], text: str) -> None:
    with pytest.raises(PlanError, match=text):
        Layout(*columns)


def test_two_axes() -> None:
    layout = Layout.of([(0, 3, 0, 4)]).with_axis(2, 5)
    assert layout.sizes.tolist() == [12]
    assert repr(layout) == "Layout(1 boxes, 2 axes, 1 ranks, 12 elements)"
    with pytest.raises(PlanError, match="two axes already"):
        layout.with_axis(0, 1)
    with pytest.raises(PlanError, match="cannot be joined"):
        Layout.union([layout, Layout.of([(0, 0, 0, 1)])])
    with pytest.raises(PlanError, match=r"use Layout\.with_axis"):
        move_between(layout, Layout.of([(0, 3, 0, 4)]))


def test_a_move_spreads_the_load_of_replicas() -> None:
    source = Layout.of([(rank, 0, 0, 80) for rank in (0, 1)])
    target = Layout.of([(2 + k, 0, 10 * k, 10 * k + 10) for k in range(8)])
    move = move_between(source, target)
    assert np.bincount(move.sender, weights=move.sizes).tolist() == [40, 40]
    assert repr(move) == "Move(8 boxes, 1 axes, 80 of 80 elements travel)"


def test_a_move_names_what_is_missing() -> None:
    with pytest.raises(PlanError, match=r"rank 1 shall receive item 4 \[8:9\), which nobody holds"):
        move_between(Layout.of([(0, 4, 0, 8)]), Layout.of([(1, 4, 2, 9)]))
    with pytest.raises(PlanError, match=r"item 4 \[0:1\)x\[2:3\)"):
        move_between(Layout.of([(0, 4, 0, 1, 0, 2)]), Layout.of([(1, 4, 0, 1, 0, 3)]))
    with pytest.raises(PlanError, match="nobody holds"):
        move_between(Layout.empty(), Layout.of([(1, 4, 2, 9)]))
    assert len(move_between(Layout.of([(0, 4, 0, 8)]), Layout.empty())) == 0
