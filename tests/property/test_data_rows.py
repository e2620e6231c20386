"""Rows of random works: all ranks together read the batch exactly once, and nobody reads anything else."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqloom.data import IGNORE_INDEX, Batch, rank_rows
from seqloom.dist import bind
from seqloom.plan import Checkpoint, StageMicroBatch
from support.strategies_attention import cases_of_many_groups


class Place:
    """A transport that can only say where it is."""

    def __init__(self, rank, ranks):
        self.rank, self.ranks = rank, ranks


class CountingSource:
    """Token p of document d is 1000 d + p; remembers every position that it was asked for."""

    vocabulary = 10**6

    def __init__(self, lengths):
        self.lengths = np.array(lengths)
        self.valid = self.lengths - 1
        self.read = {"tokens": Counter(), "labels": Counter()}

    def tokens(self, document, start, stop):
        self.read["tokens"].update((document, p) for p in range(start, stop))
        return 1000 * document + np.arange(start, stop)

    def labels(self, document, start, stop):
        self.read["labels"].update((document, p) for p in range(start, stop))
        labels = 1000 * document + np.arange(start, stop) + 1
        labels[np.arange(start, stop) == self.lengths[document] - 1] = IGNORE_INDEX
        return labels


@given(case=cases_of_many_groups(), data=st.data())
def test_all_ranks_together_read_the_batch_once(case, data):
    spare = data.draw(st.integers(0, 3))
    order = data.draw(st.permutations(range(len(case.lengths) + spare)))
    documents = np.array(order[: len(case.lengths)])
    lengths = np.full(len(order), 7)
    lengths[documents] = case.lengths
    batch = Batch(documents, lengths[documents], lengths[documents] - 1)
    seen, labels_seen = Counter(), Counter()
    for rank in range(case.world):
        source = CountingSource(lengths)
        context = bind(StageMicroBatch(case.groups, Checkpoint.NONE), Place(rank, case.world))
        ids, labels = (rows.tolist() for rows in rank_rows(source, context, batch))
        numbers, positions = documents[context.documents.tolist()], np.array(context.positions.tolist())
        assert ids == (1000 * numbers + positions).tolist()
        own = Counter(zip(numbers.tolist(), positions.tolist(), strict=True))
        assert source.read == {"tokens": own, "labels": own}
        seen.update(ids)
        labels_seen.update(labels)
    every = [(int(d), p) for d in documents for p in range(lengths[d])]
    assert seen == Counter(1000 * d + p for d, p in every)
    last = {int(d): lengths[d] - 1 for d in documents}
    assert labels_seen == Counter(IGNORE_INDEX if p == last[d] else 1000 * d + p + 1 for d, p in every)
    assert sum(count for label, count in labels_seen.items() if label != IGNORE_INDEX) == batch.valid_tokens
