"""The host launches a layer faster than the GPU computes it, and never waits for the GPU inside one."""

from functools import partial

import pytest
import torch

from seqloom.describe import ModelSpec
from seqloom.dist import SingleRankTransport
from seqloom.engine import bind_plan, run_step
from seqloom.layout import Span
from seqloom.models import ModelAdapter, Transformer
from seqloom.params import ReplicatedParameters
from seqloom.plan import Group
from seqloom.train.model import prepare_layers
from support.steps import one_stage_plan
from support.traces import name_passes, total, traced, union

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SPEC = ModelSpec(
    "layers", 4, 2048, heads=16, kv_heads=8, head_dim=128, ffn=8192, gated=True, vocabulary=1000, tied=True
)
LENGTHS = (9_000, 4_000, 2_000, 700, 300, *[24] * 16)
"""16K tokens, of which short documents need a kernel of their own."""


def test_the_host_is_ahead_of_16k_tokens():
    device = torch.device("cuda", 0)
    adapter = ModelAdapter.of(Transformer(SPEC, seed=0, dtype=torch.bfloat16).to(device))
    parameters = ReplicatedParameters(prepare_layers(adapter, split_backward=False), SingleRankTransport())
    spans = tuple(Span(number, 0, length) for number, length in enumerate(LENGTHS))
    plan = one_stage_plan([[Group((0,), 1, 1, spans)]], ranks=1, layers=SPEC.layers, heads=SPEC.heads)
    name_passes(parameters)

    def step():
        prepare = partial(adapter.prepare, dtype=torch.bfloat16)
        bound = bind_plan(plan, SingleRankTransport(), device=device, prepare=prepare)
        ids = torch.zeros(sum(LENGTHS), dtype=torch.int64, device=device)
        run_step(bound, parameters, lambda context: (ids, ids), len(ids))

    step()
    step()
    trace = traced(step)
    host_us = total(interval for name, interval in trace.ranges if name in ("forward", "backward"))
    kernel_us = total(union([kernel.interval for kernel in trace.compute()]))
    assert not trace.waits_in("forward") and not trace.waits_in("backward"), trace.waits
    assert 0 < host_us < kernel_us, (host_us, kernel_us)
