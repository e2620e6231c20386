"""The packing heuristics, each by hand and against its plain definition."""

import numpy as np
import pytest

from seqloom.planners.packing import best_fit_decreasing, first_fit, largest_differencing, least_loaded, next_fit


def test_next_fit_opens_a_bin_where_the_last_is_full():
    assert next_fit(np.array([5, 5, 1, 10]), 10) == [[0, 1], [2], [3]]


def test_best_fit_takes_the_fullest_bin_that_fits():
    assert best_fit_decreasing(np.array([6, 5, 4, 3, 2]), 10) == [[0, 2], [1, 3, 4]]


@pytest.mark.parametrize("seed", range(5))
def test_first_fit_takes_the_first_bin_with_room(seed):
    sizes = np.random.default_rng(seed).integers(1, 12, 40)
    bins: list[int] = []
    for size, chosen in zip(sizes.tolist(), first_fit(sizes, 12).tolist(), strict=True):
        expected = next((k for k, used in enumerate(bins) if used + size <= 12), len(bins))
        bins += [0] * (expected == len(bins))
        bins[expected] += size
        assert chosen == expected


def test_least_loaded_by_hand():
    def packed(sizes, work, bins, capacity, **options):
        found = least_loaded(np.array(sizes), np.array(work), bins, capacity, **options)
        return None if found is None else found.tolist()

    assert packed([5, 4, 3, 1], [5, 4, 3, 1], 2, 7) == [0, 1, 1, 0]
    assert packed([5, 4, 4], [5, 4, 4], 2, 7) is None
    assert packed([5, 4, 4], [5, 4, 4], 2, 7, overflow=True) == [0, 1, 1]
    assert packed([6, 6], [9, 1], 2, 6) == [0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_least_loaded_is_its_definition(seed):
    draw = np.random.default_rng(seed)
    sizes, work = draw.integers(1, 9, 30), draw.integers(1, 50, 30)
    bins, capacity = int(draw.integers(2, 7)), int(draw.integers(20, 60))
    held, load, expected = [0] * bins, [0] * bins, []
    for size, each in zip(sizes.tolist(), work.tolist(), strict=True):
        fitting = [b for b in range(bins) if held[b] + size <= capacity]
        best = min(fitting, key=load.__getitem__) if fitting else min(range(bins), key=held.__getitem__)
        expected.append(best if fitting else None)
        held[best] += size
        load[best] += each
    chosen = least_loaded(sizes, work, bins, capacity)
    assert (chosen is None) == (None in expected) and (chosen is None or chosen.tolist() == expected)
    overflowing = least_loaded(sizes, work, bins, capacity, overflow=True)
    assert overflowing is not None
    assert np.bincount(overflowing, weights=sizes, minlength=bins).tolist() == held


def test_largest_differencing_of_the_textbook():
    """8 - 7, 6 - 5, then 4 - 1, 3 - 1: the parts differ by 2, though 8 + 7 = 6 + 5 + 4."""
    weights = [8, 7, 6, 5, 4]
    parts = largest_differencing(weights, 2)
    assert [sum(weights[k] for k in part) for part in parts] == [16, 14]
    assert sorted(map(len, largest_differencing([*weights, 1], 3, equal_size=True))) == [2, 2, 2]
