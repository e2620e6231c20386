"""Whatever the preset, count, seed and limit: positive lengths within the limit, decided by the seed."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqloom.describe import SAMPLERS, drop_longer, sample

NAMES = st.sampled_from(sorted(SAMPLERS))
SEEDS = st.integers(0, 2**63)


@given(NAMES, st.integers(1, 20_000), SEEDS, st.none() | st.integers(32_768, 2**22))
def test_lengths_are_positive_and_within_the_limit(name, count, seed, limit):
    lengths = sample(name, count, seed=seed, max_length=limit)
    assert lengths.shape == (count,) and lengths.dtype == np.int64
    assert lengths.min() >= 1
    assert limit is None or lengths.max() <= limit


@given(NAMES, st.integers(1, 20_000), st.integers(1, 20_000), SEEDS)
def test_a_longer_sample_begins_with_the_shorter_one(name, count, more, seed):
    longer = sample(name, count + more, seed=seed, max_length=65_536)
    assert np.array_equal(longer[:count], sample(name, count, seed=seed, max_length=65_536))


@given(NAMES, st.integers(1, 5_000), SEEDS)
def test_the_limit_drops_and_changes_nothing_else(name, count, seed):
    everything = sample(name, 8 * count, seed=seed)
    kept, _ = drop_longer(np.append(everything, 1), 65_536)
    limited = sample(name, count, seed=seed, max_length=65_536)
    shared = min(count, len(kept) - 1)
    assert np.array_equal(kept[:shared], limited[:shared])
