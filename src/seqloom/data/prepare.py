"""From text files to a token store: read records, tokenize, write, in constant memory, counting what is left out.

    .jsonl, .parquet, .txt  --read_records-->  Record  --Tokenizer-->  ids and loss mask  --StoreWriter-->  store

A record is one text, a prompt with its answer, or token ids, with labels or without. The first record of a file, or its
schema, decides which, and a record that is something else, or could be, is refused. Tokenizers are bytes, a tokenizers
.json file, or a Hugging Face tokenizer folder.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from seqloom.data.source import IGNORE_INDEX, TooLong, check_length_policy, too_long_error
from seqloom.data.store import StoreWriter, require_new_folder
from seqloom.errors import SeqloomError, import_extra, unknown_name

SUFFIXES = (".jsonl", ".parquet", ".txt")
ANSWER_FIELDS = ("answer", "completion", "response")
"""Usual names of the field beside a `prompt`."""
PARQUET_ROWS = 64
"""Parquet rows converted to Python values at a time."""
UTF8_BOM = b"\xef\xbb\xbf"
CHUNK = 1 << 20
"""Characters (or ids) tokenized at a time."""
RECORD_OVERHEAD = 64
"""Characters that a record counts on top of its own, so that empty ones fill a chunk too."""
BYTES = "bytes"
"""Name of the tokenizer that needs no file: ids 0 .. 255 are the bytes of UTF-8, 256 ends a document."""
PROBES = 300
"""Words of a vocabulary tried as a text to find a tokenizer's begin and end; the first ones may be special."""

TextUnit = Literal["line", "file"]


# ---- Tokenizers


@dataclass(frozen=True, slots=True, eq=False)
class Tokenizer:
    """Text to ids. A document is `begin`, the ids of its text, `end`."""

    encode: Callable[[Sequence[str]], list[np.ndarray]]  # ids of every text alone, integers[n] each
    vocabulary: int  # ids are below this
    begin: tuple[int, ...]
    end: tuple[int, ...]
    metadata: dict[str, Any]  # entry of meta.json: kind, name, digest, begin, end; equal for equal tokenizers


def load_tokenizer(name: str | Path) -> Tokenizer:
    """Load a tokenizer by name: `bytes`, the path of a tokenizer.json, or of a Hugging Face folder."""
    if str(name) == BYTES:
        return Tokenizer(_encode_bytes, 257, (), (256,), {"kind": "bytes", "begin": [], "end": [256]})
    path = Path(name)
    if path.is_dir():
        return _load_folder(path)
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


def _load_folder(path: Path) -> Tokenizer:
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
    return _trained_tokenizer("transformers", path, encode, words, content, tokenizer.eos_token_id)


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


# ---- Records


class Record(NamedTuple):
    """One document before it is tokenized."""

    where: str  # file and line, for messages
    texts: tuple[tuple[str, bool], ...]  # each with whether the loss counts it; empty when ids are given
    ids: np.ndarray | None = None  # integers[n]
    loss_mask: np.ndarray | None = None  # bool[n] beside ids; None counts all


class RecordFormat(NamedTuple):
    """What the records of a file are, and the fields that are read: text; prompt and answer; or ids and labels."""

    kind: Literal["text", "prompt", "ids"]
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RecordFields:
    """Field names that the user gave. With none given, usual names are recognized."""

    text: str | None = None  # field with a whole text
    prompt: str | None = None
    answer: str | None = None  # beside a prompt; the loss counts the answer only
    ids: str | None = None  # token ids; a field `labels` beside it (-100 where the loss does not count) is read too

    def __post_init__(self) -> None:
        """Refuse names of more than one format."""
        if (self.prompt is None) != (self.answer is None):
            raise SeqloomError("a prompt without an answer, or the reverse; name both fields")
        if sum(name is not None for name in (self.text, self.prompt, self.ids)) > 1:
            raise SeqloomError("a record is a text, a prompt and its answer, or ids; name the fields of one of them")

    def detect(self, names: Iterable[str], where: str) -> RecordFormat:
        """Return the format of a file whose records have fields of these names."""
        present = list(names)
        given: list[Any] = [("text", (self.text,)), ("prompt", (self.prompt, self.answer)), ("ids", (self.ids,))]
        answers = [("prompt", ("prompt", name)) for name in ANSWER_FIELDS]
        usual: list[Any] = [("text", ("text",)), *answers, ("ids", ("input_ids",))]
        formats = [(kind, fields) for kind, fields in given if None not in fields]
        formats = formats or [(kind, fields) for kind, fields in usual if set(fields) <= set(present)]
        has = f"it has {', '.join(map(repr, present)) or 'none'}"
        if len(formats) != 1:
            problem = "more than one way to read its records" if formats else "no field that is known"
            raise SeqloomError(f"{where}: {problem}, {has}; name the text field, or prompt and answer, or ids")
        [(kind, fields)] = formats
        missing = [name for name in fields if name not in present]
        if missing:
            raise SeqloomError(f"{where}: no field {missing[0]!r}, {has}; name one of them")
        return RecordFormat(kind, (*fields, "labels") if kind == "ids" and "labels" in present else fields)


def read_records(path: Path, fields: RecordFields, unit: TextUnit) -> Iterator[tuple[Record, float]]:
    """Yield the records of a file, each with the share of the file that is read by then, 0 .. 1."""
    if path.suffix == ".jsonl":
        return _read_jsonl(path, fields)
    if path.suffix == ".parquet":
        return _read_parquet(path, fields)
    return _read_text(path, unit)


def _read_jsonl(path: Path, fields: RecordFields) -> Iterator[tuple[Record, float]]:
    format_: RecordFormat | None = None
    for number, line, share in _read_lines(path):
        where = f"{path}, line {number}"
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise SeqloomError(f"{where}: not valid JSON ({error}); correct the line") from None
        if not isinstance(value, dict):
            raise SeqloomError(f"{where}: {type(value).__name__}, not an object with named fields; correct the line")
        format_ = format_ or fields.detect(value, where)
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
            for batch in file.iter_batches(PARQUET_ROWS, columns=list(format_.fields)):
                for value in batch.to_pylist():
                    yield _parse_record(format_, value, f"{path}, row {row}"), row / total
                    row += 1
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise SeqloomError(f"{path}: not a readable Parquet file ({reason}); write it again") from None


def _read_text(path: Path, unit: TextUnit) -> Iterator[tuple[Record, float]]:
    if unit == "file":
        yield Record(str(path), ((_decode(path.read_bytes().removeprefix(UTF8_BOM), str(path)), True),)), 1.0
        return
    for number, line, share in _read_lines(path):
        yield Record(f"{path}, line {number}", ((line, True),)), share


def _read_lines(path: Path) -> Iterator[tuple[int, str, float]]:
    """Number, text without the line's end, and the share of the file that is read by then."""
    size, done = max(path.stat().st_size, 1), 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            done += len(line)
            if number == 1:
                line = line.removeprefix(UTF8_BOM)
            text = line.removesuffix(b"\n").removesuffix(b"\r")
            yield number, _decode(text, f"{path}, line {number}"), done / size


def _decode(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SeqloomError(f"{where}: not UTF-8 ({error.reason}); save the file as UTF-8") from None


def _parse_record(format_: RecordFormat, value: dict[str, Any], where: str) -> Record:
    missing = [name for name in format_.fields if name not in value]
    if missing:
        raise SeqloomError(f"{where}: no field {missing[0]!r} as in the records before; add it")
    if format_.kind == "ids":
        return _parse_ids(value, format_.fields, where)
    texts = [_check_text(value[name], f"{where}, field {name!r}") for name in format_.fields]
    in_loss = (True,) if format_.kind == "text" else (False, True)
    return Record(where, tuple(zip(texts, in_loss, strict=True)))


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
        return Record(where, (), ids)
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
    return Record(where, (), ids, labels != IGNORE_INDEX)


def _check_integers(value: Any, where: str) -> np.ndarray:
    if value is None:
        return np.empty(0, dtype=np.int64)
    if not isinstance(value, list) or any(type(item) is not int for item in value):
        raise SeqloomError(f"{where}: not a list of whole numbers; name another field")
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        raise SeqloomError(f"{where}: a number too large for a token id; correct it") from None


# ---- Preparation


@dataclass(slots=True)
class PrepareCounts:
    """How many records were read and left out."""

    records: int = 0  # read
    empty: int = 0  # dropped: without a text, an answer or an id
    nothing_to_learn: int = 0  # dropped: no label counts (a single token, or the answer was cut away)
    too_long: int = 0  # above the maximum length: truncated or dropped as the policy says
    tokens_lost: int = 0  # of documents above the maximum length that are not in the store


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """Totals of a new store, and what was left out."""

    path: Path
    documents: int
    tokens: int
    valid: int  # labels that the loss counts
    longest: int  # document, tokens
    vocabulary: int  # ids are below this
    counts: PrepareCounts = field(default_factory=PrepareCounts)


def prepare(
    inputs: Iterable[str | Path],
    out: str | Path,
    *,
    tokenizer: Tokenizer | None = None,
    vocabulary: int | None = None,
    fields: RecordFields = RecordFields(),  # noqa: B008 - frozen
    unit: TextUnit = "line",
    max_length: int | None = None,
    too_long: TooLong = "refuse",
    progress: Callable[[float], None] | None = None,
) -> PrepareResult:
    """Write a token store. The same input gives the same bytes; a run that fails leaves nothing.

    Args:
        inputs: .jsonl, .parquet and .txt files, read in this order.
        out: the folder to create; it must not exist.
        tokenizer: for texts. Files of ids need none.
        vocabulary: ids are below this; without it, the tokenizer's.
        fields: which fields of a record are read.
        unit: what a document of a .txt file is: a line, or the whole file.
        max_length: tokens of the longest document allowed; None for no limit.
        too_long: what happens to a longer one.
        progress: called now and then with the share that is done, 0 .. 1.
    """
    paths = _check_inputs(inputs)
    check_length_policy(max_length, too_long)
    require_new_folder(Path(out))
    if unit not in get_args(TextUnit):
        raise unknown_name("unit of text", unit, get_args(TextUnit))
    size = _check_vocabulary(tokenizer, vocabulary)
    counts = PrepareCounts()
    metadata = None if tokenizer is None else tokenizer.metadata
    with StoreWriter(out, vocabulary=size, tokenizer=metadata) as writer:
        for chunk in _chunks(paths, fields, unit, progress):
            counts.records += len(chunk)
            for record in _tokenize(chunk, tokenizer, counts):
                _store(writer, record, max_length, too_long, counts)
        if not writer.documents:
            left_out = f"{counts.empty:,} empty, {counts.nothing_to_learn:,} with nothing to learn"
            if max_length is not None:
                left_out += f", {counts.too_long:,} above {max_length:,} tokens"
            raise SeqloomError(
                f"no document is left of {counts.records:,} records ({left_out}); check the input and the limit"
            )
        writer.prepared.update(max_length=max_length, too_long=too_long, counts=asdict(counts))
    return PrepareResult(Path(out), writer.documents, writer.tokens, writer.valid, writer.longest, size, counts)


def _check_inputs(inputs: Iterable[str | Path]) -> list[Path]:
    """Refuse, before any work, files that cannot be read."""
    paths = [Path(path) for path in inputs]
    if not paths:
        raise SeqloomError(f"no input; name at least one file, {', '.join(SUFFIXES)}")
    for path in paths:
        if path.suffix not in SUFFIXES:
            wrong = "is a folder" if path.is_dir() else f"is none of {', '.join(SUFFIXES)}"
            raise SeqloomError(f"{str(path)!r} {wrong}; name files of these kinds")
        if not path.is_file():
            raise SeqloomError(f"{str(path)!r} does not exist; check the path, it is relative to {Path.cwd()}")
    return paths


def _check_vocabulary(tokenizer: Tokenizer | None, vocabulary: int | None) -> int:
    ids = vocabulary if tokenizer is None else tokenizer.vocabulary
    if ids is None:
        raise SeqloomError("neither a tokenizer nor a vocabulary; name the tokenizer, or for ids their vocabulary")
    if vocabulary is not None and vocabulary < ids:
        raise SeqloomError(
            f"a vocabulary of {vocabulary:,} for a tokenizer with {ids:,} ids; raise it, or leave it out"
        )
    return ids if vocabulary is None else vocabulary


def _chunks(
    paths: list[Path], fields: RecordFields, unit: TextUnit, progress: Callable[[float], None] | None
) -> Iterator[list[Record]]:
    """Yield the records of all files in order, about `CHUNK` characters at a time."""
    sizes = [path.stat().st_size for path in paths]
    total = max(sum(sizes), 1)
    chunk: list[Record] = []
    size = 0
    for number, path in enumerate(paths):
        for record, share in read_records(path, fields, unit):
            chunk.append(record)
            size += RECORD_OVERHEAD + sum(len(text) for text, _ in record.texts)
            size += 0 if record.ids is None else len(record.ids)
            if size >= CHUNK:
                yield chunk
                chunk, size = [], 0
                if progress is not None:
                    progress((sum(sizes[:number]) + share * sizes[number]) / total)
    yield chunk


def _tokenize(chunk: list[Record], tokenizer: Tokenizer | None, counts: PrepareCounts) -> Iterator[Record]:
    """Yield the records of a chunk in order, with ids; empty ones are left out and counted."""
    texts = [text for record in chunk for text, _ in record.texts]
    if texts and tokenizer is None:
        first = next(record for record in chunk if record.texts)
        raise SeqloomError(f"{first.where}: a text, and no tokenizer to encode it; name one, for example bytes")
    pieces = iter([] if tokenizer is None else _encode(tokenizer, texts, chunk))
    for record in chunk:
        parts = [next(pieces) for _ in record.texts]
        learned = [ids for ids, (_, in_loss) in zip(parts, record.texts, strict=True) if in_loss]
        if not all(map(len, learned if record.ids is None else [record.ids])):
            counts.empty += 1
        else:
            yield _join(record, parts, tokenizer) if record.ids is None else record


def _encode(tokenizer: Tokenizer, texts: list[str], chunk: list[Record]) -> list[np.ndarray]:
    """Ids of all texts of a chunk; an error names the record that cannot be encoded."""
    try:
        return tokenizer.encode(texts)
    except SeqloomError:
        for record in chunk:
            try:
                tokenizer.encode([text for text, _ in record.texts])
            except SeqloomError as error:
                raise SeqloomError(f"{record.where}: {error}") from None
        raise


def _join(record: Record, encoded: list[np.ndarray], tokenizer: Any) -> Record:
    """Concatenate begin, the texts and end. The loss counts the end as it counts the last text."""
    parts = [np.array(tokenizer.begin, dtype=np.int64), *encoded, np.array(tokenizer.end, dtype=np.int64)]
    in_loss = [flag for _, flag in record.texts]
    mask = None if all(in_loss) else np.repeat([False, *in_loss, in_loss[-1]], [len(part) for part in parts])
    return record._replace(ids=np.concatenate(parts, dtype=np.int64), loss_mask=mask)


def _store(
    writer: StoreWriter, record: Record, max_length: int | None, too_long: TooLong, counts: PrepareCounts
) -> None:
    where, _, ids, mask = record
    assert ids is not None
    if max_length is not None and len(ids) > max_length:
        if too_long == "refuse":
            raise too_long_error(where, len(ids), max_length)
        counts.too_long += 1
        if too_long == "drop":
            counts.tokens_lost += len(ids)
            return
        counts.tokens_lost += len(ids) - max_length
        ids, mask = ids[:max_length], None if mask is None else mask[:max_length]
    if len(ids) < 2 or (mask is not None and not mask[1:].any()):
        counts.nothing_to_learn += 1
        return
    writer.add(ids, mask, where=where)
