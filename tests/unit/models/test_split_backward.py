"""Weights' gradients that wait: the same as autograd's, whatever is recomputed, shared, frozen or in flight."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from seqloom.dist import SingleRankTransport
from seqloom.engine.rank_actions import bind_plan
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.models import TransformerOptions
from seqloom.models.adapter import ModelWithLoss
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.split_backward import defer_weight_gradients
from seqloom.plan import Checkpoint, Group
from support.held_memory import waiting_bytes, waiting_units
from support.steps import Step, one_stage_plan, tiny_spec

torch.set_num_threads(1)
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


class Mixed(nn.Module):
    """Linear layers with and without bias, one called twice, one frozen, one of another class, and a norm."""

    def __init__(self, dtype):
        super().__init__()
        self.first = nn.Linear(6, 8, dtype=dtype)
        self.twice = nn.Linear(8, 8, bias=False, dtype=dtype)
        self.norm = nn.LayerNorm(8, dtype=dtype)
        self.frozen = nn.Linear(8, 8, dtype=dtype).requires_grad_(False)
        self.only_bias = nn.Linear(8, 8, dtype=dtype)
        self.only_bias.weight.requires_grad_(False)
        self.other = nn.modules.linear.NonDynamicallyQuantizableLinear(8, 3, dtype=dtype)

    def forward(self, x):
        x = self.first(x)
        x = x + self.twice(torch.tanh(self.twice(x)))
        return self.other(self.only_bias(self.frozen(self.norm(x))))


def pair(dtype=torch.float64):
    torch.manual_seed(0)
    plain = Mixed(dtype)
    split = copy.deepcopy(plain)
    return plain, split, defer_weight_gradients([split])


def same(plain, split, close=torch.equal):
    for (name, wanted), (again, found) in zip(plain.named_parameters(), split.named_parameters(), strict=True):
        assert name == again and (wanted.grad is None) == (found.grad is None), name
        assert wanted.grad is None or close(found.grad, wanted.grad), name


@pytest.mark.parametrize("shape", [(5, 6), (1, 5, 6), (2, 3, 6), (0, 6), (6,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_at_once_it_is_plain_torch_bit_by_bit(dtype, shape):
    plain, split, weights = pair(dtype)
    given = torch.randn(shape, dtype=dtype)
    inputs = [given.clone().requires_grad_() for _ in range(2)]
    for model, x in zip((plain, split), inputs, strict=True):
        for _ in range(2):
            model(x).square().sum().backward()
    assert not waiting_units(weights)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    same(plain, split)


@pytest.mark.parametrize("wants", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_units_in_flight_get_their_weights_gradients_in_any_order(dtype, wants):
    plain, split, weights = pair(dtype)
    units = [torch.randn(rows, 6, dtype=dtype) for rows in (5, 1, 7)]
    ours = [unit.clone().requires_grad_(wants) for unit in units]
    outputs = [split(unit) for unit in ours]
    for number in (2, 0, 1):
        with weights.deferred(number):
            outputs[number].square().sum().backward()
        assert split.first.weight.grad is None and split.norm.weight.grad is not None
    assert waiting_units(weights) == (2, 0, 1) and waiting_bytes(weights) > 0
    for number in (0, 2, 1):
        weights.run(number)
    assert not waiting_units(weights) and not waiting_bytes(weights)
    theirs = [unit.clone().requires_grad_(wants) for unit in units]
    for number in (2, 0, 1):
        plain(theirs[number]).square().sum().backward()
    # Summed in another order where W runs in another order: equal but for rounding.
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.02}[dtype]
    same(plain, split, lambda found, wanted: (found - wanted).norm() <= tolerance * wanted.norm())
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.grad is None and other.grad is None) or torch.equal(mine.grad, other.grad)


@pytest.mark.parametrize("kind", Checkpoint)
def test_layers_that_recompute(kind):
    step = Step((12, 5), tiny_spec(), TransformerOptions(qkv_bias=True, qk_norm=True), dtype=torch.float32)
    group = Group((0,), 1, 1, tuple(Span(k, 0, n) for k, n in enumerate(step.lengths)))
    context = bind_plan(one_stage_plan([[group]], ranks=1, checkpoint=kind), SingleRankTransport()).rounds[0].context
    adapters = [step.model_adapter() for _ in range(2)]
    weights = defer_weight_gradients(adapters[1].layers)
    losses = []
    for adapter in adapters:
        recompute_layers(adapter.layers)
        losses.append(ModelWithLoss(adapter)(*step.rows()(context), context))
    losses[0].backward()
    with weights.deferred(0):
        losses[1].backward()
    layer = adapters[1].layers[0]
    assert layer.self_attn.q_proj.weight.grad is layer.self_attn.q_proj.bias.grad is None
    weights.run(0)
    same(adapters[0].module, adapters[1].module)


def test_a_whole_stage_that_recomputes():
    plain, split, weights = pair()
    given = torch.randn(4, 6, dtype=torch.float64)
    plain(given).square().sum().backward()
    loss = checkpoint(lambda x: split(x).square().sum(), given, use_reentrant=False)
    with weights.deferred("unit"):
        loss.backward()
    weights.run("unit")
    same(plain, split)


def test_gradients_may_add_up_in_a_wider_dtype():
    """Parameters in bf16 with gradients in float32: W adds to these, as autograd does."""
    _, split, weights = pair(torch.bfloat16)
    units = [torch.randn(3, 6, dtype=torch.bfloat16) for _ in range(3)]
    for parameter in split.parameters():
        parameter.grad_dtype = torch.float32
    found = []
    for defer in (False, True):
        for number, unit in enumerate(units):
            if defer:
                with weights.deferred(number):
                    split(unit).square().sum().backward()
                weights.run(number)
            else:
                split(unit).square().sum().backward()
        found.append([parameter.grad for parameter in split.parameters() if parameter.requires_grad])
        split.zero_grad(set_to_none=True)
    assert {gradient.dtype for gradient in found[0]} == {torch.float32}
    assert all(map(torch.equal, *found))


def test_what_waited_is_freed():
    _, split, weights = pair()
    given = torch.randn(4, 6, dtype=torch.float64)
    with weights.deferred(0):
        split(given).sum().backward()
    alive = weakref.ref(given)
    del given
    gc.collect()
    assert alive() is not None
    weights.run(0)
    gc.collect()
    assert alive() is None


def test_wrong_orders_are_refused():
    _, split, weights = pair()
    with pytest.raises(SeqloomError, match="split already; call defer_weight_gradients once"):
        defer_weight_gradients([split])
    with pytest.raises(SeqloomError, match="no weight gradients of 3 wait"):
        weights.run(3)
    with weights.deferred(0), pytest.raises(SeqloomError, match="one after the other"), weights.deferred(1):
        pass
    with pytest.raises(SeqloomError, match="gradients of 0 begin"), weights.deferred(0):
        pass
    weights.clear()
    assert not waiting_units(weights)
