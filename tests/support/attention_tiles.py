"""All tiles that a group's ring computes, in tokens: an oracle for plans and the attention schedule."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.layout.layout import Column
from seqloom.plan import Group
from seqloom.plan.rules.groups import chunk_tiles


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
