"""Log-sum-exp merge: attention over some keys, merged with attention over others, is attention over all of them.

With out_a, lse_a over the keys of a, out_b, lse_b over those of b, and so on,

    lse = log(exp(lse_a) + exp(lse_b) + ..),      out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse) + ..

A part that saw nothing has lse -inf and weight exactly 0. Several parts are merged in one pass over memory, in float32
(float64 for float64), and the result is rounded once, at the end. Gradients are plain sums and accumulate the same way.

A ring step, a gather, a prefix of earlier pieces: all merge their results into an `OutputAccumulator`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch

MAX_PARTS = 4
"""Parts that an accumulator holds before it merges them: one pass over memory then serves all of them."""


class PartialOutput(NamedTuple):
    """Attention of some rows over some keys.

    Attributes:
        out: [rows of the part, heads, dim], any float dtype; 0 where lse is -inf.
        lse: [heads, rows of the part], in `sum_dtype`.
        first_row: row of the full output where the part begins.
    """

    out: torch.Tensor
    lse: torch.Tensor
    first_row: int


class PartialGradient(NamedTuple):
    """A gradient [rows of the part, heads, dim] that begins at row `first_row` of the full gradient."""

    gradient: torch.Tensor
    first_row: int


class MergeOps(NamedTuple):
    """The merge functions of a device: those below, or faster ones that compute the same."""

    merge_outputs: Callable[[Sequence[PartialOutput], int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    add_gradients: Callable[[Sequence[PartialGradient], int, torch.dtype], torch.Tensor]
    accumulate: Callable[[torch.Tensor, torch.Tensor, bool], None]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over many parts are accumulated."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_outputs(parts: Sequence[PartialOutput], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of `rows` rows over the keys of all parts: out [rows, heads, dim], lse [heads, rows].

    There is at least one part, of any rows. A row in no part gets output 0 and lse -inf.
    """
    first = parts[0]
    lse = first.lse.new_full((len(first.lse), rows), -torch.inf)
    for part in parts:
        part_rows = lse[:, part.first_row : part.first_row + len(part.out)]
        part_rows.copy_(torch.logaddexp(part_rows, part.lse))
    out = first.lse.new_zeros((rows, *first.out.shape[1:]))
    for part in parts:
        stop = part.first_row + len(part.out)
        weight = torch.exp(part.lse - lse[:, part.first_row : stop]).masked_fill_(part.lse == -torch.inf, 0.0)
        out[part.first_row : stop] += part.out.to(out.dtype) * weight.T.unsqueeze(-1)
    return out.to(dtype), lse


def add_gradients(parts: Sequence[PartialGradient], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum [rows, heads, dim] of gradients, taken in `sum_dtype` and rounded once; 0 for a row in none."""
    first = parts[0].gradient
    total = first.new_zeros((rows, *first.shape[1:]), dtype=sum_dtype(first.dtype))
    for gradient, first_row in parts:
        total[first_row : first_row + len(gradient)] += gradient
    return total.to(dtype)


def accumulate(total: torch.Tensor, gradient: torch.Tensor, fresh: bool) -> None:
    """Add a gradient to `total` in place, or write it there where the total is `fresh`: it holds nothing yet."""
    if fresh:
        total.copy_(gradient)
    else:
        total += gradient


TORCH_OPS = MergeOps(merge_outputs, add_gradients, accumulate)
"""The merge functions of any device."""


def merge_ops(device: torch.device, dtype: torch.dtype) -> MergeOps:
    """Return the fastest merge functions for results of this dtype on a device."""
    if device.type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None:
        from seqloom.attention.kernels import triton_kernels  # every part is read once

        return MergeOps(triton_kernels.merge_outputs, triton_kernels.add_gradients, triton_kernels.accumulate)
    return TORCH_OPS


class OutputAccumulator:
    """The output of queries `q`, into which partial results over more keys are merged. A single one is not copied."""

    __slots__ = ("_ops", "_parts", "_q")

    def __init__(self, q: torch.Tensor, ops: MergeOps) -> None:
        self._q, self._ops = q, ops
        self._parts: list[PartialOutput] = []

    def merge(self, part: PartialOutput) -> None:
        """Merge the result of a run of rows over more keys."""
        if len(self._parts) == MAX_PARTS:
            merged = self._ops.merge_outputs(self._parts, len(self._q), sum_dtype(self._q.dtype))
            self._parts = [PartialOutput(*merged, 0)]
        self._parts.append(part)

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse); out [rows, heads, dim] in the dtype of the queries, lse [heads, rows]."""
        rows, heads, _ = self._q.shape
        if not self._parts:
            nothing = self._q.new_full((heads, rows), -torch.inf, dtype=sum_dtype(self._q.dtype))
            return self._q.new_zeros(self._q.shape), nothing
        out, lse, _ = self._parts[0]
        if len(self._parts) == 1 and len(out) == rows:
            return out.to(self._q.dtype), lse
        return self._ops.merge_outputs(self._parts, rows, self._q.dtype)


class GradientAccumulator:
    """The gradient of a tensor `like`, to which partial gradients are added. A single one of all rows is not copied."""

    __slots__ = ("_like", "_ops", "_parts")

    def __init__(self, like: torch.Tensor, ops: MergeOps) -> None:
        self._like, self._ops = like, ops
        self._parts: list[PartialGradient] = []

    def add(self, rows: slice, gradient: torch.Tensor) -> None:
        """Add the gradient [len(rows), heads, dim] of a run of rows."""
        if len(self._parts) == MAX_PARTS:
            total = self._ops.add_gradients(self._parts, len(self._like), sum_dtype(self._like.dtype))
            self._parts = [PartialGradient(total, 0)]
        self._parts.append(PartialGradient(gradient, rows.start))

    def result(self) -> torch.Tensor:
        """Return the gradient, with the shape and dtype of the tensor."""
        if not self._parts:
            return self._like.new_zeros(self._like.shape)
        gradient, _ = self._parts[0]
        if len(self._parts) == 1 and len(gradient) == len(self._like):
            return gradient.to(self._like.dtype)
        return self._ops.add_gradients(self._parts, len(self._like), self._like.dtype)
