"""Messages run beside compute, and no layer waits for the GPU: read from a profiler trace of rank 0."""

from functools import partial

import pytest
import torch

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.engine import bind_plan, run_step
from seqloom.layout import Span
from seqloom.models import ModelAdapter, Transformer
from seqloom.plan import Group, Sharding
from seqloom.planners.registry import PlannerChoice
from seqloom.train.model import prepare_layers, shard_parameters
from support.steps import one_stage_plan
from support.traces import name_passes, traced

RANKS, TOKENS = 8, 8_192
SPEC = ModelSpec("wide", 4, 1024, heads=8, kv_heads=8, head_dim=128, ffn=4096, gated=True, vocabulary=1000, tied=False)
VERBS = ("AllGather", "ReduceScatter", "SendRecv")


@pytest.fixture(autouse=True)
def gpu(device):
    if device == "cpu":
        pytest.skip("a trace of kernels needs a GPU")


def cost_of(sharding, stages=1):
    return CostModel(Cluster.of(1, RANKS, "H200"), SPEC, None, sharding, None, TOKENS, TOKENS // 4, stages=stages)


def one_group(ulysses, ring, sharding):
    spans = (Span(0, 0, TOKENS), Span(1, 0, TOKENS))
    group = Group(tuple(range(RANKS)), ulysses, ring, spans)
    return one_stage_plan([[group]], ranks=RANKS, layers=SPEC.layers, heads=SPEC.heads, sharding=sharding)


def in_stages(chunks, schedule):
    planner = PlannerChoice("pipeline", {"stages": 2, "chunks": chunks, "schedule": schedule})
    return planner.plan([TOKENS // 4] * 64, cost_of(Sharding.FULL, 2 * chunks))


CASES = {
    # plan; share of a verb's messages beside compute, at least: the first gather and the last reduction never are, nor
    # is what a stage sends while its layers wait for the other stage, which shares the GPU with them
    "ring": (partial(one_group, 1, RANKS, Sharding.FULL), {"SendRecv": 0.8, "AllGather": 0.5, "ReduceScatter": 0.5}),
    "ulysses": (partial(one_group, RANKS, 1, Sharding.FULL), {"AllGather": 0.5, "ReduceScatter": 0.5}),
    "parameters move": (partial(one_group, RANKS, 1, Sharding.FREE), {"SendRecv": 0.5}),
    "stages": (partial(in_stages, 1, "zb-h1"), {"SendRecv": 0.5}),
    "stages in turn": (partial(in_stages, 1, "1f1b"), {}),  # 1F1B needs every message at once: no share is certain
    "chunks": (partial(in_stages, 2, "interleaved"), {"SendRecv": 0.7, "AllGather": 0.5, "ReduceScatter": 0.5}),
}
IN_STAGES = ("stages", "stages in turn", "chunks")  # their messages wait for no compute, and for no other message
NONE_ON_THE_LAYERS_STREAM = ("ring", "stages", "stages in turn", "chunks")  # exchanges of Ulysses are


def trace_step(transport, plan, device):
    """Run a step three times; return what a trace of the last one shows on rank 0."""
    adapter = ModelAdapter.of(Transformer(SPEC, seed=0, dtype=torch.float32).to(device))
    adapter = prepare_layers(adapter, split_backward=len(plan.pipelines[0].stages) > 1)
    cost = cost_of(plan.sharding, len(plan.pipelines[0].stages))
    parameters = shard_parameters(adapter, transport, plan.pipelines[0].stages, cost, torch.bfloat16)
    name_passes(parameters)

    def rows(context):
        ids = torch.zeros(context.tokens, dtype=torch.int64, device=device)
        return ids, ids

    def step():
        bound = bind_plan(plan, transport, device=device, prepare=partial(adapter.prepare, dtype=torch.bfloat16))
        torch.cuda.synchronize()
        run_step(bound, parameters, rows, sum(plan.documents))

    step()
    step()
    if transport.rank:
        return step()
    trace = traced(step)
    return {
        "layers": trace.compute()[0].stream,
        "streams": {verb: {kernel.stream for kernel in trace.of_verb(verb)} for verb in VERBS},
        "beside": {verb: trace.beside(verb) for verb in VERBS},
        "alone": trace.alone("SendRecv"),
        "waits": trace.waits_in("forward") + trace.waits_in("backward"),
    }


@pytest.mark.parametrize("name", CASES)
def test_messages_run_beside_compute(nccl_pool, device, name):
    plan, least = CASES[name]
    found = nccl_pool.run(trace_step, plan(), device, ranks=RANKS)[0]
    print(name, found)
    assert not found["waits"], found
    assert all(found["beside"][verb] >= share for verb, share in least.items()), found
    assert name not in IN_STAGES or found["alone"] <= 0.1, found
    if name in NONE_ON_THE_LAYERS_STREAM:
        assert found["layers"] not in found["streams"]["SendRecv"], found
