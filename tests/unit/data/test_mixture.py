"""Several sources as one, and the order of their documents."""

import json

import numpy as np
import pytest

from seqloom.data import JoinedSource, LengthLimitedSource, Mixture, Sampler, StoreWriter, TokenStore, open_source
from seqloom.data.mixture import check_same_vocabulary
from seqloom.data.source import SyntheticSource
from seqloom.errors import SeqloomError

LENGTHS = [np.array([4, 2, 6, 4]), np.array([1, 3, 2])]
JOINED = np.concatenate(LENGTHS)


def mixture(weights=(1, 1), by="documents", seed=3):
    return Mixture(LENGTHS, weights, by=by, seed=seed)


def sampler(mixed=None, **options):
    return Sampler(JOINED, JOINED - 1, **({"seed": 3, "documents": 4, "mixture": mixed or mixture()} | options))


def test_joined_sources_are_read_like_each():
    parts = SyntheticSource(5, 40), LengthLimitedSource(SyntheticSource(4, 60, seed=1), 30, "truncate")
    joined = JoinedSource(parts)
    assert joined.lengths.tolist() == [*parts[0].lengths, *parts[1].lengths]
    assert joined.valid.tolist() == [*parts[0].valid, *parts[1].valid]
    for document in range(9):
        part, number = (parts[0], document) if document < 5 else (parts[1], document - 5)
        length = int(part.lengths[number])
        for start, stop in ((0, length), (1, length - 1)):
            found, wanted = joined.rows(document, start, stop), part.rows(number, start, stop)
            assert all(map(np.array_equal, found, wanted))
            assert np.array_equal(joined.tokens(document, start, stop), wanted[0])
    with pytest.raises(SeqloomError, match="document 9 of 9"):
        joined.rows(9, 0, 1)


def test_the_order_is_fixed_for_ever():
    """Sampler states outlive versions: this order must never change."""
    assert [mixture((2, 1)).order(epoch).tolist() for epoch in range(3)] == [
        [3, 0, 5, 2, 1, 6],
        [0, 3, 4, 1, 2, 5],
        [0, 1, 4, 2, 3, 6],
    ]


def test_an_epoch_ends_when_the_first_source_has_been_gone_through():
    equal = mixture()
    assert equal.per_epoch == (3, 3)
    for epoch in range(3):
        order = equal.order(epoch)
        assert len(order) == 6 and set(order[order >= 4].tolist()) == {4, 5, 6}
    assert [str(count) for count in mixture((1, 3)).per_epoch] == ["1", "3"]
    assert [str(count) for count in mixture((4, 1)).per_epoch] == ["4", "1"]


def test_shares_of_tokens_are_exact_over_whole_passes():
    """Mean lengths are 4 and 2, so half of the tokens each are one document to two."""
    found = mixture((1, 1), "tokens")
    assert [str(count) for count in found.per_epoch] == ["3/2", "3"]
    tokens = np.zeros(2, dtype=int)
    for epoch in range(8):  # 12 documents of the first, 24 of the second: three and eight passes
        order = found.order(epoch)
        tokens += [int(JOINED[order[order < 4]].sum()), int(JOINED[order[order >= 4]].sum())]
    assert tokens.tolist() == [48, 48]


def test_weights_are_decimals_of_any_scale():
    assert mixture((0.1, 0.9)).per_epoch == mixture((1, 9)).per_epoch == mixture((0.3, 2.7)).per_epoch


def test_a_source_with_less_than_a_document_in_an_epoch_comes_in_some_epochs():
    found = mixture((20, 1))
    assert str(found.per_epoch[1]) == "1/5"
    counts = [int((found.order(epoch) >= 4).sum()) for epoch in range(10)]
    assert sum(counts) == 2 and set(counts) == {0, 1}


def test_a_batch_has_no_document_twice_and_the_state_is_bounded_by_its_epoch():
    found = sampler(documents=5)
    assert [len(found.next_batch()) for _ in range(4)] == [5, 1, 5, 1]
    state = json.loads(json.dumps(found.state_dict()))
    again = sampler(documents=2)
    again.load_state_dict(state)
    assert again.next_batch().documents.tolist() == found.next_batch().documents.tolist()[:2]
    with pytest.raises(SeqloomError, match=r"position 6; an epoch has positions 0 \.\. 5"):
        again.load_state_dict(state | {"position": 6})
    with pytest.raises(SeqloomError, match="epoch -1"):
        again.load_state_dict(state | {"epoch": -1})


def test_a_state_of_another_mixture_is_refused():
    state = sampler().state_dict()
    plain = Sampler(JOINED, JOINED - 1, seed=3, documents=4)
    for other, given in (
        (sampler(mixture((1, 2))), state),
        (sampler(mixture(by="tokens")), state),
        (plain, state),
        (sampler(), plain.state_dict()),
    ):
        with pytest.raises(SeqloomError, match=r"state is of another mixture.*resume with the sources and weights"):
            other.load_state_dict(given)
    with pytest.raises(SeqloomError, match="seed 3, this sampler 4"):
        sampler(mixture(seed=4), seed=4).load_state_dict(state)


def test_bad_mixtures():
    for lengths, weights in (([], []), (LENGTHS, (1,)), (LENGTHS, (1, 0)), ([LENGTHS[0], np.array([])], (1, 1))):
        with pytest.raises(SeqloomError, match="a weight above 0 for each"):
            Mixture(lengths, weights)
    with pytest.raises(SeqloomError, match="a mixture of 7 documents beside lengths of 2"):
        Sampler([1, 1], [0, 0], documents=1, mixture=mixture())


def test_sources_of_different_tokenizers_are_refused(tmp_path):
    def store(name, vocabulary, sha256):
        with StoreWriter(tmp_path / name, vocabulary=vocabulary, tokenizer=sha256 and {"sha256": sha256}) as writer:
            writer.add([1, 2, 3])
        return TokenStore(tmp_path / name)

    one, same, ids = store("one", 257, "a"), store("same", 257, "a"), store("ids", 257, None)
    check_same_vocabulary([one, same, ids, open_source("toy:3")])
    with pytest.raises(SeqloomError, match=r"vocabulary of 257 ids, .*large one of 300; prepare both with"):
        check_same_vocabulary([one, store("large", 300, "a")])
    with pytest.raises(SeqloomError, match=r"one and .*other were prepared with different tokenizers"):
        check_same_vocabulary([one, ids, store("other", 257, "b")])
