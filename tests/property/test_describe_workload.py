"""Batches cut a stream of lengths without losing, cutting or reordering a sequence."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqloom.describe import Batch, batches_by_count, batches_by_tokens, drop_longer, read_lengths

LENGTHS = st.lists(st.integers(1, 2**31 - 1) | st.integers(1, 50), min_size=1, max_size=60)


def assert_partition(batches: list[Batch], lengths: list[int]) -> None:
    assert np.concatenate([batch.lengths for batch in batches]).tolist() == lengths
    assert np.concatenate([batch.ids for batch in batches]).tolist() == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 70))
def test_batches_by_count_partition_the_stream(lengths, size):
    batches = list(batches_by_count(lengths, size))
    assert_partition(batches, lengths)
    assert all(len(batch) == size for batch in batches[:-1]) and len(batches[-1]) <= size


@given(LENGTHS, st.integers(1, 500) | st.integers(1, 2**33))
def test_batches_by_tokens_partition_the_stream_within_the_budget(lengths, budget):
    batches = list(batches_by_tokens(lengths, budget))
    assert_partition(batches, lengths)
    for batch in batches:
        assert batch.tokens <= budget or len(batch) == 1
    for batch, following in pairwise(batches):
        assert batch.tokens + following[0].length > budget  # no batch ends before it must


@given(LENGTHS, st.data())
def test_skip_and_count_are_a_slice(lengths, data):
    batches = list(batches_by_tokens(lengths, 100))
    skip = data.draw(st.integers(0, len(batches) - 1))
    count = data.draw(st.integers(1, len(batches) - skip))
    assert list(batches_by_tokens(lengths, 100, skip=skip, count=count)) == batches[skip : skip + count]


@given(LENGTHS, st.integers(1, 100))
def test_drop_longer_keeps_order_and_counts(lengths, limit):
    wanted = [length for length in lengths if length <= limit]
    if wanted:
        kept, dropped = drop_longer(lengths, limit)
        assert kept.tolist() == wanted and dropped == len(lengths) - len(wanted)


@given(LENGTHS)
def test_statistics_are_consistent(lengths):
    statistics = Batch.of(lengths).statistics()
    assert statistics.count == len(lengths) and statistics.tokens == sum(lengths)
    assert 1 <= statistics.median <= statistics.longest and statistics.p99 <= statistics.longest
    assert 0 < statistics.top1_square_share <= 1 and statistics.cv >= 0


@given(LENGTHS, st.sampled_from(["\n", "\r\n", "\n\n"]), st.booleans())
def test_text_files_round_trip(tmp_path_factory, lengths, separator, final):
    path = tmp_path_factory.mktemp("lengths") / "a.txt"
    path.write_bytes((separator.join(map(str, lengths)) + separator * final).encode())
    assert read_lengths(path).tolist() == lengths
