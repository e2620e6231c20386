"""Ids back to text by the packages themselves, to check that a tokenizer lost nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer


def decode(name: str | Path, ids: Iterable[int]) -> str:
    """Return the text of ids of `load_tokenizer(name)`; special ones give no text."""
    numbers = [int(number) for number in ids]
    if name == "bytes":
        return bytes(number for number in numbers if number < 256).decode()
    package = AutoTokenizer.from_pretrained(name) if Path(name).is_dir() else Tokenizer.from_file(str(name))
    return package.decode(numbers, skip_special_tokens=True)
