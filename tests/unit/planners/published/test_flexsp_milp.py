"""The programme of a micro-batch: HiGHS against all placements there are; starts; what it refuses."""

import sys
from itertools import product

import numpy as np
import pytest

from seqloom.errors import SeqloomError
from seqloom.planners.published.flexsp import (
    BucketedMilp,
    best_start,
    homogeneous,
    require_highspy,
    solver_options,
    virtual_groups,
)

ENOUGH = solver_options(nodes=10_000, gap=0.0)


def small_programme(seed, every_rank=True):
    """Three buckets, a cluster of four ranks, two streams with unlike fixed costs."""
    random = np.random.default_rng(seed)
    degree = np.array([4, 2, 2, 1, 1, 1, 1])
    cost = random.integers(10**6, 10**8, (2, 1, 3)) // degree[None, :, None]
    fixed = np.stack([10**6 * (1 + degree), np.full(len(degree), 5 * 10**6)])
    bound = np.sort(random.integers(1, 12, 3))
    return BucketedMilp(bound, random.integers(1, 3, 3), degree, cost, fixed, 8, 4, every_rank)


def spread(count, groups):
    """All ways to put ``count`` equal documents into ``groups``."""
    return [counts for counts in product(range(count + 1), repeat=groups) if sum(counts) == count]


def brute_force(programme):
    ways = [spread(int(count), len(programme.degree)) for count in programme.count]
    values = (programme.value_ns(np.array(rows)) for rows in product(*ways))
    return min((value for value in values if value is not None), default=None)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("every_rank", [True, False])
def test_the_optimum_is_found(seed, every_rank):
    programme = small_programme(seed, every_rank)
    best, start = brute_force(programme), best_start(programme)
    for known in (None, None if start is None else start[1]):
        placed = programme.solve(known, ENOUGH)
        assert (None if placed is None else programme.value_ns(placed)) == best


def test_the_start_is_longest_first_on_the_least_loaded():
    programme = small_programme(0)
    placed = homogeneous(programme, 2)
    assert placed is not None and (placed.sum(axis=1) == programme.count).all()
    assert set(np.flatnonzero(placed.sum(axis=0))) == {1, 2}
    loads = (programme.tokens @ placed)[1:3]
    assert abs(loads[0] - loads[1]) <= programme.tokens.max()


def test_an_answer_that_breaks_a_rule_has_no_value():
    programme = BucketedMilp(
        np.array([8]), np.array([2]), np.array([2, 2]), np.full((1, 2, 1), 5), np.full((1, 2), 1), 6, 4
    )
    assert programme.value_ns(np.array([[1, 1]])) == 6
    assert programme.value_ns(np.array([[2, 0]])) is None  # too many tokens, and two ranks idle
    assert programme.value_ns(np.array([[1, 0]])) is None  # one document is missing


def test_smaller_degrees_get_what_the_longest_leave():
    degrees = np.array([1, 2, 4, 8])
    assert virtual_groups(degrees, np.array([5, 3]), 10, 8).tolist() == [8, 4, 4, 2, 2, 2, 2] + [1] * 8
    assert virtual_groups(degrees, np.array([35, 3]), 10, 8).tolist() == [8, 4, 4, 2, 2] + [1] * 4
    assert virtual_groups(degrees, np.array([35, 35, 3]), 10, 8).tolist() == [8, 4, 4]


def test_without_the_solver_the_way_out_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(SeqloomError, match=r"pip install 'seqloom\[exact\]'"):
        require_highspy()
