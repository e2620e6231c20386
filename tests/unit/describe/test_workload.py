"""Batches are values: validated, read-only, equal by content."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from seqloom.describe import Batch, Sequence, batches_by_count, batches_by_tokens, drop_longer
from seqloom.errors import SeqloomError


def test_batch_holds_its_sequences():
    batch = Batch.of([5, 3, 9])
    assert len(batch) == 3
    assert (batch.tokens, batch.longest) == (17, 9)
    assert list(batch) == [Sequence(0, 5), Sequence(1, 3), Sequence(2, 9)]
    assert batch[1] == Sequence(1, 3)
    assert batch[1:] == Batch.of([3, 9], ids=[1, 2])
    assert repr(batch) == "Batch(3 sequences, 17 tokens, longest 9)"


def test_batch_is_a_value():
    batch = Batch.of(np.array([4, 4]), ids=[7, 8])
    same = Batch.of([4.0, 4.0], ids=np.array([7, 8], dtype=np.int32))
    assert batch == same and hash(batch) == hash(same)
    assert batch != Batch.of([4, 4])
    assert batch != "batch"
    assert pickle.loads(pickle.dumps(batch)) == batch
    with pytest.raises(ValueError, match="read-only"):
        batch.lengths[0] = 1


def test_batch_does_not_follow_its_source():
    lengths = np.array([1, 2, 3])
    batch = Batch.of(lengths)
    lengths[0] = 99
    assert batch.longest == 3


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "empty"),
        ([3, 0], r"sequence 1: 0 is not a length; a length is a whole number of tokens from 1"),
        ([-4], "sequence 0: -4"),
        ([1.5], "sequence 0: 1.5"),
        ([2.0, float("nan")], "sequence 1: nan"),
        ([float("inf")], "inf"),
        ([2**31], "2147483648"),
        ([10**30], "sequence 0: 1000"),
        ([[1, 2]], "not a flat list"),
        ([[1], [1, 2]], "not a flat list"),
        (["7"], "'7'"),
        ([True, False], "True"),
        ([3, None], "sequence 1: None"),
    ],
)
def test_bad_lengths_are_refused(lengths, message):
    with pytest.raises(SeqloomError, match=message):
        Batch.of(lengths)


@pytest.mark.parametrize(
    ("ids", "message"),
    [([1, 1], "id 1 is used 2 times"), ([1], "one id per sequence"), ([0.5, 1], "whole number")],
)
def test_bad_ids_are_refused(ids, message):
    with pytest.raises(SeqloomError, match=message):
        Batch.of([2, 2], ids)


def test_statistics():
    statistics = Batch.of([1] * 99 + [101]).statistics()
    assert statistics.count == 100
    assert statistics.tokens == 200
    assert statistics.mean == 2 and statistics.median == 1 and statistics.longest == 101
    assert statistics.cv == pytest.approx(np.sqrt(99) / 2)
    assert statistics.top1_square_share == pytest.approx(101**2 / (101**2 + 99))


def test_drop_longer_counts_what_it_drops():
    kept, dropped = drop_longer([5, 1, 9, 2], 5)
    assert kept.tolist() == [5, 1, 2] and dropped == 1
    assert drop_longer([5], None)[1] == 0
    with pytest.raises(SeqloomError, match="the shortest has 5 tokens: raise"):
        drop_longer([5, 6], 4)


def test_batches_by_count_are_runs_in_file_order():
    batches = list(batches_by_count([1, 2, 3, 4, 5], 2))
    assert [batch.lengths.tolist() for batch in batches] == [[1, 2], [3, 4], [5]]
    assert [batch.ids.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert next(batches_by_count([1, 2, 3, 4, 5], 2, skip=1, count=1)) == batches[1]


def test_batches_by_tokens_never_cut_a_sequence():
    batches = list(batches_by_tokens([4, 5, 20, 1, 9, 1], 10))
    assert [batch.lengths.tolist() for batch in batches] == [[4, 5], [20], [1, 9], [1]]


def test_missing_batches_are_refused_before_the_first_one():
    with pytest.raises(SeqloomError, match=r"batch 3 is wanted .* make only 3"):
        batches_by_count([1, 2, 3, 4, 5], 2, skip=1, count=3)
    with pytest.raises(SeqloomError, match="make only 1"):
        batches_by_tokens([1, 2], 10, skip=1)
    with pytest.raises(SeqloomError, match="batch size 0"):
        batches_by_count([1], 0)
    with pytest.raises(SeqloomError, match="token budget -1"):
        batches_by_tokens([1], -1)
    with pytest.raises(SeqloomError, match="batches to skip -1"):
        batches_by_count([1], 1, skip=-1)
    with pytest.raises(SeqloomError, match="number of batches 0"):
        batches_by_count([1], 1, count=0)
