"""The lower bound: its dual feasible functions, and how it follows the batch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.planners.bounds import variants_bound
from seqloom.planners.bounds.roundings import ROUNDINGS
from seqloom.planners.problem import fitting_problems
from seqloom.testing.strategies import batches, cost_models

roundings = pytest.mark.parametrize("rounding", ROUNDINGS, ids=range(len(ROUNDINGS)))
parts = st.lists(st.integers(1, 60), min_size=1, max_size=20)


@roundings
@given(parts, st.integers(0, 30))
def test_parts_of_one_still_sum_to_one(rounding, weights, unused):
    shares = np.array(weights) / (sum(weights) + unused)
    assert rounding(shares).sum() <= 1 + 1e-9


@roundings
@given(st.lists(st.integers(0, 5_040), min_size=2, max_size=30))
def test_larger_parts_never_count_less(rounding, counts):
    rounded = rounding(np.sort(counts) / 5_040)
    assert (np.diff(rounded) >= 0).all() and (rounded >= 0).all() and (rounded <= 1).all()


@roundings
def test_nothing_counts_nothing_and_the_whole_counts_one(rounding):
    assert rounding(np.array([0.0, 1.0])).tolist() == [0.0, 1.0]


def test_parts_just_below_a_multiple_do_not_count_as_one():
    tiny = 2e-8
    shares = np.array([0.25 - tiny, 0.25 - tiny, 0.5 + 2 * tiny])
    assert shares.sum() <= 1
    for rounding in ROUNDINGS:
        assert rounding(shares).sum() <= 1 + 1e-9


@settings(max_examples=40)
@given(cost_models(max_ranks=16), batches(max_documents=25), st.integers(1, 60_000))
def test_a_further_document_never_lowers_the_bound(cost, lengths, further):
    longer = np.append(lengths, min(further, int(lengths.max())))
    room = max(shape.degree for shape in cost.shapes) * max(cost.capacity(variant) for variant in cost.variants)
    if int(cost.tokens(lengths).max()) > room:
        return
    for reduce in {problem.variant.reduce for problem in fitting_problems(lengths, cost)}:
        variants = [v for v in cost.variants if v.reduce == reduce]
        before, after = (variants_bound(batch, cost, variants) for batch in (lengths, longer))
        assert after >= before * (1 - 2e-3)  # bisections stop at one part in a thousand


@settings(max_examples=30)
@given(cost_models(max_ranks=16), batches(max_documents=25), st.randoms(use_true_random=False))
def test_the_order_of_documents_does_not_matter(cost, lengths, random):
    room = max(shape.degree for shape in cost.shapes) * max(cost.capacity(variant) for variant in cost.variants)
    if int(cost.tokens(lengths).max()) > room:
        return
    shuffled = lengths.tolist()
    random.shuffle(shuffled)
    for reduce in {problem.variant.reduce for problem in fitting_problems(lengths, cost)}:
        variants = [v for v in cost.variants if v.reduce == reduce]
        first, second = (variants_bound(np.array(b), cost, variants) for b in (lengths, shuffled))
        assert abs(first - second) <= 2e-3 * first
