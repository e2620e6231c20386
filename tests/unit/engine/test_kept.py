"""What is kept of a unit: enough to go backward, and no more."""

import gc
import weakref

import pytest
import torch
from torch import nn

from seqloom.engine import microbatch as module
from seqloom.engine.microbatch import MicrobatchState, Offload

torch.manual_seed(0)
LAYER = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
GIVEN = torch.randn(5, 6, dtype=torch.float64)
SEED = torch.randn(5, 6, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _everything_is_worth_a_copy(monkeypatch):
    monkeypatch.setattr(module, "LEAST", 1)


def gradients(kept):
    """Go backward from what was kept; return the gradients of the input and of the weights."""
    LAYER.zero_grad(set_to_none=True)
    torch.autograd.backward(kept.edge(), SEED)
    return [kept.gradient(), *(parameter.grad for parameter in LAYER.parameters())]


def wanted():
    given = GIVEN.clone().requires_grad_()
    return torch.autograd.grad(LAYER(given), [given, *LAYER.parameters()], SEED)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("offloads", [False, True])
def test_gradients_are_those_of_the_plain_stage(again, offloads):
    offload = Offload(LAYER.parameters()) if offloads else None
    kept = MicrobatchState(LAYER, GIVEN.clone(), again=again, offload=offload)
    output = kept.forward()
    assert torch.equal(output, LAYER(GIVEN)) and not output.requires_grad
    for found, each in zip(gradients(kept), wanted(), strict=True):
        assert torch.equal(found, each)


@pytest.mark.parametrize(("again", "left"), [(False, ["given", "inner"]), (True, ["given"])])
def test_the_output_is_not_kept_and_a_recomputed_stage_keeps_only_its_input(again, left):
    alive = {}

    def run(x):
        inner = (x * 2).tanh()  # saved by tanh
        output = inner @ torch.eye(6, dtype=x.dtype) + 1
        for name, tensor in (("given", x), ("inner", inner), ("output", output)):
            alive[name] = weakref.ref(tensor.untyped_storage())
        return output

    kept = MicrobatchState(run, GIVEN.clone(), again=again, offload=None)
    kept.forward()
    gc.collect()
    assert [name for name, each in alive.items() if each() is not None] == left
    assert kept.edge() is not None


def test_what_is_saved_goes_and_comes_back_once_and_parameters_stay(monkeypatch):
    moved = []
    monkeypatch.setattr(Offload, "_to_host", lambda self, given: [moved.append(each) or each.clone() for each in given])
    offload = Offload(LAYER.parameters())
    kept = MicrobatchState(LAYER, GIVEN.clone(), again=False, offload=offload)
    kept.forward()
    weights = {parameter.data_ptr() for parameter in LAYER.parameters()}
    assert len(moved) == 2, "the input and the output of tanh, which two layers save"
    assert not weights & {each.data_ptr() for each in moved}
    for found, each in zip(gradients(kept), wanted(), strict=True):
        assert torch.equal(found, each)


def test_small_tensors_are_not_worth_it(monkeypatch):
    monkeypatch.setattr(module, "LEAST", 10**6)
    offload = Offload(())
    with offload.saving():
        LAYER(GIVEN).sum()
    assert not offload._tensors


def test_nothing_to_learn_has_no_edge():
    kept = MicrobatchState(lambda ids: ids.double(), torch.arange(3), again=False, offload=None)
    kept.forward()
    assert kept.edge() is None


def test_an_input_without_a_gradient_gets_zeros():
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    kept = MicrobatchState(lambda x: weight * torch.ones(2), GIVEN.clone(), again=False, offload=None)
    kept.forward()
    torch.autograd.backward(kept.edge(), torch.ones(2, dtype=torch.float64))
    assert torch.equal(kept.gradient(), torch.zeros_like(GIVEN))
