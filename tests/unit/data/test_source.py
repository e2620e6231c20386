"""Sources: the length limit and the synthetic corpus."""

import numpy as np
import pytest

from seqloom.data import IGNORE_INDEX, LengthLimitedSource, open_source, split_source
from seqloom.data.source import SyntheticSource
from seqloom.errors import SeqloomError

DOCUMENTS = ([1, 2, 3, 4, 5], ([6, 7, 8, 9], [0, 1, 0, 1]), [10, 11])


def test_truncated(store):
    found = LengthLimitedSource(store(*DOCUMENTS), 3, "truncate")
    assert found.lengths.tolist() == [3, 3, 2]
    assert (found.truncated, found.dropped, found.lost_tokens, found.vocabulary) == (2, 0, 3, 300)
    assert found.tokens(1, 0, 3).tolist() == [6, 7, 8]
    assert found.labels(0, 0, 3).tolist() == [2, 3, IGNORE_INDEX]
    assert found.labels(1, 0, 3).tolist() == [7, IGNORE_INDEX, IGNORE_INDEX]
    assert found.labels(0, 1, 2).tolist() == [3]
    counts = [(found.labels(k, 0, int(n)) != IGNORE_INDEX).sum() for k, n in enumerate(found.lengths)]
    assert found.valid.tolist() == counts == [2, 1, 1]
    with pytest.raises(SeqloomError, match="not inside its 3 tokens"):
        found.tokens(0, 0, 4)


def test_dropped(store):
    found = LengthLimitedSource(store(*DOCUMENTS), 4, "drop")
    assert found.documents.tolist() == [1, 2]
    assert found.lengths.tolist() == [4, 2]
    assert (found.truncated, found.dropped, found.lost_tokens) == (0, 1, 5)
    assert found.tokens(1, 0, 2).tolist() == [10, 11]
    assert found.labels(0, 0, 4).tolist() == [7, IGNORE_INDEX, 9, IGNORE_INDEX]
    with pytest.raises(SeqloomError, match="every document is longer than 2"):
        LengthLimitedSource(store([1, 2, 3], name="long"), 2, "drop")


def test_refused(store):
    source = store(*DOCUMENTS)
    with pytest.raises(
        SeqloomError, match=r"document 0 has 5 tokens, more than the maximum length 3 \(2 of 3 documents"
    ):
        LengthLimitedSource(source, 3)
    assert np.array_equal(LengthLimitedSource(source, 5).lengths, source.lengths)
    with pytest.raises(SeqloomError, match="at least 2"):
        LengthLimitedSource(source, 1)
    with pytest.raises(SeqloomError, match="did you mean drop"):
        LengthLimitedSource(source, 3, "dropp")


def test_the_same_documents_everywhere_and_others_with_another_seed():
    first, again, other = SyntheticSource(20, 300), SyntheticSource(20, 300), SyntheticSource(20, 300, seed=1)
    assert np.array_equal(first.lengths, again.lengths) and not np.array_equal(first.lengths, other.lengths)
    for document, length in enumerate(first.lengths.tolist()):
        assert np.array_equal(first.tokens(document, 0, length), again.tokens(document, 0, length))


def test_documents_are_text_that_ends_and_labels_are_shifted():
    source = SyntheticSource(20, 300)
    assert source.lengths.min() >= 2 and source.lengths.max() <= 300
    for document, length in enumerate(source.lengths.tolist()):
        ids, labels = source.tokens(document, 0, length), source.labels(document, 0, length)
        assert ids[-1] == 256 and (ids[:-1] < 128).all()
        assert np.array_equal(labels[:-1], ids[1:]) and labels[-1] == IGNORE_INDEX
        assert source.valid[document] == (labels != IGNORE_INDEX).sum()
        half = length // 2
        assert np.array_equal(source.labels(document, 0, half), labels[:half])


def test_it_is_opened_by_name():
    source = open_source("toy:30:4", vocabulary=300)
    assert np.array_equal(source.lengths, SyntheticSource(30, seed=4).lengths)
    assert len(open_source("toy:7").lengths) == 7


@pytest.mark.parametrize("name", ["toy:", "toy:many", "toy:3:x", "toy:3:1:2", "toy:-3"])
def test_other_names_are_refused(name):
    with pytest.raises(SeqloomError, match="toy:600"):
        open_source(name)


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(SeqloomError, match="257"):
        open_source("toy:3", vocabulary=100)


@pytest.mark.parametrize(("documents", "longest"), [(0, 10), (5, 1)])
def test_nothing_is_refused(documents, longest):
    with pytest.raises(SeqloomError, match="make 1 of 2 at least"):
        SyntheticSource(documents, longest)


@pytest.mark.parametrize(
    ("documents", "share", "count"), [(400, 0.1, 40), (400, 0.001, 1), (3, 0.5, 2), (400, 0.99, 396)]
)
def test_a_split_has_every_document_once(documents, share, count):
    whole = SyntheticSource(documents, 64)
    training, evaluation = split_source(whole, share, seed=5)
    assert (len(training), len(evaluation)) == (documents - count, count)
    assert sorted([*training.documents, *evaluation.documents]) == list(range(documents))
    for part in (training, evaluation):
        assert np.all(np.diff(part.documents) > 0) and part.vocabulary == whole.vocabulary
        for number in {0, len(part) - 1}:
            document, length = int(part.documents[number]), int(part.lengths[number])
            assert (length, part.valid[number]) == (whole.lengths[document], whole.valid[document])
            assert part.tokens(number, 0, length).tolist() == whole.tokens(document, 0, length).tolist()
            assert [each.tolist() for each in part.rows(number, 1, length)] == [
                each.tolist() for each in whole.rows(document, 1, length)
            ]


def test_a_split_follows_from_its_seed_alone():
    whole = SyntheticSource(400, 64)
    first, again, other = (split_source(whole, 0.1, seed=seed)[1].documents.tolist() for seed in (5, 5, 6))
    assert first == again != other
    few = [split_source(whole, share, seed=5)[1].documents for share in (0.05, 0.1)]
    assert set(few[0].tolist()) < set(few[1].tolist()), "a larger share has those of a smaller one"
    with pytest.raises(SeqloomError, match=r"a share of 0.9 of the 3 documents .* leaves none to train on; lower"):
        split_source(SyntheticSource(3, 64), 0.9, seed=0)
    with pytest.raises(SeqloomError, match=r"\[0:99\) is not inside"):
        split_source(whole, 0.1, seed=5)[0].rows(0, 0, 99)
