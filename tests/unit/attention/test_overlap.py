"""Local documents overlap the exchanges of other groups: where, in how many calls, and without changing a bit."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from seqloom.attention.context_parallel import overlap
from seqloom.attention.context_parallel.overlap import ContextParallelAttention, LocalRuns, OverlapTask
from seqloom.attention.kernels.cpu import Reference
from seqloom.attention.masks import MaskRule
from seqloom.attention.plan import AttentionOptions, _group_attentions
from seqloom.dist.rank_tokens import bind
from seqloom.dist.thread_transport import run_ranks
from seqloom.layout import Span
from seqloom.plan import Group, Method
from support.attention_cases import Case, assemble, attend

torch.set_num_threads(1)


def spans(*documents, length=12):
    return tuple(Span(document, 0, length) for document in documents)


def overlapping(method=Method.RING, local=((4, 5, 6, 7), (8, 9))):
    """Four ranks as two nodes: a ring over all, one inside each node, documents of ranks 0 and 3."""
    groups = (
        Group((0, 1, 2, 3), 1, 4, spans(0, 3), method),
        Group((0, 1), 1, 2, spans(1), method),
        Group((2, 3), 2, 1, spans(2)),
        Group((0,), 1, 1, spans(*local[0])),
        Group((3,), 1, 1, spans(*local[1])),
    )
    return Case((12,) * 10, 4, 2, 8, world=4, groups=groups, node_size=2)


class Place:
    """A transport that can only say where it is."""

    def __init__(self, rank, ranks=4):
        self.rank, self.ranks = rank, ranks


def calls(case, rank, node_size=2):
    context = bind(case.work, Place(rank, case.world), node_size=node_size)
    return _group_attentions(context, case.heads, case.kv_heads, case.dim, torch.float32, AttentionOptions())


def test_documents_go_to_the_ring_that_joins_nodes_in_proportion_to_what_arrives():
    ring, inner, local = calls(overlapping(), 0)
    assert isinstance(local.inner, LocalRuns) and inner.schedule == ({}, {})
    assert ring.schedule.forward == {0: (OverlapTask(2, 0),), 1: (OverlapTask(2, 1),), 2: (OverlapTask(2, 2),)}
    # Backward: keys, then keys and gradients twice, then gradients twice: 1 : 2 : 2 : 1 : 1 for four documents.
    assert ring.schedule.backward == {
        0: (OverlapTask(2, 0),),
        1: (OverlapTask(2, 1),),
        2: (OverlapTask(2, 2),),
        4: (OverlapTask(2, 3),),
    }
    rows = [tile.queries for tile in local.inner.forward_runs]
    assert rows[0].start == 0 and rows[-1].stop == 48 and all(a.stop == b.start for a, b in pairwise(rows))


def test_without_nodes_all_rings_are_filled_and_without_a_ring_local_work_is_one_call():
    ring, inner, _ = calls(overlapping(), 0, node_size=None)
    assert ring.schedule.forward and inner.schedule.forward
    ring, heads, local = calls(overlapping(), 3)
    assert not isinstance(heads.inner, ContextParallelAttention) and len(local.inner.forward_runs) == 2
    case = overlapping()
    (alone,) = calls(replace(case, groups=case.groups[3:]), 0)
    assert not isinstance(alone.inner, LocalRuns | ContextParallelAttention) and alone.schedule == ({}, {})


def test_a_gpu_is_not_given_less_than_fills_it():
    documents = [overlap._Document(0, k * 1024, (k + 1) * 1024, Span(k, 0, 1024)) for k in range(16)]
    waits = [overlap._Exchange(1, k, size) for k, size in enumerate((1, 30, 0, 30, 60))]
    few = overlap._assign_exchanges(documents, waits, 32, 2**17, MaskRule())
    assert [wait.number for wait in few] == [1] * 4 + [3] * 4 + [4] * 8
    one = overlap._assign_exchanges(documents, waits, 4, 2**17, MaskRule())
    assert {wait.number for wait in one} == {4}
    assert overlap._assign_exchanges(documents, waits[2:3], 4, 0, MaskRule()) == [None] * 16


class Noting(Reference):
    """The reference kernel; notes what is computed between which messages."""

    def __init__(self, notes):
        self.notes = notes

    def prepare(self, segments, shape):
        inner, notes, size = super().prepare(segments, shape), self.notes, len(segments)

        class Prepared:
            def forward(self, *tensors):
                notes.append(f"forward {size}")
                return inner.forward(*tensors)

            def backward(self, *tensors):
                notes.append(f"backward {size}")
                return inner.backward(*tensors)

        return Prepared()


class Telling:
    """A transport that notes when an exchange starts and ends."""

    def __init__(self, transport, notes):
        self._transport, self._notes = transport, notes

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def exchange(self, sends, receives):
        self._notes.append("start")
        handle, notes = self._transport.exchange(sends, receives), self._notes

        class Handle:
            def wait(self):
                notes.append("wait")
                handle.wait()

        return Handle()


def test_local_work_runs_while_a_message_is_under_way():
    case = Case(
        (8,) * 5, 2, 2, 4, 2, (Group((0, 1), 1, 2, spans(0, length=8)), Group((0,), 1, 1, spans(1, 2, 3, 4, length=8)))
    )
    inputs = case.inputs(torch.float64)

    def body(transport):
        notes = []
        attend(Telling(transport, notes), case, inputs, Noting(notes))
        return notes

    forward = ["start", "forward 1", "forward 4", "wait", "forward 1"]
    # Keys, gradients, gradients home: 4 documents for 1 : 1 : 1, in few calls.
    backward = ["start", "backward 1", "backward 1", "wait", "start", "backward 1", "backward 2", "wait"]
    assert run_ranks(2, body)[0] == [*forward, *backward, "start", "backward 1", "wait"]


@pytest.mark.parametrize("method", Method)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_overlap_changes_no_bit(method, dtype, monkeypatch):
    case = overlapping(method)
    inputs = case.inputs(dtype)

    def found():
        return assemble(run_ranks(4, lambda transport: attend(transport, case, inputs), strict=True))

    overlapped = found()
    monkeypatch.setattr(overlap, "_assign_exchanges", lambda documents, *_: [None] * len(documents))
    assert all(torch.equal(a, b) for a, b in zip(overlapped, found(), strict=True))
