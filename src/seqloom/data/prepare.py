"""Records of .jsonl, .parquet and .txt files, one at a time: a text, a prompt with its answer, or ids.

What a file holds is decided once, from its first record or its schema, and every record must then hold it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from seqloom.data.source import IGNORED, TooLong, check_policy, refused
from seqloom.data.store import StoreWriter, pyarrow_for, require_new
from seqloom.data.tokenizer import Tokenizer
from seqloom.errors import SeqloomError, unknown

SUFFIXES = (".jsonl", ".parquet", ".txt")
ANSWERS = ("answer", "completion", "response")
"""Usual names of the field behind a `prompt`."""
ROWS = 64
"""Parquet rows that are in memory at a time as Python values."""

MARK = b"\xef\xbb\xbf"
"""What some editors put before a UTF-8 file."""

TextUnit = Literal["line", "file"]


class Record(NamedTuple):
    """One document before it is stored.

    Attributes:
        place: file and line, for messages.
        parts: texts and whether the loss counts them; empty when ids are given.
        ids: integers[n], or None.
        counted: bool[n] beside ids; None counts all.
    """

    place: str
    parts: tuple[tuple[str, bool], ...]
    ids: np.ndarray | None = None
    counted: np.ndarray | None = None


class Form(NamedTuple):
    """Which fields of a record are read: one text; prompt and answer; or ids and perhaps labels."""

    kind: Literal["text", "prompt", "ids"]
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fields:
    """Names that the user gave. With none given, usual names are found by themselves.

    Attributes:
        text: field with a whole text.
        prompt, answer: fields of a pair; the loss counts the answer only.
        ids: field with token ids. If a record has `labels` too (-100 where the loss does not count), they are read.
    """

    text: str | None = None
    prompt: str | None = None
    answer: str | None = None
    ids: str | None = None

    def __post_init__(self) -> None:
        """Refuse a mix."""
        if (self.prompt is None) != (self.answer is None):
            raise SeqloomError("a prompt without an answer, or the reverse; name both fields")
        if sum(name is not None for name in (self.text, self.prompt, self.ids)) > 1:
            raise SeqloomError("a record is a text, a prompt and its answer, or ids; name the fields of one of them")

    def form(self, names: Iterable[str], what: str) -> Form:
        """Decide what a file with these fields holds."""
        there = list(names)
        labels = ("labels",) if "labels" in there else ()
        if self.text is not None:
            found = [Form("text", (self.text,))]
        elif self.prompt is not None and self.answer is not None:
            found = [Form("prompt", (self.prompt, self.answer))]
        elif self.ids is not None:
            found = [Form("ids", (self.ids, *labels))]
        else:
            answers = [name for name in ANSWERS if "prompt" in there and name in there]
            found = [Form("prompt", ("prompt", name)) for name in answers]
            found += [Form("text", ("text",))] if "text" in there else []
            found += [Form("ids", ("input_ids", *labels))] if "input_ids" in there else []
        has = f"it has {', '.join(map(repr, there)) or 'none'}"
        if len(found) != 1:
            choice = "more than one way to read its records" if found else "no field that is known"
            raise SeqloomError(f"{what}: {choice}, {has}; name the text field, or prompt and answer, or ids")
        missing = [name for name in found[0].fields if name not in there]
        if missing:
            raise SeqloomError(f"{what}: no field {missing[0]!r}, {has}; name one of them")
        return found[0]


def read_records(path: Path, fields: Fields, unit: TextUnit) -> Iterator[tuple[Record, float]]:
    """Yield the records of a file, each with the share of the file that is read by then, 0 .. 1."""
    if path.suffix == ".jsonl":
        return _jsonl(path, fields)
    if path.suffix == ".parquet":
        return _parquet(path, fields)
    return _text(path, unit)


def check_inputs(paths: Iterable[str | Path]) -> list[Path]:
    """Refuse, before any work, files that cannot be read."""
    found = [Path(path) for path in paths]
    if not found:
        raise SeqloomError(f"no input; name at least one file, {', '.join(SUFFIXES)}")
    for path in found:
        if path.suffix not in SUFFIXES:
            wrong = "is a folder" if path.is_dir() else f"is none of {', '.join(SUFFIXES)}"
            raise SeqloomError(f"{str(path)!r} {wrong}; name files of these kinds")
        if not path.is_file():
            raise SeqloomError(f"{str(path)!r} does not exist; check the path, it is relative to {Path.cwd()}")
    return found


def _jsonl(path: Path, fields: Fields) -> Iterator[tuple[Record, float]]:
    form: Form | None = None
    for number, line, share in _lines(path):
        place = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SeqloomError(f"{place}: not valid JSON ({error}); correct the line") from None
        if not isinstance(value, dict):
            raise SeqloomError(f"{place}: {type(value).__name__}, not an object with named fields; correct the line")
        form = form or fields.form(value, place)
        yield _record(form, value, place), share


def _parquet(path: Path, fields: Fields) -> Iterator[tuple[Record, float]]:
    pyarrow = pyarrow_for(f"reading {str(path)!r}")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            form = fields.form(file.schema_arrow.names, str(path))
            total, row = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(ROWS, columns=list(form.fields)):
                for value in batch.to_pylist():
                    yield _record(form, value, f"{path}, row {row}"), row / total
                    row += 1
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise SeqloomError(f"{path}: not a readable Parquet file ({reason}); write it again") from None


def _text(path: Path, unit: TextUnit) -> Iterator[tuple[Record, float]]:
    if unit == "file":
        yield Record(str(path), ((_decoded(path.read_bytes().removeprefix(MARK), str(path)), True),)), 1.0
        return
    for number, line, share in _lines(path):
        yield Record(f"{path}, line {number}", ((line, True),)), share


def _lines(path: Path) -> Iterator[tuple[int, str, float]]:
    """Number, text without the line's end, and the share of the file that is read by then."""
    size, done = max(path.stat().st_size, 1), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            if number == 1:
                line = line.removeprefix(MARK)
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            yield number, _decoded(text, f"{path}, line {number}"), done / size


def _decoded(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SeqloomError(f"{place}: not UTF-8 ({error.reason}); save the file as UTF-8") from None


def _record(form: Form, value: dict[str, Any], place: str) -> Record:
    missing = [name for name in form.fields if name not in value]
    if missing:
        raise SeqloomError(f"{place}: no field {missing[0]!r} as in the records before; add it")
    if form.kind == "ids":
        return _ids_record(value, form.fields, place)
    texts = [_checked_text(value[name], f"{place}, field {name!r}") for name in form.fields]
    counts = (True,) if form.kind == "text" else (False, True)
    return Record(place, tuple(zip(texts, counts, strict=True)))


def _checked_text(value: Any, place: str) -> str:
    """A text; null is an empty one."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SeqloomError(f"{place}: {type(value).__name__}, not text; name another field")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise SeqloomError(f"{place}: half a surrogate pair, which is no character; correct the text") from None
    return value


def _ids_record(value: dict[str, Any], fields: tuple[str, ...], place: str) -> Record:
    ids = _integers(value[fields[0]], f"{place}, field {fields[0]!r}")
    if len(fields) == 1 or value[fields[1]] is None:
        return Record(place, (), ids)
    labels = _integers(value[fields[1]], f"{place}, field {fields[1]!r}")
    if labels.shape != ids.shape:
        raise SeqloomError(f"{place}: {len(labels)} labels for {len(ids)} ids; give one each")
    wrong = np.flatnonzero((labels != IGNORED) & (labels != ids))
    if len(wrong):
        at = wrong[0]
        raise SeqloomError(
            f"{place}: label {at} is {labels[at]} beside id {ids[at]}; a label repeats the id of its own position "
            f"or is {IGNORED}, shifting happens when the store is read"
        )
    return Record(place, (), ids, labels != IGNORED)


def _integers(value: Any, place: str) -> np.ndarray:
    if value is None:
        return np.empty(0, dtype=np.int64)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise SeqloomError(f"{place}: not a list of whole numbers; name another field")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise SeqloomError(f"{place}: a number too large for a token id; correct it") from None


# ---- merged: data.prepare
# Files of text to a token store: read, encode and store in constant memory, and count what is left out.


CHUNK = 1 << 20
"""Characters (or ids) that are encoded at a time."""
RECORD = 64
"""What a record counts beside its characters: many empty ones fill a chunk too."""
ANY = Fields()


@dataclass(slots=True)
class Counts:
    """What became of the records.

    Attributes:
        records: read.
        empty: dropped, without a text, an answer or an id.
        nothing_to_learn: dropped, no label counts (a single token, or the answer was cut away).
        too_long: above the maximum length; truncated or dropped as the policy says.
        tokens_lost: tokens of the documents above it that are not in the store.
    """

    records: int = 0
    empty: int = 0
    nothing_to_learn: int = 0
    too_long: int = 0
    tokens_lost: int = 0


@dataclass(frozen=True, slots=True)
class Prepared:
    """The outcome: totals of the store, and what was left out.

    Attributes:
        path: the store.
        documents, tokens, valid, longest: its totals; tokens of the longest document.
        vocabulary: ids are below this.
        counts: what became of the records.
    """

    path: Path
    documents: int
    tokens: int
    valid: int
    longest: int
    vocabulary: int
    counts: Counts = field(default_factory=Counts)


class Encoded(NamedTuple):
    """A document as ids, bool[n] beside them (None counts all), and where it came from."""

    place: str
    ids: np.ndarray
    counted: np.ndarray | None


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocabulary: int | None = None,
    fields: Fields = ANY,
    unit: TextUnit = "line",
    max_length: int | None = None,
    too_long: TooLong = "refuse",
    progress: Callable[[float], None] | None = None,
) -> Prepared:
    """Write a token store. The same input gives the same bytes; a run that fails leaves nothing.

    Args:
        inputs: .jsonl, .parquet and .txt files, read in this order.
        out: the folder to make; it must not exist.
        tokenizer: for texts. Files of ids need none.
        vocabulary: ids are below this; without it, the tokenizer's.
        fields: which fields of a record are read.
        unit: what a document of a .txt file is: a line, or the whole file.
        max_length: tokens of the longest document allowed; None for no limit.
        too_long: what happens to a longer one.
        progress: called now and then with the share that is done, 0 .. 1.
    """
    paths = check_inputs(inputs)
    check_policy(max_length, too_long)
    require_new(Path(out))
    if unit not in get_args(TextUnit):
        raise unknown("unit of text", unit, get_args(TextUnit))
    size = _vocabulary(tokenizer, vocabulary)
    counts = Counts()
    described = None if tokenizer is None else tokenizer.described()
    with StoreWriter(out, vocabulary=size, tokenizer=described) as writer:
        for chunk in _chunks(paths, fields, unit, progress):
            counts.records += len(chunk)
            for encoded in _encoded(chunk, tokenizer, counts):
                _store(writer, encoded, max_length, too_long, counts)
        _refuse_nothing(writer, counts, max_length)
        writer.prepared.update(max_length=max_length, too_long=too_long, counts=asdict(counts))
    return Prepared(Path(out), writer.documents, writer.tokens, writer.valid, writer.longest, size, counts)


def _vocabulary(tokenizer: Tokenizer | None, vocabulary: int | None) -> int:
    if tokenizer is None:
        if vocabulary is None:
            raise SeqloomError("neither a tokenizer nor a vocabulary; name the tokenizer, or for ids their vocabulary")
        return vocabulary
    if vocabulary is None:
        return tokenizer.vocabulary
    if vocabulary < tokenizer.vocabulary:
        raise SeqloomError(
            f"a vocabulary of {vocabulary:,} for a tokenizer with {tokenizer.vocabulary:,} ids; "
            "raise it, or leave it out"
        )
    return vocabulary


def _chunks(
    paths: list[Path], fields: Fields, unit: TextUnit, progress: Callable[[float], None] | None
) -> Iterator[list[Record]]:
    """Records of all files in order, about `CHUNK` characters at a time."""
    sizes = [path.stat().st_size for path in paths]
    total = max(sum(sizes), 1)
    chunk: list[Record] = []
    held = 0
    for number, path in enumerate(paths):
        for record, share in read_records(path, fields, unit):
            chunk.append(record)
            held += RECORD + sum(len(text) for text, _ in record.parts) + (0 if record.ids is None else len(record.ids))
            if held >= CHUNK:
                yield chunk
                chunk, held = [], 0
                if progress is not None:
                    progress((sum(sizes[:number]) + share * sizes[number]) / total)
    yield chunk


def _encoded(chunk: list[Record], tokenizer: Tokenizer | None, counts: Counts) -> Iterator[Encoded]:
    """Documents of a chunk in order; empty records are left out and counted."""
    texts = [text for record in chunk for text, _ in record.parts]
    if texts and tokenizer is None:
        first = next(record for record in chunk if record.parts)
        raise SeqloomError(f"{first.place}: a text, and no tokenizer to encode it; name one, for example bytes")
    pieces = iter([] if tokenizer is None else _encode(tokenizer, texts, chunk))
    for record in chunk:
        own = [next(pieces) for _ in record.parts]
        if record.ids is not None:
            if len(record.ids):
                yield Encoded(record.place, record.ids, record.counted)
            else:
                counts.empty += 1
        elif any(counted and not len(piece) for piece, (_, counted) in zip(own, record.parts, strict=True)):
            counts.empty += 1
        else:
            yield _joined(record, own, tokenizer)


def _encode(tokenizer: Tokenizer, texts: list[str], chunk: list[Record]) -> list[np.ndarray]:
    """Ids of all texts of a chunk; one that cannot be encoded is named by its place."""
    try:
        return tokenizer.encode(texts)
    except SeqloomError:
        for record in chunk:
            try:
                tokenizer.encode([text for text, _ in record.parts])
            except SeqloomError as error:
                raise SeqloomError(f"{record.place}: {error}") from None
        raise


def _joined(record: Record, pieces: list[np.ndarray], tokenizer: Any) -> Encoded:
    """One document of its parts: begin, the parts, end. The end counts as the last part does."""
    whole = [np.array(tokenizer.begin, dtype=np.int64), *pieces, np.array(tokenizer.end, dtype=np.int64)]
    ids = np.concatenate(whole, dtype=np.int64)
    flags = [counted for _, counted in record.parts]
    if all(flags):
        return Encoded(record.place, ids, None)
    return Encoded(record.place, ids, np.repeat([False, *flags, flags[-1]], [len(piece) for piece in whole]))


def _store(writer: StoreWriter, encoded: Encoded, max_length: int | None, too_long: TooLong, counts: Counts) -> None:
    place, ids, counted = encoded
    if max_length is not None and len(ids) > max_length:
        if too_long == "refuse":
            raise refused(place, len(ids), max_length)
        counts.too_long += 1
        kept = max_length if too_long == "truncate" else 0
        counts.tokens_lost += len(ids) - kept
        if not kept:
            return
        ids, counted = ids[:kept], None if counted is None else counted[:kept]
    if len(ids) < 2 or (counted is not None and not counted[1:].any()):
        counts.nothing_to_learn += 1
        return
    writer.add(ids, counted, place=place)


def _refuse_nothing(writer: StoreWriter, counts: Counts, max_length: int | None) -> None:
    """Refuse input of which nothing is left, and say where it went."""
    if writer.documents:
        return
    gone = f"{counts.empty:,} empty, {counts.nothing_to_learn:,} with nothing to learn"
    if max_length is not None:
        gone += f", {counts.too_long:,} above {max_length:,} tokens"
    raise SeqloomError(f"no document is left of {counts.records:,} records ({gone}); check the input and the limit")
