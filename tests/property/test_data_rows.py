"""Rows of random works: all ranks together read the batch exactly once, and nobody reads anything else."""

from collections import Counter

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.data import IGNORE_INDEX, Batch, RowReader, rank_rows
from seqloom.dist import bind
from seqloom.engine import bind_plan
from seqloom.plan import ActionKind, Checkpoint, StageMicroBatch
from support.pipelines import pipeline_plans, pipeline_steps
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
        self.read = Counter()

    def rows(self, document, start, stop):
        self.read.update((document, p) for p in range(start, stop))
        ids = 1000 * document + np.arange(start, stop)
        return ids, np.where(np.arange(start, stop) == self.lengths[document] - 1, IGNORE_INDEX, ids + 1)


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
        assert source.read == own
        seen.update(ids)
        labels_seen.update(labels)
    every = [(int(d), p) for d in documents for p in range(lengths[d])]
    assert seen == Counter(1000 * d + p for d, p in every)
    last = {int(d): lengths[d] - 1 for d in documents}
    assert labels_seen == Counter(IGNORE_INDEX if p == last[d] else 1000 * d + p + 1 for d, p in every)
    assert sum(count for label, count in labels_seen.items() if label != IGNORE_INDEX) == batch.valid_tokens


@settings(max_examples=20)
@given(st.data())
def test_a_reader_gives_every_stage_its_rows_and_reads_them_once(data):
    """Any stages, pieces, groups and layouts, in any order; stages that deal tokens differently read apart."""
    step = data.draw(pipeline_steps())
    plan = data.draw(pipeline_plans(step))
    lengths = np.array(step.lengths)
    batch = Batch(np.arange(len(lengths)), lengths, lengths - 1)
    for rank in range(plan.limits.ranks):
        source = CountingSource(lengths)
        bound = bind_plan(plan, Place(rank, plan.limits.ranks), check=False)
        forwards = [bound.microbatch(action) for action in bound.actions if action.kind == ActionKind.F]
        asked = [each.context for each in forwards if each.layers.has_embedding or each.layers.has_head]
        with RowReader(bound, source, batch) as reader:
            found = [reader(context) for context in asked]
        held = [span for spans in {context.spans for context in asked} for span in spans]
        assert source.read == Counter((d, p) for d, start, stop in held for p in range(start, stop))
        for context, rows in zip(asked, found, strict=True):
            wanted = rank_rows(CountingSource(lengths), context, batch)
            assert all(map(torch.equal, rows, wanted))
