"""Compiled layers under FSDP2 on gloo processes: every sharding and checkpointing gives what one process finds."""

import pytest
import torch

from seqloom.engine.executor import evaluate, run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.layout import Route, Span
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.params.fsdp import FSDPParameters
from seqloom.params.resharding import ReshardingParameters
from seqloom.plan import Checkpoint, Group, Remap, Sharding
from support.steps import Found, Step, one_stage_plan, tiny_spec
from support.tiny_models import documents, gradients, one_by_one, targets, tiny_model
from support.transports import CountingTransport
from support.two_layouts import shifted
from support.workers import Workers

pytestmark = pytest.mark.distributed
torch.set_num_threads(1)
STEP = Step((16, 9, 5, 13, 3, 24), tiny_spec())
VALID = sum(STEP.lengths) - len(
    STEP.lengths
)  # 64: norms of transformers are in float32, and only powers of 2 scale exactly
ROUNDS = [
    [Group((0, 1), 2, 1, (Span(0, 0, 16), Span(4, 0, 3)))],
    [Group((0, 1), 1, 2, (Span(5, 0, 24),), route=Route((0, 1), 2)), Group((0,), 1, 1, (Span(1, 0, 9),))],
    [Group((1,), 1, 1, (Span(2, 0, 5), Span(3, 0, 13)))],  # none on rank 0
]
SPANS = tuple(Span(document, 0, tokens) for document, tokens in enumerate(STEP.lengths))
KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)


@pytest.fixture(scope="module")
def pool():
    """Two processes: parameters are sharded over a whole job, and every rank of it compiles."""
    with Workers(2, timeout_s=150) as workers:
        yield workers


def compiled_step(transport, adapter, rows, valid, plan):
    """Loss, norm and gradients of a step with compiled layers, and what was compiled."""
    from torch._dynamo.utils import counters

    counters.clear()
    names = [name for name, _ in adapter.module.named_parameters()]
    compile_layers(adapter.layers, backend="aot_eager")
    recompute_layers(adapter.layers)
    if plan.sharding == Sharding.FREE:
        parameters = ReshardingParameters(adapter, transport)
    else:
        parameters = FSDPParameters(adapter, transport, plan.sharding, node_size=1)
    assert list(parameters.master_weights()) == names
    result = run_step(bind_plan(plan, transport), parameters, rows, valid)
    assert result.layers.attention > 0 and result.layers.exchange > 0  # measured inside of what the graph does not see
    found = Found(result.loss, result.gradient_norm, {name: each.clone() for name, each in parameters.full_gradients()})
    again = evaluate(bind_plan(plan, transport), parameters, rows, valid)
    assert again == pytest.approx(result.loss, rel=1e-12)
    return found, counters["stats"]["unique_graphs"], dict(counters["graph_break"])


def of_reference(transport, plans):
    torch._dynamo.reset()  # other tests of the pool may have compiled the same
    return [compiled_step(transport, ModelAdapter.of(STEP.model()), STEP.rows(), STEP.valid, plan) for plan in plans]


def of_llama(transport, plan):
    from seqloom.integrations.transformers import attach, model_adapter

    ids = documents(STEP.lengths)

    def rows(context):
        none = [torch.empty(0, dtype=torch.int64)]
        pieces = [(ids[d][a:b], targets(ids[d])[a:b]) for d, a, b in context.spans]
        return tuple(torch.cat([each[k] for each in pieces] or none) for k in (0, 1))

    return compiled_step(transport, model_adapter(attach(tiny_model("llama"))), rows, VALID, plan)


def planned(sharding, shift=0):
    kinds = KINDS[shift:] + KINDS[:shift]
    return one_stage_plan(ROUNDS, ranks=2, node_size=1, sharding=sharding, checkpoint=kinds)


@pytest.mark.slow
def test_every_sharding_and_checkpointing_equals_one_process(pool):
    """Graphs are for some tokens and for none, with gradients and without; later steps and shardings share them."""
    plans, wanted = [planned(kind, shift) for shift, kind in enumerate(Sharding)], STEP.alone()
    for rank, results in enumerate(pool.run(of_reference, plans)):
        assert max(found.worst(wanted) for found, _, _ in results) < 1e-9
        counts = {plan.sharding: graphs for plan, (_, graphs, _) in zip(plans, results, strict=True)}
        free = counts.pop(Sharding.FREE, 0)  # its parameters are of another kind than those that FSDP2 gathers
        assert sum(counts.values()) == (4 if rank == 0 else 2) >= free
        assert not any(breaks for _, _, breaks in results)


def traffic(transport, plan):
    """Calls and bytes of every verb in the rounds of a plan, with plain layers and with compiled ones."""
    found = []
    for compiles in (False, True):
        adapter = ModelAdapter.of(STEP.model())
        if compiles:
            compile_layers(adapter.layers, backend="aot_eager")
        recompute_layers(adapter.layers)
        counting = CountingTransport(transport)
        contexts = [each.context for each in bind_plan(plan, counting).rounds]
        counting.reset()
        for context in contexts:
            if context is not None:
                ModelWithLoss(adapter)(*STEP.rows()(context), context).backward()
        sent = [counting.traffic(verb) for verb in ("all_to_all", "exchange", "all_gather", "all_reduce")]
        found.append([(each.calls, each.bytes) for each in sent])
    return found


@pytest.mark.slow
def test_nothing_is_sent_more_often_than_without(pool):
    """A round of Ulysses and one of a ring, each under selective and full checkpointing."""
    kinds, sent = (Checkpoint.SELECTIVE, Checkpoint.FULL), []
    for shift in (0, 1):
        rounds = [[Group((0, 1), 2, 1, SPANS[:3])], [Group((0, 1), 1, 2, SPANS[3:])]]
        plan = one_stage_plan(rounds, ranks=2, checkpoint=kinds[shift:] + kinds[:shift])
        for plain, compiled in pool.run(traffic, plan):
            assert compiled == plain
            sent.append(plain)
    assert sent[0] != sent[-1], "what is checkpointed matters, and is counted"


@pytest.mark.slow
@pytest.mark.parametrize("remap", [None, *Remap])
def test_a_model_of_transformers_equals_plain_transformers(pool, remap):
    """Around attention the operator moves tokens, in the graph of other rounds; around the MLP layers run plainly."""
    plan = planned(Sharding.FULL) if remap is None else shifted(planned(Sharding.FULL), remap)
    plain = tiny_model("llama")
    one_by_one(plain, documents(STEP.lengths))
    for found, _, breaks in pool.run(of_llama, plan):
        for name, gradient in gradients(plain).items():
            assert float((found.gradients[name] * VALID - gradient).norm()) < 1e-9 * float(gradient.norm()), name
        assert not breaks
