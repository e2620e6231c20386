"""What a microbatch keeps: enough to go backward, and no more."""

import gc
import weakref

import pytest
import torch
from torch import nn

from seqloom.engine.executor import MicrobatchState
from seqloom.models.offload import HostCopies, Offload
from support.offloads import copy_on_cpu

torch.manual_seed(0)
LAYER = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
INPUTS = torch.randn(5, 6, dtype=torch.float64)
SEED = torch.randn(5, 6, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _copied(monkeypatch):
    copy_on_cpu(monkeypatch)


def gradients(state):
    """Go backward from what was state; return the gradients of the input and of the weights."""
    LAYER.zero_grad(set_to_none=True)
    torch.autograd.backward(state.backward_edge(), SEED)
    return [state.input_gradient(), *(parameter.grad for parameter in LAYER.parameters())]


def wanted():
    inputs = INPUTS.clone().requires_grad_()
    return torch.autograd.grad(LAYER(inputs), [inputs, *LAYER.parameters()], SEED)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_gradients_are_those_of_the_plain_stage(recompute, offloads):
    offload = Offload(HostCopies(torch.device("cpu"))) if offloads else None
    state = MicrobatchState(LAYER, INPUTS.clone(), recompute=recompute, offload=offload)
    output = state.forward()
    assert torch.equal(output, LAYER(INPUTS)) and not output.requires_grad
    for found, each in zip(gradients(state), wanted(), strict=True):
        assert torch.equal(found, each)


@pytest.mark.parametrize(("recompute", "left"), [(False, ["inputs", "inner"]), (True, ["inputs"])])
def test_the_output_is_not_kept_and_a_recomputed_stage_keeps_only_its_input(recompute, left):
    alive = {}

    def run(x):
        inner = (x * 2).tanh()  # saved by tanh
        output = inner @ torch.eye(6, dtype=x.dtype) + 1
        for name, tensor in (("inputs", x), ("inner", inner), ("output", output)):
            alive[name] = weakref.ref(tensor.untyped_storage())
        return output

    state = MicrobatchState(run, INPUTS.clone(), recompute=recompute, offload=None)
    state.forward()
    gc.collect()
    assert [name for name, each in alive.items() if each() is not None] == left
    assert state.backward_edge() is not None


def test_the_input_of_a_recomputed_stage_goes_and_comes_back():
    offload = Offload(HostCopies(torch.device("cpu")))
    inputs = INPUTS.clone()
    state = MicrobatchState(LAYER, inputs, recompute=True, offload=offload)
    state.forward()
    there = weakref.ref(inputs)
    del inputs
    HostCopies.release(offload._copies)
    assert there() is None
    for found, each in zip(gradients(state), wanted(), strict=True):
        assert torch.equal(found, each)


def test_nothing_to_learn_has_no_edge():
    state = MicrobatchState(lambda ids: ids.double(), torch.arange(3), recompute=False, offload=None)
    state.forward()
    assert state.backward_edge() is None


def test_an_input_without_a_gradient_gets_zeros():
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    state = MicrobatchState(lambda x: weight * torch.ones(2), INPUTS.clone(), recompute=False, offload=None)
    state.forward()
    torch.autograd.backward(state.backward_edge(), torch.ones(2, dtype=torch.float64))
    assert torch.equal(state.input_gradient(), torch.zeros_like(INPUTS))
