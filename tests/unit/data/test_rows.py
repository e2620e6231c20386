import numpy as np
import pytest
import torch

from seqloom.data import IGNORED, Batch, rank_rows
from seqloom.dist import bind, bind_single_rank
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, StageMicroBatch


class Place:
    """A transport that can only say where it is."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks


def batch_of(source, *documents):
    chosen = np.array(documents)
    return Batch(chosen, source.lengths[chosen], source.valid[chosen])


def context_of(rank, ranks, *spans, ulysses=1):
    group = Group(tuple(range(ranks)), ulysses, ranks // ulysses, tuple(Span(*span) for span in spans))
    return bind(StageMicroBatch((group,), Checkpoint.NONE), Place(rank, ranks))


def test_labels_at_the_edges_of_shards(store):
    """The documents of a context are numbers in the batch; the label of the last row is the neighbour's first token."""
    source = store([99, 99], [1, 10, 10, 10, 2, 2])
    batch = batch_of(source, 1)
    first, second = (rank_rows(source, context_of(rank, 2, (0, 0, 6), ulysses=2), batch) for rank in (0, 1))
    assert (first[0].tolist(), first[1].tolist()) == ([1, 10, 10], [10, 10, 10])
    assert (second[0].tolist(), second[1].tolist()) == ([10, 2, 2], [2, 2, IGNORED])
    assert first[0].dtype == first[1].dtype == torch.int64


def test_a_rank_without_tokens_gets_none(store):
    source = store([1, 2, 3])
    context = bind(StageMicroBatch((Group((0,), 1, 1, (Span(0, 0, 3),)),), Checkpoint.NONE), Place(1, 2))
    ids, labels = rank_rows(source, context, batch_of(source, 0))
    assert ids.shape == labels.shape == (0,)


def test_one_device(store):
    source = store([1, 2, 3], ([4, 5], [1, 0]))
    ids, labels = rank_rows(source, bind_single_rank([2, 3]), batch_of(source, 1, 0))
    assert ids.tolist() == [4, 5, 1, 2, 3]
    assert labels.tolist() == [IGNORED, IGNORED, 2, 3, IGNORED]


def test_a_plan_of_another_batch_is_refused(store):
    source = store([1, 2, 3], [4, 5])
    for spans, message in (
        (((0, 0, 4),), "document 0 up to token 4, but in this batch document 0 has 3 tokens"),
        (((1, 0, 2),), "document 1 up to token 2, but in this batch 1 documents"),
    ):
        with pytest.raises(SeqloomError, match=message):
            rank_rows(source, context_of(0, 1, *spans), batch_of(source, 0))
    with pytest.raises(SeqloomError, match="not so in the source"):
        rank_rows(store([7], name="other"), context_of(0, 1, (0, 0, 3)), batch_of(source, 0))
