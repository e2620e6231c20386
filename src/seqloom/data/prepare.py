"""Files of text to a token store: read, encode and store in constant memory, and count what is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from seqloom.data.limit import TooLong, check_policy, refused
from seqloom.data.records import Fields, Record, TextUnit, check_inputs, read_records
from seqloom.data.tokenizer import Tokenizer
from seqloom.data.writer import StoreWriter, require_new
from seqloom.errors import SeqloomError, unknown

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
