"""Joining partial results: attention over some keys, then over others, is attention over all of them.

With out_a, lse_a over the keys of a, out_b, lse_b over those of b, and so on,

    lse = log(exp(lse_a) + exp(lse_b) + ..),      out = out_a exp(lse_a - lse) + out_b exp(lse_b - lse) + ..

A part that saw nothing has lse -inf and weight exactly 0. Several parts are joined in one pass over memory, in float32
(float64 for float64), and the result is rounded once, at the end. Gradients are plain sums and are joined alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch

AT_ONCE = 4
"""Parts that are kept until they are joined: one pass over memory then serves all of them."""


class Part(NamedTuple):
    """A partial output of some rows.

    Attributes:
        out: [rows of the part, heads, dim], any float dtype; 0 where lse is -inf.
        lse: [heads, rows of the part], in `sum_dtype`.
        begin: the row of the whole where the part begins.
    """

    out: torch.Tensor
    lse: torch.Tensor
    begin: int


class Share(NamedTuple):
    """A partial gradient [rows of the part, heads, dim] that begins at row `begin` of the whole."""

    gradient: torch.Tensor
    begin: int


class Joins(NamedTuple):
    """How parts are joined on a device: the functions below, or something faster that does the same."""

    merge: Callable[[Sequence[Part], int, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    add: Callable[[Sequence[Share], int, torch.dtype], torch.Tensor]
    accumulate: Callable[[torch.Tensor, torch.Tensor, bool], None]


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of many parts are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_parts(parts: Sequence[Part], rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of `rows` rows over the keys of all parts: out [rows, heads, dim], lse [heads, rows].

    Args:
        parts: at least one, of any rows.
        rows: of the whole; a row in no part gets output 0 and lse -inf.
        dtype: of the output.
    """
    first = parts[0]
    lse = first.lse.new_full((len(first.lse), rows), -torch.inf)
    for part in parts:
        own = lse[:, part.begin : part.begin + len(part.out)]
        own.copy_(torch.logaddexp(own, part.lse))
    out = first.lse.new_zeros((rows, *first.out.shape[1:]))
    for part in parts:
        stop = part.begin + len(part.out)
        weight = torch.exp(part.lse - lse[:, part.begin : stop]).masked_fill_(part.lse == -torch.inf, 0.0)
        out[part.begin : stop] += part.out.to(out.dtype) * weight.T.unsqueeze(-1)
    return out.to(dtype), lse


def add_shares(shares: Sequence[Share], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum [rows, heads, dim] of shares, taken in `sum_dtype` and rounded once; 0 for a row in none."""
    first = shares[0].gradient
    total = first.new_zeros((rows, *first.shape[1:]), dtype=sum_dtype(first.dtype))
    for gradient, begin in shares:
        total[begin : begin + len(gradient)] += gradient
    return total.to(dtype)


def accumulate(total: torch.Tensor, gradient: torch.Tensor, fresh: bool) -> None:
    """Add a gradient to `total` in place, or write it there where the total is `fresh`: it holds nothing yet."""
    if fresh:
        total.copy_(gradient)
    else:
        total += gradient


PLAIN = Joins(merge_parts, add_shares, accumulate)
"""The joins of any device."""


def joins_on(device: torch.device, dtype: torch.dtype) -> Joins:
    """Return the fastest joins of results of this dtype on a device."""
    if device.type == "cuda" and dtype != torch.float64 and find_spec("triton") is not None:
        from seqloom.attention.kernels import triton_merge  # every part is read once

        return Joins(triton_merge.merge_parts, triton_merge.add_shares, triton_merge.accumulate)
    return PLAIN


class Total:
    """An output that grows by partial results over more keys. A single one that covers all rows is not copied."""

    __slots__ = ("_joins", "_parts", "_q")

    def __init__(self, q: torch.Tensor, joins: Joins) -> None:
        """Start the total of queries [rows, heads, dim]."""
        self._q, self._joins = q, joins
        self._parts: list[Part] = []

    def add(self, rows: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Add the result of a run of rows: out [len(rows), heads, dim], lse [heads, len(rows)]."""
        if len(self._parts) == AT_ONCE:
            self._parts = [Part(*self._joins.merge(self._parts, len(self._q), sum_dtype(self._q.dtype)), 0)]
        self._parts.append(Part(out, lse, rows.start))

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse); out [rows, heads, dim] in the dtype of the queries, lse [heads, rows]."""
        rows, heads, _ = self._q.shape
        if not self._parts:
            nothing = self._q.new_full((heads, rows), -torch.inf, dtype=sum_dtype(self._q.dtype))
            return self._q.new_zeros(self._q.shape), nothing
        out, lse, _ = self._parts[0]
        if len(self._parts) == 1 and len(out) == rows:
            return out.to(self._q.dtype), lse
        return self._joins.merge(self._parts, rows, self._q.dtype)


class Sum:
    """A gradient that grows by shares. A single one that covers all rows is not copied."""

    __slots__ = ("_joins", "_like", "_shares")

    def __init__(self, like: torch.Tensor, joins: Joins) -> None:
        """Start the gradient of a tensor [rows, heads, dim]."""
        self._like, self._joins = like, joins
        self._shares: list[Share] = []

    def add(self, rows: slice, gradient: torch.Tensor) -> None:
        """Add the gradient [len(rows), heads, dim] of a run of rows."""
        if len(self._shares) == AT_ONCE:
            self._shares = [Share(self._joins.add(self._shares, len(self._like), sum_dtype(self._like.dtype)), 0)]
        self._shares.append(Share(gradient, rows.start))

    def result(self) -> torch.Tensor:
        """Return the gradient, with the shape and dtype of the tensor."""
        if not self._shares:
            return self._like.new_zeros(self._like.shape)
        gradient, _ = self._shares[0]
        if len(self._shares) == 1 and len(gradient) == len(self._like):
            return gradient.to(self._like.dtype)
        return self._joins.add(self._shares, len(self._like), self._like.dtype)


def covers(rows: slice, size: int) -> bool:
    """Say whether a run of rows is all of them."""
    return rows.start == 0 and rows.stop == size
