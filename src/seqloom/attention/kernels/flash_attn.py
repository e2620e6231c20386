"""The flash-attn packages, where they are installed: version 2 (`flash_attn`), version 3 (`flash_attn_interface`).

Both are called below their autograd functions, because a ring's backward needs the log-sum-exp of all keys, not of
the keys of one call. Written to flash-attn 2.7 and flash-attn 3.0.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from seqloom import compat
from seqloom.attention.kernels.kernel import Ability, Shape
from seqloom.attention.kernels.varlen import PreparedPacked, packed_calls
from seqloom.attention.segments import Segments

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

    def prepare(self, segments: Segments, shape: Shape) -> PreparedPacked:
        """Copy the cumulative lengths to the device; import the package."""
        package = Package2(importlib.import_module(MODULES["flash_attn_2"]))
        return PreparedPacked(packed_calls(segments, shape.device), shape, package)


class FlashAttn3:
    """Flash attention of the package `flash_attn_interface`, for Hopper GPUs."""

    @property
    def ability(self) -> Ability:
        """As torch's `varlen`."""
        return FLASH_ATTN_3

    def prepare(self, segments: Segments, shape: Shape) -> PreparedPacked:
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
