"""Linear layers in float8 on a GPU: the products of float8 matrices as the CPU multiplies them, also compiled."""

import copy

import pytest
import torch
from torch import nn

from seqloom.models.float8 import FORMAT, allow_in_graphs, check_float8, float8_linear, quantise, use_float8

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True, scope="module")
def hopper():
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("float8 products with a scale for every row need compute capability 9.0")
    check_float8(torch.device("cuda", 0))


def difference(found, wanted):
    return float((found.double().cpu() - wanted.double().cpu()).norm() / wanted.double().norm())


@pytest.mark.parametrize("rows", [1, 7, 129, 4096])
@pytest.mark.parametrize(("wide", "out"), [(256, 272), (1024, 4096), (4096, 256)])
def test_products_equal_those_of_the_cpu(rows, wide, out):
    torch.manual_seed(rows)
    x = torch.randn(rows, wide, dtype=torch.bfloat16) * torch.logspace(-3, 3, rows)[:, None].bfloat16()
    weight, dy = torch.randn(out, wide, dtype=torch.bfloat16), torch.randn(rows, out, dtype=torch.bfloat16)
    results = []
    for device in ("cpu", "cuda"):
        inputs = [each.clone().to(device).requires_grad_() for each in (x, weight)]
        y = float8_linear(*inputs, None)
        y.backward(dy.to(device))
        results.append([y.detach(), *(each.grad for each in inputs)])
    for found, wanted in zip(results[1], results[0], strict=True):
        assert difference(found, wanted) < 4e-3  # bfloat16, and sums that tensor cores round


def test_both_devices_round_alike():
    matrix = torch.randn(300, 272, dtype=torch.bfloat16) * 30
    for axis in (0, 1):
        here, there = quantise(matrix, axis), quantise(matrix.cuda(), axis)
        assert torch.equal(here.scale, there.scale.cpu()) and here.values.dtype == there.values.dtype == FORMAT
        assert torch.equal(here.values.view(torch.uint8), there.values.cpu().view(torch.uint8))


def test_no_rows():
    x = torch.empty(0, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    weight = torch.randn(512, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    float8_linear(x, weight, None).sum().backward()
    assert x.grad.shape == (0, 256) and not weight.grad.any()


def test_compiled_layers_compute_the_same():
    torch.manual_seed(0)
    allow_in_graphs()
    plain = nn.Sequential(nn.Linear(512, 1024), nn.SiLU(), nn.Linear(1024, 512, bias=False)).bfloat16().cuda()
    changed = copy.deepcopy(plain)
    assert use_float8([changed]) == 2
    compiled = torch.compile(changed, dynamic=True, fullgraph=True)
    for rows in (100, 333):
        x = torch.randn(rows, 512, dtype=torch.bfloat16, device="cuda")
        results = []
        for module in (plain, changed, compiled):
            inputs = x.clone().requires_grad_()
            changed.zero_grad()
            plain.zero_grad()
            out = module(inputs)
            out.square().mean().backward()
            weight = (plain if module is plain else changed)[0].weight
            results.append([out.detach(), inputs.grad, weight.grad.clone()])
        for exact, found, fused in zip(*results, strict=True):
            # A fused activation is not rounded to bfloat16 before it is rounded to float8, so some values fall on the
            # other side: the graph must be as near to the exact result as the plain layers, not to these.
            assert difference(found, exact) < 0.08 and difference(fused, exact) < 0.08
