"""Linear layers in float8: against a quantiser that looks for the nearest number, and against plain autograd."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seqloom.cost import CostModel
from seqloom.cost.compute import Compute
from seqloom.cost.profile import Profile
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.models.float8 import allow_in_graphs, float8_linear, quantise, use_float8
from seqloom.models.split_backward import defer_weight_gradients
from seqloom.plan import Checkpoint
from seqloom.planners.hydraulis.costs import legal_configs
from seqloom.train.config import Model

torch.set_num_threads(1)
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
NUMBERS = np.unique(NUMBERS[NUMBERS.isfinite()].numpy())
"""All finite float8 numbers."""


def nearest(matrix, axis):
    """The matrix as float8 with a scale for every row (`axis` 1) or column keeps it, found by looking."""
    matrix = matrix.double().numpy()
    top = np.abs(matrix).max(axis, keepdims=True)
    factor = 2.0 ** np.floor(np.log2(448 / np.maximum(top, 2.0**-96)))
    above = np.searchsorted(NUMBERS, matrix * factor).clip(1, len(NUMBERS) - 1)
    low, high = NUMBERS[above - 1], NUMBERS[above]
    middle = (low + high) / 2
    even = np.where((above - 1) % 2 == len(NUMBERS) // 2 % 2, low, high)  # ties go to the even one: zero is even
    chosen = np.where(matrix * factor == middle, even, np.where(matrix * factor < middle, low, high))
    return torch.from_numpy(chosen / factor)


def matrices(rows, columns):
    sizes = st.sampled_from([1e-30, 1e-3, 1.0, 37.0, 3e4])
    return st.builds(
        lambda seed, scales: (
            torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
            * torch.tensor(scales, dtype=torch.float64)[:, None]
        ),
        st.integers(0, 10_000),
        st.lists(sizes | st.just(0.0), min_size=rows, max_size=rows),
    )


@given(matrix=matrices(5, 48), axis=st.sampled_from([0, 1]))
def test_values_are_the_nearest_of_float8(matrix, axis):
    values, scale = quantise(matrix, axis)
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))  # powers of two
    assert torch.equal(values.double() * scale.double(), nearest(matrix, axis))


def test_what_is_no_number_stays_none_in_its_row_alone():
    matrix = torch.ones(3, 16)
    matrix[1, 4], matrix[2, 3] = torch.nan, torch.inf
    values, scale = quantise(matrix, 1)
    found = values.float() * scale
    assert torch.equal(found[0], matrix[0]) and found[1].isnan().any() and found[2].isnan().any()


@given(x=matrices(7, 32), weight=matrices(48, 32), dy=matrices(7, 48), bias=st.booleans())
def test_products_of_rounded_matrices(x, weight, dy, bias):
    x, weight = x.requires_grad_(), weight.requires_grad_()
    offset = torch.arange(48, dtype=torch.float64, requires_grad=True) if bias else None
    out = float8_linear(x, weight, offset)
    out.backward(dy)
    wanted = nearest(x.detach(), 1) @ nearest(weight.detach(), 1).T + (offset.detach() if bias else 0)
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, nearest(dy, 1) @ nearest(weight.detach(), 0), rtol=1e-12, atol=0)
    assert torch.equal(weight.grad, dy.T @ x.detach())  # not in float8
    assert offset is None or torch.equal(offset.grad, dy.sum(0))


@pytest.mark.parametrize("shape", [(64,), (0, 64), (3, 64), (1, 5, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounding_is_a_few_percent(shape, dtype):
    torch.manual_seed(0)
    layer = nn.Linear(64, 256, dtype=dtype)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    found, wanted = float8_linear(x, layer.weight, layer.bias), layer(x)
    assert found.shape == wanted.shape and found.dtype == dtype
    if x.numel():
        assert 0.005 < float((found - wanted).detach().norm() / wanted.detach().norm()) < 0.05
    found.sum().backward()
    assert x.grad.shape == x.shape and layer.weight.grad.dtype == dtype


class Block(nn.Module):
    """Layers that change, one that is too narrow, one with an odd width, one of another class."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32, bias=False)
        self.router, self.odd = nn.Linear(32, 8), nn.Linear(32, 40)
        self.other = nn.modules.linear.NonDynamicallyQuantizableLinear(32, 32)

    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        return self.other(y) + self.odd(y).sum(-1, keepdim=True) + self.router(y).sum(-1, keepdim=True)


def blocks():
    torch.manual_seed(0)
    plain = Block()
    changed = copy.deepcopy(plain)
    assert use_float8([changed], narrowest=32) == 2
    return plain, changed


def gradients(module, x):
    x = x.clone().requires_grad_()
    module.zero_grad()
    out = module(x)
    out.square().sum().backward()
    return [out.detach(), x.grad, *(each.grad for each in module.parameters())]


def test_only_wide_linear_layers_change_and_names_stay():
    plain, changed = blocks()
    assert list(changed.state_dict()) == list(plain.state_dict())
    x = torch.randn(9, 32)
    for name, part in changed.named_children():
        inputs = torch.randn(9, part.in_features)
        same = torch.equal(part(inputs), getattr(plain, name)(inputs))
        assert same == (name not in ("up", "down")), name
    for found, wanted in zip(gradients(changed, x), gradients(plain, x), strict=True):
        assert float((found - wanted).norm()) < 0.1 * float(wanted.norm())


def test_layers_without_a_wide_one_are_refused():
    with pytest.raises(SeqloomError, match=r"none of the 4 linear layers has widths .* at least 256"):
        use_float8([Block()])


def test_a_split_backward_has_the_same_gradients():
    _, whole = blocks()
    _, split = blocks()
    deferred = defer_weight_gradients([split])
    x = torch.randn(9, 32)
    wanted = gradients(whole, x)
    assert all(map(torch.equal, gradients(split, x), wanted))
    inputs = x.clone().requires_grad_()
    split.zero_grad()
    out = split(inputs)
    with deferred.deferred(0):
        out.square().sum().backward()
    assert split.up.weight.grad is None and torch.equal(inputs.grad, wanted[1])
    deferred.run(0)
    for found, gradient in zip(split.parameters(), wanted[2:], strict=True):
        torch.testing.assert_close(found.grad, gradient)


def test_a_graph_holds_it_whole():
    allow_in_graphs()
    _, changed = blocks()
    compiled = torch.compile(changed, backend="aot_eager", dynamic=True, fullgraph=True)
    for rows in (9, 21):
        x = torch.randn(rows, 32)
        for found, wanted in zip(gradients(compiled, x), gradients(changed, x), strict=True):
            torch.testing.assert_close(found, wanted)


def test_what_float8_needs():
    with pytest.raises(SeqloomError, match=r"float8 = true with model.dtype = 'float32'.*set dtype to 'bfloat16'"):
        Model(spec="gpt-7b", float8=True)
    cluster, model = Cluster.parse("1x8xH200"), ModelSpec.load("llama3-8b")
    with pytest.raises(SeqloomError, match=r"tensor degree 2: .* would depend on the plan"):
        CostModel(cluster, model, tensor=2, float8=True)
    with pytest.raises(SeqloomError, match="profile a100, which has no float8_speedup"):
        CostModel(Cluster.parse("1x8xA100-80G"), model, float8=True)
    with pytest.raises(SeqloomError, match="profile flexsp-a100, which has no float8_speedup"):
        CostModel(Cluster.parse("8x8xA100-40G"), ModelSpec.load("gpt-7b"), "flexsp-a100", float8=True)
    free = CostModel(cluster, model, sharding="free", float8=True)
    assert {config.tensor for config in legal_configs(free)} == {1}


@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.FULL])
def test_its_price(checkpoint):
    cluster, model = Cluster.parse("1x8xH200"), ModelSpec.load("llama3-8b")
    profile = replace(Profile.for_device("H200"), float8_speedup=2.0, memory_efficiency=1e12)  # products alone
    plain, float8 = (Compute.build(profile, cluster, model, float8=each) for each in (False, True))
    passes = 3 if checkpoint == Checkpoint.NONE else 4
    ratio = (1 + (passes - 1) / 2) / passes
    assert float8.linear(checkpoint) / plain.linear(checkpoint) == pytest.approx(ratio)
    assert float8.head() == plain.head()  # the head stays
    weights = [each.matmul_share * each.linear(Checkpoint.NONE) / 3 for each in (plain, float8)]
    assert weights[0] == pytest.approx(weights[1])  # gradients of weights as well
