"""Tiles of a ring: which rows a ring index computes with which keys, and how kernels run them.

With ring r every document is cut into 2 r chunks, dealt in zigzag order: index i holds chunk i, its low one, and chunk
2 r - 1 - i, its high one. Under a causal mask the tile of queries of index i and keys of index j is, document by
document,

    j == i   a causal square over both chunks (row order is position order)
    j <  i   all queries x low keys, no mask
    j >  i   high queries x all keys, no mask

so every index computes the same area in every step but the first. Where the first tokens of a document see each other
(`MaskRule.prefixes`), those of the queries' index x those of the keys' index are one more tile, without a mask, and the
tiles above have the queries behind them.

All index work is done on the host, once per round for all layers; `forward_tiles` and `backward_tiles` then run
prepared kernels on slices of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from typing import NamedTuple

import numpy as np
import torch

from seqloom.attention.dropout import HeadDropout, Tokens
from seqloom.attention.kernels.interface import AttentionShape, Gradients, Kernel, PreparedAttention, Saved, device_rows
from seqloom.attention.latent import HeadExpansion
from seqloom.attention.masks import MaskRule, Segments, attention_chunks
from seqloom.attention.merge import (
    GradientAccumulator,
    MergeOps,
    OutputAccumulator,
    PartialOutput,
    merge_ops,
    sum_dtype,
)
from seqloom.dist.rank_tokens import rows_of_spans
from seqloom.dist.rows import RowIndex, expand_runs, on_device
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Group


class Tile(NamedTuple):
    """Segments, and the runs of query and key rows that they touch; the segments count from these."""

    segments: Segments
    queries: slice
    keys: slice


# -- zigzag chunks and ring tiles -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ZigzagChunks:
    """The low and the high chunk that a ring index holds of every document, sorted by document.

    Columns are int64[2, documents]: row 0 for low chunks, row 1 for high ones. Chunks may be empty.

    Tokens of different attention chunks do not see each other, so each of these is a document of its own here, and what
    an index holds of it is low or high or both: in the order of its rows, low ones first.

    Attributes:
        index: of the ring.
        start, stop: positions in the document.
        row: first row in the buffer of the index.
        extent: where the whole document starts and stops.
    """

    index: int
    start: np.ndarray
    stop: np.ndarray
    row: np.ndarray
    extent: np.ndarray

    @classmethod
    def of(cls, group: Group, index: int, attention_chunk: int | None = None) -> ZigzagChunks:
        """Return the chunks of one ring index: the spans of `Group.ring_spans`, as columns, cut at attention chunks."""
        _, first, last = np.array(sorted(group.spans), dtype=np.int64).reshape(-1, 3).T
        base, extra = np.divmod(last - first, 2 * group.ring)
        number = np.array([[index], [2 * group.ring - 1 - index]])
        start = first + number * base + np.minimum(number, extra)
        stop = first + (number + 1) * base + np.minimum(number + 1, extra)
        if attention_chunk is not None:
            document, first, last = attention_chunks(first, last, attention_chunk)
            start, stop = (np.clip(edges[:, document], first, last) for edges in (start, stop))
        return cls(index, start, stop, _first_rows(start, stop), np.stack([first, last]))

    @property
    def rows(self) -> int:
        """Rows of the buffer."""
        return int((self.stop - self.start).sum())

    @property
    def end(self) -> np.ndarray:
        """One past the last row of every document, int64[documents]."""
        return self.row[1] + self.stop[1] - self.start[1]

    def merged(self) -> ZigzagChunks:
        """Make one low chunk of two that touch in every document; otherwise return the chunks as they are."""
        if not np.array_equal(self.stop[0], self.start[1]):
            return self
        start, stop = np.stack([self.start[0], self.stop[1]]), np.stack([self.stop[1], self.stop[1]])
        return ZigzagChunks(self.index, start, stop, _first_rows(start, stop), self.extent)

    def rows_before(self, position: np.ndarray) -> np.ndarray:
        """Return how many tokens before a position the index holds, int64[documents]: they are its first rows."""
        return np.clip(position - self.start, 0, self.stop - self.start).sum(axis=0)

    def since(self, position: np.ndarray) -> ZigzagChunks:
        """Return the chunks without the tokens before a position, in the same rows; position is int64[documents]."""
        start = np.clip(position, self.start, self.stop)
        return replace(self, start=start, row=self.row + start - self.start)


def ring_tiles(
    queries: ZigzagChunks,
    keys: ZigzagChunks,
    *,
    causal: bool,
    window: int | None,
    prefix: np.ndarray | None = None,
) -> tuple[Tile, ...]:
    """Return the tiles of one ring step; `prefix` is that of every document under a causal mask, None: there is none.

    Without a prefix the first tile of an index with itself covers all its rows.
    """
    squares: tuple[Tile, ...] = ()
    if prefix is not None:
        own, seen = queries.rows_before(prefix), keys.rows_before(prefix)
        squares = _tiles((queries.row[0], queries.row[0] + own, keys.row[0], keys.row[0] + seen), causal=False)
    if window is not None:
        return squares + _window_tiles(queries, keys, window, prefix)
    rest = queries if prefix is None else queries.since(prefix)
    first, k_low, k_high = rest.end - (rest.stop - rest.start).sum(axis=0), keys.row[0], keys.row[1]
    if not causal or queries.index == keys.index:
        return squares + _tiles((first, rest.end, k_low, keys.end, first - queries.row[0]), causal=causal)
    if keys.index < queries.index:
        return squares + _tiles((first, rest.end, k_low, k_high), causal=False)
    return squares + _tiles((rest.row[1], rest.end, k_low, keys.end), causal=False)


def _window_tiles(
    queries: ZigzagChunks, keys: ZigzagChunks, window: int, prefix: np.ndarray | None
) -> tuple[Tile, ...]:
    """A segment for every pair of chunks that see each other. A high chunk may see two: that makes a second tile."""
    if queries.index == keys.index:
        queries = keys = queries.merged()
    queries = queries if prefix is None else queries.since(prefix)
    same = [_chunk_pair(queries, half, keys, half, window) for half in (0, 1)]
    rows = tuple(np.concatenate(columns) for columns in zip(*same, strict=True))
    return _tiles(rows, causal=True, window=window) + _tiles(_chunk_pair(queries, 1, keys, 0, window), True, window)


def _chunk_pair(
    queries: ZigzagChunks, high_q: int, keys: ZigzagChunks, high_k: int, window: int
) -> tuple[np.ndarray, ...]:
    """Return q_start, q_stop, k_start, k_stop, offset of a pair of chunks, without rows that see nothing."""
    a, b, q_row = queries.start[high_q], queries.stop[high_q], queries.row[high_q]
    c, d, k_row = keys.start[high_k], keys.stop[high_k], keys.row[high_k]
    q_low, q_high = np.maximum(a, c), np.minimum(b, d + window - 1)
    k_low, k_high = np.maximum(c, a - window + 1), np.minimum(d, b)
    return q_row + q_low - a, q_row + q_high - a, k_row + k_low - c, k_row + k_high - c, q_low - k_low


def _tiles(rows: Sequence[np.ndarray], causal: bool, window: int | None = None) -> tuple[Tile, ...]:
    """Make a tile of columns q_start, q_stop, k_start, k_stop[, offset]; none when all its segments are empty."""
    q_start, q_stop, k_start, k_stop = rows[:4]
    offset = rows[4] if len(rows) > 4 else np.zeros_like(q_start)
    used = (q_stop > q_start) & (k_stop > k_start)
    if not used.any():
        return ()
    q_start, q_stop, k_start, k_stop, offset = (x[used] for x in (q_start, q_stop, k_start, k_stop, offset))
    queries = slice(int(q_start.min()), int(q_stop.max()))
    keys = slice(int(k_start.min()), int(k_stop.max()))
    columns = (q_start - queries.start, q_stop - queries.start, k_start - keys.start, k_stop - keys.start, offset)
    return (Tile(Segments(*columns, causal=causal, window=window), queries, keys),)


def _first_rows(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Rows where runs begin, int64[2, documents]: document after document, the low run before the high one."""
    lengths = stop - start
    ends = np.cumsum(lengths.sum(axis=0))
    low = ends - lengths.sum(axis=0)
    return np.stack([low, low + lengths[0]])


# -- gathered keys ----------------------------------------------------------------------------------------------------


class GatherSchedule(NamedTuple):
    """One ring index's part of a key/value gather. Rows are received in ring order, its own ones too.

    Attributes:
        sends: rows of the own buffer that every index wants.
        counts: rows that arrive from every index, the own ones too.
        order: int64[sum of counts], sorts the received rows by document and position; None when they are sorted.
        tiles: over the own queries and the sorted keys.
        key_spans: of the sorted keys; their documents are numbered anew.
    """

    sends: tuple[RowIndex, ...]
    counts: tuple[int, ...]
    order: torch.Tensor | None
    tiles: tuple[Tile, ...]
    key_spans: tuple[Span, ...]


def gather_schedule(
    chunks: Sequence[ZigzagChunks],
    index: int,
    device: torch.device,
    *,
    causal: bool,
    window: int | None,
    prefix: np.ndarray | None = None,
) -> GatherSchedule:
    """Return what ring index `index` sends, receives and computes when keys are gathered; `chunks` are those of all.

    With a prefix, that of every document under a causal mask, the keys of all tokens are gathered.
    """
    own, sends = chunks[index], []
    tiles = _gather_tiles(own, causal, window) if prefix is None else _prefix_gather_tiles(own, window, prefix)
    causal, window = (causal, window) if prefix is None else (False, None)
    for other in chunks:
        _, _, row, length = _visible_keys(_visible_positions(other, causal, window), own)
        sends.append(device_rows(row, row + length, device))
    parts = [_visible_keys(_visible_positions(own, causal, window), other) for other in chunks]
    document, position, _, length = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    arrived = np.cumsum(length) - length
    sort = np.lexsort((position, document))
    order = None
    if not np.array_equal(sort, np.arange(len(sort))):
        order = on_device(expand_runs(arrived[sort], length[sort]), device)
    counts = tuple(int(part[3].sum()) for part in parts)
    runs = zip(document[sort].tolist(), position[sort].tolist(), (position + length)[sort].tolist(), strict=True)
    return GatherSchedule(tuple(sends), counts, order, tiles, tuple(starmap(Span, runs)))


def visible_runs(
    chunks: Sequence[ZigzagChunks], reader: ZigzagChunks, *, causal: bool, window: int | None
) -> list[list[tuple[int, int]]]:
    """Return, for every ring index, the runs of its rows that the queries of `reader` see, in the order of the rows."""
    seen = _visible_positions(reader, causal, window)
    wanted = [_visible_keys(seen, holder) for holder in chunks]
    return [list(zip(row.tolist(), (row + length).tolist(), strict=True)) for _, _, row, length in wanted]


def _visible_positions(queries: ZigzagChunks, causal: bool, window: int | None) -> np.ndarray:
    """int64[2 intervals, start and stop, documents]: the positions that the queries see, in two disjoint runs.

    The low chunk sees the first run. The high chunk sees the second and, where that begins right after the first,
    the end of the first (all of it without a window).
    """
    used = queries.stop > queries.start
    first, last = queries.extent
    if not causal:
        low = np.where(used.any(axis=0), (first, last), (first, first))
        return np.stack([low, np.stack([low[1], low[1]])])
    reach = _first_seen(queries, window)
    low = np.where(used[0], (reach[0], queries.stop[0]), (first, first))
    high = np.where(used[1], (np.maximum(reach[1], low[1]), queries.stop[1]), (low[1], low[1]))
    return np.stack([low, high])


def _first_seen(queries: ZigzagChunks, window: int | None) -> np.ndarray:
    """int64[2, documents]: the first position that the first query of every chunk sees."""
    first = np.broadcast_to(queries.extent[0], queries.start.shape)
    return first if window is None else np.maximum(first, queries.start - window + 1)


def _visible_keys(visible: np.ndarray, keys: ZigzagChunks) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the runs of `keys` that are visible: document number, position, row and length, sorted by row."""
    start = np.maximum(keys.start[:, None], visible[None, :, 0])  # [chunk, interval, document]
    stop = np.minimum(keys.stop[:, None], visible[None, :, 1])
    row = keys.row[:, None] + start - keys.start[:, None]
    document = np.broadcast_to(np.arange(start.shape[-1]), start.shape)
    used = stop > start
    columns = (document[used], start[used], row[used], (stop - start)[used])
    sort = np.argsort(columns[2], kind="stable")
    return columns[0][sort], columns[1][sort], columns[2][sort], columns[3][sort]


def _gather_tiles(queries: ZigzagChunks, causal: bool, window: int | None) -> tuple[Tile, ...]:
    if not causal:
        rows = _first_rows(*_visible_positions(queries, causal, window).transpose(1, 0, 2))
        return _tiles((queries.row[0], queries.end, rows[0], rows[0] + queries.extent[1] - queries.extent[0]), False)
    queries = queries.merged()
    if window is None:
        return _prefix_tiles(queries)
    visible, reach = _visible_positions(queries, causal, window), _first_seen(queries, window)
    rows = _first_rows(visible[:, 0], visible[:, 1])
    stop = rows + visible[:, 1] - visible[:, 0]
    # The high chunk's keys begin inside the low chunk's run, or right after it when there is a gap between them.
    start = np.stack([rows[0], rows[0] + np.minimum(reach[1], visible[0, 1]) - visible[0, 0]])
    columns = (queries.row, queries.row + queries.stop - queries.start, start, stop, queries.start - reach)
    low, high = ([column[half] for column in columns] for half in (0, 1))
    if np.all((start[1] >= stop[0]) | (queries.start[1] == queries.stop[1])):  # no key is seen by both
        return _tiles([np.concatenate(pair) for pair in zip(low, high, strict=True)], causal, window)
    return _tiles(low, causal, window) + _tiles(high, causal, window)


def _prefix_gather_tiles(queries: ZigzagChunks, window: int | None, prefix: np.ndarray) -> tuple[Tile, ...]:
    """The tiles over the keys of all tokens: those of the prefix, then those of the low chunk behind it, and the high.

    A document begins at the key in row `first`.
    """
    first = _first_rows(*_visible_positions(queries, False, None).transpose(1, 0, 2))[0]
    row, rest = queries.row[0], queries.merged().since(prefix)
    squares = _tiles((row, row + queries.rows_before(prefix), first, first + prefix), causal=False)
    reach = _first_seen(rest, window)
    seen = (first + edge - queries.extent[0] for edge in (reach, rest.stop))
    columns = (rest.row, rest.row + rest.stop - rest.start, *seen, rest.start - reach)
    low, high = ([column[half] for column in columns] for half in (0, 1))
    return squares + _tiles(low, True, window) + _tiles(high, True, window)


def _prefix_tiles(queries: ZigzagChunks) -> tuple[Tile, ...]:
    """A causal square for every chunk, and all keys before it without a mask: kernels are fastest so.

    Both chunks see the keys before the low one, so these are in a tile of each.
    """
    visible = _visible_positions(queries, True, None)
    first = _first_rows(*visible.transpose(1, 0, 2))[0]  # keys of a document follow each other
    start, stop = (first + edge - queries.extent[0] for edge in (queries.start, queries.stop))
    rows = (queries.row, queries.row + queries.stop - queries.start)
    squares = _tiles([np.concatenate(column) for column in (*rows, start, stop)], causal=True)
    before = [_tiles((rows[0][half], rows[1][half], first, start[half]), causal=False) for half in (0, 1)]
    return squares + before[0] + before[1]


# -- documents of one rank --------------------------------------------------------------------------------------------


def packed_tiles(spans: Sequence[Span], mask: MaskRule) -> tuple[Tile, ...]:
    """Return the tiles of whole documents over themselves, one after the other: without a prefix it is one."""
    length, prefix = np.array([span.tokens for span in spans], dtype=np.int64), mask.prefixes_of(spans)
    if prefix is None:
        rows = slice(0, int(length.sum()))
        return (Tile(mask.packed(length.tolist()), rows, rows),)
    stop = np.cumsum(length)
    start = stop - length
    first = start if mask.window is None else start + np.maximum(prefix - mask.window + 1, 0)
    squares = _tiles((start, start + prefix, start, start + prefix), causal=False)
    return squares + _tiles((start + prefix, stop, first, stop, start + prefix - first), True, mask.window)


# -- tiles on kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class LocalHeads:
    """The heads of one rank, and which kv head every query head reads.

    Attributes:
        shape: with `kv_heads` as they lie in memory.
        kv_index: int[heads], the kv head of every query head, ascending, when they share them unequally; else None.
        dropout: of their attention weights; None: none.
    """

    shape: AttentionShape
    kv_index: tuple[int, ...] | None = None
    dropout: HeadDropout | None = None

    def tokens(self, spans: Sequence[Span]) -> Tokens | None:
        """Return which tokens the rows of spans are, where dropout asks for it."""
        return None if self.dropout is None else rows_of_spans(spans, self.shape.device)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedTile:
    """A tile's segments prepared by a kernel, with its rows."""

    prepared: PreparedAttention
    queries: slice
    keys: slice

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) of the tile's query rows."""
        return self.prepared.forward(q[self.queries], k[self.keys], v[self.keys])

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return dq of the tile's query rows, dk and dv of its key rows."""
        (q, k, v, out, lse), rows, keys = saved, self.queries, self.keys
        return self.prepared.backward(dout[rows], Saved(q[rows], k[keys], v[keys], out[rows], lse[:, rows]))


def prepare(
    kernel: Kernel, segments: Segments, heads: LocalHeads, queries: Tokens | None, keys: Tokens | None
) -> PreparedAttention:
    """Have a kernel prepare segments; refuse those it does not support.

    `queries` and `keys` are the tokens of the buffers' rows, see `LocalHeads.tokens`.
    """
    shape, kv_index = heads.shape, heads.kv_index
    if heads.dropout is not None and queries is not None and keys is not None:
        shape = replace(shape, dropout=heads.dropout.of_rows(queries, keys))
    if kv_index is not None:
        shape = replace(shape, kv_heads=shape.heads)
    unsupported = kernel.capabilities.unsupported(segments, shape)
    if unsupported is not None:
        raise SeqloomError(unsupported)
    prepared = kernel.prepare(segments, shape)
    if kv_index is None:
        return prepared
    edges = [0, *(h for h in range(1, len(kv_index)) if kv_index[h] != kv_index[h - 1]), len(kv_index)]
    index = on_device(np.array(kv_index, dtype=np.int64), shape.device)
    return RepeatedKV(prepared, index, tuple(pairwise(edges)))


def prepare_tiles(
    kernel: Kernel, tiles: Iterable[Tile], heads: LocalHeads, queries: Tokens | None, keys: Tokens | None
) -> tuple[PreparedTile, ...]:
    """Have a kernel prepare tiles of two buffers; see `prepare`."""

    def prepared(tile: Tile) -> PreparedAttention:
        own = (_rows_of(queries, tile.queries), _rows_of(keys, tile.keys))
        return prepare(kernel, tile.segments, heads, *own)

    return tuple(PreparedTile(prepared(tile), tile.queries, tile.keys) for tile in tiles)


def prepare_documents(kernel: Kernel, spans: Sequence[Span], mask: MaskRule, heads: LocalHeads) -> PreparedAttention:
    """Have a kernel prepare whole documents, one after the other, over themselves; see `prepare`."""
    tiles, tokens = packed_tiles(spans, mask), heads.tokens(spans)
    if len(tiles) == 1:
        return prepare(kernel, tiles[0].segments, heads, tokens, tokens)
    ops = merge_ops(heads.shape.device, heads.shape.dtype)
    return MergedTiles(prepare_tiles(kernel, tiles, heads, tokens, tokens), ops)


def _rows_of(tokens: Tokens | None, rows: slice) -> Tokens | None:
    return None if tokens is None else (tokens[0][rows], tokens[1][rows])


@dataclass(frozen=True, slots=True, eq=False)
class MergedTiles:
    """Several prepared tiles of the same queries and keys, as one `PreparedAttention`."""

    tiles: tuple[PreparedTile, ...]
    ops: MergeOps

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        total = OutputAccumulator(q, self.ops)
        for tile in self.tiles:
            total.merge(PartialOutput(*tile.forward(q, k, v), tile.queries.start))
        return total.result()

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv)."""
        dq, dk, dv = (GradientAccumulator(x, self.ops) for x in saved[:3])
        for tile in self.tiles:
            parts = tile.backward(dout, saved)
            for total, rows, part in zip((dq, dk, dv), (tile.queries, tile.keys, tile.keys), parts, strict=True):
                total.add(rows, part)
        return dq.result(), dk.result(), dv.result()


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedKV:
    """Prepared segments for query heads that share kv heads unequally: keys and values are repeated per query head.

    Attributes:
        inner: prepared for as many kv heads as heads.
        index: int64[heads], the kv head of every query head.
        ranges: the query heads of every kv head.
    """

    inner: PreparedAttention
    index: torch.Tensor
    ranges: tuple[tuple[int, int], ...]

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse)."""
        return self.inner.forward(q, k.index_select(1, self.index), v.index_select(1, self.index))

    def backward(self, dout: torch.Tensor, saved: Saved) -> Gradients:
        """Return (dq, dk, dv). The query heads of a kv head are summed in float32."""
        k, v = saved.k.index_select(1, self.index), saved.v.index_select(1, self.index)
        dq, dk, dv = self.inner.backward(dout, saved._replace(k=k, v=v))
        return dq, self._sum_heads(dk), self._sum_heads(dv)

    def _sum_heads(self, gradient: torch.Tensor) -> torch.Tensor:
        wide = sum_dtype(gradient.dtype)
        return torch.stack([gradient[:, low:high].sum(1, dtype=wide) for low, high in self.ranges], dim=1)


def forward_tiles(
    tiles: Sequence[PreparedTile], q: torch.Tensor, kv: torch.Tensor, expansion: HeadExpansion | None = None
) -> Iterator[PartialOutput]:
    """Run the forward of tiles over the rows of `q` and `kv` [key rows, 2 * kv heads, dim], keys before values.

    With an expansion `kv` has latents, and the keys and values of a tile are made for it.
    """
    for tile in tiles:
        tile, k, v = _with_keys(tile, kv, expansion)
        yield PartialOutput(*tile.forward(q, k, v), tile.queries.start)


def _with_keys(
    tile: PreparedTile, kv: torch.Tensor, expansion: HeadExpansion | None
) -> tuple[PreparedTile, torch.Tensor, torch.Tensor]:
    """Return keys and values for a tile, and the tile as it lies on these: made from latents they are its own alone."""
    if expansion is not None:
        kv = expansion(kv[tile.keys])
        tile = replace(tile, keys=slice(0, len(kv)))
    k, v = kv.tensor_split(2, dim=1)
    return tile, k, v


KeyGradient = tuple[slice, torch.Tensor, torch.Tensor]
"""A run of keys, and its dk, dv [len(keys), kv heads, dim]; of latents their gradient, and nothing."""


def backward_tiles(
    tiles: Sequence[PreparedTile],
    dout: torch.Tensor,
    saved: Saved,
    kv: torch.Tensor,
    dq: GradientAccumulator,
    expansion: HeadExpansion | None = None,
) -> list[KeyGradient]:
    """Run the backward of tiles: add to `dq` and return the gradients of their keys.

    Keys and values are those of `kv`, see `forward_tiles`, not those of `saved`.
    """
    gradients = []
    for tile in tiles:
        with_keys, k, v = _with_keys(tile, kv, expansion)
        tile_dq, dk, dv = with_keys.backward(dout, saved._replace(k=k, v=v))
        dq.add(tile.queries, tile_dq)
        if expansion is not None:
            dk, dv = expansion.backward(kv[tile.keys], dk, dv)
        gradients.append((tile.keys, dk, dv))
    return gradients


def add_key_gradients(
    total: torch.Tensor | None, size: int, parts: Sequence[KeyGradient], ops: MergeOps
) -> torch.Tensor | None:
    """Add gradients to `total` [size, heads of keys and of values, dim] in `sum_dtype`, in place, and return it.

    Without a total one is allocated. Without a total and without parts there is none.
    """
    for keys, dk, dv in parts:
        heads, fresh = dk.shape[1], total is None
        if total is None:
            allocate = dk.new_empty if (keys.start, keys.stop) == (0, size) else dk.new_zeros
            total = allocate((size, heads + dv.shape[1], dk.shape[2]), dtype=sum_dtype(dk.dtype))
        ops.accumulate(total[keys, :heads], dk, fresh)
        if dv.shape[1]:
            ops.accumulate(total[keys, heads:], dv, fresh)
    return total
