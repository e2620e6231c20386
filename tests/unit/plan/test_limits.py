from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.errors import PlanError
from seqloom.plan import GroupFamily


def test_eight_nodes_of_eight() -> None:
    family = GroupFamily(64, 8)
    assert {1, 2, 4, 8, 16, 32, 64} <= set(family.sizes)
    assert family.sizes == (1, 2, 3, 4, 5, 6, 7, 8, 16, 24, 32, 40, 48, 56, 64)
    assert family.blocks(3)[:3] == (range(0, 3), range(3, 6), range(8, 11))
    assert family.blocks(24) == (range(0, 24), range(24, 48))
    assert family.blocks(9) == ()


def test_powers_of_two_come_first_then_the_world() -> None:
    assert GroupFamily(64, 8, budget=6).sizes == (1, 2, 4, 8, 16, 32, 64)
    assert GroupFamily(24, 8, budget=5).sizes == (1, 2, 4, 8, 16, 24)
    assert GroupFamily(12, 6, budget=3).sizes == (1, 2, 6, 12)
    assert GroupFamily(12, 6, budget=4).sizes == (1, 2, 3, 6, 12)
    assert GroupFamily(1024, 8).sizes == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 128, 256, 512, 1024)
    assert GroupFamily(8, 8, budget=0).sizes == (1,)


@given(st.integers(1, 6), st.integers(1, 12), st.integers(0, 20))
def test_blocks_are_aligned_contiguous_and_within_budget(nodes: int, node_size: int, budget: int) -> None:
    family = GroupFamily(nodes * node_size, node_size, budget)
    memberships = [0] * family.ranks
    for block in family.communicators():
        size = len(block)
        assert family.contains(block.start, size)
        if size < node_size:
            assert block.start // node_size == (block.stop - 1) // node_size
            assert block.start % node_size % size == 0
        else:
            assert size % node_size == 0
            assert block.start % size == 0
        for rank in block:
            memberships[rank] += 1
    assert max(memberships) <= budget
    assert all(family.contains(rank, 1) for rank in range(family.ranks))


@given(st.integers(1, 4), st.integers(1, 8), st.integers(-2, 40), st.integers(-2, 40))
def test_contains_agrees_with_the_listing(nodes: int, node_size: int, start: int, size: int) -> None:
    family = GroupFamily(nodes * node_size, node_size)
    assert family.contains(start, size) == (range(start, start + size) in family.blocks(size) and size > 0)
    nearest = family.nearest(start, size)
    assert family.contains(nearest.start, len(nearest))


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(PlanError, match="choose 8 ranks"):
        GroupFamily(10, 4)
    with pytest.raises(PlanError, match="must not be negative"):
        GroupFamily(8, 4, -1)
