"""Filling one round: aligned blocks, memory, the time limit, and skipping what cannot fit."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seqloom.plan import GroupFamily
from seqloom.planners.fill import arrange, block_count, block_start, fill_round
from seqloom.planners.problem import Problem
from support.strategies import batches, cost_models


@pytest.mark.parametrize(("ranks", "node"), [(8, 8), (6, 6), (12, 6), (24, 8), (7, 7), (12, 4), (9, 3)])
def test_blocks_are_those_of_the_family(ranks, node):
    family = GroupFamily(ranks, node)
    for size in family.sizes:
        starts = [block_start(index, size, node) for index in range(block_count(size, ranks, node))]
        assert starts == [block.start for block in family.blocks(size)]


def test_arrange_takes_the_lowest_free_blocks():
    starts = np.zeros(4, np.int64)
    assert arrange(np.array([4, 2, 1, 1]), 8, 8, starts) and starts.tolist() == [0, 4, 6, 7]
    assert arrange(np.array([3, 2, 1]), 6, 6, starts) and starts[:3].tolist() == [0, 4, 3]
    assert not arrange(np.array([5, 4]), 9, 9, starts)  # five from 0, four from 0 or 4: no room though 9 ranks would do
    assert not arrange(np.array([4, 4, 4]), 8, 8, starts)


def filled(tables, limit, floor, order, falling):
    """Fill one round; returns groups, time, value, the group of each place, and the arrays of the groups."""
    joined = np.full(len(order), -1, np.int64)
    shapes, starts, tokens = (np.zeros(tables.ranks, np.int64) for _ in range(3))
    load = np.zeros((len(tables.cost), tables.ranks), np.int64)
    out = (joined, shapes, starts, load, tokens)
    least = int(tables.tokens[order].min())
    answer = fill_round(tables, limit, floor, tables.ranks, order, least, falling, *out)
    return (*(int(number) for number in answer), *out)


@st.composite
def rounds(draw):
    """A problem's tables and a limit between what the shortest document takes and far beyond the longest."""
    cost = draw(cost_models(max_nodes=2, max_ranks=16))
    problem = Problem(
        lengths := draw(batches()), cost, (v := draw(st.sampled_from(cost.policies))), cost.tables(lengths, v)
    )
    assume(problem.fits)
    times = problem.search.alone.min(axis=0)
    limit = draw(st.integers(int(times.min()), 3 * int(times.max())))
    return problem, limit, draw(st.integers(0, len(problem.search.degrees) - 1))


@given(rounds())
def test_groups_lie_apart_in_the_family_within_memory_and_limit(drawn):
    problem, limit, floor = drawn
    tables, family = problem.search, problem.cost.family
    order = np.argsort(-tables.tokens, kind="stable")
    groups, longest, value, joined, shapes, starts, load, tokens = filled(tables, limit, floor, order, True)
    taken = np.zeros(tables.ranks, np.int64)
    for group in range(groups):
        documents, degree = order[joined == group], int(tables.shape_degree[shapes[group]])
        assert len(documents) > 0 and degree >= tables.degrees[floor]
        assert family.contains(int(starts[group]), degree)
        taken[starts[group] : starts[group] + degree] += 1
        assert tokens[group] == tables.tokens[documents].sum() <= degree * tables.capacity
        time = problem.tables.group_ns(int(shapes[group]), documents)
        assert time == load[:, group].max() <= limit
        assert time <= longest
    assert taken.max() <= 1
    assert value == tables.value[order[joined >= 0]].sum()
    assert longest == load[:, :groups].max(initial=0)
    assert joined.max() == groups - 1


@given(rounds())
def test_skipping_what_cannot_fit_changes_nothing(drawn):
    problem, limit, floor = drawn
    order = np.argsort(-problem.search.tokens, kind="stable")
    skipping, trying = (filled(problem.search, limit, floor, order, falling) for falling in (True, False))
    groups = skipping[0]
    assert skipping[:3] == trying[:3]
    assert skipping[3].tolist() == trying[3].tolist()
    for a, b in zip(skipping[4:], trying[4:], strict=True):
        assert (a[..., :groups] == b[..., :groups]).all()


@given(rounds(), st.randoms(use_true_random=False))
def test_any_order_is_filled_within_the_limits(drawn, random):
    problem, limit, floor = drawn
    order = list(range(len(problem.lengths)))
    random.shuffle(order)
    order = np.array(order)
    groups, longest, _, joined, shapes, _, _, _ = filled(problem.search, limit, floor, order, False)
    assert longest <= limit
    for group in range(groups):
        assert problem.tables.group_ns(int(shapes[group]), order[joined == group]) <= limit
