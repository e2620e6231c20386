"""Latent attention (MLA, DeepSeek): keys and values of all heads are made from one small row per token, which travels.

A token has a latent c and a rotated key r, both without heads. The key of a head is K c beside r, its value V c, with K
and V out of the model's projection. So keys and values are products of the row x = (c, r) with one matrix of the heads
that a rank computes, which also copies r, and fills values up with zeros to the width of keys:

    key    K 0      value    V 0
           0 I               0 0

Where a plan says so (`Group.latent`), ring, gather, Ulysses and KV cache have rows x in the place of keys and values,
as if these were one head, and a rank makes keys and values of its heads when it needs them: in forward, and in backward
again. The gradients of x travel back and are summed like those of keys; a rank's gradient of the projection is of the
products that it computed, and the sum over ranks is the gradient.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from seqloom.attention.merge import sum_dtype
from seqloom.errors import SeqloomError

Range = tuple[int, int]


class LatentShape(NamedTuple):
    """Widths of latent attention.

    Attributes:
        latent, rotated: of a row x.
        unrotated: of a key, the part that is made from the latent.
        values: of a value.
    """

    latent: int
    rotated: int
    unrotated: int
    values: int

    @property
    def row(self) -> int:
        """Width of a row x."""
        return self.latent + self.rotated

    @property
    def head(self) -> int:
        """Width of keys and values as kernels read them: that of the wider."""
        return max(self.unrotated + self.rotated, self.values)

    def check(self, q: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor) -> None:
        """Refuse tensors of other widths."""
        heads, own = q.shape[1], self.unrotated + self.rotated
        wanted = (len(q), heads, own), (len(q), self.row), (heads * (self.unrotated + self.values), self.latent)
        given = tuple(tuple(each.shape) for each in (q, rows, weight))
        if given != wanted or len({each.dtype for each in (q, rows, weight)}) > 1:
            raise SeqloomError(
                f"q {given[0]}, latents {given[1]}, weight {given[2]} of {q.dtype}, {rows.dtype}, {weight.dtype}: with "
                f"{self} latent attention takes {wanted[0]}, {wanted[1]} and {wanted[2]}, in one dtype"
            )


@dataclass(slots=True, eq=False)
class HeadExpansion:
    """Keys and values of some heads, made from rows x.

    Attributes:
        matrix: [2 * heads * head width, row width], of all keys before all values.
        heads: their number.
        gradient: of the matrix, in which `backward` adds up; None: nobody wants it.
    """

    matrix: torch.Tensor
    heads: int
    gradient: torch.Tensor | None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """Return keys and values [rows, 2 * heads, dim], keys before values, of rows x [rows, 1, width]."""
        return linear(rows[:, 0], self.matrix).unflatten(1, (2 * self.heads, -1))

    def backward(self, rows: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradient of rows x [rows, 1, width] from those of keys and values, in `sum_dtype`.

        They stand in the place of keys, so what stands in the place of values, with no heads, is returned too.
        """
        x, half = rows[:, 0], len(self.matrix) // 2
        total = torch.zeros(x.shape, dtype=sum_dtype(x.dtype), device=x.device)
        for part, part_rows in ((dk, slice(None, half)), (dv, slice(half, None))):
            flat = part.to(x.dtype).flatten(1)
            total += flat @ self.matrix[part_rows]
            if self.gradient is not None:
                self.gradient[part_rows] += flat.T @ x
        dx = total[:, None]
        return dx, dx[:, :0]


@dataclass(slots=True, eq=False)
class Expansion:
    """The projection of one call, for the heads of every group.

    Attributes:
        shape: widths.
        weight: [heads * (unrotated + values), latent], head by head the rows of a key and of a value.
        heads: of the model.
        with_gradient: whether backward shall add up the gradient of the weight.
    """

    shape: LatentShape
    weight: torch.Tensor
    heads: int
    with_gradient: bool = False
    _by_heads: dict[Range, HeadExpansion] = field(default_factory=dict)

    def of_heads(self, heads: slice) -> HeadExpansion:
        """Return the expansion of some heads; its matrix is written once."""
        low, high, _ = heads.indices(self.heads)
        if (low, high) not in self._by_heads:
            matrix = self._matrix(low, high)
            gradient = torch.zeros_like(matrix, dtype=sum_dtype(matrix.dtype)) if self.with_gradient else None
            self._by_heads[low, high] = HeadExpansion(matrix, high - low, gradient)
        return self._by_heads[low, high]

    def gradient(self) -> torch.Tensor | None:
        """Return the gradient of the weight, of all that was added up; None: nobody wants it."""
        if not self.with_gradient:
            return None
        shape, dtype = self.shape, sum_dtype(self.weight.dtype)
        total = torch.zeros(self.weight.shape, dtype=dtype, device=self.weight.device)
        by_head = total.view(self.heads, -1, shape.latent)
        for (low, high), expansion in self._by_heads.items():
            keys, values = self._blocks(expansion.gradient, high - low)
            by_head[low:high, : shape.unrotated] += keys
            by_head[low:high, shape.unrotated :] += values
        return total.to(self.weight.dtype)

    def _matrix(self, low: int, high: int) -> torch.Tensor:
        shape, own = self.shape, self.weight.view(self.heads, -1, self.shape.latent)[low:high]
        matrix = own.new_zeros((2 * (high - low) * shape.head, shape.row))
        keys, values = self._blocks(matrix, high - low)
        keys.copy_(own[:, : shape.unrotated])
        values.copy_(own[:, shape.unrotated :])
        copied = matrix.view(2, high - low, shape.head, shape.row)[0, :, shape.unrotated :, shape.latent :]
        copied.diagonal(dim1=1, dim2=2).fill_(1)
        return matrix

    def _blocks(self, matrix: torch.Tensor | None, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the blocks K and V of a matrix, [heads, width, latent] each."""
        assert matrix is not None  # of an expansion with gradient
        shape = self.shape
        keys, values = matrix.view(2, heads, shape.head, shape.row)[..., : shape.latent]
        return keys[:, : shape.unrotated], values[:, : shape.values]
