"""The made-up corpus."""

import numpy as np
import pytest

from seqloom.data import open_source
from seqloom.data.source import END, IGNORED, LONGEST, ToySource
from seqloom.errors import SeqloomError


def test_the_same_documents_everywhere_and_others_with_another_seed():
    first, again, other = ToySource(20, 300), ToySource(20, 300), ToySource(20, 300, seed=1)
    assert np.array_equal(first.lengths, again.lengths) and not np.array_equal(first.lengths, other.lengths)
    for document, length in enumerate(first.lengths.tolist()):
        assert np.array_equal(first.tokens(document, 0, length), again.tokens(document, 0, length))


def test_documents_are_text_that_ends_and_labels_are_shifted():
    source = ToySource(20, 300)
    assert source.lengths.min() >= 2 and source.lengths.max() <= 300
    for document, length in enumerate(source.lengths.tolist()):
        ids, labels = source.tokens(document, 0, length), source.labels(document, 0, length)
        assert ids[-1] == END and (ids[:-1] < 128).all()
        assert np.array_equal(labels[:-1], ids[1:]) and labels[-1] == IGNORED
        assert source.valid[document] == (labels != IGNORED).sum()
        half = length // 2
        assert np.array_equal(source.labels(document, 0, half), labels[:half])


def test_it_is_opened_by_name():
    source = open_source("toy:30:4", vocabulary=300)
    assert np.array_equal(source.lengths, ToySource(30, LONGEST, seed=4).lengths)
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
        ToySource(documents, longest)
