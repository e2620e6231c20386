"""What a kernel is: an ability that can be asked beforehand, and segments prepared once and run many times."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from seqloom.attention.masks import Segments
from seqloom.dist.rows import on_device, slice_or_index


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What the tensors of one attention look like on this rank.

    Attributes:
        heads, kv_heads: heads here, after any exchange; query head h reads kv head h // (heads // kv_heads).
        dim: width of a head.
        scale: logits are multiplied by it.
    """

    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    scale: float


@dataclass(frozen=True, slots=True)
class Ability:
    """What a kernel can do. A refusal names the value, the rule and what would be accepted.

    Attributes:
        name: how the dispatcher, the profile and the documentation call it.
        devices: "cpu", "cuda".
        dtypes: of q, k, v.
        max_dim, dim_multiple: widths of a head.
        grouped: fewer kv heads than heads, without repeating them.
        windows: sliding windows. A window that hides nothing is none.
        offsets: any offset; otherwise only squares (offset 0, as many queries as keys) and segments without mask.
        prefixes: where `offsets` is false, also segments that end on the diagonal (offset = keys - queries > 0).
        spills: it also writes rows behind its segments, so it runs before the kernels that own them.
        tested: this project's tests run it; otherwise it is written to its documentation only.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_dim: int
    dim_multiple: int = 1
    grouped: bool = True
    windows: bool = True
    offsets: bool = True
    prefixes: bool = False
    spills: bool = False
    tested: bool = True

    def refusal(self, segments: Segments, shape: AttentionShape) -> str | None:
        """Say why this kernel cannot take the segments, or None when it can."""
        return self.refuse_shape(shape) or self.refuse_segments(segments)

    def refuse_shape(self, shape: AttentionShape) -> str | None:
        """Say why no segment of tensors of this shape can be taken, or None."""
        if shape.device.type not in self.devices:
            return f"{self.name}: device {shape.device.type}; it runs on {_either(self.devices)}"
        if shape.dtype not in self.dtypes:
            return f"{self.name}: dtype {_short(shape.dtype)}; it takes {_either(map(_short, self.dtypes))}"
        if shape.dim < 1 or shape.dim > self.max_dim or shape.dim % self.dim_multiple:
            multiple = f"a multiple of {self.dim_multiple}, " if self.dim_multiple > 1 else ""
            return f"{self.name}: head dim {shape.dim}; it takes {multiple}at most {self.max_dim}"
        if shape.heads < 1 or shape.kv_heads < 1 or shape.heads % shape.kv_heads:
            return f"{self.name}: {shape.kv_heads} kv heads for {shape.heads} heads; kv heads must divide the heads"
        if shape.heads != shape.kv_heads and not self.grouped:
            return f"{self.name}: {shape.kv_heads} kv heads for {shape.heads} heads; it takes one kv head per head"
        return None

    def refuse_segments(self, segments: Segments) -> str | None:
        """Say why one of the segments cannot be taken, whatever the tensors look like, or None."""
        refused = np.flatnonzero(~self.takes(segments))
        if not len(refused):
            return None
        q_start, q_stop, k_start, k_stop, offset = next(segments.select(refused[:1]).rows())
        queries, keys = q_stop - q_start, k_stop - k_start
        if segments.windowed()[refused[0]] and not self.windows:
            return f"{self.name}: window {segments.window} over {keys} keys; it takes no window"
        squares = "squares (offset 0, as many queries as keys), segments without mask"
        prefixes = " and segments with offset = keys - queries" if self.prefixes else ""
        return f"{self.name}: {queries} queries on {keys} keys at offset {offset}; it takes {squares}{prefixes}"

    def takes(self, segments: Segments) -> np.ndarray:
        """Return which segments can be taken, as far as masks go, bool[n]."""
        taken = np.ones(len(segments), dtype=bool)
        if not self.windows:
            taken &= ~segments.windowed()
        if not self.offsets:
            spare = segments.k_len - segments.q_len
            aligned = segments.offset == spare
            taken &= segments.unmasked() | (aligned & (spare >= 0 if self.prefixes else spare == 0))
        return taken


def _either(names: Iterable[str]) -> str:
    """a, b or c."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last


def _short(dtype: torch.dtype) -> str:
    """bfloat16 for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""dq, dk, dv."""


class Saved(NamedTuple):
    """What a backward needs of its forward. `out` and `lse` may be those of more keys than `k` and `v` (a ring)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor


class Prepared(Protocol):
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
class Writer(Protocol):
    """A `Prepared` that can also write its rows into buffers of others, so that several kernels share a result.

    Rows in no segment of its own are left as they are.
    """

    def forward_into(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Write the query rows of the segments into `out` and `lse`."""
        ...

    def backward_into(self, dout: torch.Tensor, saved: Saved, gradients: Gradients) -> None:
        """Write the query rows of the segments into the gradient of q, their key rows into those of k and v."""
        ...


@runtime_checkable
class Warmable(Protocol):
    """A kernel that builds or compiles something for every new kind of input, and can do so beforehand."""

    def warm_up(
        self,
        shape: AttentionShape,
        longest: int,
        *,
        tokens: int | None = None,
        report: Callable[[int, int], None] | None = None,
    ) -> int:
        """Build all that documents of up to `longest` tokens, `tokens` in all, can need. Returns how many things.

        `report` is called as report(done, total).
        """
        ...


class Kernel(Protocol):
    """One way to compute attention over segments."""

    @property
    def ability(self) -> Ability:
        """What it can do, asked before anything is computed."""
        ...

    def prepare(self, segments: Segments, shape: AttentionShape) -> Prepared:
        """Do the index work for these segments. Only called for what `ability` allows."""
        ...


def rows_of(start: np.ndarray, stop: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    """Return the rows of these intervals, in their order, to index a buffer with.

    A slice where each begins at the end of the one before, else int64[rows] on the device.
    """
    rows = slice_or_index(start, stop - start)
    return rows if isinstance(rows, slice) else on_device(rows, device)
