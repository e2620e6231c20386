"""Compiled layers: the same numbers, one graph for all lengths, nothing computed or kept that was not before."""

import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from seqloom.dist import SingleRankTransport, bind_single_rank
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import TransformerOptions
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.plan import Checkpoint, Group
from support.attention_cases import CountingKernel
from support.steps import Step, one_stage_plan, tiny_spec

pytestmark = pytest.mark.filterwarnings("ignore::Warning:torch")  # its compiler does what it warns others of
torch.set_num_threads(1)
STEP = Step((20, 9, 1, 17, 3), tiny_spec())
LAYERS = 2
KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)
TRACED = "aot_eager"  # what the compiler traces, run as it stands


@pytest.fixture
def fresh():
    """Forget what was compiled; others share it."""
    torch._dynamo.reset()
    counters.clear()


def alone_plan(step, checkpoint):
    """Documents one round each, but for the last two, which are two groups of the same rank."""
    spans = [Span(document, 0, tokens) for document, tokens in enumerate(step.lengths)]
    rounds = [[Group((0,), 1, 1, (span,))] for span in spans[:-2]]
    rounds.append([Group((0,), 1, 1, (span,)) for span in spans[-2:]])
    return one_stage_plan(rounds, ranks=1, checkpoint=checkpoint)


def compiled(step):
    adapter = ModelAdapter.of(step.model())
    compile_layers(adapter.layers, backend=TRACED)
    recompute_layers(adapter.layers)
    return adapter


def once(adapter, step, context):
    """Forward and backward; return the loss."""
    loss = ModelWithLoss(adapter)(*step.rows()(context), context)
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("kinds", [KINDS[1:2], pytest.param(KINDS, marks=pytest.mark.slow)])
def test_loss_and_gradients_are_those_of_plain_layers(fresh, kinds):
    """Two windows, so two graphs, each also for one token."""
    step = replace(STEP, spec=tiny_spec(windows=(None, 6)), options=TransformerOptions(qk_norm=True, qkv_bias=True))
    wanted = step.alone()
    for checkpoint in kinds:
        found = step.spread(alone_plan(step, checkpoint), SingleRankTransport(), backend=TRACED)
        assert found.worst(wanted) < 1e-9, checkpoint
    assert counters["stats"]["unique_graphs"] == 4 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's compiler for CPUs needs g++")
def test_machine_code_gives_the_same_numbers(fresh):
    step = replace(STEP, lengths=(20, 9, 17, 3))
    found = step.spread(alone_plan(step, KINDS), SingleRankTransport(), backend="inductor")
    assert found.worst(step.alone()) < 1e-9
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.slow  # test_compiled_layers.py says it of transformers
def test_fresh_lengths_compile_nothing(fresh):
    """Also not a length that another axis has by chance (16, 4), and none and one only once."""
    adapter = compiled(STEP)
    graphs = []
    for lengths in ((16,), (5, 6), (4,), (100, 3), (), (8, 9), (), (1,), (33,), (1,), (2,)):
        context = bind_single_rank(lengths)
        loss = ModelWithLoss(adapter)(torch.arange(context.tokens) % 23, torch.arange(context.tokens) % 7, context)
        loss.backward()
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert not counters["graph_break"]


@pytest.mark.parametrize(("checkpoint", "forwards"), list(zip(KINDS, (1, 1, 2), strict=True)))
def test_no_kernel_runs_more_often_than_without(monkeypatch, checkpoint, forwards):
    kernel = CountingKernel()
    monkeypatch.setattr("seqloom.attention.plan._default_kernel", lambda device: kernel)
    step = replace(STEP, lengths=(20, 9))
    plan = one_stage_plan([[Group((0,), 1, 1, (Span(0, 0, 20), Span(1, 0, 9)))]], ranks=1, checkpoint=checkpoint)
    once(compiled(step), step, bind_plan(plan, SingleRankTransport()).rounds[0].context)
    assert kernel.calls == {"forward": forwards * LAYERS, "backward": LAYERS}


@pytest.mark.parametrize("checkpoint", KINDS)
def test_nothing_is_left_behind_with_or_without_a_backward(checkpoint, live_handles):
    step = replace(STEP, lengths=(20, 9))
    plan = one_stage_plan([[Group((0,), 1, 1, (Span(0, 0, 20), Span(1, 0, 9)))]], ranks=1, checkpoint=checkpoint)
    adapter, context = compiled(step), bind_plan(plan, SingleRankTransport()).rounds[0].context
    once(adapter, step, context)
    loss = ModelWithLoss(adapter)(*step.rows()(context), context)
    kept = len(live_handles)
    assert kept == (LAYERS if checkpoint == Checkpoint.NONE else 0)  # those that recompute have forgotten them
    del loss
    assert not live_handles
    with torch.no_grad():
        ModelWithLoss(adapter)(*step.rows()(context), context)
    assert not live_handles


@pytest.mark.slow
def test_names_and_classes_stay_and_the_order_does_not_matter(fresh):
    model, other = STEP.model(), STEP.model()
    layers, names = [*model.model.layers, *other.model.layers], list(model.state_dict())
    classes = [type(layer) for layer in layers]
    compile_layers(model.model.layers, backend=TRACED)
    recompute_layers(layers)
    compile_layers(other.model.layers, backend=TRACED)
    assert list(model.state_dict()) == list(other.state_dict()) == names and [type(each) for each in layers] == classes
    context = bind_single_rank((9, 4))
    losses = [once(ModelAdapter.of(each), replace(STEP, lengths=(9, 4)), context) for each in (model, other)]
    assert losses[0] == losses[1] and counters["stats"]["unique_graphs"] == 1
    with pytest.raises(SeqloomError, match="Layer is compiled already; call compile_layers once"):
        compile_layers(other.model.layers)
