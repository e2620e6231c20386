"""The plain kernel: a dense softmax per segment, readable in a minute, exact for every mask and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from seqloom.attention.kernels.interface import Ability, AttentionShape, Gradients, Saved
from seqloom.attention.lse import sum_dtype
from seqloom.attention.masks import Segments

REFERENCE = Ability(
    name="reference",
    devices=("cpu", "cuda"),
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    max_dim=2**16,
)


class Reference:
    """Attention as it is written in books, one segment after the other."""

    @property
    def ability(self) -> Ability:
        """Everything that segments can say."""
        return REFERENCE

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedReference:
        """Keep the segments; masks are made when they are needed."""
        return PreparedReference(segments, shape)


@dataclass(frozen=True, slots=True)
class PreparedReference:
    """Segments for `Reference`. Half precision is computed in float32 and rounded once, at the end."""

    segments: Segments
    shape: AttentionShape

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Prepared`."""
        wide = sum_dtype(q.dtype)
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.full((self.shape.heads, len(q)), -torch.inf, dtype=wide, device=q.device)
        for rows, keys, visible in self._tiles(q.device):
            logits = self._by_head(q[rows]) @ self._by_head(k[keys]).mT * self.shape.scale
            logits = logits.masked_fill(~visible, -torch.inf)
            sums = torch.logsumexp(logits, dim=-1)
            weights = _weights(logits, sums, visible)
            out[rows] = self._by_row(weights @ self._by_head(v[keys])).to(out.dtype)
            lse[:, rows] = sums.flatten(0, 1)
        return out, lse

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv), see `Prepared`."""
        q, k, v, out, lse = saved
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        for rows, keys, visible in self._tiles(q.device):
            queries, keyed, values = self._by_head(q[rows]), self._by_head(k[keys]), self._by_head(v[keys])
            grad = self._by_head(dout[rows])
            logits = queries @ keyed.mT * self.shape.scale
            sums = lse[:, rows].unflatten(0, (self.shape.kv_heads, -1))
            weights = _weights(logits, sums, visible)
            delta = (grad * self._by_head(out[rows])).sum(dim=-1, keepdim=True)
            dlogits = weights * (grad @ values.mT - delta) * self.shape.scale
            dq[rows] = self._by_row(dlogits @ keyed).to(dq.dtype)
            # The query heads that read one kv head add up.
            dk[keys] = (dlogits.mT @ queries).sum(dim=1).transpose(0, 1).to(dk.dtype)
            dv[keys] = (weights.mT @ grad).sum(dim=1).transpose(0, 1).to(dv.dtype)
        return dq, dk, dv

    def _tiles(self, device: torch.device) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Yield (query rows, key rows, visible [queries, keys]) of every segment."""
        causal, window = self.segments.causal, self.segments.window
        for q_start, q_stop, k_start, k_stop, offset in self.segments.rows():
            position = torch.arange(offset, offset + q_stop - q_start, device=device)
            behind = position[:, None] - torch.arange(k_stop - k_start, device=device)
            visible = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
            if window is not None:
                visible &= behind < window
            yield slice(q_start, q_stop), slice(k_start, k_stop), visible

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, heads or kv_heads, dim] -> [kv_heads, heads per kv head or 1, rows, dim] in the wide dtype."""
        x = x.to(sum_dtype(x.dtype)).transpose(0, 1)
        return x.unflatten(0, (self.shape.kv_heads, -1))

    def _by_row(self, x: torch.Tensor) -> torch.Tensor:
        """[kv_heads, heads per kv head, rows, dim] -> [rows, heads, dim]."""
        return x.flatten(0, 1).transpose(0, 1)


def _weights(logits: torch.Tensor, sums: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """exp(logits - sums) where visible, else exactly 0: also in a row that sees nothing, whose sum is -inf."""
    return torch.exp(logits - sums.unsqueeze(-1)).masked_fill(~visible, 0)
