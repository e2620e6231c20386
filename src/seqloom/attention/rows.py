"""Rows of a buffer: a run of them as a slice, which costs nothing, others as an index on the device."""

from __future__ import annotations

import torch

RowIndex = slice | torch.Tensor
"""A run of rows, or an index int64[rows]."""


def take(tensor: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """Return rows of a tensor: a view of a run, a copy of others."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def put(tensor: torch.Tensor, rows: RowIndex, part: torch.Tensor) -> None:
    """Write `part` [len(rows), ...] into rows of a tensor."""
    if isinstance(rows, slice):
        tensor[rows] = part
    else:
        tensor.index_copy_(0, rows, part)


def add(tensor: torch.Tensor, rows: RowIndex, part: torch.Tensor) -> None:
    """Add `part` [len(rows), ...] to rows of a tensor; no row comes twice."""
    if isinstance(rows, slice):
        tensor[rows] += part
    else:
        tensor.index_add_(0, rows, part)


def count(rows: RowIndex) -> int:
    """How many rows these are."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
