"""Models of transformers over a document in pieces: gradients of plain transformers on the whole document."""

import pytest
import torch

from seqloom.attention.context_parallel import KVCache
from seqloom.dist import SingleRankTransport, bind
from seqloom.integrations.transformers import attach, model_adapter
from seqloom.layout import Span
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.compile import compile_layers
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.plan import Checkpoint, Group, StageMicroBatch
from support.tiny_models import documents, gradients, one_by_one, targets, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore::Warning:torch")  # its compiler does what it warns others of
torch.set_num_threads(1)
PIECES = (Span(0, 0, 8), Span(0, 8, 11), Span(0, 11, 20))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "checkpoint"), [("llama", "none"), ("qwen2-windows", "selective")])
def test_a_layer_says_which_one_it_is(name, checkpoint, compiled):
    plain, model = tiny_model(name), tiny_model(name)
    own, kv_cache, losses = model_adapter(attach(model)), KVCache(), []
    if compiled:
        torch._dynamo.reset()
        compile_layers(own.layers, backend="aot_eager")
    recompute_layers(own.layers)
    (ids,) = documents([20])
    one_by_one(plain, [ids])
    for piece in PIECES:
        work = StageMicroBatch((Group((0,), 1, 1, (piece,)),), Checkpoint(checkpoint))
        context = bind(work, SingleRankTransport(), pieces={0: PIECES}, kv_cache=kv_cache)
        rows = slice(piece.start, piece.stop)
        losses.append(ModelWithLoss(own)(ids[rows], targets(ids)[rows], context))
    for loss in reversed(losses):
        loss.backward()
    kv_cache.check_empty()
    for wanted, found in zip(gradients(plain).values(), gradients(model).values(), strict=True):
        assert float((found - wanted).norm()) <= 1e-9 * float(wanted.norm())
