"""Activations of single layers in pinned host memory, on a GPU: the same result, less memory, copies beside layers."""

from dataclasses import replace

import pytest
import torch

from seqloom.dist import SingleRankTransport
from seqloom.engine import bind_plan, run_step
from seqloom.layout import Span
from seqloom.models import ModelAdapter, Transformer, recompute_layers
from seqloom.params import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, Round
from support.steps import Found, Step, one_stage_plan, tiny_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)
LAYERS = 8
SPEC = tiny_spec(layers=LAYERS, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, vocabulary=128)


def plan_of(step, kind, count):
    """All documents in one group of one rank, with so many offloaded layers."""
    spans = tuple(Span(k, 0, length) for k, length in enumerate(step.lengths))
    plan = one_stage_plan([[Group((0,), 1, 1, spans)]], ranks=1, layers=LAYERS, heads=8, checkpoint=kind)
    [line] = plan.pipelines
    works = [replace(each.by_stage[0], offloaded_layers=count) for each in line.rounds]
    return replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in works)),))


class Run:
    """A model on the GPU and its documents."""

    def __init__(self, step):
        self.step = step
        adapter = ModelAdapter.of(Transformer(step.spec, seed=2, dtype=step.dtype, device="cuda"))
        recompute_layers(adapter.layers)
        self.parameters = ReplicatedParameters(adapter, SingleRankTransport())

    def __call__(self, plan):
        self.parameters.zero_grad()
        read = self.step.rows()
        bound = bind_plan(plan, SingleRankTransport(), device="cuda")
        result = run_step(bound, self.parameters, lambda c: tuple(each.cuda() for each in read(c)), self.step.valid)
        gradients = {name: each.cpu() for name, each in self.parameters.full_gradients()}
        return Found(result.loss, result.gradient_norm, gradients)

    def peak(self, plan):
        """Bytes allocated at most beyond what was there before; the first run finds kernels and workspaces."""
        for _ in range(2):
            self.parameters.zero_grad()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            self(plan)
        return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 3, LAYERS])
def test_the_result_is_that_of_layers_that_stay(kind, count):
    run = Run(Step((700, 300, 90), SPEC, dtype=torch.float32))
    wanted = run(plan_of(run.step, kind, 0))
    for _ in range(3):  # a race would show in one of them
        assert run(plan_of(run.step, kind, count)).worst(wanted) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_the_device_has_two_layers_at_a_time(kind):
    """Of the bytes that layers store, all but those of two layers are gone at the peak."""
    run = Run(Step((32_768,), SPEC, dtype=torch.bfloat16))
    here, some, all_ = (run.peak(plan_of(run.step, kind, count)) for count in (0, LAYERS // 2, LAYERS))
    assert all_ < some < here
    stored = 32_768 * 2 * SPEC.hidden  # the input of a layer, which every kind stores
    assert here - all_ > 0.8 * (LAYERS - 2) * stored


def test_copies_run_beside_layers():
    """Copies have a stream of their own, and layers go on while they run."""
    run = Run(Step((65_536,), SPEC, dtype=torch.bfloat16))
    plan = plan_of(run.step, Checkpoint.SELECTIVE, LAYERS)
    run(plan)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        run(plan)
    events = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    copies = [e for e in events if "Memcpy" in e.name and "Pinned" in e.name]
    kernels = [e for e in events if "Memcpy" not in e.name and "Memset" not in e.name]
    assert len(copies) >= 2 * (LAYERS - 2)
    busy = sum(each.time_range.elapsed_us() for each in copies)
    beside = sum(
        max(0, min(c.time_range.end, k.time_range.end) - max(c.time_range.start, k.time_range.start))
        for c in copies
        for k in kernels
    )
    assert beside > 0.5 * busy
