"""KV cache of documents in pieces (Seq1F1B): keys and values of earlier pieces, and their gradients from later ones.

A later piece reads the keys of all earlier ones, so its backward has gradients for them. Forwards ascend, and backwards
descend:

    forward    write keys of piece n at their rows        read the rows before them, a view
    backward   read both again                            add gradients for the rows before, take those for the own

So one buffer serves a document in one layer. A piece that is run forward again writes the same numbers to the same
rows. Gradients are sums over many pieces and kept in float32 (float64 for float64). The buffer is freed when the first
piece has gone backward: nothing is left at the end of a step. Where latents stand in the place of keys and values, they
are what is kept, and the tiles of a piece make keys and values from them anew.

`PrefixAttention` computes the tokens of a round as if they were whole documents, and the tiles of every piece with its
prefix, merged by log-sum-exp. Every piece is dealt to the ring indices by itself, so an index holds two chunks of each
piece, one after the other:

    rows of index 0, ring 2    piece 0: 0 .. 4 | 12 .. 16    piece 1: 16 .. 20 | 28 .. 32    ...

All of them are before every query of a later piece: without a window the tile of a piece with its prefix is full,
whatever the index. A window cuts both sides, run by run. With a ring the prefixes go round beside the keys of the
round, in the same exchanges, and so do their gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple, cast

import numpy as np
import torch

from seqloom.attention.context_parallel.overlap import Overlap
from seqloom.attention.context_parallel.ring import Ring, RingKeys, Tensors
from seqloom.attention.context_parallel.scan_states import ScanStates
from seqloom.attention.kernels.interface import Gradients, Kernel, Saved
from seqloom.attention.latent import HeadExpansion
from seqloom.attention.masks import MaskRule, Segments
from seqloom.attention.merge import merge_ops
from seqloom.attention.tiles import LocalHeads, Tile, prepare_tiles
from seqloom.dist.rank_tokens import BoundGroup, Context
from seqloom.dist.rows import RowIndex, count, on_device, put, slice_or_index, take
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
        start, stop: rows in the document's cache, which has those of all pieces.
        total: rows of that cache.
    """

    document: int
    number: int
    of: int
    rows: slice
    start: int
    stop: int
    total: int


@dataclass(slots=True, eq=False)
class _CachedDocument:
    """One document in one layer.

    Attributes:
        kv: [rows of all pieces, 2 * kv heads, dim], keys before values.
        written: pieces that have gone forward.
        next_backward: the piece whose backward is next.
        gradient: of the first rows of `kv`, as many as the latest piece that read some has before it; None: all zero.
    """

    kv: torch.Tensor
    written: int
    next_backward: int
    gradient: torch.Tensor | None = None


class KVCache:
    """Keys, values and their gradients of documents in pieces: one cache for all rounds and stages of a rank's step.

    `scan_states` has the states of layers that scan.
    """

    __slots__ = ("_documents", "backward", "scan_states")

    def __init__(self, *, backward: bool = True) -> None:
        """Start empty. Where no backward follows, a document is freed after its last piece's forward."""
        self.backward, self.scan_states = backward, ScanStates()
        self._documents: dict[tuple[int, int], _CachedDocument] = {}

    def check_empty(self) -> None:
        """Refuse keys that are left at the end of a step."""
        if self._documents:
            layer, document = min(self._documents)
            piece = self._documents[layer, document].next_backward
            raise SeqloomError(
                f"keys and values of {len(self._documents)} documents x layers are left, such as document {document} "
                f"in layer {layer}, whose piece {piece} has not gone backward: every piece that goes forward goes "
                "backward in the same step; evaluate with KVCache(backward=False), and call clear() after an error"
            )
        if self.scan_states:
            layer, _, document = self.scan_states.first()
            raise SeqloomError(
                f"states of {len(self.scan_states)} documents x scans are left, such as document {document} in layer "
                f"{layer}: every piece that goes forward goes backward in the same step; evaluate with "
                "KVCache(backward=False), and call clear() after an error"
            )

    def clear(self) -> None:
        """Free everything, as after a failed step."""
        self._documents.clear()
        self.scan_states.clear()

    def write(self, layer: int, piece: Piece, k: torch.Tensor, v: torch.Tensor) -> None:
        """Copy the keys and values [rows of the piece, kv heads, dim] of a piece that goes forward, maybe again."""
        cached = self._documents.get((layer, piece.document))
        heads = k.shape[1]
        if cached is None:
            kv = k.new_empty((piece.total, heads + v.shape[1], k.shape[2]))
            cached = _CachedDocument(kv, written=0, next_backward=piece.of - 1)
        if piece.number > cached.written or piece.number > cached.next_backward:
            early = piece.number > cached.written
            missing = f"piece {cached.written} has not been forward" if early else "its backward is done"
            raise SeqloomError(
                f"layer {layer}: piece {piece.number} of document {piece.document} goes forward, but {missing}; run "
                "the pieces of a document forward in order, and all of them before the first backward"
            )
        if piece.number < cached.written < piece.of:  # recomputing comes when all pieces have been forward
            raise SeqloomError(
                f"layer {layer} computes attention twice for piece {piece.number} of document {piece.document}, whose "
                "keys are kept once for a layer; plan whole documents for such a model"
            )
        self._documents[layer, piece.document] = cached
        cached.kv[piece.start : piece.stop, :heads] = k
        cached.kv[piece.start : piece.stop, heads:] = v
        cached.written = max(cached.written, piece.number + 1)

    def keys(self, layer: int, piece: Piece) -> torch.Tensor:
        """Return keys and values of a document, [rows of all pieces, 2 * kv heads, dim]; those written are valid."""
        return self._cached(layer, piece).kv

    def end_forward(self, layer: int, piece: Piece) -> None:
        """Free a document after its last piece's forward where no backward follows."""
        if not self.backward and piece.number == piece.of - 1:
            del self._documents[layer, piece.document]

    def begin_backward(self, layer: int, piece: Piece) -> None:
        """Refuse a backward out of turn."""
        cached = self._cached(layer, piece)
        if cached.written < piece.of or cached.next_backward != piece.number:
            raise SeqloomError(
                f"layer {layer}: piece {piece.number} of document {piece.document} goes backward, but {cached.written} "
                f"of {piece.of} pieces have been forward and the backward of piece {cached.next_backward} is next; run "
                "all pieces forward first, then backward in descending order"
            )

    def add_gradient(self, layer: int, piece: Piece, first: int, gradient: torch.Tensor) -> None:
        """Add a piece's gradient [rows, 2 * kv heads, dim] for the rows from `first` to its own; takes ownership."""
        cached = self._cached(layer, piece)
        if cached.gradient is None and first == 0:
            cached.gradient = gradient
            return
        if cached.gradient is None:
            cached.gradient = gradient.new_zeros((piece.start, *gradient.shape[1:]))
        cached.gradient[first : first + len(gradient)] += gradient

    def partial_gradient(self, layer: int, piece: Piece, first: int) -> torch.Tensor | None:
        """Return the gradient of the rows from `first` to those of a piece, to be added to in place; None: none yet."""
        gradient = self._cached(layer, piece).gradient
        return None if gradient is None else gradient[first : piece.start]

    def take_gradient(self, layer: int, piece: Piece, total: torch.Tensor) -> None:
        """Add the gradient that later pieces left for a piece to `total` [rows, 2 * kv heads, dim]; end the piece."""
        cached = self._cached(layer, piece)
        if cached.gradient is not None:
            total += cached.gradient[piece.start : piece.stop]
        cached.next_backward -= 1
        if piece.number == 0:
            del self._documents[layer, piece.document]

    def _cached(self, layer: int, piece: Piece) -> _CachedDocument:
        cached = self._documents.get((layer, piece.document))
        if cached is None:
            why = "none was written" if self.backward else "this cache frees them, being made with backward=False"
            raise SeqloomError(
                f"layer {layer}: no keys of document {piece.document} for the backward of piece {piece.number}: {why}; "
                "run every piece once forward and once backward with one KVCache()"
            )
        return cached


@dataclass(frozen=True, slots=True, eq=False)
class PrefixAttention(Ring):
    """A ring (of one index, maybe) over the keys of a round and over those of earlier pieces.

    Keys and values of pieces are held once, in the `KVCache`. Tensors saved for backward have those of whole documents
    only.

    Attributes:
        pieces: of this round.
        prefixes: pieces that read earlier ones, and the first row of the cache that each reads; the last is the one
            before its own. Their keys are `keys[1:]`.
        whole_rows: rows of the round that belong to whole documents.
        kv_cache: of the step.
        layer: whose keys these are; -1 until a layer calls, see `plan.plan_attention`.
    """

    pieces: tuple[Piece, ...]
    prefixes: tuple[tuple[Piece, int], ...]
    whole_rows: RowIndex
    kv_cache: KVCache
    layer: int = -1

    @classmethod
    def of(
        cls, context: Context, bound: BoundGroup, heads: LocalHeads, kernel: Kernel, mask: MaskRule
    ) -> PrefixAttention:
        """Do the index work of a group; the context has the pieces of its documents, and a KV cache."""
        group, index = bound.group, bound.ring_index
        pieces, rows = _local_pieces(group, index, context.pieces)
        keys, prefixes = [RingKeys.of_round(group, index, heads, kernel, mask)], []
        for piece in pieces:
            first, prefix_keys = _prefix(group, index, piece, context.pieces[piece.document], heads, kernel, mask)
            if any(prefix_keys.counts):
                prefixes.append((piece, first))
                keys.append(prefix_keys)
        whole_rows = rows if isinstance(rows, slice) else on_device(rows, context.device)
        ops, cache = merge_ops(context.device, heads.shape.dtype), cast("KVCache", context.kv_cache)
        ring = (context.transport, bound.ring_ranks, index, tuple(keys), ops, None)
        return cls(*ring, tuple(pieces), tuple(prefixes), whole_rows, cache)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        overlap: Overlap,
        expansion: HeadExpansion | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) over the keys of all ring indices and all pieces so far."""
        for piece in self.pieces:
            self.kv_cache.write(self.layer, piece, k[piece.rows], v[piece.rows])
        result = Ring.forward(self, q, take(k, self.whole_rows), take(v, self.whole_rows), overlap, expansion)
        for piece in self.pieces:
            self.kv_cache.end_forward(self.layer, piece)
        return result

    def backward(
        self, dout: torch.Tensor, saved: Saved, overlap: Overlap, expansion: HeadExpansion | None = None
    ) -> Gradients:
        """Return (dq, dk, dv); `saved` is what `saved_for_backward` returned."""
        for piece in self.pieces:
            self.kv_cache.begin_backward(self.layer, piece)
        return Ring.backward(self, dout, saved, overlap, expansion)

    def saved_for_backward(self, saved: Saved, exchanged: bool) -> Saved:
        """Return what backward needs beside the cache, in memory of its own.

        Args:
            saved: all of the group's.
            exchanged: q, k and v come from an exchange, which leaves them in one memory.
        """
        k, v = (_copy_rows(x, self.whole_rows) for x in (saved.k, saved.v))
        return saved._replace(q=saved.q.contiguous().clone() if exchanged else saved.q, k=k, v=v)

    def _pack(self, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Return keys and values of the round, then those of prefixes as views; k and v are of whole documents."""
        cached = [self.kv_cache.keys(self.layer, piece) for piece in self.pieces]
        if len(cached) == 1 and not len(k):
            piece = self.pieces[0]
            own = cached[0][piece.start : piece.stop]
        else:
            own = k.new_empty((self.keys[0].counts[self.index], k.shape[1] + v.shape[1], k.shape[2]))
            for piece, kv in zip(self.pieces, cached, strict=True):
                own[piece.rows] = kv[piece.start : piece.stop]
            put(own, self.whole_rows, torch.cat((k, v), dim=1))
        views = [self.kv_cache.keys(self.layer, piece)[first : piece.start] for piece, first in self.prefixes]
        return [own, *views]

    def _started_gradients(self) -> list[torch.Tensor | None]:
        """Return, where nothing travels, the gradients in the cache, to be added to in place."""
        if self.size > 1:
            return [None for _ in self.keys]
        return [None, *(self.kv_cache.partial_gradient(self.layer, *prefix) for prefix in self.prefixes)]

    def _finish_gradients(self, gradients: Tensors, started: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Leave the gradients of prefixes in the cache; return those of the round, with what later pieces left."""
        for piece in self.pieces:
            self.kv_cache.take_gradient(self.layer, piece, gradients[0][piece.rows])
        for prefix, gradient, before in zip(self.prefixes, gradients[1:], started[1:], strict=True):
            if before is None:
                self.kv_cache.add_gradient(self.layer, *prefix, gradient)
        return gradients[0]


def _copy_rows(tensor: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """Return rows of a tensor in memory of their own: a view would keep all of it."""
    if not count(rows):
        return tensor.new_empty((0, *tensor.shape[1:]))
    return tensor[rows].clone() if isinstance(rows, slice) else tensor.index_select(0, rows)


# -- index work -------------------------------------------------------------------------------------------------------


class _Run(NamedTuple):
    """Tokens `start .. stop` of a document in rows from `row` of a buffer."""

    start: int
    stop: int
    row: int


def _local_pieces(
    group: Group, index: int, pieces: Mapping[int, Sequence[Span]]
) -> tuple[list[Piece], slice | np.ndarray]:
    """Return the pieces that a group works on, as ring index `index` sees them, and its rows of whole documents."""
    found, whole, row = [], [], 0
    for span in sorted(group.spans):
        rows = _held_tokens(group, index, span)
        if span.document in pieces:
            every = pieces[span.document]
            number = every.index(span)
            held = [_held_tokens(group, index, piece) for piece in every]
            start = sum(held[:number])
            place = slice(row, row + rows)
            found.append(Piece(span.document, number, len(every), place, start, start + rows, sum(held)))
        elif rows:
            whole.append((row, rows))
        row += rows
    starts, lengths = np.array(whole, dtype=np.int64).reshape(-1, 2).T
    return found, slice_or_index(starts, lengths)


def _held_tokens(group: Group, index: int, piece: Span) -> int:
    return sum(chunk.tokens for chunk in _chunks(group, index, piece))


def _prefix(
    group: Group,
    index: int,
    piece: Piece,
    pieces: Sequence[Span],
    heads: LocalHeads,
    kernel: Kernel,
    mask: MaskRule,
) -> tuple[int, RingKeys]:
    """Return the first row of the cache that a piece reads here, and the tiles over keys of all earlier `pieces`."""
    current, window, attention_chunk = pieces[piece.number], mask.window, mask.attention_chunk
    seen_from, seen_until = 0 if window is None else max(0, current.start - window + 1), current.stop
    if attention_chunk is not None:  # only queries of the chunk in which the prefix ends see some of it
        first = current.start - current.start % attention_chunk
        seen_from, seen_until = max(seen_from, first), min(seen_until, first + attention_chunk)
    keys = [_runs(group, other, pieces[: piece.number]) for other in range(group.ring)]
    first_rows = [sum(min(max(seen_from - run.start, 0), run.stop - run.start) for run in runs) for runs in keys]
    held = [sum(run.stop - run.start for run in runs) for runs in keys]
    counts = tuple(rows - first for rows, first in zip(held, first_rows, strict=True))
    queries = [
        _Run(run.start, min(run.stop, seen_until), run.row + piece.rows.start)
        for run in _runs(group, index, [current])
        if run.start < seen_until
    ]
    rows = sum(run.stop - run.start for run in queries)  # the first ones of the piece: rows are in order of position
    own, steps = heads.tokens(sorted(group.ring_spans(index))), []
    for step in range(group.ring):
        other = (index - step) % group.ring
        if window is not None:
            tiles = _window_tiles(queries, keys[other], seen_from, first_rows[other], window)
        elif rows and counts[other]:  # these queries over all keys before the piece
            full = Segments.of([(0, rows, 0, counts[other], 0)], causal=False)
            tiles = [Tile(full, slice(piece.rows.start, piece.rows.start + rows), slice(0, counts[other]))]
        else:
            tiles = []
        held_keys = heads.tokens([span for each in pieces[: piece.number] for span in _chunks(group, other, each)])
        seen = None if held_keys is None else (held_keys[0][first_rows[other] :], held_keys[1][first_rows[other] :])
        steps.append(prepare_tiles(kernel, tiles, heads, own, seen))
    return first_rows[index], RingKeys(counts, tuple(steps))


def _window_tiles(queries: Sequence[_Run], keys: Sequence[_Run], seen_from: int, first: int, window: int) -> list[Tile]:
    """A tile for every pair of runs that see each other: keys from position `seen_from` on, which is row `first`."""
    tiles = []
    for query in queries:
        for key in keys:
            q_stop = min(query.stop, key.stop + window - 1)
            k_start = max(key.start, query.start - window + 1, seen_from)
            if q_stop <= query.start or key.stop <= k_start:
                continue
            rows, k_rows, row = q_stop - query.start, key.stop - k_start, key.row + k_start - key.start - first
            one = Segments.of([(0, rows, 0, k_rows, query.start - k_start)], causal=True, window=window)
            tiles.append(Tile(one, slice(query.row, query.row + rows), slice(row, row + k_rows)))
    return tiles


def _runs(group: Group, index: int, pieces: Sequence[Span]) -> list[_Run]:
    """Return the runs of tokens that a ring index holds of these pieces, those that touch joined, and their rows."""
    held = [span for piece in pieces for span in _chunks(group, index, piece)]
    rows = accumulate((span.tokens for span in held), initial=0)
    found: list[_Run] = []
    for (_, start, stop), row in zip(held, rows, strict=False):
        if found and found[-1].stop == start:
            found[-1] = found[-1]._replace(stop=stop)
        else:
            found.append(_Run(start, stop, row))
    return found


def _chunks(group: Group, index: int, piece: Span) -> list[Span]:
    """Return the zigzag chunks of one piece that a ring index holds, in order."""
    return replace(group, spans=(piece,)).ring_spans(index)
