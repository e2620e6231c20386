"""Tiles ready to run: a kernel's prepared segments with the runs of rows they touch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from seqloom.attention.kernels.kernel import Gradients, Kernel, Prepared, Saved, Shape
from seqloom.attention.merge import Joins, Sum, Total, covers, sum_dtype
from seqloom.attention.schedule import Tile
from seqloom.attention.segments import Segments
from seqloom.comm.upload import on_device
from seqloom.errors import SeqloomError


@dataclass(frozen=True, slots=True, eq=False)
class Heads:
    """The heads of one rank, and which kv head every query head reads.

    Attributes:
        shape: with `kv_heads` as they lie in memory.
        readers: int[heads], the kv head of every query head, ascending, when they do not share them equally; else None.
    """

    shape: Shape
    readers: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTile:
    """A tile as a kernel wants it."""

    prepared: Prepared
    queries: slice
    keys: slice


def prepare(kernel: Kernel, segments: Segments, heads: Heads) -> Prepared:
    """Have a kernel prepare segments; refuse what it cannot take."""
    shape, readers = heads.shape, heads.readers
    if readers is not None:
        shape = Shape(shape.heads, shape.heads, shape.dim, shape.dtype, shape.device, shape.scale)
    refusal = kernel.ability.refusal(segments, shape)
    if refusal is not None:
        raise SeqloomError(refusal)
    prepared = kernel.prepare(segments, shape)
    if readers is None:
        return prepared
    edges = [0, *(h for h in range(1, len(readers)) if readers[h] != readers[h - 1]), len(readers)]
    index = on_device(np.array(readers, dtype=np.int64), shape.device)
    return Expanded(prepared, index, tuple(pairwise(edges)))


def prepare_tiles(kernel: Kernel, tiles: Iterable[Tile], heads: Heads) -> tuple[PreparedTile, ...]:
    """Have a kernel prepare tiles."""
    return tuple(PreparedTile(prepare(kernel, tile.segments, heads), tile.queries, tile.keys) for tile in tiles)


@dataclass(frozen=True, slots=True, eq=False)
class Expanded:
    """Prepared segments for query heads that share kv heads unequally: keys and values get one copy per query head.

    Attributes:
        inner: prepared for as many kv heads as heads.
        index: int64[heads], the kv head of every query head.
        ranges: the query heads of every kv head.
    """

    inner: Prepared
    index: torch.Tensor
    ranges: tuple[tuple[int, int], ...]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Prepared.forward`."""
        return self.inner.forward(q, k.index_select(1, self.index), v.index_select(1, self.index))

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """See `Prepared.backward`. The query heads of a kv head are summed in float32."""
        k, v = saved.k.index_select(1, self.index), saved.v.index_select(1, self.index)
        dq, dk, dv = self.inner.backward(dout, saved._replace(k=k, v=v))
        return dq, self._summed(dk), self._summed(dv)

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        wide = sum_dtype(gradient.dtype)
        return torch.stack([gradient[:, low:high].sum(1, dtype=wide) for low, high in self.ranges], dim=1)


def forward_tiles(tiles: Sequence[PreparedTile], total: Total, q: torch.Tensor, kv: torch.Tensor) -> None:
    """Merge the results of tiles into `total`.

    Args:
        tiles: over the rows of `q` and `kv`.
        total: of the rows of `q`.
        q: [rows, heads, dim].
        kv: [key rows, 2 * kv heads, dim], keys before values.
    """
    k, v = kv.tensor_split(2, dim=1)
    for tile in tiles:
        out, lse = tile.prepared.forward(q[tile.queries], k[tile.keys], v[tile.keys])
        total.add(tile.queries, out, lse)


class KeyGradient(NamedTuple):
    """dk, dv [len(keys), kv heads, dim] of a run of keys."""

    keys: slice
    dk: torch.Tensor
    dv: torch.Tensor


def backward_tiles(
    tiles: Sequence[PreparedTile], dout: torch.Tensor, saved: Saved, kv: torch.Tensor, dq: Sum
) -> list[KeyGradient]:
    """Add the tiles' share to `dq` and return the gradients of their keys.

    Args:
        tiles: over the rows of the queries and of `kv`.
        dout: [rows, heads, dim].
        saved: of the queries; its own keys and values are not used.
        kv: [key rows, 2 * kv heads, dim], keys before values.
        dq: the gradient of the queries so far.
    """
    found = []
    for tile in tiles:
        rows = tile.queries
        k, v = kv[tile.keys].tensor_split(2, dim=1)
        part = Saved(saved.q[rows], k, v, saved.out[rows], saved.lse[:, rows])
        share, dk, dv = tile.prepared.backward(dout[rows], part)
        dq.add(rows, share)
        found.append(KeyGradient(tile.keys, dk, dv))
    return found


def add_key_gradients(
    total: torch.Tensor | None, size: int, parts: Sequence[KeyGradient], joins: Joins
) -> torch.Tensor | None:
    """Add gradients to `total` [size, 2 * kv heads, dim] in `sum_dtype`, in place, and return it.

    Without a total one is made. Without a total and without parts there is none.
    """
    for keys, dk, dv in parts:
        heads, fresh = dk.shape[1], total is None
        if total is None:
            make = dk.new_empty if covers(keys, size) else dk.new_zeros
            total = make((size, 2 * heads, dk.shape[2]), dtype=sum_dtype(dk.dtype))
        joins.accumulate(total[keys, :heads], dk, fresh)
        joins.accumulate(total[keys, heads:], dv, fresh)
    return total
