"""A cuDNN call and where its documents lie: addresses of rows, and lengths, on the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from seqloom.attention.kernels import cudnn_graphs as names
from seqloom.attention.kernels.cudnn_graphs import Graph
from seqloom.attention.kernels.grid import Call
from seqloom.attention.kernels.kernel import rows_of
from seqloom.attention.segments import Segments
from seqloom.comm.upload import on_device

KEY_TENSORS = (names.K, names.V, names.DK, names.DV)

Tensors = dict[int, torch.Tensor]
"""Tensors [rows, heads, dim] (log-sum-exp: [rows, heads]) by their name in a graph."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedCall:
    """A call and where its documents lie.

    Attributes:
        rows: first (query row, key row) and lengths of a dense call's only segment.
        q_rows, k_rows: int64[batch + 1] on the GPU, where documents begin in the query and the key buffer.
        q_lengths, k_lengths: int32[batch] on the GPU.
        scaled: q_rows or k_rows in elements of a tensor with a given row stride, made on demand.
        graphs: by strides and pass, so that a call finds its graph without hashing all of its key.
    """

    call: Call
    rows: tuple[int, int, int, int]
    q_rows: torch.Tensor
    k_rows: torch.Tensor
    q_lengths: torch.Tensor
    k_lengths: torch.Tensor
    scaled: dict[tuple[bool, int], torch.Tensor] = field(default_factory=dict)
    graphs: dict[tuple, Graph] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, segments: Segments, device: torch.device) -> PlacedCall:
        """Upload the rows and lengths of a call; missing documents have length 0."""
        chosen = segments.select(call.segments)
        spare = call.shape.batch - len(chosen)
        columns = []
        for start, stop in ((chosen.q_start, chosen.q_stop), (chosen.k_start, chosen.k_stop)):
            begins = np.concatenate([start, np.repeat(stop[-1:], spare + 1)])
            lengths = np.concatenate([stop - start, np.zeros(spare, dtype=np.int64)])
            columns.append((on_device(begins, device), on_device(lengths.astype(np.int32), device)))
        (q_rows, q_lengths), (k_rows, k_lengths) = columns
        q_start, q_stop, k_start, k_stop, _ = next(chosen.rows())
        rows = (q_start, k_start, q_stop - q_start, k_stop - k_start)
        return cls(call, rows, q_rows, k_rows, q_lengths, k_lengths)

    def begins(self, keys: bool, stride: int) -> int:
        """Return the address of the rows' begins in elements of a tensor with this row stride."""
        if (keys, stride) not in self.scaled:
            self.scaled[keys, stride] = (self.k_rows if keys else self.q_rows) * stride
        return self.scaled[keys, stride].data_ptr()

    def pointers(self, tensors: Tensors) -> dict[int, int]:
        """Return the addresses that a packed call needs."""
        found = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            found[names.ROWS + name] = self.begins(name in KEY_TENSORS, tensor.stride(0))
        found[names.LENGTH_Q] = self.q_lengths.data_ptr()
        found[names.LENGTH_K] = self.k_lengths.data_ptr()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class Gaps:
    """The rows of a buffer that no segment holds.

    Attributes:
        between: rows between segments, on the device where they are not one run; None without any.
        end: where the rows behind the last segment begin.
    """

    between: slice | torch.Tensor | None
    end: int

    @classmethod
    def of(cls, start: np.ndarray, stop: np.ndarray, device: torch.device) -> Gaps:
        """Find what intervals of rows leave out."""
        order = np.argsort(start)
        begins, ends = np.concatenate([[0], stop[order][:-1]]), start[order]
        apart = begins < ends
        between = rows_of(begins[apart], ends[apart], device) if apart.any() else None
        return cls(between, int(stop.max()))

    def fill(self, tensor: torch.Tensor, value: float) -> None:
        """Write a value into these rows of a tensor: a launch or two, however many gaps there are."""
        if isinstance(self.between, torch.Tensor):
            tensor.index_fill_(0, self.between, value)
        elif self.between is not None:
            tensor[self.between] = value
        if self.end < len(tensor):
            tensor[self.end :] = value
