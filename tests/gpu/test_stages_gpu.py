"""Parameters of stages and split backwards on a GPU: bf16 copies that come and go, gradients in float32."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from seqloom.dist import Communicators, SingleRankTransport, TorchTransport, bind_single_rank
from seqloom.dist.transport import P2PTensor
from seqloom.models import defer_weight_gradients
from seqloom.models.adapter import ModelAdapter, ModelWithLoss
from seqloom.params import PipelineFSDP, Placement
from seqloom.plan import GroupFamily, Sharding, Stage
from support.held_memory import waiting_bytes
from support.steps import Step, tiny_spec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SPEC = tiny_spec(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, ffn=512, vocabulary=1000, tied=True)
STEP = Step((300, 120, 50), SPEC, dtype=torch.float32)
DEVICE = "cuda"


@pytest.fixture
def job():
    """A job of this process alone."""
    backend = "nccl" if DEVICE == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def network_of(dtype, device=DEVICE):
    """The model, and rows of the step, on a device."""
    model, context = STEP.model().to(device, dtype), bind_single_rank(STEP.lengths, device=device)
    ids, labels = (torch.cat(each).to(device) for each in STEP.documents())
    return ModelAdapter.of(model), context, ids, labels


def gradients_in(dtype, device=DEVICE):
    """What one process finds in a dtype."""
    adapter, context, ids, labels = network_of(dtype, device)
    (ModelWithLoss(adapter)(ids, labels, context) / STEP.valid).backward()
    return {name: each.grad.double().cpu() for name, each in adapter.module.named_parameters()}


def furthest(found, wanted):
    least = 1e-3 * max(float(each.norm()) for each in wanted.values())
    return max(float((found[name] - each).norm()) / max(float(each.norm()), least) for name, each in wanted.items())


def bytes_now():
    return torch.cuda.memory_allocated() if DEVICE == "cuda" else 0


def test_two_stages_on_one_gpu(job):
    adapter, context, ids, labels = network_of(torch.float32)
    adapter = replace(adapter, weight_gradients=defer_weight_gradients(adapter.layers))
    whole = sum(each.numel() for each in adapter.module.parameters())
    placement = Placement((Stage((0,), (0, 1)), Stage((0,), (1, 4))), Sharding.FULL, 1)
    parameters = PipelineFSDP(adapter, SingleRankTransport(), placement, param_dtype=torch.bfloat16)
    first, last = placement.layer_ranges(0)
    before = bytes_now()
    for part in (first, last):
        parameters.unshard(part)
    assert DEVICE == "cpu" or bytes_now() - before >= 2 * whole
    given = parameters.forward(first, ids, None, context)
    middle = given.detach().requires_grad_()
    loss = parameters.forward(last, middle, labels, context)
    with parameters.weight_gradients.deferred(1):
        parameters.backward(loss, torch.full_like(loss, 1 / STEP.valid), reduce=False)
    with parameters.weight_gradients.deferred(0):
        parameters.backward(given, middle.grad, reduce=False)
    assert waiting_bytes(parameters.weight_gradients) > 0
    del given, middle, loss
    for number, part in enumerate((first, last)):
        parameters.weight_gradients.run(number)
        parameters.reduce(part)
        parameters.reshard(part)
    parameters.finish_gradients()
    found = {name: each.double().cpu() for name, each in parameters.full_gradients()}
    assert {each.grad.dtype for each in parameters.master_weights().values()} == {torch.float32}
    assert sum(each.untyped_storage().nbytes() for each in adapter.module.parameters()) == 0
    exact = gradients_in(torch.float64, "cpu")
    assert furthest(found, exact) < 2 * furthest(gradients_in(torch.bfloat16), exact)


def test_rows_that_stay_on_a_rank_are_there_when_another_stream_has_waited(job):
    """A message between stages starts on a stream of its own, and no handle of NCCL's covers a copy on this rank."""
    transport = TorchTransport(Communicators(GroupFamily(1, 1)))
    source, target = torch.ones(1_000, device=DEVICE), torch.zeros(1_000, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second
        exchange = transport.exchange([P2PTensor(0, source)], [P2PTensor(0, target)])
    assert not exchange.done()
    exchange.wait()
    assert torch.equal(target, source) and exchange.done()
