"""Rows of a rank: labels at the edges of shards, plans of other batches, and what is read ahead."""

import threading
from collections import Counter

import numpy as np
import pytest
import torch

from seqloom.data import IGNORE_INDEX, Batch, RowReader, rank_rows
from seqloom.data.rows import ROUNDS_AHEAD
from seqloom.data.source import Source
from seqloom.dist import SingleRankTransport, bind, bind_single_rank, run_ranks
from seqloom.engine import bind_plan, evaluate, run_step
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.params import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.scheduled import fixed_step
from support.steps import Step, one_stage_plan, tiny_spec

torch.set_num_threads(1)


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
    assert (second[0].tolist(), second[1].tolist()) == ([10, 2, 2], [2, 2, IGNORE_INDEX])
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
    assert labels.tolist() == [IGNORE_INDEX, IGNORE_INDEX, 2, 3, IGNORE_INDEX]


def test_a_plan_of_another_batch_is_refused(store):
    source = store([1, 2, 3], [4, 5])
    for spans, message in (
        (((0, 0, 4),), "document 0 up to token 4, but in this batch it has 3 tokens"),
        (((1, 0, 2),), "document 1 up to token 2, but in this batch there are 1 documents"),
    ):
        with pytest.raises(SeqloomError, match=message):
            rank_rows(source, context_of(0, 1, *spans), batch_of(source, 0))
    with pytest.raises(SeqloomError, match="not so in the source"):
        rank_rows(store([7], name="other"), context_of(0, 1, (0, 0, 3)), batch_of(source, 0))


class StepSource(Source):
    """The documents of a step; counts how often every token is read, and fails at one document."""

    def __init__(self, step, *, broken=None):
        lengths = np.array(step.lengths)
        super().__init__("the step", lengths, lengths - 1, step.spec.vocabulary)
        self._ids = [each.numpy() for each in step.documents()[0]]
        self.broken, self.reads = broken, Counter()

    def _read(self, document, start, stop):
        if document == self.broken:
            raise OSError(f"document {document}: the disk is gone")
        self.reads.update((document, position) for position in range(start, stop))
        return self._ids[document][start:stop]

    def batch(self):
        return batch_of(self, *range(len(self)))


STEP = Step((20, 9, 6, 17, 3), tiny_spec())
SPANS = tuple(Span(k, 0, n) for k, n in enumerate(STEP.lengths))
ROUND_PER_DOCUMENT = one_stage_plan([[Group((0,), 1, 1, (span,))] for span in SPANS], ranks=1)


def reader_threads():
    return [each for each in threading.enumerate() if each.name.startswith("seqloom-rows")]


def test_a_step_and_an_evaluation_read_every_token_once():
    two = one_stage_plan([[Group((0,), 1, 1, SPANS[:2]), Group((1,), 1, 1, SPANS[2:])]], ranks=2)
    sources = [StepSource(STEP) for _ in range(4)]

    def body(transport):
        parameters, bound = ReplicatedParameters(STEP.model_adapter(), transport), bind_plan(two, transport)
        losses = []
        for run, source in zip((run_step, evaluate), sources[2 * transport.rank :][:2], strict=True):
            with RowReader(bound, source, source.batch()) as rows:
                losses.append(run(bound, parameters, rows, sum(STEP.lengths) - len(STEP.lengths)))
        return losses[0].loss, losses[1]

    [[loss, evaluated], _] = run_ranks(2, body, strict=True)
    assert loss == pytest.approx(evaluated, rel=1e-12)
    assert all(set(source.reads.values()) == {1} for source in sources)
    assert reader_threads() == []


def test_stages_with_embedding_and_head_on_one_rank_get_the_same_tensors():
    step, plan = fixed_step("zb-v", 1, 1, (1, 1, 1))
    source, bound = StepSource(step), bind_plan(plan, SingleRankTransport())
    embedding, *_, head = bound.stages.values()
    with RowReader(bound, source, source.batch()) as rows:
        first = [rows(each.context) for each in embedding]
        second = [rows(each.context) for each in head]
        assert all(a is b for pair in zip(first, second, strict=True) for a, b in zip(*pair, strict=True))
        assert rows._rows == {}, "nothing is kept after the last stage"
    assert len(source.reads) == source.reads.total() == sum(step.lengths)


def test_few_rounds_are_read_ahead():
    source, bound = StepSource(STEP), bind_plan(ROUND_PER_DOCUMENT, SingleRankTransport())
    with RowReader(bound, source, source.batch()) as rows:
        for number, each in enumerate(bound.rounds):
            rows(each.context)
            assert len({document for document, _ in source.reads}) <= number + 1 + ROUNDS_AHEAD
    assert len(source.reads) == sum(STEP.lengths)


@pytest.mark.parametrize("run", [run_step, evaluate])
def test_an_error_of_the_source_is_raised_in_the_step_with_its_own_message(run):
    source, bound = StepSource(STEP, broken=3), bind_plan(ROUND_PER_DOCUMENT, SingleRankTransport())
    parameters = ReplicatedParameters(STEP.model_adapter(), SingleRankTransport())
    with (
        pytest.raises(OSError, match="document 3: the disk is gone"),
        RowReader(bound, source, source.batch()) as rows,
    ):
        run(bound, parameters, rows, 50)
    assert {document for document, _ in source.reads} >= {0, 1, 2}
    assert reader_threads() == []


def test_a_step_that_fails_ends_the_thread_and_reads_no_more():
    source, bound = StepSource(STEP), bind_plan(ROUND_PER_DOCUMENT, SingleRankTransport())
    with pytest.raises(ValueError, match="elsewhere"), RowReader(bound, source, source.batch()):
        raise ValueError("elsewhere")
    assert reader_threads() == [] and len({document for document, _ in source.reads}) <= ROUNDS_AHEAD


def test_another_plan_and_a_second_step_are_refused(store):
    source, bound = StepSource(STEP), bind_plan(ROUND_PER_DOCUMENT, SingleRankTransport())
    with RowReader(bound, source, source.batch()) as rows:
        rows(bound.rounds[0].context)
        for context in (bound.rounds[0].context, bind_single_rank([7])):
            with pytest.raises(SeqloomError, match=r"tokens in a round that is not in the plan.*for every step"):
                rows(context)
    other = store([1, 2, 3])
    with (
        RowReader(bound, other, batch_of(other, 0)) as rows,
        pytest.raises(SeqloomError, match="document 0 up to token 20, but in this batch it has 3 tokens"),
    ):
        rows(bound.rounds[0].context)
