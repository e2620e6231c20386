"""Messages run beside compute, and no layer waits for the GPU: read from a profiler trace of one rank."""

from functools import partial

import pytest
import torch
from torch.profiler import record_function

from seqloom.describe import ModelSpec
from seqloom.engine import bind_plan, run_step
from seqloom.layout import Span
from seqloom.models import ModelAdapter, Transformer
from seqloom.params import FSDPParameters, PipelineFSDP, Placement, ReshardingParameters
from seqloom.plan import Group, Sharding
from support.steps import one_stage_plan
from support.traces import traced

RANKS, TOKENS = 2, 8_192
SPEC = ModelSpec(
    *("wide", 3, 1024), heads=8, kv_heads=4, head_dim=128, ffn=4096, gated=True, vocabulary=1000, tied=False
)
LEAST = 0.1
"""Share of the shorter of compute and messages that runs beside the other. Sockets between ranks of one GPU make
messages much longer than between GPUs, so that little of them can be hidden; but compute runs while they do."""


@pytest.fixture(autouse=True)
def gpu(device):
    if device == "cpu":
        pytest.skip("a trace of kernels needs a GPU")


def step_trace(transport, plan, device, kind):
    """Run a step three times; return the trace of the last one on rank 0, as plain values."""
    adapter = ModelAdapter.of(Transformer(SPEC, seed=0, dtype=torch.float32).to(device))
    if kind == "stages":
        placement = Placement(plan.pipelines[0].stages, plan.sharding, plan.limits.node_size)
        parameters = PipelineFSDP(adapter, transport, placement, param_dtype=torch.bfloat16)
    elif plan.sharding == Sharding.FREE:
        parameters = ReshardingParameters(adapter, transport, param_dtype=torch.bfloat16)
    else:
        parameters = FSDPParameters(adapter, transport, plan.sharding, node_size=RANKS, param_dtype=torch.bfloat16)
    for name in ("forward", "backward"):
        setattr(parameters, name, partial(named, name, getattr(parameters, name)))

    def rows(context):
        ids = torch.zeros(context.tokens, dtype=torch.int64, device=device)
        return ids, ids

    def step():
        prepare = partial(adapter.prepare, dtype=torch.bfloat16)
        rank_plan = bind_plan(plan, transport, device=device, prepare=prepare)
        torch.cuda.synchronize()
        run_step(rank_plan, parameters, rows, sum(plan.documents))

    step()
    step()
    trace = traced(step) if transport.rank == 0 else step()
    if trace is None:
        return None
    streams = {
        verb: sorted({k.stream for k in trace.of_verb(verb)}) for verb in ("AllGather", "ReduceScatter", "SendRecv")
    }
    return {
        "compute streams": sorted({kernel.stream for kernel in trace.compute()}),
        "streams": streams,
        "beside": {verb: trace.beside(verb) for verb in streams},
        "waits": {name: trace.waits_in(name) for name in ("forward", "backward")},
    }


def named(name, call, *args, **kwargs):
    """Call under a name that the trace shows."""
    with record_function(name):
        return call(*args, **kwargs)


def check(found, verbs):
    print(found)
    assert not found["waits"]["forward"] and not found["waits"]["backward"], found
    for verb in verbs:
        assert found["streams"][verb], f"no {verb}"
        assert not {*found["streams"][verb]} & {*found["compute streams"]}, found
        assert found["beside"][verb] > LEAST, found


def one_group(ulysses, ring, sharding):
    spans = (Span(0, 0, TOKENS), Span(1, 0, TOKENS))
    return one_stage_plan([[Group(tuple(range(RANKS)), ulysses, ring, spans)]] * 1, ranks=RANKS, sharding=sharding)


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.FREE])
def test_a_ring_and_its_parameters(nccl_pool, device, sharding):
    found = nccl_pool.run(step_trace, one_group(1, RANKS, sharding), device, "one stage", ranks=RANKS)[0]
    check(found, ["SendRecv"])
