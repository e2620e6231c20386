"""Rows on a GPU: read into pinned memory by a thread, copied without a wait."""

import warnings

import numpy as np
import pytest
import torch

from seqloom.data import Batch, RowReader, rank_rows
from seqloom.data.source import SyntheticSource
from seqloom.dist import SingleRankTransport
from seqloom.engine import bind_plan
from seqloom.layout import Span
from seqloom.plan import Group
from support.steps import one_stage_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_the_rows_are_those_of_a_cpu_and_no_round_waits_for_the_device():
    source = SyntheticSource(6, max_length=300)
    batch = Batch(np.arange(6), source.lengths, source.valid)
    spans = [Span(k, 0, int(length)) for k, length in enumerate(source.lengths)]
    plan = one_stage_plan([[Group((0,), 1, 1, (span,))] for span in spans], ranks=1)
    transport = SingleRankTransport()
    on_gpu, on_cpu = (bind_plan(plan, transport, device=device) for device in ("cuda", "cpu"))
    wanted = [rank_rows(source, each.context, batch) for each in on_cpu.rounds]
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says that the mode does not find every wait
            torch.cuda.set_sync_debug_mode("error")
        with RowReader(on_gpu, source, batch) as rows:
            found = [rows(each.context) for each in on_gpu.rounds]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ours, theirs in zip(found, wanted, strict=True):
        assert all(each.is_cuda for each in ours)
        assert all(torch.equal(each.cpu(), other) for each, other in zip(ours, theirs, strict=True))
