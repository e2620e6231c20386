from __future__ import annotations

import numpy as np
import pytest

from seqloom.errors import PlanError
from seqloom.layout import Layout, balanced_token_counts, rebalance_layout


def rows(layout: Layout) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in layout.columns()), strict=True))


def test_the_tail_goes_to_the_node_first() -> None:
    layout = Layout.of([(0, 0, 0, 100), (1, 1, 0, 20), (2, 2, 0, 20), (3, 3, 0, 20)])
    after = rebalance_layout(layout, [40, 40, 40, 40], 2)
    assert rows(after) == [
        (0, 0, 0, 40),
        (1, 0, 40, 60),
        (1, 1, 0, 20),
        (2, 0, 60, 80),
        (2, 2, 0, 20),
        (3, 0, 80, 100),
        (3, 3, 0, 20),
    ]


def test_what_leaves_a_node_is_spread_over_its_ranks() -> None:
    layout = Layout.of([(0, 0, 0, 90), (1, 1, 0, 60), (3, 2, 0, 20), (4, 3, 0, 10)])
    after = rebalance_layout(layout, [30, 30, 30, 30, 30, 30], 3)
    # Ranks 0 and 1 have 60 and 30 too many, rank 2 takes 30: of the 60 that leave, each sends one half.
    away = after.rank >= 3
    assert [int(after.sizes[away & (after.item == k)].sum()) for k in (0, 1)] == [30, 30]
    # Ranks 3 to 5 lack 10, 20 and 30, all from the other node.
    assert np.bincount(after.rank, after.sizes * (after.item < 2)).tolist() == [30, 30, 30, 10, 20, 30]


def test_nothing_moves_without_need() -> None:
    layout = Layout.of([(0, 0, 0, 9), (1, 0, 9, 12)])
    assert rebalance_layout(layout, [9, 3], 2) == layout
    assert rebalance_layout(Layout.empty(), [0, 0], 2) == Layout.empty()


def test_targets_level_what_is_left_over() -> None:
    # 80, 80 and 90 ns; rank 0 has 100 of other work. The last token could be on ranks 1 to 3: it stays on rank 3.
    assert balanced_token_counts([100, 0, 0, 50], 10, [5, 5, 5, 5]).tolist() == [0, 8, 8, 4]
    assert balanced_token_counts([0, 10**9], 1, [3, 4]).tolist() == [7, 0]
    # Both get two, and the odd token stays where it is.
    assert balanced_token_counts([0, 0], 5, [1, 4]).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("targets", "shard_groups", "words"),
    [
        ([5, 6], None, "shard group 0 sum to 11, its ranks hold 10 tokens"),
        ([-1, 11], None, "rank 0 shall have -1 tokens"),
        ([10], None, "targets for 1 ranks, but rank 1 holds"),
        ([5, 5], [[0], [1]], "shard group 0 sum to 5, its ranks hold 6"),
        ([5, 5], [[0]], "rank 1 shall have 5 of its 4 tokens but is in no shard group.*use 4"),
    ],
)
def test_targets_that_cannot_be_met_are_refused(targets: list[int], shard_groups: list[list[int]], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        rebalance_layout(Layout.of([(0, 0, 0, 6), (1, 1, 0, 4)]), targets, 2, shard_groups)


def test_other_bad_values_are_refused() -> None:
    with pytest.raises(PlanError, match="two axes"):
        rebalance_layout(Layout.of([(0, 0, 0, 6, 0, 1)]), [6], 1)
    with pytest.raises(PlanError, match="token_ns is 0"):
        balanced_token_counts([1], 0, [1])
    with pytest.raises(PlanError, match="work of 2 ranks and tokens of 1"):
        balanced_token_counts([1, 1], 3, [1])
