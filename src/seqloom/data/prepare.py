"""From files to a token store: read records, tokenize, write, in constant memory, counting what is left out.

inputs  --find_files, read_records-->  Record  --Tokenizer-->  ids and loss mask  --StoreWriter-->  store
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np

from seqloom.data.chats import Chat
from seqloom.data.hub import HubDataset
from seqloom.data.records import Record, RecordFields, TextUnit, find_files, read_records
from seqloom.data.source import TooLong, check_length_policy, too_long_error
from seqloom.data.store import StoreWriter, require_new_folder
from seqloom.data.tokenizers import Tokenizer
from seqloom.errors import SeqloomError, unknown_name

CHUNK = 1 << 20
"""Characters (or ids) tokenized at a time."""


@dataclass(slots=True)
class PrepareCounts:
    """How many records were read and left out."""

    records: int = 0  # read
    empty: int = 0  # dropped: without a text, an answer, a message or an id
    nothing_to_learn: int = 0  # dropped: no label counts (a single token, no answer, or it was cut away)
    too_long: int = 0  # above the maximum length: truncated or dropped as the policy says
    tokens_lost: int = 0  # of documents above the maximum length that are not in the store
    merged: int = 0  # kept: a token lies across the border of prompt and answer, and the loss counts it


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
    files: int = 1  # that were read
    other_files: tuple[str, ...] = ()  # in the folders of the input, of kinds that are not read

    def lines(self, too_long: str = "refuse") -> list[str]:
        """Say what is in the store and what was left out; `too_long` is the policy for long documents."""
        counts = self.counts
        lines = [
            f"{self.documents:,} documents, {self.tokens:,} tokens of which {self.valid:,} count, "
            f"longest {self.longest:,}, vocabulary {self.vocabulary:,}"
        ]
        if counts.empty or counts.nothing_to_learn:
            lines.append(f"left out: {counts.empty:,} empty, {counts.nothing_to_learn:,} with nothing to learn")
        if counts.too_long:
            happened = "truncated" if too_long == "truncate" else "dropped"
            lines.append(f"too long: {counts.too_long:,} {happened}, {counts.tokens_lost:,} tokens lost")
        if counts.merged:
            lines.append(
                f"merged: in {counts.merged:,} a token lies across the border of prompt and answer, and counts"
            )
        if self.other_files:
            lines.append(f"not read: {len(self.other_files):,} files of other kinds, {self.other_files[0]} among them")
        return [*lines, f"wrote {self.path}"]


def prepare(
    inputs: Iterable[str | Path | HubDataset],
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
        inputs: .jsonl, .parquet and .txt files, .gz among them, folders and globs of these, and data sets of Hugging
            Face (`hf:org/name`, see `data.hub`), read in this order.
        out: the folder to create; it must not exist.
        tokenizer: for texts and chats. Files of ids need none.
        vocabulary: ids are below this; without it, the tokenizer's.
        fields: which fields of a record are read.
        unit: what a document of a .txt file is: a line, or the whole file.
        max_length: tokens of the longest document allowed; None for no limit.
        too_long: what happens to a longer one.
        progress: called now and then with the share that is done, 0 .. 1.
    """
    paths, others = find_files(inputs)
    check_length_policy(max_length, too_long)
    require_new_folder(Path(out))
    if unit not in get_args(TextUnit):
        raise unknown_name("unit of text", unit, get_args(TextUnit))
    size = _check_vocabulary(tokenizer, vocabulary)
    counts = PrepareCounts()
    metadata = None if tokenizer is None else tokenizer.metadata
    with StoreWriter(out, vocabulary=size, tokenizer=metadata) as writer:
        for chunk in record_chunks(paths, fields, unit, progress):
            counts.records += len(chunk)
            for record in encode_records(chunk, tokenizer, counts):
                _store(writer, record, max_length, too_long, counts)
        if not writer.documents:
            left_out = f"{counts.empty:,} empty, {counts.nothing_to_learn:,} with nothing to learn"
            if max_length is not None:
                left_out += f", {counts.too_long:,} above {max_length:,} tokens"
            raise SeqloomError(
                f"no document is left of {counts.records:,} records ({left_out}); check the input and the limit"
            )
        writer.prepared.update(max_length=max_length, too_long=too_long, counts=asdict(counts))
        if tokenizer is not None and tokenizer.chats is not None and tokenizer.chats.used:
            writer.prepared["chat_templates"] = dict(sorted(tokenizer.chats.used.items()))
    totals = writer.documents, writer.tokens, writer.valid, writer.longest
    return PrepareResult(Path(out), *totals, size, counts, len(paths), tuple(map(str, others)))


def _check_vocabulary(tokenizer: Tokenizer | None, vocabulary: int | None) -> int:
    ids = vocabulary if tokenizer is None else tokenizer.vocabulary
    if ids is None:
        raise SeqloomError("neither a tokenizer nor a vocabulary; name the tokenizer, or for ids their vocabulary")
    if vocabulary is not None and vocabulary < ids:
        raise SeqloomError(
            f"a vocabulary of {vocabulary:,} for a tokenizer with {ids:,} ids; raise it, or leave it out"
        )
    return ids if vocabulary is None else vocabulary


def record_chunks(
    paths: Sequence[Path | HubDataset], fields: RecordFields, unit: TextUnit, progress: Callable[[float], None] | None
) -> Iterator[list[Record]]:
    """Yield the records of all files in order, about `CHUNK` characters at a time."""
    sizes = [path.size if isinstance(path, HubDataset) else path.stat().st_size for path in paths]
    total = max(sum(sizes), 1)
    chunk: list[Record] = []
    size = 0
    for number, path in enumerate(paths):
        for record, share in read_records(path, fields, unit):
            chunk.append(record)
            size += record.size
            if size >= CHUNK:
                yield chunk
                chunk, size = [], 0
                if progress is not None:
                    progress((sum(sizes[:number]) + share * sizes[number]) / total)
    yield chunk


def encode_records(chunk: list[Record], tokenizer: Tokenizer | None, counts: PrepareCounts) -> Iterator[Record]:
    """Yield the records of a chunk in order, with ids; empty ones are left out and counted."""
    texts = [text for record in chunk for text in _texts(record)]
    first = next((record for record in chunk if record.ids is None), None)
    if first is not None and tokenizer is None:
        what = "a text" if first.chat is None else "a chat"
        raise SeqloomError(f"{first.where}: {what}, and no tokenizer to encode it; name one, for example bytes")
    pieces = iter(_encode(tokenizer, texts, chunk) if texts and tokenizer is not None else [])
    for record in chunk:
        if record.chat is not None:
            done = _encode_chat(record, record.chat, tokenizer)
        elif record.ids is None:
            done = _join(record, [next(pieces) for _ in _texts(record)], tokenizer, counts)
        else:
            done = record if len(record.ids) else None
        if done is None:
            counts.empty += 1
        else:
            yield done


def _texts(record: Record) -> list[str]:
    """What is encoded of a record: its text, and the prompt by itself."""
    return [text for text in (record.text, record.prompt) if text is not None]


def _encode(tokenizer: Tokenizer, texts: list[str], chunk: list[Record]) -> list[np.ndarray]:
    """Ids of all texts of a chunk; an error names the record that cannot be encoded."""
    try:
        return tokenizer.encode(texts)
    except SeqloomError:
        for record in chunk:
            try:
                tokenizer.encode(_texts(record))
            except SeqloomError as error:
                raise SeqloomError(f"{record.where}: {error}") from None
        raise


def _encode_chat(record: Record, chat: Chat, tokenizer: Any) -> Record | None:
    """Encode a chat by the tokenizer's template; None: it has no message."""
    if tokenizer.chats is None:
        raise SeqloomError(
            f"{record.where}: a chat, and tokenizer {tokenizer.metadata.get('name', 'bytes')!r} has no chat template; "
            "name a Hugging Face tokenizer folder with one, or give one (--chat-template FILE)"
        )
    if not chat.messages:
        return None
    ids, mask = tokenizer.chats.encode(chat, record.where)
    return record._replace(ids=ids, loss_mask=mask)


def _join(record: Record, encoded: list[np.ndarray], tokenizer: Any, counts: PrepareCounts) -> Record | None:
    """Put begin and end around the ids of a text, unless it has the end; None: nothing is left to learn from it.

    Prompt and answer are encoded as one text. The loss counts from where its ids are no longer those of the prompt.
    """
    ids, prompt = encoded[0], 0
    if len(encoded) > 1:
        both = min(map(len, encoded))
        prompt = int(np.argmin(np.append(ids[:both] == encoded[1][:both], False)))
    if len(ids) == prompt:
        return None
    if len(encoded) > 1 and prompt < len(encoded[1]):
        counts.merged += 1
    begin, end = (np.array(part, dtype=np.int64) for part in (tokenizer.begin, tokenizer.end))
    has_end = len(end) and np.array_equal(ids[-len(end) :], end)
    parts = [begin, ids] if has_end else [begin, ids, end]
    whole = np.concatenate(parts, dtype=np.int64)
    mask = None if record.prompt is None else np.arange(len(whole)) >= len(begin) + prompt
    return record._replace(ids=whole, loss_mask=mask)


def _store(
    writer: StoreWriter, record: Record, max_length: int | None, too_long: TooLong, counts: PrepareCounts
) -> None:
    where, ids, mask = record.where, record.ids, record.loss_mask
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
    if not is_learnable(ids, mask):
        counts.nothing_to_learn += 1
        return
    writer.add(ids, mask, where=where)


def is_learnable(ids: np.ndarray, mask: np.ndarray | None) -> bool:
    """Whether the loss counts any label of a document."""
    return len(ids) > 1 and (mask is None or bool(mask[1:].any()))
