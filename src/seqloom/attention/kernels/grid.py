"""The fixed grid of shapes that may reach cuDNN, and how segments are laid on it.

cuDNN builds a plan for every new shape, about 0.1 s each time, and lengths in training are almost always new. So
lengths are rounded up to a few classes, all of which can be built before the first step. There are two ways up:

    packed   documents of one octave (513..1024 tokens, say) in one call, true lengths read from the GPU: exact, and
             nothing is computed for the surplus. Missing documents of a call have length 0.
    dense    one long document, rounded up by at most 2 % into the tokens that follow it: under a causal mask these
             come later, so its own rows do not see them, and the surplus rows are thrown away. About 5 % faster than
             packed where a document is long.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from seqloom.attention.segments import Segments

OCTAVES = tuple(128 << k for k in range(18))
"""Longest document of every packed class, tokens: 128 to 16M."""
DENSE_FROM, DENSE_TO, DENSE_STEP = 16_384, 131_072, 1.02
EXACT_FROM = 8_192
TILE_FROM = 4_096
MAX_BATCH = 512
MAX_PACKED_TOKENS = 1 << 18
"""Documents of a packed call times its class: bounds cuDNN's scratch memory, which is that of the padded batch."""


@dataclass(frozen=True, slots=True, order=True)
class CallShape:
    """What a call looks like to cuDNN.

    Attributes:
        batch: documents.
        q_length, k_length: longest query and key part, tokens.
        causal: a square under a causal mask; otherwise no mask.
        packed: lengths are read from the GPU.
    """

    batch: int
    q_length: int
    k_length: int
    causal: bool
    packed: bool


@dataclass(frozen=True, slots=True)
class Call:
    """A shape and the segments (indices into `Segments`) it computes, at most `shape.batch` of them."""

    shape: CallShape
    segments: np.ndarray


def dense_lengths() -> tuple[int, ...]:
    """Lengths of the dense classes, multiples of 128 tokens, each at most `DENSE_STEP` above the last."""
    lengths = [DENSE_FROM]
    while lengths[-1] < DENSE_TO:
        grown = int(lengths[-1] * DENSE_STEP) // 128 * 128
        lengths.append(min(max(grown, lengths[-1] + 128), DENSE_TO))
    return tuple(lengths)


def all_shapes(longest: int, tokens: int | None = None) -> list[CallShape]:
    """Every shape that documents of up to `longest` tokens, `tokens` in all, can reach: what a warm-up builds."""
    lengths = (EXACT_FROM, *dense_lengths())
    dense = [CallShape(1, length, length, causal=True, packed=False) for length in lengths]
    packed = [
        CallShape(batch, octave, octave, causal=True, packed=True) for octave in OCTAVES for batch in _batches(octave)
    ]
    longest = longest if tokens is None else min(longest, tokens)
    reached = [shape for shape in dense + packed if shape.q_length < 2 * max(longest, OCTAVES[0])]
    return reached if tokens is None else [shape for shape in reached if _fewest_tokens(shape) <= tokens]


def _fewest_tokens(shape: CallShape) -> int:
    """Tokens that a call has at least: its batch is more than half full, of documents beyond the octave below."""
    shortest = shape.q_length // 2 + 1 if shape.q_length > OCTAVES[0] else 1
    return (shape.batch // 2 + 1) * shortest if shape.packed else 1


def plan_calls(segments: Segments) -> list[Call]:
    """Lay segments (squares, or without mask) on the grid. Dense calls come first, in row order, then packed ones.

    A dense call also writes the surplus rows behind its document; whatever owns these rows must run after it. Where
    keys lie in another order than queries, no order is right for both, and only calls without surplus are dense.
    """
    causal = segments.causal & (segments.offset == 0) & (segments.q_len == segments.k_len)
    dense = _dense_lengths_of(segments, causal)
    order = np.argsort(segments.q_start, kind="stable")
    if np.any(np.diff(segments.k_start[order]) < 0):
        dense[dense[:, 0] > segments.q_len] = 0
    calls = [
        Call(CallShape(1, *dense[index].tolist(), causal=bool(causal[index]), packed=False), np.array([index]))
        for index in order[dense[order, 0] > 0]
    ]
    return calls + list(_packed_calls(segments, causal, order[dense[order, 0] == 0]))


def _dense_lengths_of(segments: Segments, causal: np.ndarray) -> np.ndarray:
    """Query and key length of the dense class of every segment, int64[n, 2], 0 where it is packed.

    A segment without mask must have exactly its keys, so it is dense only where its lengths are powers of two, as the
    chunks of documents are that were cut at a context length. A square of such a chunk is dense from `EXACT_FROM`.
    """
    found = np.zeros((len(segments), 2), dtype=np.int64)
    q_len, k_len = segments.q_len, segments.k_len
    grid = np.array(dense_lengths())
    long = causal & (q_len >= DENSE_FROM) & (q_len <= DENSE_TO)
    found[long] = grid[np.searchsorted(grid, q_len[long])][:, None]
    found[causal & (q_len == EXACT_FROM)] = EXACT_FROM
    exact = ~causal & (q_len & (q_len - 1) == 0) & (k_len & (k_len - 1) == 0) & (np.minimum(q_len, k_len) >= TILE_FROM)
    found[exact] = np.stack([q_len[exact], k_len[exact]], axis=1)
    return found


def _packed_calls(segments: Segments, causal: np.ndarray, members: np.ndarray) -> Iterator[Call]:
    """Group segments by mask and octave, then cut each group into calls of a batch on the grid."""
    octaves = np.array(OCTAVES)
    columns = (causal, *(octaves[np.searchsorted(octaves, size)] for size in (segments.q_len, segments.k_len)))
    kinds = np.stack(columns, axis=1)[members]
    for kind in sorted({tuple(row) for row in kinds.tolist()}, key=lambda kind: (-kind[1] * kind[2], kind)):
        same = members[(kinds == kind).all(axis=1)]
        for part in _split(same, _batches(max(kind[1:]))[-1]):
            batch = 1 << (len(part) - 1).bit_length()
            yield Call(CallShape(batch, kind[1], kind[2], causal=bool(kind[0]), packed=True), part)


def _split(members: np.ndarray, largest: int) -> Iterator[np.ndarray]:
    """Cut into parts that nearly fill a batch: a missing document still costs the launch of its blocks."""
    while len(members):
        batch = min(largest, 1 << (len(members) - 1).bit_length())
        if 4 * len(members) < 3 * batch:
            batch //= 2
        yield members[:batch]
        members = members[batch:]


def _batches(octave: int) -> list[int]:
    """Batches of a class: powers of two."""
    largest = min(MAX_BATCH, max(1, MAX_PACKED_TOKENS // octave))
    return [1 << k for k in range(largest.bit_length())]
