"""Kernels for CPUs: torch's flash attention, one call per segment, and the dense reference that every test trusts.

The causal mask of torch's CPU operator starts at the first query and the first key (query a sees key b when b <= a),
which serves squares and segments at offset 0. Other masks are added to the logits, for a block of queries at a time and
only over the keys the block can see, so that a long document with a window costs what the window costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from seqloom import compat
from seqloom.attention.kernels.interface import DTYPES, AttentionShape, Capabilities, Gradients, Saved
from seqloom.attention.masks import Segments
from seqloom.attention.merge import sum_dtype

MASKED_QUERIES = 256
"""Queries that share one added mask."""


class CpuFlash:
    """Torch's CPU flash attention, for every mask and dtype; a segment's result does not depend on other segments."""

    capabilities = Capabilities(name="cpu_flash", devices=("cpu",), dtypes=DTYPES, max_dim=2**16)

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedCpuFlash:
        """Cut the segments into operator calls."""
        return PreparedCpuFlash(tuple(_operator_calls(segments)), shape)


class _OperatorCall(NamedTuple):
    """Rows of one call of the operator, in which every query sees a key.

    Attributes:
        causal: uses the operator's own mask.
        shift: with an added mask, the position of the first query minus that of the first key; None without.
    """

    queries: slice
    keys: slice
    causal: bool
    shift: int | None = None
    window: int | None = None

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return the mask that is added to the logits, [queries, keys]: 0, or -inf where a key is hidden."""
        if self.shift is None:
            return None
        queries, keys = self.queries.stop - self.queries.start, self.keys.stop - self.keys.start
        behind = torch.arange(self.shift, self.shift + queries)[:, None] - torch.arange(keys)
        hidden = behind < 0
        if self.window is not None:
            hidden |= behind >= self.window
        return torch.zeros(queries, keys, dtype=dtype).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True, slots=True)
class PreparedCpuFlash:
    """Operator calls of `CpuFlash`."""

    calls: tuple[_OperatorCall, ...]
    shape: AttentionShape

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        out = torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.full((self.shape.heads, len(q)), -torch.inf, dtype=sum_dtype(q.dtype))
        for call in self.calls:
            inputs = map(_heads_first, (q[call.queries], k[call.keys], v[call.keys]))
            options = {"causal": call.causal, "mask": call.mask(lse.dtype), "scale": self.shape.scale}
            call_out, call_lse = compat.cpu_flash_forward(*inputs, **options)
            out[call.queries] = _rows_first(call_out)
            lse[:, call.queries] = call_lse[0]
        return out, lse

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv).

        The operator would add up dk and dv in half precision, an error that grows with the heads and the length;
        so the backward of half precision runs in float32 and is rounded once.
        """
        q, k, v, out, lse = saved
        wide = sum_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
        for call in self.calls:
            call_dout, call_q, call_out = (_heads_first(x[call.queries].to(wide)) for x in (dout, q, out))
            call_k, call_v = (_heads_first(x[call.keys].to(wide)) for x in (k, v))
            call_lse = lse[None, :, call.queries]
            options = {"causal": call.causal, "mask": call.mask(wide), "scale": self.shape.scale}
            grads = compat.cpu_flash_backward(call_dout, call_q, call_k, call_v, call_out, call_lse, **options)
            call_dq, call_dk, call_dv = map(_rows_first, grads)
            dq[call.queries] = call_dq
            dk[call.keys] += call_dk
            dv[call.keys] += call_dv
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _operator_calls(segments: Segments) -> Iterator[_OperatorCall]:
    """Yield the calls of every segment, without the queries that see nothing."""
    windowed, unmasked = segments.windowed().tolist(), segments.unmasked().tolist()
    for index, (q_start, q_stop, k_start, k_stop, offset) in enumerate(segments.rows()):
        if unmasked[index]:
            yield _OperatorCall(slice(q_start, q_stop), slice(k_start, k_stop), causal=False)
            continue
        window = segments.window if windowed[index] else None
        # From here on positions count from the first key: a query at `p` sees the keys p - window + 1 .. p.
        first, last = max(offset, 0), offset + q_stop - q_start
        if window is not None:
            last = min(last, k_stop - k_start + window - 1)
        row = q_start - offset
        if first == 0 and window is None and last > 0:
            keys = slice(k_start, min(k_stop, k_start + last))
            yield _OperatorCall(slice(row, row + last), keys, causal=True)
            continue
        for low in range(first, last, MASKED_QUERIES):
            high = min(low + MASKED_QUERIES, last)
            key = 0 if window is None else max(0, low - window + 1)
            keys = slice(k_start + key, min(k_stop, k_start + high))
            yield _OperatorCall(slice(row + low, row + high), keys, causal=False, shift=low - key, window=window)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] -> [1, heads, rows, dim], a view."""
    return x.transpose(0, 1)[None]


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, rows, dim] -> [rows, heads, dim], a view."""
    return x[0].transpose(0, 1)


class Reference:
    """Attention as textbooks write it, on any device: a dense softmax per segment, exact for every mask and dtype."""

    capabilities = Capabilities(
        name="reference", devices=("cpu", "cuda"), dtypes=DTYPES, max_dim=2**16, softcap=True, dropout=True
    )

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedReference:
        """Keep the segments; forward and backward build the masks."""
        return PreparedReference(segments, shape)


@dataclass(frozen=True, slots=True)
class PreparedReference:
    """Segments for `Reference`. Half precision is computed in float32 and rounded once, at the end."""

    segments: Segments
    shape: AttentionShape

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full((self.shape.heads, len(q)), -torch.inf, dtype=sum_dtype(q.dtype), device=q.device)
        for rows, keys, visible in self._dense_masks(q.device):
            logits, _ = self._logits(self._by_kv_head(q[rows]), self._by_kv_head(k[keys]))
            logits = logits.masked_fill(~visible, -torch.inf)
            segment_lse = torch.logsumexp(logits, dim=-1)
            weights = _softmax(logits, segment_lse, visible) * self._keep_mask(rows, keys)
            out[rows] = (weights @ self._by_kv_head(v[keys])).flatten(0, 1).transpose(0, 1).to(out.dtype)
            lse[:, rows] = segment_lse.flatten(0, 1)
        return out, lse

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv)."""
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in saved[:3])
        for rows, keys, visible in self._dense_masks(dq.device):
            q, out, segment_dout = (self._by_kv_head(x[rows]) for x in (saved.q, saved.out, dout))
            k, v = self._by_kv_head(saved.k[keys]), self._by_kv_head(saved.v[keys])
            segment_lse = saved.lse[:, rows].unflatten(0, (self.shape.kv_heads, -1))
            logits, slope = self._logits(q, k)
            weights = _softmax(logits, segment_lse, visible)
            delta = (segment_dout * out).sum(dim=-1, keepdim=True)
            kept = self._keep_mask(rows, keys)
            dlogits = weights * (segment_dout @ v.mT * kept - delta) * slope * self.shape.scale
            dq[rows] = (dlogits @ k).flatten(0, 1).transpose(0, 1).to(dq.dtype)
            # The query heads that read one kv head add up.
            dk[keys] = (dlogits.mT @ q).sum(dim=1).transpose(0, 1).to(dk.dtype)
            dv[keys] = ((weights * kept).mT @ segment_dout).sum(dim=1).transpose(0, 1).to(dv.dtype)
        return dq, dk, dv

    def _logits(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
        """Return the logits, capped if so wished, and what a cap multiplies their gradient with."""
        logits, cap = q @ k.mT * self.shape.scale, self.shape.softcap
        if cap is None:
            return logits, 1.0
        squashed = torch.tanh(logits / cap)
        return cap * squashed, 1 - squashed**2

    def _keep_mask(self, rows: slice, keys: slice) -> torch.Tensor | float:
        """Return what weights are multiplied with, [kv_heads, heads per kv head, queries, keys]; 1: none is dropped."""
        shape = self.shape
        if shape.dropout is None:
            return 1.0
        mask = shape.dropout.mask(rows, keys, shape.heads, sum_dtype(shape.dtype))
        return mask.unflatten(0, (shape.kv_heads, -1))

    def _dense_masks(self, device: torch.device) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield (query rows, key rows, visible bool[queries, keys]) of every segment."""
        causal, window = self.segments.causal, self.segments.window
        for q_start, q_stop, k_start, k_stop, offset in self.segments.rows():
            position = torch.arange(offset, offset + q_stop - q_start, device=device)
            behind = position[:, None] - torch.arange(k_stop - k_start, device=device)
            visible = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
            if window is not None:
                visible &= behind < window
            yield slice(q_start, q_stop), slice(k_start, k_stop), visible

    def _by_kv_head(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, heads or kv_heads, dim] -> [kv_heads, heads per kv head or 1, rows, dim] in `sum_dtype`."""
        return x.to(sum_dtype(x.dtype)).transpose(0, 1).unflatten(0, (self.shape.kv_heads, -1))


def _softmax(logits: torch.Tensor, lse: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """exp(logits - lse) where visible, else exactly 0: also in a row that sees nothing, whose lse is -inf."""
    return torch.exp(logits - lse.unsqueeze(-1)).masked_fill(~visible, 0)
