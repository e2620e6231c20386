"""Text to ids: bytes, a tokenizers .json file, or a Hugging Face tokenizer folder, perhaps with a chat template."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from seqloom.data.chats import ChatTemplate
from seqloom.errors import SeqloomError, import_extra

BYTES = "bytes"
"""Name of the tokenizer that needs no file: ids 0 .. 255 are the bytes of UTF-8, 256 ends a document."""
PROBES = 300
"""Words of a vocabulary tried as a text to find a tokenizer's begin and end; the first ones may be special."""


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """Text to ids. A document is `begin`, the ids of its text, `end`."""

    encode: Callable[[Sequence[str]], list[np.ndarray]]  # ids of every text alone, integers[n] each
    vocabulary: int  # ids are below this
    begin: tuple[int, ...]
    end: tuple[int, ...]
    metadata: dict[str, Any]  # entry of meta.json: kind, name, digest, begin, end; equal for equal tokenizers
    chats: ChatTemplate | None = None  # of a folder that has one, or that was given one


def load_tokenizer(name: str | Path, chat_template: str | Path | None = None) -> Tokenizer:
    """Load a tokenizer by name: `bytes`, the path of a tokenizer.json, or of a Hugging Face folder.

    `chat_template` is a Jinja file that a folder's own template gives way to.
    """
    path = Path(name)
    folder = str(name) != BYTES and path.is_dir()
    if chat_template is not None and not folder:
        raise SeqloomError(
            f"a chat template, {str(chat_template)!r}, for tokenizer {str(name)!r}; templates need a Hugging Face "
            "tokenizer folder, name one, or leave the template out"
        )
    if str(name) == BYTES:
        return Tokenizer(_encode_bytes, 257, (), (256,), {"kind": "bytes", "begin": [], "end": [256]})
    if folder:
        return _load_folder(path, chat_template)
    if path.is_file():
        return _load_json(path)
    raise SeqloomError(
        f"tokenizer {str(name)!r} is neither a file nor a folder; pass the path of a tokenizer.json or of a "
        "Hugging Face tokenizer folder, or 'bytes'"
    )


def _encode_bytes(texts: Sequence[str]) -> list[np.ndarray]:
    return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]


def _load_json(path: Path) -> Tokenizer:
    """Load a tokenizer.json of the package tokenizers."""
    tokenizers = import_extra(f"tokenizer {str(path)!r}", "hf", "tokenizers", otherwise=", or use bytes")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a file that it cannot parse
        raise SeqloomError(f"tokenizer {str(path)!r} cannot be read ({error}); pass a tokenizer.json") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def encode(texts: list[str], special: bool) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=special)]

    return _trained_tokenizer("tokenizers", path, encode, tokenizer.get_vocab(), tokenizer.to_str())


def _load_folder(path: Path, chat_template: str | Path | None) -> Tokenizer:
    """Load a Hugging Face tokenizer folder by transformers; no code of the folder is run."""
    way_out = ", or name a tokenizer.json"
    transformers = import_extra(f"tokenizer folder {str(path)!r}", "hf", "transformers", otherwise=way_out)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # whatever the package raises for a folder that it cannot read
        reason = str(error).partition("\n")[0]
        raise SeqloomError(f"tokenizer folder {str(path)!r} cannot be read ({reason}); save it again") from None
    tokenizer.model_max_length = sys.maxsize  # `prepare` has a limit and a policy of its own

    def encode(texts: list[str], special: bool) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=special, return_attention_mask=False)["input_ids"]

    words, fast = tokenizer.get_vocab(), getattr(tokenizer, "backend_tokenizer", None)
    content = json.dumps(words, sort_keys=True) if fast is None else fast.to_str()
    made = _trained_tokenizer("transformers", path, encode, words, content, tokenizer.eos_token_id)
    return replace(made, chats=ChatTemplate.of(tokenizer, chat_template))


def _trained_tokenizer(
    kind: str,
    path: Path,
    encode: Callable[[list[str], bool], list[list[int]]],
    words: dict[str, int],
    content: str,
    eos: int | None = None,
) -> Tokenizer:
    """Wrap a tokenizer of another package (`kind`); `content` is everything that decides about ids, as text.

    `encode(texts, special)` returns the ids of every text, with or without special ones. `eos` ends a document where
    the tokenizer's own template puts nothing after a text.
    """
    if not words:
        raise SeqloomError(f"tokenizer {str(path)!r} has an empty vocabulary; pass a trained one")
    name = path.absolute().name

    def call(texts: Sequence[str], special: bool = False) -> list[list[int]]:
        try:
            return encode(list(texts), special)
        except Exception as error:  # the packages raise bare Exception, for an unknown word for example
            raise SeqloomError(
                f"tokenizer {name!r} cannot encode a text ({error}); pass one that knows every character"
            ) from None

    begin, end = _find_template(call, words, str(path))
    end = end or (() if eos is None else (int(eos),))
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    metadata = {"kind": kind, "name": name, "sha256": sha256, "begin": [*begin], "end": [*end]}

    def encode_texts(texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, dtype=np.int64) for ids in call(texts)]

    return Tokenizer(encode_texts, max(words.values()) + 1, begin, end, metadata)


def _find_template(
    call: Callable[..., list[list[int]]], words: dict[str, int], name: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids before and after a text: encode words with and without special ids and compare."""
    [special] = call([""], special=True)
    for probe in ("a", *sorted(words, key=lambda word: words[word])[:PROBES]):
        try:
            [plain], [full] = call([probe]), call([probe], special=True)
        except SeqloomError:
            continue  # no text by itself
        if not plain or set(plain) & set(special):
            continue
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise SeqloomError(f"tokenizer {name!r} gives no ids for its own words; pass a trained one")
