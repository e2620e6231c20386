"""A small corpus made up on the spot: documents of very unequal lengths that a tiny model can learn something of."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from seqloom.data.writer import StoreWriter

VOCABULARY = 257
"""Bytes, and one id that ends a document."""
END = 256
_SUBJECTS = ("the loom", "a weaver", "the shuttle", "one thread", "the pattern", "a long warp", "the short weft")
_VERBS = ("crosses", "follows", "holds", "meets", "carries", "turns", "binds")
_OBJECTS = ("the frame", "every row", "the next one", "a knot", "the whole cloth", "its neighbour", "the edge")


def write_toy_store(path: Path, lengths: np.ndarray, *, seed: int = 0) -> None:
    """Write a token store of documents with these lengths: sentences of a tiny grammar, cut where a length ends.

    Args:
        path: folder of the store; it must not exist.
        lengths: int64[n], tokens of every document, at least 2.
        seed: of the sentences.
    """
    draw = np.random.default_rng(seed)
    with StoreWriter(path, vocabulary=VOCABULARY) as writer:
        for length in lengths.tolist():
            text = b""
            while len(text) < length:
                words = (str(draw.choice(part)) for part in (_SUBJECTS, _VERBS, _OBJECTS))
                text += " ".join(words).encode() + b". "
            ids = np.frombuffer(text[:length], dtype=np.uint8).astype(np.int64)
            ids[-1] = END
            writer.add(ids)
