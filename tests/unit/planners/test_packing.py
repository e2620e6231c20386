"""The packing heuristics, each by hand and against its plain definition; compiled twins give the same."""

import numpy as np
import pytest

from seqloom.planners import loops
from seqloom.planners.packing import best_fit_decreasing, first_fit, least_loaded, next_fit


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
    assert least_loaded(range(4), [5, 4, 3, 1], [5, 4, 3, 1], 2, 7) == [[0, 3], [1, 2]]
    assert least_loaded(range(3), [5, 4, 4], [5, 4, 4], 2, 7) is None
    assert least_loaded(range(3), [5, 4, 4], [5, 4, 4], 2, 7, overflow=True) == [[0], [1, 2]]
    assert least_loaded([1, 0], [6, 6], [1, 9], 2, 6) == [[1], [0]]


@pytest.mark.parametrize("seed", range(20))
def test_least_loaded_is_its_compiled_twin(seed):
    draw = np.random.default_rng(seed)
    sizes, work = draw.integers(1, 9, 30), draw.integers(1, 50, 30)
    bins, room = int(draw.integers(2, 7)), int(draw.integers(20, 60))
    out = np.empty(30, dtype=np.int64)
    most = loops.least_loaded(sizes, work, room, bins, out)
    members = least_loaded(range(30), sizes.tolist(), work.tolist(), bins, room)
    if members is None:
        assert most == -1
    else:
        assert members == [np.flatnonzero(out == number).tolist() for number in range(bins)]
        assert most == max(work[documents].sum() for documents in members)
