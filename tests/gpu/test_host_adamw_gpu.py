"""AdamW with state in pinned host memory, on a GPU: both ways to update, and parameters of a model trained so."""

import pytest
import torch
from torch import nn

from seqloom.params import host_adamw
from seqloom.params.host_masters import device_shard, host_copy, host_master
from seqloom.train.config import Optimiser
from seqloom.train.optim import make_optimiser, set_learning_rate, state_by_name

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SHAPES = {"embedding": (1_000, 64), "matrix": (513, 77), "norm": (64,), "nothing": (0, 8)}
SETTINGS = Optimiser(lr=0.02, weight_decay=0.3)


def values_of(seed, device="cuda"):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(device) for name, shape in SHAPES.items()}


def trained(steps=4, *, device="cuda"):
    """Plain AdamW in float32."""
    parameters = {name: nn.Parameter(each) for name, each in values_of(0, device).items()}
    optimiser = make_optimiser(parameters, SETTINGS)
    for number in range(1, 1 + steps):
        set_learning_rate(optimiser, 0.02 / number)
        for name, gradient in values_of(number, device).items():
            parameters[name].grad = gradient
        optimiser.step()
    return parameters, state_by_name(optimiser)


def trained_in_host_memory(update_on_host, dtype, steps=4):
    shards, masters = {}, {}
    for name, each in values_of(0).items():
        shards[name] = device_shard(each.to(dtype), requires_grad=True, master_dtype=torch.float32)
        masters[name] = host_master(host_copy(each), shards[name])
    optimiser = make_optimiser(masters, SETTINGS, shards=shards, update_on_host=update_on_host)
    for number in range(1, 1 + steps):
        set_learning_rate(optimiser, 0.02 / number)
        for name, gradient in values_of(number).items():
            shards[name].grad = gradient
        optimiser.step()
    torch.cuda.synchronize()
    return masters, shards, state_by_name(optimiser)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("part", [256, 1 << 20])
@pytest.mark.parametrize("update_on_host", [False, True])
def test_parameters_are_those_of_adamw(monkeypatch, update_on_host, part, dtype):
    """On the device bit by bit those of the GPU, by the CPUs those of a CPU."""
    monkeypatch.setattr(host_adamw, "PART", part)
    masters, shards, state = trained_in_host_memory(update_on_host, dtype)
    wanted, wanted_state = trained(device="cpu" if update_on_host else "cuda")
    for name, master in masters.items():
        assert master.device.type == "cpu" and shards[name].device.type == "cuda"
        assert torch.equal(master, wanted[name].cpu())
        assert torch.equal(shards[name].cpu(), master.to(dtype))
        for key, tensor in wanted_state[name].items():
            assert torch.equal(state[name][key].cpu(), tensor.cpu()), (name, key)


def test_state_is_pinned_and_exactly_as_large_as_it_is():
    masters, _, state = trained_in_host_memory(False, torch.bfloat16, steps=1)
    for name in ("embedding", "matrix"):
        for tensor in (masters[name], state[name]["exp_avg"], state[name]["exp_avg_sq"]):
            assert tensor.is_pinned() and tensor.untyped_storage().nbytes() == tensor.nbytes


def test_the_gpu_holds_copies_and_gradients_only():
    elements = 1 << 24
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    shard = device_shard(
        torch.zeros(elements, dtype=torch.bfloat16, device="cuda"), requires_grad=True, master_dtype=torch.float32
    )
    master = host_master(host_copy(torch.zeros(elements, device="cuda")), shard)
    optimiser = make_optimiser({"x": master}, SETTINGS, shards={"x": shard})
    shard.grad = torch.ones(elements, device="cuda")
    optimiser.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before <= (2 + 4) * elements + (1 << 20)
