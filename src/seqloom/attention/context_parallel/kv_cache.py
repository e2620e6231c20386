"""Keys and values of documents in pieces, kept from piece to piece, and the gradients that come back for them.

A later piece reads the keys of all earlier ones, so on its way back it has gradients for them. Forwards ascend, and
backwards descend:

    forward    write keys of piece n at their rows        read the rows before them, a view
    backward   read both again                            add gradients for the rows before, take those for the own

So one buffer serves a document in one layer. A piece that is run forward again writes the same numbers to the same
rows. Gradients are sums over many pieces and kept in float32 (float64 for float64). All of it is freed when the first
piece has gone backward: nothing is left at the end of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import cast

import numpy as np
import torch

from seqloom.attention.context_parallel.overlap import ContextParallelAttention, Meanwhile, Waits
from seqloom.attention.kernels.interface import Gradients, Kernel, Saved
from seqloom.attention.lse import Joins, Sum, Total, joins_on, sum_dtype
from seqloom.attention.masks import Segments
from seqloom.attention.tiles import (
    Chunks,
    Heads,
    PreparedTile,
    Tile,
    add_key_gradients,
    backward_tiles,
    forward_tiles,
    prepare_tiles,
    ring_tiles,
)
from seqloom.dist.rows import RowIndex, count, on_device, put, slice_or_index, span_columns, take
from seqloom.dist.token_layout import BoundGroup, Context
from seqloom.dist.transport import Handle, P2PTensor, Transport, exchange_nonempty
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Group


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a document, as one ring index sees it.

    Attributes:
        document: that it belongs to.
        number, of: which piece it is of how many.
        rows: in the buffer of its group in this round.
        start, stop: rows in the document's buffer, which has those of all pieces.
        total: rows of that buffer.
    """

    document: int
    number: int
    of: int
    rows: slice
    start: int
    stop: int
    total: int


@dataclass(slots=True, eq=False)
class _Document:
    """One document in one layer.

    Attributes:
        kv: [rows of all pieces, 2 * kv heads, dim], keys before values.
        written: how many pieces have been forward.
        awaited: the piece whose backward is next.
        gradient: of the first rows of `kv`, as many as the latest piece that read some has before it; None: all zero.
    """

    kv: torch.Tensor
    written: int
    awaited: int
    gradient: torch.Tensor | None = None


class KVCache:
    """What one rank carries from piece to piece in one step; all its rounds and stages share it."""

    __slots__ = ("_kept", "backward")

    def __init__(self, *, backward: bool = True) -> None:
        """Start empty.

        Args:
            backward: whether a backward follows. Without one, a document is freed after its last piece's forward.
        """
        self.backward = backward
        self._kept: dict[tuple[int, int], _Document] = {}

    @property
    def bytes(self) -> int:
        """Memory of keys, values and gradients that are held now."""
        held = [each for kept in self._kept.values() for each in (kept.kv, kept.gradient) if each is not None]
        return sum(each.numel() * each.itemsize for each in held)

    def check_empty(self) -> None:
        """Refuse what is left at the end of a step."""
        if self._kept:
            layer, document = min(self._kept)
            kept = self._kept[layer, document]
            raise SeqloomError(
                f"keys and values of {len(self._kept)} documents x layers are left, such as document {document} in "
                f"layer {layer}, whose piece {kept.awaited} has not gone backward: every piece that goes forward goes "
                "backward in the same step; evaluate with KVCache(backward=False), and call clear() after an error"
            )

    def clear(self) -> None:
        """Forget everything, as after a step that was given up."""
        self._kept.clear()

    def write(self, layer: int, piece: Piece, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the keys and values [rows of the piece, kv heads, dim] of a piece that goes forward, maybe again."""
        kept = self._kept.get((layer, piece.document))
        if kept is None:
            room = k.new_empty((piece.total, 2 * k.shape[1], k.shape[2]))
            kept = _Document(room, written=0, awaited=piece.of - 1)
        if piece.number > kept.written or piece.number > kept.awaited:
            early = piece.number > kept.written
            missing = f"piece {kept.written} has not been forward" if early else "its backward is done"
            raise SeqloomError(
                f"layer {layer}: piece {piece.number} of document {piece.document} goes forward, but {missing}; run "
                "the pieces of a document forward in order, and all of them before the first backward"
            )
        self._kept[layer, piece.document] = kept
        heads = k.shape[1]
        kept.kv[piece.start : piece.stop, :heads] = k
        kept.kv[piece.start : piece.stop, heads:] = v
        kept.written = max(kept.written, piece.number + 1)

    def keys(self, layer: int, piece: Piece) -> torch.Tensor:
        """Return keys and values of a document, [rows of all pieces, 2 * kv heads, dim]; those written are valid."""
        return self._of(layer, piece).kv

    def forwarded(self, layer: int, piece: Piece) -> None:
        """Note that a piece has read what it needs in its forward."""
        if not self.backward and piece.number == piece.of - 1:
            del self._kept[layer, piece.document]

    def begin_backward(self, layer: int, piece: Piece) -> None:
        """Refuse a backward out of turn."""
        kept = self._of(layer, piece)
        if kept.written < piece.of or kept.awaited != piece.number:
            raise SeqloomError(
                f"layer {layer}: piece {piece.number} of document {piece.document} goes backward, but {kept.written} "
                f"of {piece.of} pieces have been forward and the backward of piece {kept.awaited} is next; run all "
                "pieces forward first, then backward in descending order"
            )

    def add(self, layer: int, piece: Piece, first: int, gradient: torch.Tensor) -> None:
        """Add the gradient [rows, 2 * kv heads, dim] that a piece has for rows from `first` to its own, and own it."""
        kept = self._of(layer, piece)
        if kept.gradient is None and first == 0:
            kept.gradient = gradient
            return
        if kept.gradient is None:
            kept.gradient = gradient.new_zeros((piece.start, *gradient.shape[1:]))
        kept.gradient[first : first + len(gradient)] += gradient

    def left(self, layer: int, piece: Piece, first: int) -> torch.Tensor | None:
        """Return what is left for the rows from `first` to those of a piece, to be added to; None: nothing."""
        gradient = self._of(layer, piece).gradient
        return None if gradient is None else gradient[first : piece.start]

    def take(self, layer: int, piece: Piece, total: torch.Tensor) -> None:
        """Add to `total` [rows of the piece, 2 * kv heads, dim] what later pieces have left for it, and close it."""
        kept = self._of(layer, piece)
        if kept.gradient is not None:
            total += kept.gradient[piece.start : piece.stop]
        kept.awaited -= 1
        if piece.number == 0:
            del self._kept[layer, piece.document]

    def _of(self, layer: int, piece: Piece) -> _Document:
        kept = self._kept.get((layer, piece.document))
        if kept is None:
            why = "none was written" if self.backward else "this carry frees them, being made with backward=False"
            raise SeqloomError(
                f"layer {layer}: no keys of document {piece.document} for the backward of piece {piece.number}: {why}; "
                "run every piece once forward and once backward with one KVCache()"
            )
        return kept


# ---- merged: attention.prefix
# Documents in pieces: where the keys of earlier pieces lie, and which tiles a piece computes with them.
#
# Every piece is dealt to the ring indices by itself, so index j holds two chunks of each piece, one after the
# other:
#
#     rows of index 0, ring 2    piece 0: 0 .. 4 | 12 .. 16    piece 1: 16 .. 20 | 28 .. 32    ...
#
# All of them are before every query of a later piece: without a window the tile of a piece with its prefix is full,
# whatever the index. A window cuts both sides, run by run.


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens `start .. stop` of a document in rows from `row` of a buffer."""

    start: int
    stop: int
    row: int


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """What a piece reads of the pieces before it.

    Attributes:
        piece: as this index sees it.
        begins: the first row that is read, at every ring index; the last one is the piece's `start` there.
        counts: rows that are read, at every ring index.
        steps: the tiles of every ring step; key rows count from the first that is read.
    """

    piece: Piece
    begins: tuple[int, ...]
    counts: tuple[int, ...]
    steps: tuple[tuple[Tile, ...], ...]


def pieces_of(group: Group, index: int, spans: Sequence[Span], pieces: dict[int, tuple[Span, ...]]) -> list[Piece]:
    """Return the documents in pieces that a group works on, as ring index `index` sees them.

    Args:
        group: of a round.
        index: of the ring.
        spans: of the index, sorted by document and position.
        pieces: all pieces of every document that has several, in order.
    """
    found, row = [], 0
    own = {span.document: span for span in group.spans}
    for document in sorted(own):
        rows = sum(span.tokens for span in spans if span.document == document)
        if document in pieces:
            every = pieces[document]
            number = every.index(own[document])
            held = [sum(run.tokens for run in _dealt(group, index, each)) for each in every]
            start = sum(held[:number])
            place = slice(row, row + rows)
            found.append(Piece(document, number, len(every), place, start, start + held[number], sum(held)))
        row += rows
    return found


def prefix_of(group: Group, index: int, piece: Piece, pieces: Sequence[Span], window: int | None) -> Prefix | None:
    """Return what a piece reads of the earlier ones; None where that is nothing at any index.

    Args:
        group: the piece's.
        index: of the ring.
        piece: as this index sees it.
        pieces: all pieces of its document.
        window: how many tokens a query sees, itself included; None: all.
    """
    current = pieces[piece.number]
    seen_from = 0 if window is None else max(0, current.start - window + 1)
    keys = [_runs(group, other, pieces[: piece.number]) for other in range(group.ring)]
    begins = tuple(sum(min(max(seen_from - run.start, 0), run.stop - run.start) for run in runs) for runs in keys)
    counts = tuple(sum(run.stop - run.start for run in runs) - first for runs, first in zip(keys, begins, strict=True))
    if not any(counts):
        return None
    queries = [Run(run.start, run.stop, run.row + piece.rows.start) for run in _runs(group, index, [current])]
    steps = []
    for step in range(group.ring):
        other = (index - step) % group.ring
        if window is None:
            steps.append(_full(piece.rows, counts[other]))
        else:
            steps.append(_windowed(queries, keys[other], begins[other], window))
    return Prefix(piece, begins, counts, tuple(steps))


def _full(queries: slice, keys: int) -> tuple[Tile, ...]:
    """All queries of the piece over all keys before it."""
    rows = queries.stop - queries.start
    if not rows or not keys:
        return ()
    return (Tile(Segments.of([(0, rows, 0, keys, 0)], causal=False), queries, slice(0, keys)),)


def _windowed(queries: Sequence[Run], keys: Sequence[Run], first: int, window: int) -> tuple[Tile, ...]:
    """A tile for every pair of runs that see each other; `first` is the row from which keys count."""
    tiles = []
    for query in queries:
        for key in keys:
            q_stop = min(query.stop, key.stop + window - 1)
            k_start = max(key.start, query.start - window + 1)
            if q_stop <= query.start or key.stop <= k_start:
                continue
            rows, columns, row = q_stop - query.start, key.stop - k_start, key.row + k_start - key.start - first
            one = Segments.of([(0, rows, 0, columns, query.start - k_start)], causal=True, window=window)
            tiles.append(Tile(one, slice(query.row, query.row + rows), slice(row, row + columns)))
    return tuple(tiles)


def _runs(group: Group, index: int, pieces: Sequence[Span]) -> list[Run]:
    """Return the runs of tokens that a ring index holds of these pieces, those that touch joined, and their rows."""
    held = [span for piece in pieces for span in _dealt(group, index, piece)]
    rows = accumulate((span.tokens for span in held), initial=0)
    found: list[Run] = []
    for (_, start, stop), row in zip(held, rows, strict=False):
        if found and found[-1].stop == start:
            found[-1] = replace(found[-1], stop=stop)
        else:
            found.append(Run(start, stop, row))
    return found


def _dealt(group: Group, index: int, piece: Span) -> list[Span]:
    """The chunks of one piece that a ring index holds, in order."""
    return replace(group, spans=(piece,)).ring_spans(index)


# ---- merged: attention.carried
# Attention of a group that works on documents in pieces: keys of this round, and those carried over from earlier
# ones.
#
# The tokens of the round are computed as if they were whole documents. To that come the tiles of every piece with
# its
# prefix, and results are merged by log-sum-exp. With a ring the prefixes go round beside the keys of the round, in
# the same exchanges, and so do their gradients on the way back, in float32; see `ring.py` for the order.
#
# Keys and values of pieces are kept once, in the `KVCache`. What is saved for backward has those of whole documents
# only.


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
class PrefixAttention(ContextParallelAttention):
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
    kv_cache: KVCache
    layer: int = -1

    @classmethod
    def of(
        cls, context: Context, bound: BoundGroup, heads: Heads, kernel: Kernel, window: int | None
    ) -> PrefixAttention:
        """Do the index work of a group; the context has the pieces of its documents, and a carry."""
        group, index, kv_cache = bound.group, bound.ring_index, cast("KVCache", context.kv_cache)
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
        return cls(context.transport, bound.ring_ranks, index, pieces, whole, tuple(sources), joins, kv_cache)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) over the keys of all ring indices and all pieces so far. `out` has the dtype of q."""
        for piece in self.pieces:
            self.kv_cache.write(self.layer, piece, k[piece.rows], v[piece.rows])
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
            self.kv_cache.forwarded(self.layer, piece)
        return total.result()

    def backward(self, dout: torch.Tensor, saved: Saved, meanwhile: Meanwhile) -> Gradients:
        """Return (dq, dk, dv) of the own rows: dq in the dtype of q, dk and dv in `sum_dtype`."""
        for piece in self.pieces:
            self.kv_cache.begin_backward(self.layer, piece)
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
        written = [self.kv_cache.keys(self.layer, piece) for piece in self.pieces]
        if len(written) == 1 and not len(k):
            piece = self.pieces[0]
            own = written[0][piece.start : piece.stop]
        else:
            own = k.new_empty((self.sources[0].counts[self.index], 2 * k.shape[1], k.shape[2]))
            for piece, kv in zip(self.pieces, written, strict=True):
                own[piece.rows] = kv[piece.start : piece.stop]
            put(own, self.whole, torch.cat((k, v), dim=1))
        prefixes = [source.prefix for source in self.sources if source.prefix is not None]
        views = [self.kv_cache.keys(self.layer, each.piece)[_read(each, self.index)] for each in prefixes]
        return [own, *views]

    def _begun(self) -> list[torch.Tensor | None]:
        """Return the sums that the first step goes on with: where nothing travels, those of the carry, in place."""
        prefixes = [source.prefix for source in self.sources]
        if self.ring > 1:
            return [None for _ in prefixes]
        return [
            None if each is None else self.kv_cache.left(self.layer, each.piece, each.begins[0]) for each in prefixes
        ]

    def _settled(self, gradients: Tensors, begun: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Leave the gradients of prefixes in the carry; return those of the round, with what later pieces left."""
        own = gradients[0]
        for piece in self.pieces:
            self.kv_cache.take(self.layer, piece, own[piece.rows])
        for source, gradient, before in zip(self.sources, gradients, begun, strict=True):
            if source.prefix is not None and before is None:
                self.kv_cache.add(self.layer, source.prefix.piece, source.prefix.begins[self.index], gradient)
        return own

    def _rooms(self, like: Tensors, step: int, dtype: torch.dtype) -> Tensors:
        """Return empty buffers for what belongs to the keys of a step."""
        held = self._held(step)
        shape = like[0].shape[1:]
        return [like[0].new_empty((source.counts[held], *shape), dtype=dtype) for source in self.sources]

    def _pass_on(self, *moves: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]) -> Handle:
        """Send the first of every pair to the next index, receive the second from the one before."""
        after, before = (self.ranks[(self.index + k) % self.ring] for k in (1, -1))
        sends = [P2PTensor(after, tensor) for tensors, _ in moves for tensor in tensors]
        receives = [P2PTensor(before, room) for _, rooms in moves for room in rooms]
        return exchange_nonempty(self.transport, sends, receives)


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
    _, starts, stops = span_columns(bound.spans)
    lengths, whole = stops - starts, np.array([span.document not in carried for span in bound.spans], dtype=bool)
    return slice_or_index((np.cumsum(lengths) - lengths)[whole], lengths[whole])


def _read(prefix: Prefix, index: int) -> slice:
    """Rows of the document's buffer that a piece reads of the pieces before it."""
    return slice(prefix.begins[index], prefix.piece.start)


def _copied(tensor: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """Return rows of a tensor in memory of their own: a view would keep all of it."""
    if not count(rows):
        return tensor.new_empty((0, *tensor.shape[1:]))
    return tensor[rows].clone() if isinstance(rows, slice) else tensor.index_select(0, rows)
