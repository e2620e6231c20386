"""Flash attention over packed sequences, as torch brings it: one call for any number of documents.

Its causal mask ends at the last query and the last key, so squares and pieces with their prefix are its own. Segments
without mask under a causal rule go into a second call. Segments that do not lie one after the other are gathered.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from seqloom import compat
from seqloom.attention.kernels.interface import Ability, AttentionShape, Gradients, Saved, rows_of
from seqloom.attention.lse import sum_dtype
from seqloom.attention.masks import Segments
from seqloom.dist.rows import on_device

VARLEN = Ability(
    name="varlen",
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    max_dim=256,
    dim_multiple=8,
    offsets=False,
    prefixes=True,
)


class Flash(Protocol):
    """A packed flash attention: torch's, or that of a package. Tensors as in `compat.flash_forward`."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: compat.PackedLengths,
        *,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        ...

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        lengths: compat.PackedLengths,
        *,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> compat.Gradients:
        """Return the gradients of q, k, v."""
        ...


class TorchFlash:
    """Torch's own packed flash attention."""

    forward = staticmethod(compat.flash_forward)
    backward = staticmethod(compat.flash_backward)


class Varlen:
    """Packed flash attention on a GPU: half precision, head dims up to 256."""

    @property
    def ability(self) -> Ability:
        """Squares, pieces with their prefix, windows over both, and segments without mask."""
        return VARLEN

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedPacked:
        """Copy the cumulative lengths to the device."""
        return PreparedPacked(packed_calls(segments, shape.device), shape, TorchFlash())


@dataclass(frozen=True, slots=True)
class PackedCall:
    """Sequences for one call. `queries` and `keys` say where its rows are: a slice, or an index on the device."""

    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    lengths: compat.PackedLengths
    causal: bool
    window: int | None

    def covers(self, q_rows: int, k_rows: int) -> bool:
        """Whether it takes every row of the buffers, in place."""
        return (
            isinstance(self.queries, slice)
            and isinstance(self.keys, slice)
            and (self.queries, self.keys) == (slice(0, q_rows), slice(0, k_rows))
        )


@dataclass(frozen=True, slots=True)
class PreparedPacked:
    """Calls of a packed flash attention. Their rows do not overlap."""

    calls: tuple[PackedCall, ...]
    shape: AttentionShape
    flash: Flash

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Prepared`."""
        if self._alone(q, k):
            return self._forward(self.calls[0], q, k, v)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full((self.shape.heads, len(q)), -torch.inf, dtype=sum_dtype(q.dtype), device=q.device)
        self.forward_into(q, k, v, out, lse)
        return out, lse

    def forward_into(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """See `Writer`."""
        for call in self.calls:
            result, sums = self._forward(call, q[call.queries], k[call.keys], v[call.keys])
            out[call.queries] = result.to(out.dtype)
            lse[:, call.queries] = sums

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv), see `Prepared`."""
        if self._alone(saved.q, saved.k):
            return self._backward(self.calls[0], dout, saved)
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])
        self.backward_into(dout, saved, (dq, dk, dv))
        return dq, dk, dv

    def backward_into(self, dout: torch.Tensor, saved: Saved, gradients: Gradients) -> None:
        """See `Writer`."""
        q, k, v, out, lse = saved
        dq, dk, dv = gradients
        for call in self.calls:
            rows, keys = call.queries, call.keys
            part = Saved(q[rows], k[keys], v[keys], out[rows], lse[:, rows])
            grads = self._backward(call, dout[rows], part)
            for buffer, where, grad in ((dq, rows, grads.q), (dk, keys, grads.k), (dv, keys, grads.v)):
                buffer[where] = grad.to(buffer.dtype)

    def _alone(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        """Whether the results of one call are the results."""
        return len(self.calls) == 1 and self.calls[0].covers(len(q), len(k))

    def _forward(
        self, call: PackedCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        options = {"causal": call.causal, "window": call.window, "scale": self.shape.scale}
        return self.flash.forward(q, k, v, call.lengths, **options)

    def _backward(self, call: PackedCall, dout: torch.Tensor, saved: Saved) -> compat.Gradients:
        q, k, v, out, lse = saved
        options = {"causal": call.causal, "window": call.window, "scale": self.shape.scale}
        # A ring hands over its merged output in float32; the operator wants one dtype, and lse without gaps.
        tensors = (dout.to(q.dtype), q, k, v, out.to(q.dtype), lse.contiguous())
        return self.flash.backward(*tensors, call.lengths, **options)


def packed_calls(segments: Segments, device: torch.device) -> tuple[PackedCall, ...]:
    """Sort segments into at most two packed calls: those whose mask ends on the diagonal, and those without mask."""
    spare = segments.k_len - segments.q_len
    aligned = segments.causal & (segments.offset == spare) & (spare >= 0)
    calls = []
    for causal, chosen in ((True, aligned), (False, ~aligned)):
        if chosen.any():
            part = segments.select(np.flatnonzero(chosen)[np.argsort(segments.q_start[chosen], kind="stable")])
            window = part.window if causal and part.windowed().any() else None
            rows, keys = rows_of(part.q_start, part.q_stop, device), rows_of(part.k_start, part.k_stop, device)
            calls.append(PackedCall(rows, keys, _lengths(part, device), causal, window))
    return tuple(calls)


def _lengths(part: Segments, device: torch.device) -> compat.PackedLengths:
    """Return cumulative and longest lengths of the segments."""
    q, k = (np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32) for lengths in (part.q_len, part.k_len))
    return compat.PackedLengths(
        on_device(q, device), on_device(k, device), int(part.q_len.max()), int(part.k_len.max())
    )


# ---- merged: attention.kernels.flash_attn
# The flash-attn packages, where they are installed: version 2 (`flash_attn`), version 3 (`flash_attn_interface`).
#
# Both are called below their autograd functions, because a ring's backward needs the log-sum-exp of all keys, not
# of
# the keys of one call. Written to flash-attn 2.7 and flash-attn 3.0.


FLASH_ATTN_2 = Ability(
    name="flash_attn_2",
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    max_dim=256,
    dim_multiple=8,
    offsets=False,
    prefixes=True,
    tested=False,
)
FLASH_ATTN_3 = Ability(
    name="flash_attn_3",
    devices=("cuda",),
    dtypes=(torch.bfloat16, torch.float16),
    max_dim=256,
    dim_multiple=8,
    offsets=False,
    prefixes=True,
    tested=False,
)
MODULES = {"flash_attn_2": "flash_attn.flash_attn_interface", "flash_attn_3": "flash_attn_interface"}


def installed(kernel: str) -> bool:
    """Whether the package of "flash_attn_2" or "flash_attn_3" is here. Nothing is imported."""
    return importlib.util.find_spec(MODULES[kernel].partition(".")[0]) is not None


class FlashAttn2:
    """Flash attention of the package `flash_attn`."""

    @property
    def ability(self) -> Ability:
        """As torch's `varlen`."""
        return FLASH_ATTN_2

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedPacked:
        """Copy the cumulative lengths to the device; import the package."""
        package = Package2(importlib.import_module(MODULES["flash_attn_2"]))
        return PreparedPacked(packed_calls(segments, shape.device), shape, package)


class FlashAttn3:
    """Flash attention of the package `flash_attn_interface`, for Hopper GPUs."""

    @property
    def ability(self) -> Ability:
        """As torch's `varlen`."""
        return FLASH_ATTN_3

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedPacked:
        """Copy the cumulative lengths to the device; import the package."""
        package = Package3(importlib.import_module(MODULES["flash_attn_3"]))
        return PreparedPacked(packed_calls(segments, shape.device), shape, package)


@dataclass(frozen=True, slots=True)
class Package2:
    """The calls of flash-attn 2."""

    module: Any

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: compat.PackedLengths,
        *,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Flash`."""
        mask = compat.flash_mask(causal, window)
        options = {"softcap": 0.0, "alibi_slopes": None, "return_softmax": False}
        return self.module._flash_attn_varlen_forward(
            q, k, v, *lengths, 0.0, scale, mask.causal, mask.left, mask.right, **options
        )[:2]

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        lengths: compat.PackedLengths,
        *,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> compat.Gradients:
        """Return the gradients, see `Flash`."""
        mask = compat.flash_mask(causal, window)
        grads = _empty_gradients(q, k, v)
        options = {"softcap": 0.0, "alibi_slopes": None, "deterministic": False}
        self.module._flash_attn_varlen_backward(
            dout, q, k, v, out, lse, *grads, *lengths, 0.0, scale, mask.causal, mask.left, mask.right, **options
        )
        return grads


@dataclass(frozen=True, slots=True)
class Package3:
    """The calls of flash-attn 3. Its backward calls `causal` by another name."""

    module: Any

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: compat.PackedLengths,
        *,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Flash`."""
        mask = compat.flash_mask(causal, window)
        options = {"window_size_left": mask.left, "window_size_right": mask.right, "softmax_scale": scale}
        return self.module._flash_attn_forward(q, k, v, causal=mask.causal, **_named(lengths), **options)[:2]

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        lengths: compat.PackedLengths,
        *,
        causal: bool,
        window: int | None,
        scale: float,
    ) -> compat.Gradients:
        """Return the gradients, see `Flash`."""
        mask = compat.flash_mask(causal, window)
        grads = _empty_gradients(q, k, v)
        buffers = {"dq": grads.q, "dk": grads.k, "dv": grads.v}
        options = {"window_size_left": mask.left, "window_size_right": mask.right, "softmax_scale": scale}
        self.module._flash_attn_backward(
            dout, q, k, v, out, lse, is_causal=mask.causal, **_named(lengths), **buffers, **options
        )
        return grads


def _named(lengths: compat.PackedLengths) -> dict[str, Any]:
    """The lengths by the names of flash-attn."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, lengths, strict=True))


def _empty_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> compat.Gradients:
    """Buffers that the packages write into."""
    return compat.Gradients(*(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)))
