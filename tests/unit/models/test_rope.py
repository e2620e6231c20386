"""Rotary positions: what they are for, where they stay exact, and Llama 3's stretch."""

import math

import pytest
import torch

from seqloom.errors import SeqloomError
from seqloom.models import Llama3Scaling, Rope
from seqloom.models.transformer import rotate

F64 = torch.float64


def turned(rope: Rope, x: torch.Tensor, position: int) -> torch.Tensor:
    return rotate(x[None, None], rope.table(torch.tensor([position]), len(x), x.dtype))[0, 0]


@pytest.mark.parametrize("rope", [Rope(), Rope(500_000.0, Llama3Scaling(context=64))], ids=["plain", "stretched"])
def test_a_product_depends_on_the_distance_only(rope):
    q, k = torch.randn(2, 16, dtype=F64, generator=torch.Generator().manual_seed(0))
    near = turned(rope, q, 7) @ turned(rope, k, 2)
    far = turned(rope, q, 1_000_007) @ turned(rope, k, 1_000_002)
    assert torch.isclose(near, far, rtol=1e-8)
    assert not torch.isclose(near, turned(rope, q, 8) @ turned(rope, k, 2), rtol=1e-3)
    assert torch.equal(turned(rope, q, 0), q)
    assert torch.isclose(turned(rope, q, 12345).norm(), q.norm(), rtol=1e-12)


def test_the_first_point_turns_by_one_radian_per_token():
    x = torch.zeros(8, dtype=F64)
    x[0] = 1.0
    y = turned(Rope(), x, 3)
    assert math.isclose(y[0], math.cos(3)) and math.isclose(y[4], math.sin(3))
    assert y[[1, 2, 3, 5, 6, 7]].eq(0).all()


def test_float32_and_bf16_tables_are_exact_at_a_million():
    positions = torch.tensor([1_000_003])
    cos, sin = Rope().table(positions, 64, torch.bfloat16)
    exact, _ = Rope().table(positions, 64, F64)
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos - exact).abs().max() < 1e-7


def test_the_stretch_is_llama_3s():
    """The three cases as they are published, with the figures of Llama 3.1."""
    rope = Rope(500_000.0, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    for speed, wanted in zip(Rope(500_000.0).frequencies(128).tolist(), rope.frequencies(128).tolist(), strict=True):
        wavelength = 2 * math.pi / speed
        if wavelength < 8192 / 4:
            expected = speed
        elif wavelength > 8192 / 1:
            expected = speed / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * speed / 8 + smooth * speed
        assert math.isclose(wanted, expected, rel_tol=1e-12)


def test_what_cannot_be_turned_is_refused():
    with pytest.raises(SeqloomError, match="head_dim 8"):
        Rope().frequencies(7)
    with pytest.raises(SeqloomError, match="theta"):
        Rope(0.0).frequencies(8)
    with pytest.raises(SeqloomError, match="low < high"):
        Llama3Scaling(low=4.0, high=1.0)
