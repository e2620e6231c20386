import numpy as np
import pytest

from seqloom.data import IGNORED, Limited
from seqloom.errors import SeqloomError

DOCUMENTS = ([1, 2, 3, 4, 5], ([6, 7, 8, 9], [0, 1, 0, 1]), [10, 11])


def test_truncated(store):
    found = Limited(store(*DOCUMENTS), 3, "truncate")
    assert found.lengths.tolist() == [3, 3, 2]
    assert (found.truncated, found.dropped, found.lost, found.vocabulary) == (2, 0, 3, 300)
    assert found.tokens(1, 0, 3).tolist() == [6, 7, 8]
    assert found.labels(0, 0, 3).tolist() == [2, 3, IGNORED]
    assert found.labels(1, 0, 3).tolist() == [7, IGNORED, IGNORED]
    assert found.labels(0, 1, 2).tolist() == [3]
    counts = [(found.labels(k, 0, int(n)) != IGNORED).sum() for k, n in enumerate(found.lengths)]
    assert found.valid.tolist() == counts == [2, 1, 1]
    with pytest.raises(SeqloomError, match="not inside its 3 tokens"):
        found.tokens(0, 0, 4)


def test_dropped(store):
    found = Limited(store(*DOCUMENTS), 4, "drop")
    assert found.documents.tolist() == [1, 2]
    assert found.lengths.tolist() == [4, 2]
    assert (found.truncated, found.dropped, found.lost) == (0, 1, 5)
    assert found.tokens(1, 0, 2).tolist() == [10, 11]
    assert found.labels(0, 0, 4).tolist() == [7, IGNORED, 9, IGNORED]
    with pytest.raises(SeqloomError, match="every document is longer than 2"):
        Limited(store([1, 2, 3], name="long"), 2, "drop")


def test_refused(store):
    source = store(*DOCUMENTS)
    with pytest.raises(
        SeqloomError, match=r"document 0 has 5 tokens, more than the maximum length 3 \(2 of 3 documents"
    ):
        Limited(source, 3)
    assert np.array_equal(Limited(source, 5).lengths, source.lengths)
    with pytest.raises(SeqloomError, match="at least 2"):
        Limited(source, 1)
    with pytest.raises(SeqloomError, match="did you mean drop"):
        Limited(source, 3, "dropp")
