"""Activation checkpointing drops and recomputes: counted kernels and messages, and memory that is freed."""

import gc
import weakref
from dataclasses import replace
from itertools import chain

import pytest
import torch

from seqloom.attention import attention
from seqloom.cost.compute import layer_values
from seqloom.dist import SingleRankTransport, bind, run_ranks
from seqloom.engine.executor import run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Route, Span
from seqloom.models import Transformer
from seqloom.models import layer_wrapper as module
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.params import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, Method, Round, Sharding, StageMicroBatch
from support.attention_cases import CountingKernel
from support.steps import Found, Step, one_stage_plan, tiny_spec
from support.transports import CountingTransport

torch.set_num_threads(1)
STEP = Step((40, 9, 3), tiny_spec())
LAYERS = 2
SPANS = (Span(0, 0, 40), Span(1, 0, 9), Span(2, 0, 3))
VERBS = ("all_to_all", "exchange", "all_gather", "all_reduce")


def counts(checkpoint, ulysses, ring, method="ring"):
    """Calls of every verb on rank 0 in a forward and backward, and bytes of all of them."""
    group = Group(tuple(range(ulysses * ring)), ulysses, ring, SPANS, Method(method))
    return counts_of([group], checkpoint)[0]


def counts_of(groups, checkpoint, node_size=4, sharding=Sharding.NONE):
    """The same of every rank, for any groups."""
    plan = one_stage_plan([groups], ranks=4, node_size=node_size, checkpoint=checkpoint, sharding=sharding)

    def body(transport):
        counting = CountingTransport(transport)
        adapter = ModelAdapter.of(STEP.model())
        recompute_layers(adapter.layers)
        context = bind_plan(plan, counting).rounds[0].context
        if context is None:
            return None
        counting.reset()
        ModelWithLoss(adapter)(*STEP.rows()(context), context).backward()
        return {verb: counting.traffic(verb).calls for verb in VERBS}, sum(counting.traffic(v).bytes for v in VERBS)

    return run_ranks(4, body, strict=True)


def with_lighter(plan, count):
    """The plan with so many layers of every round that recompute less."""
    [line] = plan.pipelines
    works = [replace(each.by_stage[0], lighter_layers=count) for each in line.rounds]
    changed = replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in works)),))
    changed.validate()
    return changed


@pytest.mark.parametrize(("checkpoint", "linear", "attention"), [("selective", 2 + 1, 2), ("full", 2 + 2, 2 + 1)])
def test_the_last_layers_recompute_less(monkeypatch, checkpoint, linear, attention):
    """Of two layers the second keeps all, or its attention: how often projections and kernels run forward."""
    kernel, calls = CountingKernel(), []
    monkeypatch.setattr("seqloom.attention.plan._default_kernel", lambda device: kernel)
    plan = with_lighter(one_stage_plan([[Group((0,), 1, 1, SPANS)]], ranks=1, checkpoint=Checkpoint(checkpoint)), 1)
    adapter = ModelAdapter.of(STEP.model())
    recompute_layers(adapter.layers)
    for number, layer in enumerate(adapter.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    parameters = ReplicatedParameters(adapter, SingleRankTransport())
    result = run_step(bind_plan(plan, SingleRankTransport()), parameters, STEP.rows(), STEP.valid)
    assert (len(calls), kernel.calls["forward"]) == (linear, attention)
    if checkpoint == "selective":
        assert calls == [0, 1, 0]
    found = Found(result.loss, result.gradient_norm, dict(parameters.full_gradients()))
    assert found.worst(STEP.alone()) < 1e-12


def test_a_context_that_does_not_know_its_layers_is_refused():
    work = StageMicroBatch((Group((0,), 1, 1, SPANS),), Checkpoint.FULL, lighter_layers=1)
    adapter = ModelAdapter.of(STEP.model())
    recompute_layers(adapter.layers)
    context = bind(work, SingleRankTransport())
    with pytest.raises(SeqloomError, match=r"the last 1 layers .*; bind it with layers=stage.layers"):
        ModelWithLoss(adapter)(*STEP.rows()(context), context)


def overlapping(method):
    """Two nodes of two: a document over both, routed through ranks outside; one in a node; one of rank 0."""
    return [
        Group((0, 2), 1, 2, SPANS[:1], method, Route((1, 3), 2)),
        Group((0, 1), 2, 1, SPANS[1:2]),
        Group((0,), 1, 1, SPANS[2:]),
    ]


@pytest.mark.parametrize("method", Method)
def test_selective_repeats_nothing_of_several_groups_and_of_relays(monkeypatch, method):
    kernel = CountingKernel()
    monkeypatch.setattr("seqloom.attention.plan._default_kernel", lambda device: kernel)
    kinds = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)
    found, forwards = [], []
    for kind in kinds:
        kernel.calls.clear()
        found.append(counts_of(overlapping(method), kind, 2, Sharding.FULL))
        forwards.append(kernel.calls["forward"])
    assert forwards[0] == forwards[1] and forwards[2] == 2 * forwards[0]
    for rank in range(4):  # those that only pass on repeat it if the others do
        plain, selective, full = (of_kind[rank][0]["exchange"] for of_kind in found)
        assert full > selective == plain > 0


@pytest.mark.parametrize("method", ["ring", "gather"])
def test_selective_sends_no_key_or_value_twice(method):
    nothing, full = (counts(kind, 1, 4, method) for kind in (Checkpoint.NONE, Checkpoint.FULL))
    assert counts(Checkpoint.SELECTIVE, 1, 4, method) == nothing
    again = 3 if method == "ring" else 1  # a forward's exchanges
    assert full[0]["exchange"] == nothing[0]["exchange"] + LAYERS * again and full[1] > nothing[1]


@pytest.mark.parametrize(("ulysses", "ring"), [(4, 1), (2, 2)])
def test_selective_repeats_one_exchange_of_heads(ulysses, ring):
    nothing, full = (counts(kind, ulysses, ring) for kind in (Checkpoint.NONE, Checkpoint.FULL))
    assert nothing[0]["all_to_all"] == 4 * LAYERS and full[0]["all_to_all"] == 6 * LAYERS
    selective = counts(Checkpoint.SELECTIVE, ulysses, ring)
    assert selective[0] == nothing[0] | {"all_to_all": 5 * LAYERS}  # as plans are priced


@pytest.mark.parametrize(
    ("checkpoint", "forwards"), [(Checkpoint.NONE, 1), (Checkpoint.SELECTIVE, 1), (Checkpoint.FULL, 2)]
)
def test_selective_runs_no_kernel_twice(monkeypatch, checkpoint, forwards):
    kernel = CountingKernel()
    monkeypatch.setattr("seqloom.attention.plan._default_kernel", lambda device: kernel)
    counts(checkpoint, 1, 1)
    assert kernel.calls == {"forward": forwards * LAYERS, "backward": LAYERS}


@pytest.mark.parametrize(("ulysses", "outputs"), [(1, 1), (4, 2)])
def test_selective_keeps_attention_outputs_and_lse_and_nothing_else(monkeypatch, ulysses, outputs):
    """With Ulysses the output is kept as the kernel left it and as it came back."""
    stores = []

    class Watched(module.SavedAttention):
        def __init__(self, hooks):
            super().__init__(hooks)
            stores.append(self)

    monkeypatch.setattr(module, "SavedAttention", Watched)
    counts(Checkpoint.SELECTIVE, ulysses, 1)
    tensors = [each for store in stores for out, _, groups in store._records for each in (out, *chain(*groups))]
    storages = [each.untyped_storage() for each in tensors]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    tokens, heads, dim, size = 52, 4, 4, 8
    assert held == LAYERS * tokens * (outputs * heads * dim + heads) * size


@pytest.mark.parametrize(("ulysses", "ring", "outputs"), [(1, 1, 1), (1, 4, 1), (4, 1, 2), (2, 2, 2)])
def test_without_checkpointing_ulysses_keeps_the_attention_output_twice(ulysses, ring, outputs):
    """What backward of attention and of the projection after it hold, beside what the cost model counts for it."""
    spec = tiny_spec(kv_heads=4)
    plan = one_stage_plan([[Group(tuple(range(ulysses * ring)), ulysses, ring, SPANS)]], ranks=4)

    def body(transport):
        context = bind_plan(plan, transport).rounds[0].context
        if context is None:
            return {}
        q, k, v = (torch.randn(context.tokens, 4, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
        project, held = torch.nn.Linear(16, 16, bias=False, dtype=torch.float64), {}

        def keep(tensor):
            held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            project(attention(q, k, v, context).flatten(1)).sum()
        held.pop(project.weight.untyped_storage().data_ptr())
        return held

    held = sum(sum(each.values()) for each in run_ranks(4, body, strict=True))
    query, kv, heads = 16, 16, 4
    assert held == 8 * 52 * ((1 + outputs) * query + 2 * kv + heads)
    counted = layer_values(spec)[0].saved - 4 * spec.hidden - 3 * spec.ffn
    assert counted == 3 * query + 2 * kv, "one number for all groups, so that of Ulysses"


def test_what_was_kept_is_given_back_without_the_garbage_collector(monkeypatch):
    stores = []

    class Watched(module.SavedAttention):
        def __init__(self, hooks):
            super().__init__(hooks)
            stores.append(weakref.ref(self))

    monkeypatch.setattr(module, "SavedAttention", Watched)
    gc.disable()
    try:
        counts(Checkpoint.SELECTIVE, 2, 2)
        assert len(stores) == 4 * LAYERS and all(store() is None for store in stores)
    finally:
        gc.enable()


def test_names_and_classes_stay():
    model, other = STEP.model(), STEP.model()
    recompute_layers(model.model.layers)
    assert list(model.state_dict()) == list(other.state_dict())
    assert isinstance(model.model.layers[0], type(other.model.layers[0]))
    assert type(model.model.layers[0]).__name__ == "Layer" and isinstance(model, Transformer)


def test_nothing_is_recomputed_without_gradients():
    plan = one_stage_plan([[Group((0,), 1, 1, SPANS)]], ranks=1, checkpoint=Checkpoint.FULL)

    def body(transport):
        adapter = ModelAdapter.of(STEP.model())
        recompute_layers(adapter.layers)
        context = bind_plan(plan, transport).rounds[0].context
        with torch.no_grad():
            return ModelWithLoss(adapter)(*STEP.rows()(context), context).item() / STEP.valid

    assert run_ranks(1, body)[0] == pytest.approx(STEP.alone().loss, rel=1e-12)


def test_backward_twice_through_a_kept_graph_recomputes_twice():
    plan = one_stage_plan([[Group((0,), 1, 1, SPANS)]], ranks=1, checkpoint=Checkpoint.SELECTIVE)

    def body(transport):
        adapter = ModelAdapter.of(STEP.model())
        recompute_layers(adapter.layers)
        context = bind_plan(plan, transport).rounds[0].context
        loss = ModelWithLoss(adapter)(*STEP.rows()(context), context)
        loss.backward(retain_graph=True)
        once = [parameter.grad.clone() for parameter in adapter.module.parameters()]
        loss.backward()
        return [(2 * a, p.grad) for a, p in zip(once, adapter.module.parameters(), strict=True)]

    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in run_ranks(1, body)[0])


def test_a_layer_without_context_and_a_second_wrapping_are_refused():
    model = STEP.model()
    recompute_layers(model.model.layers)
    with pytest.raises(SeqloomError, match="0 contexts"):
        model.model.layers[0](torch.zeros(3, 16, dtype=torch.float64), None, None)
    with pytest.raises(SeqloomError, match="Layer recomputes already"):
        recompute_layers(model.model.layers)
