"""Flash attention over packed sequences on a GPU: torch's own operator, and FlashAttention-4.

The causal mask ends at the last query and the last key, so squares and pieces with their prefix go into one call for
any number of documents. Unmasked segments under a causal rule go into a second call. Segments that do not lie one after
the other are gathered. Operators are called below autograd, because a ring's backward needs the log-sum-exp of all
keys, not of the keys of one call.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom import compat
from seqloom.attention.kernels.interface import (
    AttentionShape,
    Capabilities,
    Gradients,
    KernelBuild,
    KernelUse,
    Saved,
    device_rows,
)
from seqloom.attention.masks import Segments
from seqloom.attention.merge import sum_dtype
from seqloom.dist.rows import on_device
from seqloom.errors import SeqloomError


class Varlen:
    """Torch's packed flash attention on a GPU: half precision, head dims up to 256.

    It takes squares, pieces with their prefix, windows over both, and unmasked segments.
    """

    capabilities = Capabilities(
        "varlen",
        ("cuda",),
        (torch.bfloat16, torch.float16),
        max_dim=256,
        dim_multiple=8,
        offsets=False,
        prefixes=True,
        copies=True,
    )

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedVarlen:
        """Copy the cumulative lengths to the device."""
        return PreparedVarlen(varlen_calls(segments, shape), shape, FlashOperator.of_torch())


class FlashAttention4:
    """FlashAttention-4 (package flash-attn-4) on Hopper and later: half precision, head dims up to 256.

    It takes what `Varlen` takes, and caps logits. A kernel is compiled for every kind of mask and ratio of heads, not
    for lengths. Of other head dims than multiples of 32 it takes some, and dq is wrong on Hopper for 72 and its like:
    its backward pads them to a multiple of 16, and sums in buffers that are padded to one of 32.
    """

    capabilities = replace(Varlen.capabilities, name="fa4", dim_multiple=32, softcap=True)

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedVarlen:
        """Copy the cumulative lengths to the device."""
        calls = varlen_calls(segments, shape)
        spelt = tuple(replace(call, arguments=_fa4_arguments(call.arguments, shape.softcap)) for call in calls)
        return PreparedVarlen(spelt, shape, FlashOperator.of_fa4())

    def builds(self, shape: AttentionShape, use: KernelUse) -> list[KernelBuild]:
        """Return a build for every kind of mask, forward and backward; see `SupportsBuilds`."""
        window = use.window if use.window is not None and use.window < use.longest else None
        kinds = [Segments.packed([FA4_LEAST], window=window)]
        if window is not None:
            kinds.append(Segments.packed([FA4_LEAST]))  # documents that the window covers
        if use.tiles:
            kinds.append(Segments.packed([FA4_LEAST], causal=False))
        return [partial(self._build, segments, shape) for segments in kinds]

    def _build(self, segments: Segments, shape: AttentionShape) -> None:
        prepared, (q, k) = self.prepare(segments, shape), shape.zeros(FA4_LEAST)
        out, lse = prepared.forward(q, k, k)
        prepared.backward(out, Saved(q, k, k, out, lse))


class FlashOperator(NamedTuple):
    """Flash attention over packed sequences, with `VarlenArguments` in its own spelling.

    Attributes:
        forward: forward(q, k, v, arguments) -> (out, lse), shapes as in `compat.flash_forward`.
        backward: backward(dout, saved, arguments) -> dq, dk, dv.
    """

    forward: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
    backward: Callable[[torch.Tensor, Saved, Any], Gradients]

    @classmethod
    def of_torch(cls) -> FlashOperator:
        """Return torch's."""
        return cls(compat.flash_forward, compat.flash_backward)

    @classmethod
    @cache
    def of_fa4(cls) -> FlashOperator:
        """Load FlashAttention-4; what it compiles goes to its cache on disk, unless the environment says otherwise.

        Its two private functions are all that takes a log-sum-exp of more keys than those of the call. One thread calls
        at a time: a call may compile, and two threads that compile abort the process. Gradients are summed in a fixed
        order where torch is told to use deterministic algorithms.
        """
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one of its parts about another
            try:
                interface = import_module("flash_attn.cute.interface")
            except ImportError as error:
                raise SeqloomError(
                    f"package flash-attn-4 is installed and cannot be loaded: {error}; install it again with what it "
                    "needs (pip install 'seqloom[gpu]'), or remove it: attention then runs on Triton's kernels"
                ) from error
        warnings.filterwarnings("ignore", message="Argument .* cannot be converted to a JitArgument")
        calling = Lock()

        def forward(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, arguments: dict[str, Any]
        ) -> tuple[torch.Tensor, torch.Tensor]:
            with calling:
                return interface._flash_attn_fwd(q, k, v, return_lse=True, **arguments)[:2]

        def backward(dout: torch.Tensor, saved: Saved, arguments: dict[str, Any]) -> Gradients:
            q, k, v, out, lse = saved
            fixed_order = torch.are_deterministic_algorithms_enabled()
            with calling:
                return interface._flash_attn_bwd(q, k, v, out, dout, lse, deterministic=fixed_order, **arguments)

        return cls(forward, backward)


FA4_LEAST = 256
"""Longest sequence that FlashAttention-4 is told of, at least: it compiles anew where one block of rows holds all."""


def _fa4_arguments(arguments: compat.VarlenArguments, softcap: float | None) -> dict[str, Any]:
    """Spell arguments for FlashAttention-4: no bound is None there, and -1 beside a bound hides every key."""
    found = arguments._asdict() | {"softcap": softcap or 0.0}  # 0: none
    for side in ("window_size_left", "window_size_right"):
        found[side] = None if arguments.causal or found[side] < 0 else found[side]
    for side in ("max_seqlen_q", "max_seqlen_k"):
        found[side] = max(found[side], FA4_LEAST)
    return found


@dataclass(frozen=True, slots=True)
class VarlenCall:
    """Sequences of one call. `queries` and `keys` are the rows it reads: a slice, or an index on the device.

    `arguments` are spelt as the operator wants them.
    """

    queries: slice | torch.Tensor
    keys: slice | torch.Tensor
    arguments: Any

    def covers(self, q_rows: int, k_rows: int) -> bool:
        """Return whether the call reads every row of the buffers, in place."""
        return (
            isinstance(self.queries, slice)
            and isinstance(self.keys, slice)
            and (self.queries, self.keys) == (slice(0, q_rows), slice(0, k_rows))
        )


@dataclass(frozen=True, slots=True)
class PreparedVarlen:
    """Calls of a packed flash attention, whose rows do not overlap."""

    calls: tuple[VarlenCall, ...]
    shape: AttentionShape
    operator: FlashOperator

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        if self._is_one_call(q, k):
            return self.operator.forward(q, k, v, self.calls[0].arguments)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full((self.shape.heads, len(q)), -torch.inf, dtype=sum_dtype(q.dtype), device=q.device)
        self.forward_into(q, k, v, out, lse)
        return out, lse

    def forward_into(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Write the rows of the calls, see `InPlaceAttention`."""
        for call in self.calls:
            inputs = q[call.queries], k[call.keys], v[call.keys]
            call_out, call_lse = self.operator.forward(*inputs, call.arguments)
            out[call.queries] = call_out.to(out.dtype)
            lse[:, call.queries] = call_lse

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv)."""
        if self._is_one_call(saved.q, saved.k):
            return self._backward(self.calls[0], dout, saved)
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])
        self.backward_into(dout, saved, (dq, dk, dv))
        return dq, dk, dv

    def backward_into(self, dout: torch.Tensor, saved: Saved, gradients: Gradients) -> None:
        """Write the rows of the calls, see `InPlaceAttention`."""
        q, k, v, out, lse = saved
        for call in self.calls:
            rows, keys = call.queries, call.keys
            part = Saved(q[rows], k[keys], v[keys], out[rows], lse[:, rows])
            grads = self._backward(call, dout[rows], part)
            for buffer, where, grad in zip(gradients, (rows, keys, keys), grads, strict=True):
                buffer[where] = grad.to(buffer.dtype)

    def _is_one_call(self, q: torch.Tensor, k: torch.Tensor) -> bool:
        return len(self.calls) == 1 and self.calls[0].covers(len(q), len(k))

    def _backward(self, call: VarlenCall, dout: torch.Tensor, saved: Saved) -> Gradients:
        # A ring hands over its merged output in float32; the operator wants one dtype, and lse without gaps.
        dtype = saved.q.dtype
        saved = saved._replace(out=saved.out.to(dtype), lse=saved.lse.contiguous())
        return self.operator.backward(dout.to(dtype), saved, call.arguments)


def varlen_calls(segments: Segments, shape: AttentionShape) -> tuple[VarlenCall, ...]:
    """Sort segments into at most two packed calls: those whose mask ends on the diagonal, and unmasked ones.

    Arguments are `compat.VarlenArguments`.
    """
    spare, device = segments.k_len - segments.q_len, shape.device
    aligned = segments.causal & (segments.offset == spare) & (spare >= 0)
    calls = []
    for causal, chosen in ((True, aligned), (False, ~aligned)):
        if chosen.any():
            part = segments.select(np.flatnonzero(chosen)[np.argsort(segments.q_start[chosen], kind="stable")])
            window = part.window if causal and part.windowed().any() else None
            rows, keys = device_rows(part.q_start, part.q_stop, device), device_rows(part.k_start, part.k_stop, device)
            lengths = part.q_len, part.k_len
            cu_q, cu_k = (on_device(np.concatenate([[0], np.cumsum(n)]).astype(np.int32), device) for n in lengths)
            max_q, max_k = (int(n.max()) for n in lengths)
            mask = compat.flash_mask(causal, window)
            arguments = compat.VarlenArguments(cu_q, cu_k, max_q, max_k, shape.scale, *mask)
            calls.append(VarlenCall(rows, keys, arguments))
    return tuple(calls)
