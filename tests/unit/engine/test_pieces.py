"""Layers over documents in pieces: the reference model, plain and compiled, gives what it gives on whole documents."""

import pytest
import torch
from torch._dynamo.utils import counters

from seqloom.attention.context_parallel import KVCache
from seqloom.dist import SingleRankTransport, bind, bind_single_rank
from seqloom.layout import Span
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.steps import Step, tiny_spec

pytestmark = pytest.mark.filterwarnings("ignore::Warning:torch")  # its compiler does what it warns others of
torch.set_num_threads(1)
STEP = Step((30, 4, 7), tiny_spec())
PIECES = (Span(0, 0, 9), Span(0, 9, 21), Span(0, 21, 30))
ROUNDS = ((PIECES[0],), (PIECES[1], Span(1, 0, 4)), (Span(2, 0, 7), PIECES[2]))


def whole():
    """Gradients of one call over whole documents."""
    adapter = STEP.model_adapter()
    context = bind_single_rank(STEP.lengths)
    ModelWithLoss(adapter)(*STEP.rows()(context), context).backward()
    return [parameter.grad for parameter in adapter.module.parameters()]


def in_pieces(adapter, checkpoint):
    """Gradients of three calls, forward in order and backward in reverse."""
    kv_cache, losses = KVCache(), []
    for spans in ROUNDS:
        work = StageMicroBatch((Group((0,), 1, 1, spans),), checkpoint)
        context = bind(work, SingleRankTransport(), pieces={0: PIECES}, kv_cache=kv_cache)
        losses.append(ModelWithLoss(adapter)(*STEP.rows()(context), context))
    for loss in reversed(losses):
        loss.backward()
    kv_cache.check_empty()
    found = [parameter.grad for parameter in adapter.module.parameters()]
    adapter.module.zero_grad()
    return found


def assert_same(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm()) <= 1e-9 * float(other.norm())


@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL])
def test_layers_keep_their_keys_apart(checkpoint):
    adapter = ModelAdapter.of(STEP.model())
    recompute_layers(adapter.layers)
    assert_same(in_pieces(adapter, checkpoint), whole())


@pytest.mark.slow
def test_one_compiled_graph_serves_all_layers(live_handles):
    torch._dynamo.reset()
    counters.clear()
    adapter = ModelAdapter.of(STEP.model())
    compile_layers(adapter.layers, backend="aot_eager")
    recompute_layers(adapter.layers)
    for checkpoint in (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL):
        assert_same(in_pieces(adapter, checkpoint), whole())
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert not live_handles
