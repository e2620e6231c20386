"""What an attention kernel is: capabilities that can be asked beforehand, and masks prepared once and run many times.

`Kernel.prepare` does the index work for the `Segments` of a round; the `PreparedAttention` it returns serves every
layer, forward and backward. `dispatch.py` decides which kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from seqloom.attention.dropout import WeightDropout
from seqloom.attention.masks import Segments
from seqloom.dist.rows import on_device, slice_or_index


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape, dtype, device and softmax scale of one attention call on this rank.

    Attributes:
        heads, kv_heads: of this rank, after the Ulysses exchange; query head h reads kv head h // (heads // kv_heads).
        dim: width of a head.
        scale: softmax scale, by which logits are multiplied.
        softcap: c of c * tanh(logits / c), which stands in the place of logits; None: logits as they are.
        dropout: weights that are dropped between the rows of the call; None: none.
    """

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    softcap: float | None = None
    dropout: WeightDropout | None = field(default=None, compare=False)

    def zeros(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros like q and like k or v."""
        options: dict[str, Any] = {"dtype": self.dtype, "device": self.device}
        q, k = ((rows, heads, self.dim) for heads in (self.heads, self.kv_heads))
        return torch.zeros(q, **options), torch.zeros(k, **options)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Shapes and masks that a kernel supports.

    Attributes:
        name: of the kernel, in the dispatcher, in measured times and in the documentation.
        devices: "cpu", "cuda".
        dtypes: of q, k, v.
        max_dim, dim_multiple: legal head widths.
        windows: takes sliding windows. A window that hides nothing is none.
        offsets: takes any offset; otherwise only squares (offset 0, as many queries as keys) and unmasked segments.
        prefixes: where `offsets` is false, also takes segments that end on the diagonal (offset = keys - queries > 0).
        softcap: caps logits.
        dropout: drops weights.
        copies: its calls work on rows that lie one after the other: it gathers others, and copies the results to their
            place in the buffers where it does not serve all rows.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_dim: int
    dim_multiple: int = 1
    windows: bool = True
    offsets: bool = True
    prefixes: bool = False
    softcap: bool = False
    dropout: bool = False
    copies: bool = False

    def unsupported(self, segments: Segments, shape: AttentionShape) -> str | None:
        """Return why the kernel cannot run these segments (value, rule, legal values); None when it can."""
        return self.unsupported_shape(shape) or self.unsupported_segments(segments)

    def unsupported_shape(self, shape: AttentionShape) -> str | None:
        """Return why the kernel cannot run tensors of this shape, whatever the mask; None when it can."""
        if shape.device.type not in self.devices:
            return f"{self.name}: device {shape.device.type}; it runs on {_either(self.devices)}"
        if shape.dtype not in self.dtypes:
            return f"{self.name}: dtype {dtype_name(shape.dtype)}; it takes {_either(map(dtype_name, self.dtypes))}"
        if shape.dim < 1 or shape.dim > self.max_dim or shape.dim % self.dim_multiple:
            multiple = f"a multiple of {self.dim_multiple}, " if self.dim_multiple > 1 else ""
            return f"{self.name}: head dim {shape.dim}; it takes {multiple}at most {self.max_dim}"
        if shape.heads < 1 or shape.kv_heads < 1 or shape.heads % shape.kv_heads:
            return f"{self.name}: {shape.kv_heads} kv heads for {shape.heads} heads; kv heads must divide the heads"
        if shape.softcap is not None and not self.softcap:
            return f"{self.name}: softcap {shape.softcap}; it caps no logits"
        if shape.dropout is not None and not self.dropout:
            return f"{self.name}: dropout {shape.dropout.heads.p} of attention weights; it drops none"
        return None

    def unsupported_segments(self, segments: Segments) -> str | None:
        """Return why the kernel cannot run one of the segments, whatever the shape; None when it can run all."""
        refused = np.flatnonzero(~self.supports(segments))
        if not len(refused):
            return None
        q_start, q_stop, k_start, k_stop, offset = next(segments.select(refused[:1]).rows())
        queries, keys = q_stop - q_start, k_stop - k_start
        if segments.windowed()[refused[0]] and not self.windows:
            return f"{self.name}: window {segments.window} over {keys} keys; it takes no window"
        squares = "squares (offset 0, as many queries as keys), segments without mask"
        prefixes = " and segments with offset = keys - queries" if self.prefixes else ""
        return f"{self.name}: {queries} queries on {keys} keys at offset {offset}; it takes {squares}{prefixes}"

    def supports(self, segments: Segments) -> np.ndarray:
        """Return whether the kernel supports the mask of every segment, bool[n]."""
        supported = np.ones(len(segments), dtype=bool)
        if not self.windows:
            supported &= ~segments.windowed()
        if not self.offsets:
            spare = segments.k_len - segments.q_len
            aligned = segments.offset == spare
            supported &= segments.unmasked() | (aligned & (spare >= 0 if self.prefixes else spare == 0))
        return supported


def _either(names: Iterable[str]) -> str:
    """a, b or c."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def dtype_name(dtype: torch.dtype) -> str:
    """Return "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""That attention takes; a kernel may take fewer."""
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq, dk, dv."""


class Saved(NamedTuple):
    """Tensors that a forward saves for its backward. In a ring, `out` and `lse` cover more keys than `k` and `v`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class PreparedAttention(Protocol):
    """Segments with all index work done: reused by every layer, forward and backward. Results are new tensors.

    q, out, dout, dq are [q rows, heads, dim]; k, v, dk, dv are [k rows, kv_heads, dim]; the last axis is
    contiguous, the others may be strided. lse is [heads, q rows] in float32 (float64 for float64), rows contiguous.
    A query row in no segment gets output 0 and lse -inf; a key row in none gets gradient 0.
    """

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse): the output and the log of the sum of exponentials of the logits."""
        ...

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv)."""
        ...


@runtime_checkable
class InPlaceAttention(Protocol):
    """A `PreparedAttention` that also writes its rows into given buffers, so that several kernels share a result.

    Rows in none of its segments are left as they are.
    """

    def forward_into(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Write the query rows of the segments into `out` and `lse`."""
        ...

    def backward_into(self, dout: torch.Tensor, saved: Saved, gradients: Gradients) -> None:
        """Write the query rows of the segments into the gradient of q, their key rows into those of k and v."""
        ...


class KernelUse(NamedTuple):
    """What a run will ask of a kernel.

    Attributes:
        longest: tokens of a document.
        tokens: of a call, at most; None: any number.
        window: of the attention; None: none.
        tiles: also unmasked segments, as a ring has, whose results are merged.
    """

    longest: int
    tokens: int | None = None
    window: int | None = None
    tiles: bool = False

    def merged(self, other: KernelUse) -> KernelUse:
        """Return both uses of a kernel as one, of the same documents and window."""
        tokens = None if self.tokens is None or other.tokens is None else max(self.tokens, other.tokens)
        return self._replace(tokens=tokens, tiles=self.tiles or other.tiles)


KernelBuild = Callable[[], object]
"""Compiles one thing that a kernel needs, by running it on dummy tensors; a cache on disk keeps it for other processes.
"""


@runtime_checkable
class SupportsBuilds(Protocol):
    """A kernel that compiles something for a new shape, and can do so before the first step."""

    def builds(self, shape: AttentionShape, use: KernelUse) -> list[KernelBuild]:
        """Return all that such a use can need; the same list in every process."""
        ...


class Kernel(Protocol):
    """One implementation of attention over segments."""

    @property
    def capabilities(self) -> Capabilities:
        """Shapes and masks that it supports."""
        ...

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedAttention:
        """Do the index work for segments that `capabilities` supports."""
        ...


def device_rows(start: np.ndarray, stop: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """Return the rows of intervals, in their order, as an index into a buffer.

    A slice where each interval begins at the end of the one before, else int64[rows] on the device.
    """
    rows = slice_or_index(start, stop - start)
    return rows if isinstance(rows, slice) else on_device(rows, device)
