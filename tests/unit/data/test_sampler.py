"""Which documents make a step."""

import json
from itertools import pairwise

import numpy as np
import pytest

from seqloom.data import Batch, Sampler
from seqloom.errors import SeqloomError

LENGTHS = [5, 3, 8, 1, 9, 2, 2]
VALID = [4, 0, 7, 0, 8, 1, 1]


def sampler(**options):
    return Sampler(LENGTHS, VALID, **({"seed": 1, "documents": 3} | options))


def columns(batch):
    return batch.documents.tolist(), batch.lengths.tolist(), batch.valid.tolist()


def epoch_of(found):
    """All batches of the epoch that begins now."""
    batches, number = [], found.epoch
    while found.epoch == number:
        batches.append(found.next_batch())
    return batches


def test_an_epoch_is_every_document_once():
    found = sampler()
    orders = []
    for number in range(4):
        assert (found.epoch, found.position) == (number, 0)
        batches = epoch_of(found)
        assert [len(batch) for batch in batches] == [3, 3, 1]
        orders.append(tuple(np.concatenate([batch.documents for batch in batches]).tolist()))
        assert sorted(orders[-1]) == list(range(7))
        for batch in batches:
            assert batch.lengths.tolist() == [LENGTHS[k] for k in batch.documents]
            assert batch.valid.tolist() == [VALID[k] for k in batch.documents]
            assert (batch.tokens, batch.valid_tokens) == (batch.lengths.sum(), batch.valid.sum())
    assert len(set(orders)) == 4


def test_the_order_is_fixed_for_ever():
    """Sampler states outlive versions: this order must never change."""
    found = sampler(documents=7)
    assert found.next_batch().documents.tolist() == [2, 0, 1, 4, 5, 6, 3]
    assert found.next_batch().documents.tolist() == [1, 6, 3, 5, 0, 2, 4]


def test_a_budget_is_kept_and_nothing_is_lost():
    found = sampler(documents=None, tokens=10)
    batches = epoch_of(found)
    assert max(batch.tokens for batch in batches) <= 10
    assert sorted(np.concatenate([batch.documents for batch in batches])) == list(range(7))
    for batch, after in pairwise(batches):
        assert batch.tokens + after.lengths[0] > 10, "the next document would have fitted"
    with pytest.raises(SeqloomError, match="2 documents are longer than a batch of 7 tokens, the longest has 9"):
        sampler(documents=None, tokens=7)


STEPS = {
    0: (np.array([6, 0, 3, 1, 2, 5, 4]), np.array([0, 2, 3, 7])),
    1: (np.array([1, 2, 5, 4, 6, 0, 3]), np.array([0, 4, 6, 7])),
}


def test_batches_that_are_given_come_as_they_are_and_go_on_from_a_state():
    given = {"documents": None, "packed": lambda epoch: STEPS[epoch]}
    found = sampler(**given)
    assert [batch.documents.tolist() for batch in epoch_of(found)] == [[6, 0], [3], [1, 2, 5, 4]]
    assert found.next_batch().documents.tolist() == [1, 2, 5, 4]
    again = sampler(**given)
    again.load_state_dict(found.state_dict())
    assert columns(again.next_batch()) == columns(found.next_batch())
    others = {0: (STEPS[0][0], np.array([0, 3, 7])), 1: STEPS[1]}
    for other in (sampler(), sampler(documents=None, packed=lambda epoch: others[epoch])):
        with pytest.raises(SeqloomError, match="of other batches"):
            other.load_state_dict(found.state_dict())
    with pytest.raises(SeqloomError, match="of other batches"):
        sampler(**given).load_state_dict(sampler().state_dict())


def test_peeking_does_not_move():
    found = sampler()
    ahead = found.peek(8)
    assert (found.epoch, found.position) == (0, 0)
    assert [columns(found.next_batch()) for _ in range(8)] == [columns(batch) for batch in ahead]


def test_a_state_is_plain_and_resumes_with_another_batch_size():
    first = sampler(documents=2)
    behind = [first.next_batch() for _ in range(2)]
    state = json.loads(json.dumps(first.state_dict()))
    assert (state["epoch"], state["position"]) == (0, 4)
    second = sampler(documents=None, tokens=1_000)
    second.load_state_dict(state)
    rest = second.next_batch()
    assert sorted(np.concatenate([rest.documents, *(batch.documents for batch in behind)])) == list(range(7))
    assert (second.epoch, second.position) == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 2}, "seed 2, this sampler 1"),
        ({"documents": 8}, "documents 8, this sampler 7"),
        ({"lengths_sha256": "0"}, "resume with the data"),
        ({"position": 7}, r"position 7; an epoch has positions 0 \.\. 6"),
        ({"epoch": -1}, "epoch -1"),
        ({"epoch": "1"}, "epoch '1'"),
    ],
)
def test_a_state_of_another_run_is_refused(change, message):
    found = sampler()
    with pytest.raises(SeqloomError, match=message):
        found.load_state_dict(found.state_dict() | change)
    assert found.position == 0
    with pytest.raises(SeqloomError, match="has no 'epoch'"):
        found.load_state_dict({"position": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": 10}, "give one of the three"),
        ({"documents": None}, "give one of the three"),
        ({"packed": lambda epoch: STEPS[epoch]}, "give one of the three"),
        ({"documents": 0}, "at least 1"),
        ({"seed": -1}, "at least 0"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(SeqloomError, match=message):
        sampler(**options)


@pytest.mark.parametrize(("lengths", "valid"), [([], []), ([0], [0]), ([2, 2], [1])])
def test_bad_documents(lengths, valid):
    with pytest.raises(SeqloomError, match="a sampler needs documents"):
        Sampler(lengths, valid, documents=1)


def test_a_batch_shows_its_totals():
    batch = Batch(np.array([1, 2]), np.array([3, 3]), np.array([2, 2]))
    assert repr(batch) == "Batch(2 documents, 6 tokens, 4 valid)"
