"""What `models.dropout` and `attention.dropout` have to drop, in numpy's unsigned numbers."""

from __future__ import annotations

import numpy as np

GOLDEN, FIRST, SECOND = (np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _mixed64(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * FIRST
    x = (x ^ (x >> np.uint64(27))) * SECOND
    return x ^ (x >> np.uint64(31))


def _mixed32(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def expected_mask(
    seed: int, documents: np.ndarray, positions: np.ndarray, number: int, features: int, p: float
) -> np.ndarray:
    """Return 0 for what the dropout module of this number drops, else 1 / (1 - p); float64[tokens, features]."""
    return _mask(seed, documents, positions, (number,), np.arange(features), p)


def expected_weights(
    seed: int, document: int, queries: np.ndarray, keys: np.ndarray, layer: int, heads: int, p: float
) -> np.ndarray:
    """Return the same of attention weights in a document, float64[heads, queries, keys], given positions."""
    documents = np.full(len(queries), document)
    return np.stack([_mask(seed, documents, queries, (layer, head), keys, p) for head in range(heads)])


def _mask(
    seed: int, documents: np.ndarray, positions: np.ndarray, numbers: tuple[int, ...], columns: np.ndarray, p: float
) -> np.ndarray:
    keys = _mixed64(np.full(len(documents), seed % 2**63, dtype=np.uint64))
    for each in (documents, positions, *(np.full(len(documents), number) for number in numbers)):
        keys = _mixed64(keys + GOLDEN * (each.astype(np.uint64) + np.uint64(1)))
    low, high = keys.astype(np.uint32)[:, None], (keys >> np.uint64(32)).astype(np.uint32)[:, None]
    drawn = _mixed32(_mixed32(low ^ _mixed32(columns.astype(np.uint32))) + high)
    return (drawn.astype(np.float64) >= p * 2.0**32) * (1 / (1 - p) if p < 1 else 0.0)
