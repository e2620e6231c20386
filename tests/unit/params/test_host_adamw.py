"""AdamW over master weights in host memory, where the device is a CPU: the same numbers, whatever the parts."""

import pytest
import torch
from torch import nn

from seqloom.params import host_adamw
from seqloom.params.host_masters import copy_to_shards, device_shard, host_copy, host_master
from seqloom.train.config import Optimiser
from seqloom.train.optim import make_optimiser, set_learning_rate, state_by_name

torch.set_num_threads(1)
SHAPES = {"embedding": (100, 7), "matrix": (51, 13), "norm": (64,), "nothing": (0, 8)}
SETTINGS = Optimiser(lr=0.02, weight_decay=0.3)


def values_of(seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}


def step(optimiser, parameters, number, dtype):
    set_learning_rate(optimiser, 0.02 / number)
    for name, gradient in values_of(number, dtype).items():
        parameters[name].grad = gradient
    optimiser.step()


def offloaded(dtype, compute, seed=0):
    shards, masters = {}, {}
    for name, each in values_of(seed, dtype).items():
        shards[name] = device_shard(each.to(compute), requires_grad=True, master_dtype=dtype)
        masters[name] = host_master(host_copy(each), shards[name])
    return masters, shards, make_optimiser(masters, SETTINGS, shards=shards)


@pytest.mark.parametrize("part", [64, 1 << 20])
@pytest.mark.parametrize(
    ("dtype", "compute"),
    [(torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float64, torch.float64)],
)
def test_parameters_and_state_are_those_of_adamw(monkeypatch, dtype, compute, part):
    monkeypatch.setattr(host_adamw, "PART", part)
    masters, shards, optimiser = offloaded(dtype, compute)
    plain = {name: nn.Parameter(each) for name, each in values_of(0, dtype).items()}
    wanted = make_optimiser(plain, SETTINGS)
    for number in (1, 2, 3):
        step(optimiser, shards, number, dtype)
        step(wanted, plain, number, dtype)
    state, wanted_state = state_by_name(optimiser), state_by_name(wanted)
    for name, parameter in plain.items():
        assert torch.equal(masters[name], parameter) and torch.equal(shards[name], parameter.to(compute))
        assert all(torch.equal(state[name][key], each) for key, each in wanted_state[name].items())


def test_a_parameter_without_a_gradient_stays_as_it_is():
    masters, shards, optimiser = offloaded(torch.float32, torch.bfloat16)
    before = masters["norm"].detach().clone()
    shards["matrix"].grad = torch.ones(SHAPES["matrix"])
    optimiser.step()
    assert torch.equal(masters["norm"], before) and float(optimiser.state[masters["norm"]]["step"]) == 0
    assert float(optimiser.state[masters["matrix"]]["step"]) == 1


def test_loaded_masters_reach_the_device():
    masters, shards, _ = offloaded(torch.float32, torch.bfloat16)
    with torch.no_grad():
        for name, value in values_of(9, torch.float32).items():
            masters[name].copy_(value)
    copy_to_shards(masters, shards)
    assert all(torch.equal(shards[name], master.bfloat16()) for name, master in masters.items())
