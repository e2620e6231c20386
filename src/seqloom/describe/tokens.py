"""Token counts of texts: bytes, or a tokenizer file on disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from seqloom.errors import SeqloomError

TextCounter = Callable[[Sequence[str]], np.ndarray]
"""Texts -> int64 token counts."""

BYTES = "bytes"
"""The tokenizer that counts UTF-8 bytes."""

_CHUNK = 4096
"""Texts encoded at a time: encodings of a whole file would not fit in memory."""


def text_counter(tokenizer: str | None, column: str) -> TextCounter:
    """The function that counts tokens of texts.

    Args:
        tokenizer: ``"bytes"`` for UTF-8 bytes, or the path of a ``tokenizer.json`` (needs the package
            ``tokenizers``). None is refused: how texts become tokens is not a thing to guess.
        column: name of the column that holds the texts, for messages.
    """
    if tokenizer is None:
        raise SeqloomError(
            f"column {column!r} holds text and no tokenizer was named; pass tokenizer='bytes' to count "
            "bytes, or the path of a tokenizer.json, or name a column of integers"
        )
    return count_bytes if tokenizer == BYTES else _file_counter(Path(tokenizer))


def count_bytes(texts: Sequence[str]) -> np.ndarray:
    """UTF-8 bytes of each text, int64[n]."""
    return np.fromiter((len(text.encode("utf-8", "surrogatepass")) for text in texts), np.int64, len(texts))


def _file_counter(path: Path) -> TextCounter:
    if not path.is_file():
        raise SeqloomError(
            f"tokenizer {str(path)!r} is not a file; pass the path of a tokenizer.json, or 'bytes' for bytes"
        )
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise SeqloomError(
            f"tokenizer {str(path)!r} needs the package 'tokenizers', which is not installed; install it "
            "(pip install tokenizers), or pass tokenizer='bytes'"
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a file that it cannot parse
        raise SeqloomError(f"tokenizer {str(path)!r} cannot be read ({error}); pass a tokenizer.json") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def count(texts: Sequence[str]) -> np.ndarray:
        counts: list[int] = []
        for start in range(0, len(texts), _CHUNK):
            counts.extend(len(encoding.ids) for encoding in tokenizer.encode_batch(list(texts[start : start + _CHUNK])))
        return np.array(counts, dtype=np.int64)

    return count
