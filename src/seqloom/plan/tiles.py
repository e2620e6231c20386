"""Who computes which pairs of query and key: the zigzag ring on paper, without tensors.

A group with ring r cuts every span into 2 r chunks; index i holds chunk i, its low one, and chunk 2 r - 1 - i, its high
one. When the keys of index j come by, index i computes

    j == i   low x low and high x high under the causal mask, high x low
    j <  i   low x low of j, high x low of j
    j >  i   high x low of j, high x high of j

Gathered keys are computed in one go: each chunk x all chunks before it, and itself under the causal mask. A piece with
tokens before it (its prefix) sees all of them: they lie on the same ranks and come by in the same way. ring 2, chunks
of queries downwards, of keys to the right, by ring index:

    0
    1 1
    1 1 1
    0 0 0 0
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from seqloom.plan.boxes import Column
from seqloom.plan.group import Group, Method


class Tiles(NamedTuple):
    """Rectangles of a causal attention matrix, as columns with one entry per tile.

    Attributes:
        index: ring index that computes it.
        document: whose tokens these are.
        q_start, q_stop, k_start, k_stop: positions in the document.
        causal: bool, later keys are hidden; queries and keys are then the same tokens.
    """

    index: Column
    document: Column
    q_start: Column
    q_stop: Column
    k_start: Column
    k_stop: Column
    causal: np.ndarray


class ChunkTiles(NamedTuple):
    """The same in chunks of one span: a query chunk and a run of key chunks, `first .. last - 1`."""

    index: Column
    query: Column
    first: Column
    last: Column
    causal: np.ndarray


@lru_cache(maxsize=256)
def chunk_tiles(ring: int, method: Method) -> ChunkTiles:
    """Return who computes which chunks. Without a ring the span is one chunk, with ring r there are 2 r."""
    low = np.arange(ring)
    high = 2 * ring - 1 - low
    if ring == 1:
        return _table([(low, low, low, low + 1)], [])
    squares: list[tuple[Column, ...]] = [(low, chunk, chunk, chunk + 1) for chunk in (low, high)]
    if method == Method.GATHER:
        return _table(squares, [(low, chunk, 0 * chunk, chunk) for chunk in (low, high)])
    i, j = (grid.ravel() for grid in np.indices((ring, ring)))
    earlier, later = j < i, j > i
    steps = [(low, high, low)]
    steps += [(i[earlier], query[i[earlier]], j[earlier]) for query in (low, high)]
    steps += [(i[later], high[i[later]], key[j[later]]) for key in (low, high)]
    return _table(squares, [(index, query, key, key + 1) for index, query, key in steps])


def _table(causal: list[tuple[Column, ...]], full: list[tuple[Column, ...]]) -> ChunkTiles:
    """Join columns of index, query chunk and run of key chunks, with and without the mask."""
    index, query, first, last = (np.concatenate(columns) for columns in zip(*causal, *full, strict=True))
    masked = sum(len(columns[0]) for columns in causal)
    return ChunkTiles(index, query, first, last, np.arange(len(index)) < masked)


@lru_cache(maxsize=256)
def wrong_chunks(ring: int, method: Method) -> tuple[int, int] | None:
    """Return a query and a key chunk that are not computed exactly once, or None: the schedule is complete.

    Chunks on the diagonal must be in one tile under the causal mask, those before it in one without.
    """
    tiles = chunk_tiles(ring, method)
    chunks = 1 if ring == 1 else 2 * ring
    for causal in (False, True):
        chosen = tiles.causal == causal
        count = np.zeros((chunks, chunks + 1), dtype=np.int64)
        np.add.at(count, (tiles.query[chosen], tiles.first[chosen]), 1)
        np.add.at(count, (tiles.query[chosen], tiles.last[chosen]), -1)
        expected = np.eye(chunks, dtype=np.int64) if causal else np.tri(chunks, k=-1, dtype=np.int64)
        wrong = np.argwhere(np.cumsum(count, axis=1)[:, :-1] != expected)
        if len(wrong):
            return int(wrong[0, 0]), int(wrong[0, 1])
    return None


def group_tiles(group: Group) -> Tiles:
    """Return all tiles that a group computes, without empty ones; tiles with the prefix of a span come last."""
    document, start, stop = np.array(group.spans, dtype=np.int64).reshape(-1, 3).T
    chunks = 1 if group.ring == 1 else 2 * group.ring
    base, extra = np.divmod(stop - start, chunks)
    number = np.arange(chunks + 1)
    edges = start[:, None] + number * base[:, None] + np.minimum(number, extra[:, None])  # [spans, chunks + 1]
    table = chunk_tiles(group.ring, group.method)
    inside = (edges[:, table.query], edges[:, table.query + 1], edges[:, table.first], edges[:, table.last])
    holder = np.minimum(number[:-1], chunks - 1 - number[:-1])
    zero = np.zeros_like(edges[:, :-1])
    prefix = (edges[:, :-1], edges[:, 1:], zero, zero + start[:, None])
    parts = []
    for rows, index, causal in ((inside, table.index, table.causal), (prefix, holder, np.zeros(chunks, dtype=bool))):
        used = (rows[1] > rows[0]) & (rows[3] > rows[2])
        heads = (index, np.broadcast_to(document[:, None], used.shape), *rows, causal)
        parts.append([np.broadcast_to(column, used.shape)[used] for column in heads])
    return Tiles(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
