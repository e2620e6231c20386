"""Lengths of documents as a training run will have them: of a token store, or of what `data prepare` would write.

Planning by them needs no training: a store's index is read, and files of records are tokenized without being stored.
What is no data set (a column of lengths, an array) goes to `describe.read_lengths`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from seqloom.data.hub import HUB
from seqloom.data.prepare import PrepareCounts, encode_records, is_learnable, record_chunks
from seqloom.data.records import GLOB_SIGNS, Record, RecordFields, find_files, read_jsonl, read_lines
from seqloom.data.store import META, TokenStore
from seqloom.data.tokenizers import load_tokenizer
from seqloom.describe import read_lengths
from seqloom.describe.lengths import STDIN, USUAL_COLUMNS, lengths_of_bytes, read_stdin
from seqloom.errors import SeqloomError, import_extra

RECORD_FIELDS = ({"messages"}, {"conversations"}, {"input_ids"}, {"prompt", "answer"}, {"prompt", "completion"})
"""Fields by which a file is known to hold records, whether a tokenizer is named or not."""


class DocumentLengths(NamedTuple):
    """Lengths of documents in order, and how many records have nothing to learn and are in no store."""

    lengths: np.ndarray  # int64[n], tokens
    left_out: int = 0


def document_lengths(
    name: str, *, column: str | None = None, tokenizer: str | None = None, chat_template: str | Path | None = None
) -> DocumentLengths:
    """Return the lengths of a file, folder, glob or of standard input (-), in order.

    Args:
        name: a token store; what `prepare` takes; or a file of lengths, as `describe.read_lengths` takes it.
        column: a field of lengths or of texts, in a file of lengths.
        tokenizer: for texts and chats, as of `load_tokenizer`; with one, a .txt file is documents, one per line.
        chat_template: of chats, instead of the tokenizer's own.
    """
    path = Path(name)
    if (path / META).is_file():
        _refuse_options(name, "a token store, which knows its lengths", column=column, tokenizer=tokenizer)
        return DocumentLengths(TokenStore(path).lengths)
    if name == STDIN:
        data = read_stdin()
        if column is not None or not _is_record(_first_object(data.split(b"\n", 64)), tokenizer):
            return DocumentLengths(lengths_of_bytes(data, "standard input", column, tokenizer))
        lines = read_lines(io.BytesIO(data), "standard input")
        records = [record for record, _ in read_jsonl(lines, "standard input", RecordFields())]
        return _lengths(name, [records], tokenizer, chat_template)
    folder = name.startswith(HUB) or path.is_dir() or (not path.exists() and any(sign in name for sign in GLOB_SIGNS))
    if folder or path.suffix.lower() == ".gz":
        _refuse_options(name, "read as the documents of a data set", column=column)
    elif column is not None or not _holds_records(path, tokenizer):
        return DocumentLengths(read_lengths(path, column=column, tokenizer=tokenizer))
    files, _ = find_files([name])
    return _lengths(name, record_chunks(files, RecordFields(), "line", None), tokenizer, chat_template)


def _refuse_options(name: str, what: str, **options: str | None) -> None:
    for option, value in options.items():
        if value is not None:
            raise SeqloomError(f"--{option} {value} for {name!r}, {what}; leave it out")


def _holds_records(path: Path, tokenizer: str | None) -> bool:
    """Whether a file holds records that `prepare` takes, and no column of lengths."""
    suffix = path.suffix.lower()
    if not path.is_file() or suffix not in (".txt", ".jsonl", ".parquet"):
        return False
    if suffix == ".txt":
        return tokenizer is not None
    if suffix == ".jsonl":
        with path.open("rb") as file:
            return _is_record(_first_object(file), tokenizer)
    pyarrow = import_extra(f"{path}: reading Parquet", "data", "pyarrow", "pyarrow.parquet")
    try:
        return _is_record(pyarrow.parquet.read_schema(path).names, tokenizer)
    except (pyarrow.ArrowException, OSError):
        return False  # its reader says what is wrong with it


def _first_object(lines: Iterable[bytes]) -> list[str]:
    """Return the fields of the first line that is not blank; none where it is no JSON object."""
    line = next((line for line in lines if line.strip()), b"").removeprefix(b"\xef\xbb\xbf")
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return []
    return list(value) if isinstance(value, dict) else []


def _is_record(fields: list[str], tokenizer: str | None) -> bool:
    """Whether records with these fields are documents: a field of lengths beside them goes first."""
    if ({*USUAL_COLUMNS} - {"text"}) & {*fields}:
        return False
    return any(needed <= {*fields} for needed in RECORD_FIELDS) or ("text" in fields and tokenizer is not None)


def _lengths(
    name: str, chunks: Iterable[list[Record]], tokenizer: str | None, chat_template: str | Path | None
) -> DocumentLengths:
    """Tokenize records, and keep their lengths."""
    if tokenizer is None and chat_template is not None:
        raise SeqloomError(f"--chat-template {chat_template} without --tokenizer; name a Hugging Face tokenizer folder")
    chosen = None if tokenizer is None else load_tokenizer(tokenizer, chat_template)
    counts, found, left_out = PrepareCounts(), [], 0
    for chunk in chunks:
        for record in encode_records(chunk, chosen, counts):
            if record.ids is not None and is_learnable(record.ids, record.loss_mask):
                found.append(len(record.ids))
            else:
                left_out += 1
    left_out += counts.empty
    if not found:
        raise SeqloomError(f"{name}: {left_out:,} records, none with anything to learn; check the input")
    return DocumentLengths(np.array(found, dtype=np.int64), left_out)
