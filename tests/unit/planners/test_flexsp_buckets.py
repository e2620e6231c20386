"""The buckets' bounds against all bounds there are."""

from itertools import combinations, pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqloom.planners.published.flexsp import micro_batch as buckets
from seqloom.planners.published.flexsp.micro_batch import bucket

small = st.lists(st.integers(1, 25), min_size=1, max_size=10)


def least_tokens(sizes, count):
    ordered = np.sort(sizes)
    cuts = (pairwise((0, *inner, len(ordered))) for inner in combinations(range(1, len(ordered)), count - 1))
    return min(sum(int(ordered[b - 1]) * (b - a) for a, b in edges) for edges in cuts)


@given(small, st.integers(1, 5))
def test_bucketed_tokens_are_as_few_as_can_be(sizes, least):
    found = bucket(np.array(sizes), least, 10**6)
    assert len(found.bound) == min(least, len(set(sizes)))
    assert found.tokens == least_tokens(sizes, min(least, len(sizes)))
    assert sorted(np.concatenate(found.members).tolist()) == list(range(len(sizes)))
    for bound, members in zip(found.bound, found.members, strict=True):
        assert max(sizes[k] for k in members) == bound


@given(small, st.integers(0, 40))
def test_buckets_are_added_until_the_batch_fits(sizes, room):
    capacity = sum(sizes) + room
    found = bucket(np.array(sizes), 1, capacity)
    assert 2 * found.tokens <= sum(sizes) + capacity
    fewer = len(found.bound) - 1
    assert fewer == 0 or 2 * least_tokens(sizes, fewer) > sum(sizes) + capacity


def test_blocks_of_rows_do_not_change_the_answer(monkeypatch):
    tokens = np.random.default_rng(0).integers(1, 10**6, 300)
    whole = bucket(tokens, 16, 10**12)
    monkeypatch.setattr(buckets, "ROWS", 7)
    assert (bucket(tokens, 16, 10**12).bound == whole.bound).all()
