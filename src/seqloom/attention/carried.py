"""Attention of a group that works on documents in pieces: keys of this round, and those carried over from earlier ones.

The tokens of the round are computed as if they were whole documents. To that come the tiles of every piece with its
prefix, and results are merged by log-sum-exp. With a ring the prefixes go round beside the keys of the round, in
the same exchanges, and so do their gradients on the way back, in float32; see `ring.py` for the order.

Keys and values of pieces are kept once, in the `Carry`. What is saved for backward has those of whole documents only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from seqloom.attention.calls import Meanwhile, Shared, Waits
from seqloom.attention.carry import Carry, Piece
from seqloom.attention.kernels.kernel import Gradients, Kernel, Saved
from seqloom.attention.merge import Joins, Sum, Total, joins_on, sum_dtype
from seqloom.attention.prefix import Prefix, pieces_of, prefix_of
from seqloom.attention.rows import RowIndex, count, put, take
from seqloom.attention.schedule import Chunks, Tile, ring_tiles
from seqloom.attention.segments import Segments
from seqloom.attention.tiles import (
    Heads,
    PreparedTile,
    add_key_gradients,
    backward_tiles,
    forward_tiles,
    prepare_tiles,
)
from seqloom.comm.context import BoundGroup, Context
from seqloom.comm.parcels import exchange_filled
from seqloom.comm.rows import columns, rows_of
from seqloom.comm.transport import Handle, Parcel, Transport
from seqloom.comm.upload import on_device

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Keys that go round: those of the round (first), or the prefix of a piece.

    Attributes:
        counts: rows of every ring index.
        steps: the tiles of every step.
        prefix: whose it is; None: the keys of the round.
    """

    counts: tuple[int, ...]
    steps: tuple[tuple[PreparedTile, ...], ...]
    prefix: Prefix | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Carried(Shared):
    """One rank's part of a group with documents in pieces.

    Attributes:
        transport: this rank's.
        ranks: of the ring, by ring index; one without a ring.
        index: of this rank.
        pieces: of this round.
        whole: rows of the round that belong to whole documents.
        sources: the keys of the round, then prefixes.
        joins: how partial results are joined.
        carry: where keys, values and gradients of pieces are.
        layer: whose keys these are; -1 until a layer calls, see `in_layer`.
    """

    transport: Transport
    ranks: tuple[int, ...]
    index: int
    pieces: tuple[Piece, ...]
    whole: RowIndex
    sources: tuple[Source, ...]
    joins: Joins
    carry: Carry
    layer: int = -1

    @classmethod
    def of(cls, context: Context, bound: BoundGroup, heads: Heads, kernel: Kernel, window: int | None) -> Carried:
        """Do the index work of a group; the context has the pieces of its documents, and a carry."""
        group, index, carry = bound.group, bound.ring_index, cast("Carry", context.carry)
        every = {document: tuple(spans) for document, spans in context.pieces.items()}
        pieces = tuple(pieces_of(group, index, bound.spans, every))
        prefixes = [prefix_of(group, index, piece, every[piece.document], window) for piece in pieces]
        sources = [_of_the_round(bound, heads, kernel, window)]
        for prefix in prefixes:
            if prefix is not None:
                steps = tuple(prepare_tiles(kernel, tiles, heads) for tiles in prefix.steps)
                sources.append(Source(prefix.counts, steps, prefix))
        rows = _rows_of_whole(bound, pieces)
        whole = rows if isinstance(rows, slice) else on_device(rows, context.device)
        joins = joins_on(context.device, heads.shape.dtype)
        return cls(context.transport, bound.ring_ranks, index, pieces, whole, tuple(sources), joins, carry)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) over the keys of all ring indices and all pieces so far. `out` has the dtype of q."""
        for piece in self.pieces:
            self.carry.write(self.layer, piece, k[piece.rows], v[piece.rows])
        keys = self._keys(take(k, self.whole), take(v, self.whole))
        total = Total(q, self.joins)
        for step in range(self.ring):
            coming = self._rooms(keys, step + 1, keys[0].dtype) if step + 1 < self.ring else []
            handle = self._pass_on((keys if coming else [], coming))
            for source, kv in zip(self.sources, keys, strict=True):
                forward_tiles(source.steps[step], total, q, kv)
            meanwhile(step)
            handle.wait()
            keys = coming or keys
        for piece in self.pieces:
            self.carry.forwarded(self.layer, piece)
        return total.result()

    def backward(self, dout: torch.Tensor, saved: Saved, meanwhile: Meanwhile) -> Gradients:
        """Return (dq, dk, dv) of the own rows: dq in the dtype of q, dk and dv in `sum_dtype`."""
        for piece in self.pieces:
            self.carry.begin_backward(self.layer, piece)
        wide = sum_dtype(saved.q.dtype)
        keys, gradients = self._keys(saved.k, saved.v), []
        begun, dq = self._begun(), Sum(saved.q, self.joins)
        for step in range(self.ring):
            coming = self._rooms(keys, step + 1, keys[0].dtype) if step + 1 < self.ring else []
            arriving = self._rooms(keys, step, wide) if step else []
            handle = self._pass_on((keys if coming else [], coming), (gradients, arriving))
            found = [
                backward_tiles(source.steps[step], dout, saved, kv, dq)
                for source, kv in zip(self.sources, keys, strict=True)
            ]
            meanwhile(step)
            handle.wait()
            gradients = []
            for kv, parts, so_far in zip(keys, found, arriving or begun, strict=True):
                total = add_key_gradients(so_far, len(kv), parts, self.joins)
                gradients.append(kv.new_zeros(kv.shape, dtype=wide) if total is None else total)
            keys = coming or keys
        if self.ring > 1:
            home = self._rooms(keys, 0, wide)
            handle = self._pass_on((gradients, home))
            meanwhile(self.ring)
            handle.wait()
            gradients = home
        dk, dv = self._settled(gradients, begun).tensor_split(2, dim=1)
        return dq.result(), dk, dv

    def saved(self, saved: Saved, delivered: bool) -> Saved:
        """Return what backward needs beside the carry, in memory of its own.

        Args:
            saved: all of the group's.
            delivered: by an exchange, which leaves q, k and v in one memory.
        """
        k, v = (_copied(x, self.whole) for x in (saved.k, saved.v))
        return saved._replace(q=saved.q.contiguous().clone() if delivered else saved.q, k=k, v=v)

    def waits(self, row: int, wide_row: int) -> Waits:
        """See `Shared.waits`."""
        rows = [sum(source.counts[self._held(step)] for source in self.sources) for step in range(self.ring)]
        keys, gradients = [row * some for some in rows[1:]], [wide_row * some for some in rows[1:]]
        both = [sum(pair) for pair in zip([*keys, 0], [0, *gradients], strict=True)]
        return Waits(tuple(keys), (*both, wide_row * rows[0]))

    @property
    def ring(self) -> int:
        """Indices of the ring."""
        return len(self.ranks)

    def _held(self, step: int) -> int:
        """The index whose keys are here in a step."""
        return (self.index - step) % self.ring

    def _keys(self, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Return the keys and values of every source, [rows, 2 * kv heads, dim]; prefixes are views.

        Args:
            k, v: of whole documents.
        """
        written = [self.carry.keys(self.layer, piece) for piece in self.pieces]
        if len(written) == 1 and not len(k):
            piece = self.pieces[0]
            own = written[0][piece.start : piece.stop]
        else:
            own = k.new_empty((self.sources[0].counts[self.index], 2 * k.shape[1], k.shape[2]))
            for piece, kv in zip(self.pieces, written, strict=True):
                own[piece.rows] = kv[piece.start : piece.stop]
            put(own, self.whole, torch.cat((k, v), dim=1))
        prefixes = [source.prefix for source in self.sources if source.prefix is not None]
        views = [self.carry.keys(self.layer, each.piece)[_read(each, self.index)] for each in prefixes]
        return [own, *views]

    def _begun(self) -> list[torch.Tensor | None]:
        """Return the sums that the first step goes on with: where nothing travels, those of the carry, in place."""
        prefixes = [source.prefix for source in self.sources]
        if self.ring > 1:
            return [None for _ in prefixes]
        return [None if each is None else self.carry.left(self.layer, each.piece, each.begins[0]) for each in prefixes]

    def _settled(self, gradients: Tensors, begun: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Leave the gradients of prefixes in the carry; return those of the round, with what later pieces left."""
        own = gradients[0]
        for piece in self.pieces:
            self.carry.take(self.layer, piece, own[piece.rows])
        for source, gradient, before in zip(self.sources, gradients, begun, strict=True):
            if source.prefix is not None and before is None:
                self.carry.add(self.layer, source.prefix.piece, source.prefix.begins[self.index], gradient)
        return own

    def _rooms(self, like: Tensors, step: int, dtype: torch.dtype) -> Tensors:
        """Return empty buffers for what belongs to the keys of a step."""
        held = self._held(step)
        shape = like[0].shape[1:]
        return [like[0].new_empty((source.counts[held], *shape), dtype=dtype) for source in self.sources]

    def _pass_on(self, *moves: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]) -> Handle:
        """Send the first of every pair to the next index, receive the second from the one before."""
        after, before = (self.ranks[(self.index + k) % self.ring] for k in (1, -1))
        sends = [Parcel(after, tensor) for tensors, _ in moves for tensor in tensors]
        receives = [Parcel(before, room) for _, rooms in moves for room in rooms]
        return exchange_filled(self.transport, sends, receives)


def _of_the_round(bound: BoundGroup, heads: Heads, kernel: Kernel, window: int | None) -> Source:
    """The tokens of this round, as if all of them were whole documents."""
    group, index = bound.group, bound.ring_index
    if group.ring == 1:
        segments = Segments.packed([span.tokens for span in bound.spans], window=window)
        rows = slice(0, group.tokens)
        return Source((group.tokens,), (prepare_tiles(kernel, [Tile(segments, rows, rows)], heads),))
    chunks = [Chunks.of(group, other) for other in range(group.ring)]
    order = [chunks[(index - step) % group.ring] for step in range(group.ring)]
    tiles = [ring_tiles(chunks[index], keys, causal=True, window=window) for keys in order]
    return Source(tuple(each.rows for each in chunks), tuple(prepare_tiles(kernel, some, heads) for some in tiles))


def _rows_of_whole(bound: BoundGroup, pieces: Sequence[Piece]) -> slice | np.ndarray:
    """Rows of the round that belong to no piece."""
    carried = {piece.document for piece in pieces}
    _, starts, stops = columns(bound.spans)
    lengths, whole = stops - starts, np.array([span.document not in carried for span in bound.spans], dtype=bool)
    return rows_of((np.cumsum(lengths) - lengths)[whole], lengths[whole])


def _read(prefix: Prefix, index: int) -> slice:
    """Rows of the document's buffer that a piece reads of the pieces before it."""
    return slice(prefix.begins[index], prefix.piece.start)


def _copied(tensor: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """Return rows of a tensor in memory of their own: a view would keep all of it."""
    if not count(rows):
        return tensor.new_empty((0, *tensor.shape[1:]))
    return tensor[rows].clone() if isinstance(rows, slice) else tensor.index_select(0, rows)
