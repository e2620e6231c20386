"""The verdict of a race: the interval of a median, and what is said of it."""

from itertools import product

import pytest

from seqloom.cli.demo import race_lines
from seqloom.profiling.race import CONFIDENCE, RaceResult, median_interval


@pytest.mark.parametrize("n", [6, 8, 11, 16])
def test_the_interval_holds_the_median_as_often_as_it_says(n):
    """All ways in which n values may lie below (-1) or above (1) the true median, 0, are equally likely."""
    held = 0
    for signs in product((-1.0, 1.0), repeat=n):
        low, high = median_interval(signs)
        held += low < 0 < high
    assert held / 2**n >= CONFIDENCE


@pytest.mark.parametrize(("n", "first"), [(1, 0), (3, 0), (6, 0), (8, 0), (9, 1), (12, 2), (16, 3), (20, 5)])
def test_the_interval_is_the_narrowest_of_its_kind(n, first):
    """Positions as tables of the sign test have them."""
    assert median_interval(range(n)) == (first, n - 1 - first)


def test_a_race_says_what_it_found():
    quick = RaceResult(("static", "flex"), 1.4, 0.03, (1.3, 1.35, 1.4, 1.32, 1.38, 1.37))
    assert quick.conclusive and "1.36x" in race_lines(quick)[1] and "Inconclusive" not in race_lines(quick)[1]
    noisy = RaceResult(("static", "flex"), 1.2, 0.03, (0.9, 1.35, 1.4, 1.32, 1.38, 1.37))
    assert not noisy.conclusive and "Inconclusive" in race_lines(noisy)[1]
    none = RaceResult(("static", "flex"), 1.05, 0.03, ())
    assert none.median is None and not none.conclusive and "not raced" in race_lines(none)[1]
    assert none.to_dict()["interval"] is None
