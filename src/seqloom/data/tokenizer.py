"""Text to ids and back: bytes, a tokenizers .json file, or a Hugging Face tokenizer folder."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from seqloom.errors import SeqloomError

BYTES = "bytes"
"""The name of the tokenizer that needs nothing."""
PROBES = 300
"""Words of a vocabulary that are tried as a text; the first ones may be special."""


class Tokenizer(Protocol):
    """How texts become ids. A whole document is `begin`, the ids of its text, `end`.

    Attributes:
        vocabulary: ids are below this.
        begin, end: ids around a document.
    """

    vocabulary: int
    begin: tuple[int, ...]
    end: tuple[int, ...]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of every text alone, without `begin` and `end`; integers[n] each."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids; special ones give no text."""
        ...

    def described(self) -> dict[str, Any]:
        """Return what goes into meta.json: kind, name, digest, begin and end. Equal for equal tokenizers."""
        ...


class ByteTokenizer:
    """Ids 0 .. 255 are the bytes of UTF-8, 256 ends a document."""

    vocabulary = 257
    begin: tuple[int, ...] = ()
    end: tuple[int, ...] = (256,)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the UTF-8 bytes of every text, uint8[n] each."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text; a character that was cut is shown as the replacement character."""
        array = np.asarray(ids, dtype=np.int64)
        return array[array < 256].astype(np.uint8).tobytes().decode("utf-8", "replace")

    def described(self) -> dict[str, Any]:
        """Return what goes into meta.json."""
        return {"kind": "bytes", "begin": [], "end": list(self.end)}


class FileTokenizer:
    """A tokenizer.json of the package tokenizers.

    `begin` and `end` are what its own template puts around a text, if it has one.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the file."""
        try:
            import tokenizers
        except ImportError as error:
            raise SeqloomError(
                f"tokenizer {str(path)!r} needs the package 'tokenizers' ({error}); install the extra 'hf': "
                "pip install 'seqloom[hf]', or use bytes"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception for a file that it cannot parse
            raise SeqloomError(f"tokenizer {str(path)!r} cannot be read ({error}); pass a tokenizer.json") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._name = Path(path).name
        words = self._tokenizer.get_vocab()
        self.vocabulary = _vocabulary(words, str(path))
        self.begin, self.end = _around(self._ids, words, str(path))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of every text alone, int64[n] each."""
        return [np.array(ids, dtype=np.int64) for ids in self._ids(list(texts), False)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, without special ones."""
        return self._tokenizer.decode([int(id) for id in ids])

    def described(self) -> dict[str, Any]:
        """Return what goes into meta.json."""
        digest = _digest(self._tokenizer.to_str())
        return {"kind": "tokenizers", "name": self._name, "sha256": digest, "begin": [*self.begin], "end": [*self.end]}

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        try:
            return [encoding.ids for encoding in self._tokenizer.encode_batch(texts, add_special_tokens=special)]
        except Exception as error:  # the package raises bare Exception, for an unknown word for example
            raise _refusal(self._name, error) from None


class FolderTokenizer:
    """A Hugging Face tokenizer folder, read by transformers; no code of the folder is run.

    `begin` and `end` are what the tokenizer itself puts around a text; where it puts nothing behind, `end` is its
    end-of-sequence token.
    """

    def __init__(self, path: str | Path) -> None:
        """Read the folder."""
        try:
            import transformers
        except ImportError as error:
            raise SeqloomError(
                f"tokenizer folder {str(path)!r} needs the package 'transformers' ({error}); install the extra 'hf': "
                "pip install 'seqloom[hf]', or name a tokenizer.json"
            ) from None
        try:
            loaded: Any = transformers.AutoTokenizer
            self._tokenizer = loaded.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # whatever the package raises for a folder that it cannot read
            reason = str(error).partition("\n")[0]
            raise SeqloomError(f"tokenizer folder {str(path)!r} cannot be read ({reason}); save it again") from None
        self._tokenizer.model_max_length = sys.maxsize  # the limit is ours, and so is what happens above it
        self._name = Path(path).absolute().name
        words = self._tokenizer.get_vocab()
        self.vocabulary = _vocabulary(words, str(path))
        self.begin, self.end = _around(self._ids, words, str(path))
        if not self.end and self._tokenizer.eos_token_id is not None:
            self.end = (int(self._tokenizer.eos_token_id),)

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids of every text alone, int64[n] each."""
        return [np.array(ids, dtype=np.int64) for ids in self._ids(list(texts), False)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids, without special ones."""
        return str(self._tokenizer.decode([int(id) for id in ids], skip_special_tokens=True))

    def described(self) -> dict[str, Any]:
        """Return what goes into meta.json."""
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        digest = _digest(json.dumps(self._tokenizer.get_vocab(), sort_keys=True) if fast is None else fast.to_str())
        ends = {"begin": [*self.begin], "end": [*self.end]}
        return {"kind": "transformers", "name": self._name, "sha256": digest, **ends}

    def _ids(self, texts: list[str], special: bool) -> list[list[int]]:
        try:
            return self._tokenizer(texts, add_special_tokens=special, return_attention_mask=False)["input_ids"]
        except Exception as error:  # as above, through transformers
            raise _refusal(self._name, error) from None


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Return a tokenizer by name: `bytes`, the path of a tokenizer.json, or of a Hugging Face folder."""
    if str(name) == BYTES:
        return ByteTokenizer()
    path = Path(name)
    if path.is_dir():
        return FolderTokenizer(path)
    if path.is_file():
        return FileTokenizer(path)
    raise SeqloomError(
        f"tokenizer {str(name)!r} is neither a file nor a folder; pass the path of a tokenizer.json or of a "
        "Hugging Face tokenizer folder, or 'bytes'"
    )


def _vocabulary(ids: dict[str, int], name: str) -> int:
    if not ids:
        raise SeqloomError(f"tokenizer {name!r} has an empty vocabulary; pass a trained one")
    return max(ids.values()) + 1


def _around(
    encode: Callable[[list[str], bool], list[list[int]]], words: dict[str, int], name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What a tokenizer puts before and behind a text: that of a text with special ids which it has not alone."""
    [special] = encode([""], True)
    for probe in ("a", *sorted(words, key=lambda word: words[word])[:PROBES]):
        try:
            [plain], [whole] = encode([probe], False), encode([probe], True)
        except SeqloomError:
            continue  # not a word of its own
        if not plain or set(plain) & set(special):
            continue
        for start in range(len(whole) - len(plain) + 1):
            if whole[start : start + len(plain)] == plain:
                return tuple(whole[:start]), tuple(whole[start + len(plain) :])
    raise SeqloomError(f"tokenizer {name!r} gives no ids for its own words; pass a trained one")


def _refusal(name: str, error: Exception) -> SeqloomError:
    return SeqloomError(f"tokenizer {name!r} cannot encode a text ({error}); pass one that knows every character")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
