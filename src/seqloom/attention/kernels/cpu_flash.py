"""Torch's flash attention for CPUs, one call per segment.

Its causal mask starts at the first query and the first key (query a sees key b when b <= a), which serves squares and
segments at offset 0. Other masks are added to the logits, for a block of queries at a time and only over the keys the
block can see, so that a long document with a window costs what the window costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from seqloom import compat
from seqloom.attention.kernels.interface import Ability, AttentionShape, Gradients, Saved
from seqloom.attention.lse import sum_dtype
from seqloom.attention.masks import Segments

CPU_FLASH = Ability(
    name="cpu_flash",
    devices=("cpu",),
    dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    max_dim=2**16,
)

BLOCK = 256
"""Queries that share one added mask."""


class CpuFlash:
    """Attention on a CPU, for every mask and dtype; a segment's result does not depend on the other segments."""

    @property
    def ability(self) -> Ability:
        """Everything that segments can say."""
        return CPU_FLASH

    def prepare(self, segments: Segments, shape: AttentionShape) -> PreparedCpuFlash:
        """Cut the segments into calls."""
        return PreparedCpuFlash(tuple(_tiles(segments)), shape)


class Tile(NamedTuple):
    """One call: every query sees a key."""

    queries: slice
    keys: slice
    causal: bool
    """The operator's own mask."""
    shift: int | None = None
    """With an added mask: position of the first query minus that of the first key."""
    window: int | None = None

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """Return what is added to the logits, [queries, keys]: 0, or -inf where a key is hidden."""
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
    """Calls for `CpuFlash`."""

    tiles: tuple[Tile, ...]
    shape: AttentionShape

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Prepared`."""
        out = torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.full((self.shape.heads, len(q)), -torch.inf, dtype=sum_dtype(q.dtype))
        for tile in self.tiles:
            inputs = (_by_head(q[tile.queries]), _by_head(k[tile.keys]), _by_head(v[tile.keys]))
            options = {"causal": tile.causal, "mask": tile.mask(lse.dtype), "scale": self.shape.scale}
            result, sums = compat.cpu_flash_forward(*inputs, **options)
            out[tile.queries] = _by_row(result)
            lse[:, tile.queries] = sums[0]
        return out, lse

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv), see `Prepared`.

        The operator would add up dk and dv in half precision, an error that grows with the heads and the length;
        so the backward of half precision runs in float32 and is rounded once.
        """
        q, k, v, out, lse = saved
        wide = sum_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide) for x in (q, k, v))
        for tile in self.tiles:
            grad, queries, result = (_by_head(x[tile.queries].to(wide)) for x in (dout, q, out))
            keys, values = (_by_head(x[tile.keys].to(wide)) for x in (k, v))
            sums = lse[None, :, tile.queries]
            options = {"causal": tile.causal, "mask": tile.mask(wide), "scale": self.shape.scale}
            grads = compat.cpu_flash_backward(grad, queries, keys, values, result, sums, **options)
            dq[tile.queries] = _by_row(grads.q)
            dk[tile.keys] += _by_row(grads.k)
            dv[tile.keys] += _by_row(grads.v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _tiles(segments: Segments) -> Iterator[Tile]:
    """Yield the calls of every segment, without the queries that see nothing."""
    windowed, unmasked = segments.windowed().tolist(), segments.unmasked().tolist()
    for index, (q_start, q_stop, k_start, k_stop, offset) in enumerate(segments.rows()):
        if unmasked[index]:
            yield Tile(slice(q_start, q_stop), slice(k_start, k_stop), causal=False)
            continue
        window = segments.window if windowed[index] else None
        # From here on positions count from the first key: a query at `p` sees the keys p - window + 1 .. p.
        first, last = max(offset, 0), offset + q_stop - q_start
        if window is not None:
            last = min(last, k_stop - k_start + window - 1)
        row = q_start - offset
        if first == 0 and window is None and last > 0:
            keys = slice(k_start, min(k_stop, k_start + last))
            yield Tile(slice(row, row + last), keys, causal=True)
            continue
        for low in range(first, last, BLOCK):
            high = min(low + BLOCK, last)
            key = 0 if window is None else max(0, low - window + 1)
            keys = slice(k_start + key, min(k_stop, k_start + high))
            yield Tile(slice(row + low, row + high), keys, causal=False, shift=low - key, window=window)


def _by_head(x: torch.Tensor) -> torch.Tensor:
    """[rows, heads, dim] -> [1, heads, rows, dim], a view."""
    return x.transpose(0, 1)[None]


def _by_row(x: torch.Tensor) -> torch.Tensor:
    """[1, heads, rows, dim] -> [rows, heads, dim], a view."""
    return x[0].transpose(0, 1)
