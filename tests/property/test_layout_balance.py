"""Rebalanced layouts against a linear programme, targets against brute force."""

from __future__ import annotations

import math
from itertools import product
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.layout import Layout, balanced_token_counts, move_between, rebalance_layout

COSTS = (0, 1, 10)
"""Of a token that stays, goes to a rank of its node, goes to another node."""


class Case(NamedTuple):
    layout: Layout
    held: list[int]
    targets: list[int]
    node_size: int
    shard_groups: list[list[int]] | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw tokens of every rank, in documents that may go over ranks, and how many every rank shall have."""
    node_size, nodes = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ranks = node_size * nodes
    held = draw(st.lists(st.integers(0, 30), min_size=ranks, max_size=ranks))
    spread = draw(st.sampled_from(("all", "node", "any")))
    number = {
        "all": [0] * ranks,
        "node": [rank // node_size for rank in range(ranks)],
        "any": draw(st.lists(st.integers(0, 2), min_size=ranks, max_size=ranks)),
    }[spread]
    shard_groups = [[rank for rank in range(ranks) if number[rank] == k] for k in sorted(set(number))]
    targets = [0] * ranks
    for shard_group in shard_groups:
        total = sum(held[rank] for rank in shard_group)
        cuts = sorted(
            draw(st.lists(st.integers(0, total), min_size=len(shard_group) - 1, max_size=len(shard_group) - 1))
        )
        for rank, low, high in zip(shard_group, [0, *cuts], [*cuts, total], strict=True):
            targets[rank] = high - low
    boxes, document, position = [], 0, 0
    for rank in draw(st.permutations(range(ranks))):
        left = held[rank]
        while left:
            size = draw(st.integers(1, left))
            boxes.append((rank, document, position, position + size))
            left, position = left - size, position + size
            if draw(st.booleans()):
                document, position = document + 1, 0
    return Case(Layout.of(boxes), held, targets, node_size, None if spread == "all" else shard_groups)


def tokens(layout: Layout) -> set[tuple[int, int]]:
    boxes = zip(layout.item.tolist(), layout.start.tolist(), layout.stop.tolist(), strict=True)
    found = [(item, at) for item, start, stop in boxes for at in range(start, stop)]
    assert len(found) == len(set(found)), "a token is on two ranks"
    return set(found)


def flow(case: Case, after: Layout) -> np.ndarray:
    """int64[sender, receiver]: tokens that go from one rank to another, or stay."""
    move = move_between(case.layout, after)
    found = np.zeros((len(case.held),) * 2, dtype=np.int64)
    np.add.at(found, (move.sender, move.receiver), move.sizes)
    return found


def prices(case: Case) -> np.ndarray:
    """Cost of a token from rank to rank; infinite between shard groups."""
    ranks = np.arange(len(case.held))
    node = ranks // case.node_size
    cost = np.where(node[:, None] == node, COSTS[1], COSTS[2]).astype(float)
    cost[ranks, ranks] = COSTS[0]
    if case.shard_groups is not None:
        home = {rank: k for k, shard_group in enumerate(case.shard_groups) for rank in shard_group}
        number = np.array([home[rank] for rank in ranks])
        cost[number[:, None] != number] = np.inf
    return cost


@given(cases())
def test_every_rank_has_its_target_of_the_same_tokens(case: Case) -> None:
    after = rebalance_layout(case.layout, case.targets, case.node_size, case.shard_groups)
    assert np.bincount(after.rank, after.sizes, len(case.held)).tolist() == case.targets
    assert tokens(after) == tokens(case.layout)
    moved = flow(case, after)
    assert not moved[np.isinf(prices(case))].any(), "tokens leave their shard group"
    # Runs, not crumbs: one more box for every receiver of a rank at most.
    assert len(move_between(case.layout, after)) <= len(case.layout) + np.count_nonzero(moved)


@given(cases())
def test_the_move_is_the_cheapest_and_its_traffic_between_nodes_the_most_even(case: Case) -> None:
    highspy = pytest.importorskip("highspy", reason="highspy is not installed: pip install seqloom[exact]")
    moved = flow(case, rebalance_layout(case.layout, case.targets, case.node_size, case.shard_groups))
    price = prices(case)
    ranks = range(len(case.held))
    allowed = [(s, r) for s, r in product(ranks, ranks) if np.isfinite(price[s, r])]

    def solved(*, even: str | None) -> float:
        """The least cost; or, at that cost, the least of the most that a rank sends or receives between nodes."""
        model = highspy.Highs()
        model.silent()
        x = {pair: model.addVariable(lb=0) for pair in allowed}
        for rank in ranks:
            model.addConstr(sum(x[s, r] for s, r in allowed if s == rank) == case.held[rank])
            model.addConstr(sum(x[s, r] for s, r in allowed if r == rank) == case.targets[rank])
        total = sum(float(price[pair]) * x[pair] for pair in allowed)
        if even is None:
            model.minimize(total)
            return model.getObjectiveValue()
        model.addConstr(total <= float((moved[moved > 0] * price[moved > 0]).sum()))
        most = model.addVariable(lb=0)
        for rank in ranks:
            mine = [(s, r) for s, r in allowed if price[s, r] == COSTS[2] and (s, r)[even == "to"] == rank]
            model.addConstr(sum((x[pair] for pair in mine), start=0 * most) <= most)
        model.minimize(most)
        return model.getObjectiveValue()

    cost = float((moved[moved > 0] * price[moved > 0]).sum())
    assert cost == pytest.approx(solved(even=None), abs=1e-6)
    across = np.where(price == COSTS[2], moved, 0)
    assert across.sum(axis=1).max() == math.ceil(solved(even="from") - 1e-6)
    assert across.sum(axis=0).max() == math.ceil(solved(even="to") - 1e-6)


@st.composite
def loads(draw: st.DrawFn) -> tuple[list[int], int, list[int]]:
    ranks = draw(st.integers(1, 4))
    work = draw(st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks))
    held = draw(st.lists(st.integers(0, 4), min_size=ranks, max_size=ranks))
    return work, draw(st.integers(1, 12)), held


@given(loads())
def test_targets_are_the_best_of_all(load: tuple[list[int], int, list[int]]) -> None:
    work, token_ns, held = load
    total = sum(held)

    def times(counts: tuple[int, ...]) -> list[int]:
        """Of ranks with tokens, slowest first: the others cannot become faster."""
        return sorted((w + token_ns * n for w, n in zip(work, counts, strict=True) if n), reverse=True)

    found = balanced_token_counts(work, token_ns, held)
    options = [c for c in product(range(total + 1), repeat=len(work)) if sum(c) == total]
    assert found.min() >= 0 and found.sum() == total
    assert max(times(tuple(found)), default=0) == min(max(times(c), default=0) for c in options)
    level = max(times(tuple(found)), default=0)
    assert all(w + token_ns * (n + 1) >= level for w, n in zip(work, found.tolist(), strict=True))


@given(cases(), st.integers(1, 9))
def test_islands_keep_their_tokens(case: Case, token_ns: int) -> None:
    work = np.arange(len(case.held)) * 7 % 11
    shard_groups = [list(range(len(case.held)))] if case.shard_groups is None else case.shard_groups
    found = balanced_token_counts(work, token_ns, case.held, case.shard_groups)
    for shard_group in shard_groups:
        alone = balanced_token_counts(work[shard_group], token_ns, np.array(case.held)[shard_group])
        assert found[shard_group].tolist() == alone.tolist()
