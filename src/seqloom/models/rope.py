"""Rotary positions: a query and a key are turned by angles that grow with their position in the document.

The two halves of a head are the two coordinates of dim / 2 points. Point i at position p is turned by p * f_i, so
the product of a query at p and a key at s depends on p - s only. Positions are given per token: a token keeps
its own wherever a plan puts it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from seqloom.errors import SeqloomError


@dataclass(frozen=True, slots=True)
class Stretch:
    """Llama 3's way to a longer context: slow points turn `factor` times slower, fast ones as they did.

    A point is slow when it turns less than `low` times in the `context` tokens of the first training, fast when it
    turns more than `high` times, and in between it is in between.
    """

    factor: float = 8.0
    low: float = 1.0
    high: float = 4.0
    context: int = 8192

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.factor < 1 or not 0 < self.low < self.high or self.context < 1:
            raise SeqloomError(f"{self}: needs factor >= 1, 0 < low < high and context >= 1; Llama 3.1 has Stretch()")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions with base `theta`: point i of n turns by theta ** (-i / n) radians per token."""

    theta: float = 10_000.0
    stretch: Stretch | None = None

    def frequencies(self, dim: int, device: torch.device | None = None) -> torch.Tensor:
        """Return radians per token of every point, float64[dim / 2]."""
        if dim % 2 or self.theta <= 0:
            raise SeqloomError(
                f"heads of {dim} with rope theta {self.theta}: a head is dim / 2 points and theta is positive; "
                f"choose head_dim {dim + dim % 2} and a theta like 10000"
            )
        speed = self.theta ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
        if self.stretch is None:
            return speed
        turns = self.stretch.context * speed / (2 * math.pi)
        fast = ((turns - self.stretch.low) / (self.stretch.high - self.stretch.low)).clamp(0, 1)
        return speed * (fast + (1 - fast) / self.stretch.factor)

    def table(self, positions: torch.Tensor, dim: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (cos, sin) of every token's angles, each [tokens, 1, dim / 2].

        Angles are float64: at position 1,000,000 a float32 angle is wrong by up to 0.03 radians. The table is
        float32, or `dtype` where that is wider.

        Args:
            positions: int64[tokens], from 0 at the start of each document.
            dim: width of a head.
            dtype: of the tensors that will be turned.
        """
        angles = positions.double()[:, None, None] * self.frequencies(dim, positions.device)
        wide = torch.promote_types(dtype, torch.float32)
        return angles.cos().to(wide), angles.sin().to(wide)


def rotate(x: torch.Tensor, table: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn `x` [tokens, heads, dim] by the angles of its tokens; rounded once, at the end."""
    cos, sin = table
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
