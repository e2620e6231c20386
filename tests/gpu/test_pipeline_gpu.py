"""Stages on a GPU: ranks as threads on one device, units offloaded to pinned memory and back."""

from dataclasses import replace

import pytest
import torch

from seqloom.dist import Ranks, SingleRankTransport
from seqloom.engine import bind_plan, run_step
from seqloom.layout import Span
from seqloom.models import ModelAdapter, Transformer, defer_weight_gradients, offload, recompute_layers
from seqloom.params import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.schedules import build_schedule
from support.pipelines import stages_on
from support.steps import Found, Step, tiny_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
STEP = Step((61, 40, 33, 18), tiny_spec(layers=4, tied=True))


def planned(step, name, hosts, width, pieces, offloads, kinds):
    """A document is a sequence of the schedule; rounds keep something else in turn."""
    schedule = build_schedule(name, hosts, len(step.lengths), pieces)
    stages, rounds = stages_on(schedule.pp_ranks, width, step.spec.layers), []
    for number, (document, piece, count) in enumerate(schedule.units):
        low, high = (step.lengths[document] * (piece + k) // count for k in (0, 1))
        spans, kind = (Span(document, low, high),), kinds[number % len(kinds)]
        rounds.append(
            Round(
                tuple(
                    StageMicroBatch(
                        (Group(s.ranks, width, 1, spans),), kind, offloaded_layers=s.layer_count if offloads else 0
                    )
                    for s in stages
                )
            )
        )
    limits = Limits(hosts * width, hosts * width, step.spec.heads, tuple((kind, 10**6) for kind in Checkpoint))
    line = Pipeline(stages, tuple(rounds), schedule.pipeline_actions())
    return Plan(limits, Sharding.FULL, Reduce.STEP, step.lengths, (line,), name)


def spread(step, plan, transport):
    adapter = ModelAdapter.of(step.model().cuda())
    adapter = replace(adapter, weight_gradients=defer_weight_gradients(adapter.layers))
    recompute_layers(adapter.layers)
    parameters, read = ReplicatedParameters(adapter, transport), step.rows()
    bound = bind_plan(plan, transport, device="cuda")
    result = run_step(bound, parameters, lambda c: tuple(each.cuda() for each in read(c)), step.valid)
    return Found(result.loss, result.gradient_norm, {name: each.cpu() for name, each in parameters.full_gradients()})


@pytest.mark.parametrize("offloads", [False, True])
@pytest.mark.parametrize(("name", "hosts"), [("seq1f1b-zb", 2), ("zb-v", 2)])
def test_stages_of_two_ranks_are_one_process(name, hosts, offloads, monkeypatch):
    monkeypatch.setattr(offload, "MIN_ELEMENTS", 1)
    pieces = 2 if name == "seq1f1b-zb" else 1
    plan, wanted = planned(STEP, name, hosts, 2, pieces, offloads, tuple(Checkpoint)), STEP.alone()
    plan.validate()
    with Ranks(2 * hosts) as ranks:
        for found in ranks.run(lambda transport: spread(STEP, plan, transport)):
            assert found.worst(wanted) < 1e-9


def peak(step, kind, offloads):
    """Bytes allocated at most in a step whose forwards all come before its backwards."""
    model = Transformer(step.spec, dtype=torch.bfloat16, device="cuda")
    adapter = ModelAdapter.of(model)
    recompute_layers(adapter.layers)
    parameters, read = ReplicatedParameters(adapter, SingleRankTransport()), step.rows()
    bound = bind_plan(planned(step, "gpipe", 1, 1, 1, offloads, (kind,)), SingleRankTransport(), device="cuda")
    for _ in range(2):  # the first one finds kernels and workspaces
        parameters.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run_step(bound, parameters, lambda c: tuple(each.cuda() for each in read(c)), step.valid)
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("kind", [Checkpoint.NONE, Checkpoint.FULL])
def test_offloaded_units_leave_the_device(kind):
    """Of the bytes that layers of all units store, all but those of two layers are gone at the peak."""
    spec = tiny_spec(layers=4, hidden=512, heads=8, kv_heads=8, head_dim=64, ffn=1024, vocabulary=128)
    step = Step((4096,) * 16, spec, dtype=torch.bfloat16)
    stored = 4096 * 2 * spec.hidden  # the input of a layer, which every kind stores
    assert peak(step, kind, False) - peak(step, kind, True) > 0.9 * (16 * spec.layers - 2) * stored
