"""Ids back to text, to check that a tokenizer lost nothing."""

from __future__ import annotations

from collections.abc import Iterable

from seqloom.data.prepare import ByteTokenizer, Tokenizer


def decode(tokenizer: Tokenizer, ids: Iterable[int]) -> str:
    """Return the text of ids; special ones give no text."""
    numbers = [int(number) for number in ids]
    if isinstance(tokenizer, ByteTokenizer):
        return bytes(number for number in numbers if number < 256).decode()
    return tokenizer._tokenizer.decode(numbers, skip_special_tokens=True)  # pyrefly: ignore
