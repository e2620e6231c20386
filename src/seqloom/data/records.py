"""Records of files: which files, lines or rows of them, and what a record is.

    .jsonl, .parquet, .txt, .jsonl.gz, .txt.gz; globs and folders of them; hf:...  --find_files, read_records-->  Record

A record is one text, a prompt with its answer, a chat, or token ids, with labels or without. The first record of a
file, or its schema, decides which. Every record is looked at: one that is something else, or could be, is refused.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import numpy as np

from seqloom.data.chats import OPTIONS, Chat, parse_messages, parse_options
from seqloom.data.hub import HUB, HubDataset
from seqloom.data.source import IGNORE_INDEX
from seqloom.errors import SeqloomError, import_extra

SUFFIXES = (".jsonl", ".parquet", ".txt", ".jsonl.gz", ".txt.gz")
ANSWER_FIELDS = ("answer", "completion", "response")
"""Usual names of the field beside a `prompt`."""
CHAT_FIELDS = ("messages", "conversations")
"""Usual names of the field with the messages of a chat."""
PARQUET_ROWS = 64
"""Parquet rows converted to Python values at a time."""
GLOB_SIGNS = "*?["
UTF8_BOM = b"\xef\xbb\xbf"
RECORD_OVERHEAD = 64
"""Characters that a record counts on top of its own, so that empty ones fill a chunk too."""

TextUnit = Literal["line", "file"]


# ---- Files


def find_files(inputs: Iterable[str | Path | HubDataset]) -> tuple[list[Path | HubDataset], list[Path]]:
    """Return the files that inputs name, and those of other kinds in folders among them, which are not read.

    A folder is all files below it, a glob all files that it matches, each in the order of their names; what begins with
    a dot is left out. `hf:...` is a data set, opened (`hub`). What cannot be read, and a file that is named twice, is
    refused before any work.
    """
    found: list[Path | HubDataset] = []
    others: list[Path] = []
    for each in inputs:
        if isinstance(each, HubDataset) or str(each).startswith(HUB):
            found.append(each if isinstance(each, HubDataset) else HubDataset.open(str(each)))
            continue
        name = str(each)
        path, shown = Path(name), repr(name)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file() and not is_hidden(file.relative_to(path)))
            own = [file for file in files if file_kind(file)]
            others += [file for file in files if not file_kind(file)]
            if not own:
                raise SeqloomError(f"{shown} has no file of {', '.join(SUFFIXES)} in it; name another folder")
            found += own
        elif path.is_file() or not any(sign in name for sign in GLOB_SIGNS):
            if not file_kind(path):
                raise SeqloomError(f"{shown} is none of {', '.join(SUFFIXES)}; name files of these kinds")
            if not path.is_file():
                raise SeqloomError(f"{shown} does not exist; check the path, it is relative to {Path.cwd()}")
            found.append(path)
        else:
            matches = sorted(map(Path, glob(name, recursive=True)))
            if not matches:
                raise SeqloomError(f"no file matches {shown}; check the pattern, it is relative to {Path.cwd()}")
            for match in matches:
                if not match.is_file() or not file_kind(match):
                    wrong = "a folder" if match.is_dir() else f"none of {', '.join(SUFFIXES)}"
                    raise SeqloomError(f"{shown} matches {str(match)!r}, which is {wrong}; narrow the pattern")
            found += matches
    if not found:
        raise SeqloomError(f"no input; name at least one file, {', '.join(SUFFIXES)}, or a folder of them")
    seen: set[str | Path] = set()
    for each in found:
        own, name = (each.name, each.name) if isinstance(each, HubDataset) else (each.resolve(), str(each))
        if own in seen:
            raise SeqloomError(f"{name!r} is named twice; name every file once")
        seen.add(own)
    return found, others


def file_kind(path: Path) -> str | None:
    """Return the one of `SUFFIXES` that a file has; None: it is no file of records."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def is_hidden(path: Path) -> bool:
    """Whether a part of a path begins with a dot."""
    return any(part.startswith(".") for part in path.parts)


@contextmanager
def _open(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Open a file for reading, unpacked; yield it, and the file on disk, whose position says how far it is read."""
    with path.open("rb") as raw:
        if path.suffix.lower() != ".gz":
            yield raw, raw
            return
        try:
            with gzip.open(raw) as file:
                yield cast("IO[bytes]", file), raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise SeqloomError(f"{path}: not a readable gzip file ({error}); copy it again") from None


# ---- Records


class Record(NamedTuple):
    """One document before it is tokenized: a text, a chat, or ids."""

    where: str  # file and line, for messages
    text: str | None = None
    prompt: str | None = None  # what the text begins with, and the loss leaves out
    chat: Chat | None = None
    ids: np.ndarray | None = None  # integers[n]
    loss_mask: np.ndarray | None = None  # bool[n] beside ids; None counts all

    @property
    def size(self) -> int:
        """Characters and ids, about, and a little for the record itself."""
        chat, ids = (0 if self.chat is None else self.chat.size), (0 if self.ids is None else len(self.ids))
        return RECORD_OVERHEAD + len(self.text or "") + len(self.prompt or "") + chat + ids


class RecordFormat(NamedTuple):
    """What the records of a file are, and the fields that are read: text; prompt and answer; chat; or ids and labels.

    A prompt and its answer are texts, or both are messages of a chat.
    """

    kind: Literal["text", "prompt", "chat", "ids"]
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Field names that the user gave. With none given, usual names are recognized."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    text: str | None = None  # field with a whole text
    prompt: str | None = None
    answer: str | None = None  # beside a prompt; the loss counts the answer only
    ids: str | None = None  # token ids; a field `labels` beside it (-100 where the loss does not count) is read too
    messages: str | None = None  # of a chat; `tools` and `chat_template_kwargs` beside it are read too

    def __post_init__(self) -> None:
        """Refuse names of more than one format."""
        if (self.prompt is None) != (self.answer is None):
            raise SeqloomError("a prompt without an answer, or the reverse; name both fields")
        if sum(name is not None for name in (self.text, self.prompt, self.ids, self.messages)) > 1:
            raise SeqloomError(
                "a record is a text, a prompt and its answer, a chat, or ids; name the fields of one of them"
            )

    def detect(self, names: Iterable[str], where: str) -> RecordFormat:
        """Return the format of a file whose records have fields of these names."""
        present = list(names)
        given: list[Any] = [("text", (self.text,)), ("prompt", (self.prompt, self.answer)), ("ids", (self.ids,))]
        given.append(("chat", (self.messages,)))
        answers = [("prompt", ("prompt", name)) for name in ANSWER_FIELDS]
        chats = [("chat", (name,)) for name in CHAT_FIELDS]
        usual: list[Any] = [("text", ("text",)), *answers, *chats, ("ids", ("input_ids",))]
        formats = [(kind, fields) for kind, fields in given if None not in fields]
        formats = formats or [(kind, fields) for kind, fields in usual if set(fields) <= set(present)]
        has = f"it has {', '.join(map(repr, present)) or 'none'}"
        if len(formats) != 1:
            problem = "more than one way to read its records" if formats else "no field that is known"
            raise SeqloomError(
                f"{where}: {problem}, {has}; name the text field, or prompt and answer, or messages, or ids"
            )
        [(kind, fields)] = formats
        missing = [name for name in fields if name not in present]
        if missing:
            raise SeqloomError(f"{where}: no field {missing[0]!r}, {has}; name one of them")
        return RecordFormat(kind, (*fields, "labels") if kind == "ids" and "labels" in present else fields)


def read_records(path: Path | HubDataset, fields: RecordFields, unit: TextUnit) -> Iterator[tuple[Record, float]]:
    """Yield the records of a file, each with the share of the file that is read by then, 0 .. 1."""
    if isinstance(path, HubDataset):
        return _read_dataset(path, fields)
    suffix = file_kind(path)
    if suffix in (".jsonl", ".jsonl.gz"):
        return read_jsonl(_read_lines(path), str(path), fields)
    if suffix == ".parquet":
        return _read_parquet(path, fields)
    return _read_text(path, unit)


def read_jsonl(lines: Iterable[Line], name: str, fields: RecordFields) -> Iterator[tuple[Record, float]]:
    """Yield the records of lines of JSON; `name` is that of the file, for messages."""
    format_: RecordFormat | None = None
    for number, line, share in lines:
        where = f"{name}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SeqloomError(f"{where}: not valid JSON ({error}); correct the line") from None
        if not isinstance(value, dict):
            raise SeqloomError(f"{where}: {type(value).__name__}, not an object with named fields; correct the line")
        format_ = format_ or fields.detect(value, where)
        _check_kind(format_, fields, value, where)
        record = _parse_record(format_, value, where)
        more = {*fields.detect(value, where).fields} - {*format_.fields}
        if more:
            raise SeqloomError(
                f"{where}: field {min(more)!r}, which the records before do not have; give it in all records of a file "
                "or in none"
            )
        yield record, share


def _read_parquet(path: Path, fields: RecordFields) -> Iterator[tuple[Record, float]]:
    pyarrow = import_extra(f"reading {str(path)!r}", "data", "pyarrow", "pyarrow.parquet")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            format_ = fields.detect(file.schema_arrow.names, str(path))
            total, row = max(file.metadata.num_rows, 1), 0
            columns = [*format_.fields, *(name for name in OPTIONS if name in file.schema_arrow.names)]
            for batch in file.iter_batches(PARQUET_ROWS, columns=columns):
                for value in batch.to_pylist():
                    yield _parse_record(format_, value, f"{path}, row {row}"), row / total
                    row += 1
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise SeqloomError(f"{path}: not a readable Parquet file ({reason}); write it again") from None


def _read_dataset(data: HubDataset, fields: RecordFields) -> Iterator[tuple[Record, float]]:
    format_ = fields.detect(data.columns, data.name)
    columns = [*format_.fields, *(name for name in OPTIONS if name in data.columns)]
    for row, value in data.read(columns):
        yield _parse_record(format_, value, f"{data.name}, row {row}"), row / max(len(data.rows), 1)


def _read_text(path: Path, unit: TextUnit) -> Iterator[tuple[Record, float]]:
    if unit == "file":
        with _open(path) as (file, _):
            yield Record(str(path), _decode(file.read().removeprefix(UTF8_BOM), str(path))), 1.0
        return
    for number, line, share in _read_lines(path):
        yield Record(f"{path}, line {number}", line), share


Line = tuple[int, str, float]
"""Number from 1, text without the line's end, and the share of the file that is read by then."""


def _read_lines(path: Path) -> Iterator[Line]:
    size = max(path.stat().st_size, 1)
    with _open(path) as (file, raw):
        for number, text, done in read_lines(file, str(path)):
            yield number, text, (done if file is raw else raw.tell()) / size


def read_lines(file: Iterable[bytes], name: str) -> Iterator[Line]:
    """Yield the lines of UTF-8 text, with the number of bytes that are read by then instead of their share."""
    done = 0
    for number, line in enumerate(file, start=1):
        done += len(line)
        if number == 1:
            line = line.removeprefix(UTF8_BOM)
        text = line.removesuffix(b"\n").removesuffix(b"\r")
        yield number, _decode(text, f"{name}, line {number}"), done


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SeqloomError(f"{where}: not UTF-8 ({error.reason}); save the file as UTF-8") from None


def _check_kind(format_: RecordFormat, fields: RecordFields, value: dict[str, Any], where: str) -> None:
    """Refuse a record of another kind than those before it; one of no kind is refused where it is parsed."""
    if all(name in value for name in format_.fields):
        return
    try:
        other = fields.detect(value, where)
    except SeqloomError:
        return
    if other.kind != format_.kind:
        has, before = (" and ".join(map(repr, each.fields)) for each in (other, format_))
        raise SeqloomError(
            f"{where}: a record with {has}, and those before it in the file have {before}; put records of one kind "
            "into a file of their own"
        )


def _parse_record(format_: RecordFormat, value: dict[str, Any], where: str) -> Record:
    missing = [name for name in format_.fields if name not in value]
    if missing:
        raise SeqloomError(f"{where}: no field {missing[0]!r} as in the records before; add it")
    if format_.kind == "ids":
        return _parse_ids(value, format_.fields, where)
    if format_.kind == "chat":
        return _parse_chat(value, format_.fields, where)
    if format_.kind == "prompt" and any(isinstance(value[name], list) for name in format_.fields):
        return _parse_chat(value, format_.fields, where)
    texts = [_check_text(value[name], f"{where}, field {name!r}") for name in format_.fields]
    return Record(where, "".join(texts), None if format_.kind == "text" else texts[0])


def _parse_chat(value: dict[str, Any], fields: tuple[str, ...], where: str) -> Record:
    """Messages in one field; or in a prompt and its answer, after which it counts."""
    parts = [parse_messages(value[name], f"{where}, field {name!r}") for name in fields]
    prompt = None if len(parts) == 1 or not parts[1] else len(parts[0])
    messages = [message for part in parts for message in part] if len(parts) == 1 or parts[1] else []
    return Record(where, chat=Chat(messages, prompt, parse_options(value, where)))


def _check_text(value: Any, where: str) -> str:
    """Return a text; null is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SeqloomError(f"{where}: {type(value).__name__}, not text; name another field")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise SeqloomError(f"{where}: half a surrogate pair, which is no character; correct the text") from None
    return value


def _parse_ids(value: dict[str, Any], fields: tuple[str, ...], where: str) -> Record:
    ids = _check_integers(value[fields[0]], f"{where}, field {fields[0]!r}")
    if len(fields) == 1 or value[fields[1]] is None:
        return Record(where, ids=ids)
    labels = _check_integers(value[fields[1]], f"{where}, field {fields[1]!r}")
    if labels.shape != ids.shape:
        raise SeqloomError(f"{where}: {len(labels)} labels for {len(ids)} ids; give one each")
    wrong = np.flatnonzero((labels != IGNORE_INDEX) & (labels != ids))
    if len(wrong):
        at = wrong[0]
        raise SeqloomError(
            f"{where}: label {at} is {labels[at]} beside id {ids[at]}; a label repeats the id of its own position "
            f"or is {IGNORE_INDEX}, shifting happens when the store is read"
        )
    return Record(where, ids=ids, loss_mask=labels != IGNORE_INDEX)


def _check_integers(value: Any, where: str) -> np.ndarray:
    if value is None:
        return np.empty(0, dtype=np.int64)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise SeqloomError(f"{where}: not a list of whole numbers; name another field")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise SeqloomError(f"{where}: a number too large for a token id; correct it") from None
