"""The token store: documents on disk, memory-mapped, so that a rank touches only the spans that it reads.

    FOLDER/
      tokens.arrow   one column `token`, all documents one after the other
      index.arrow    per document: `length`, `valid`, `ignored` (runs of tokens that the loss does not count)
      meta.json      vocabulary, tokenizer, totals, and size and digest of the two files above

Both .arrow files are plain Arrow IPC files: any Arrow reader opens them.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from seqloom.data.arrow import pyarrow_for
from seqloom.data.source import check_ids, check_span, frozen, shifted
from seqloom.describe.files import build, read_mapping
from seqloom.errors import SeqloomError

TOKENS, INDEX, META = "tokens.arrow", "index.arrow", "meta.json"
FORMAT, VERSION = "seqloom tokens", 1
AGAIN = "prepare it again"


@dataclass(frozen=True, slots=True)
class FileMark:
    """What a file of the store must be."""

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012 - a misspelt key makes the right one missing

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Meta:
    """The content of meta.json.

    Attributes:
        format, version: of the store.
        vocabulary: ids are below this.
        dtype: of the ids on disk, int32 or int64.
        documents, tokens, valid, longest: totals; the longest document in tokens.
        tokenizer: what it was, with a digest; None when ids were given.
        prepared: policies and counts of the preparation, free of dates and paths.
        files: mark of every other file.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    format: str
    version: int
    vocabulary: int
    dtype: str
    documents: int
    tokens: int
    valid: int
    longest: int
    files: dict[str, FileMark]
    tokenizer: dict[str, Any] | None = None
    prepared: dict[str, Any] = field(default_factory=dict)


class TokenStore:
    """A store opened for reading; a `Source`. Reading is safe from several threads, and a pickle is its path."""

    def __init__(self, path: str | Path) -> None:
        """Open a folder that `StoreWriter` wrote.

        Raises:
            SeqloomError: no store there, or one that is truncated or does not agree with itself.
        """
        self.path = Path(path)
        self.meta = read_meta(self.path)
        self._parts = [part.column("token").to_numpy() for part in _batches(self.path / TOKENS, ["token"])]
        index = _batches(self.path / INDEX, ["length", "valid", "ignored"])
        self._lengths = _joined([part.column("length").to_numpy() for part in index])
        self._valid = _joined([part.column("valid").to_numpy() for part in index])
        runs = [part.column("ignored") for part in index]
        self._run_counts = np.concatenate([[0], *(np.diff(part.offsets.to_numpy()) for part in runs)])
        self._run_ends = np.cumsum(self._run_counts)
        self._runs = _joined([part.flatten().to_numpy() for part in runs])
        self._firsts = np.concatenate([[0], np.cumsum(self._lengths)])
        self._part_firsts = np.cumsum([0, *(len(part) for part in self._parts)])
        self._check_totals()

    @property
    def lengths(self) -> np.ndarray:
        """int64[documents], tokens."""
        return self._lengths

    @property
    def valid(self) -> np.ndarray:
        """int64[documents], labels that count."""
        return self._valid

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        return self.meta.vocabulary

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the ids of positions `start .. stop - 1`, int64[stop - start]."""
        check_span(str(self.path), self._lengths, document, start, stop)
        return self._read(document, start, stop)

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the labels of positions `start .. stop - 1`, int64[stop - start]."""
        check_span(str(self.path), self._lengths, document, start, stop)
        last = min(stop + 1, int(self._lengths[document]))
        first = min(start + 1, last)
        return shifted(self._read(document, first, last), self._counted(document, first, last), stop - start)

    def counted(self, document: int) -> np.ndarray:
        """Return for every token of a document whether the loss counts it, bool[length]."""
        check_span(str(self.path), self._lengths, document, 0, 0)
        length = int(self._lengths[document])
        mask = self._counted(document, 0, length)
        return np.ones(length, dtype=bool) if mask is None else mask

    def verify(self) -> None:
        """Read everything once and compare it with the digests of meta.json; refuse a store that was changed."""
        for name, mark in self.meta.files.items():
            with (self.path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != mark.sha256:
                raise SeqloomError(f"{self.path / name}: its digest is not the one in {META}; it changed, {AGAIN}")

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        first = self._firsts[document] + start
        ids = np.empty(stop - start, dtype=np.int64)
        part = int(np.searchsorted(self._part_firsts, first, side="right")) - 1
        done = 0
        while done < len(ids):
            offset = int(first + done - self._part_firsts[part])
            piece = self._parts[part][offset : offset + len(ids) - done]
            ids[done : done + len(piece)] = piece
            done, part = done + len(piece), part + 1
        check_ids(ids, self.vocabulary, f"{self.path}, document {document}", start)
        return ids

    def _counted(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """The mask of a run of tokens; None when the document has none."""
        low, high = self._run_ends[document], self._run_ends[document + 1]
        if low == high:
            return None
        mask = np.ones(stop - start, dtype=bool)
        for begin, end in self._runs[low:high].reshape(-1, 2):
            mask[max(begin - start, 0) : max(end - start, 0)] = False
        return mask

    def _check_totals(self) -> None:
        found = {
            "documents": len(self._lengths),
            "tokens": int(self._part_firsts[-1]),
            "valid": int(self._valid.sum()),
            "longest": int(self._lengths.max(initial=0)),
        }
        for name, value in found.items():
            if value != getattr(self.meta, name):
                raise SeqloomError(
                    f"{self.path}: {value:,} {name}, but {META} says {getattr(self.meta, name):,}; {AGAIN}"
                )
        short = self._lengths.min(initial=1) < 1
        if short or self._firsts[-1] != found["tokens"] or (self._run_counts % 2).any():
            raise SeqloomError(f"{self.path}: the lengths of {INDEX} do not cut the ids of {TOKENS}; {AGAIN}")

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._lengths)

    def __repr__(self) -> str:
        """Say how much there is."""
        return f"TokenStore({str(self.path)!r}: {len(self):,} documents, {self.meta.tokens:,} tokens)"

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        """Pickle the path: another process maps the files itself."""
        return TokenStore, (self.path,)


def read_meta(path: Path) -> Meta:
    """Read meta.json of a store, and check that the files beside it have the size that it names."""
    if not (path / META).is_file():
        wrong = "has no meta.json" if path.is_dir() else "is a file" if path.exists() else "does not exist"
        raise SeqloomError(f"{str(path)!r} is no token store, it {wrong}; make one with `seqloom data prepare`")
    content = read_mapping(path / META)
    known = content.get("format"), content.get("version")
    if known != (FORMAT, VERSION):
        raise SeqloomError(
            f"{path / META}: format {known[0]!r} version {known[1]!r}, not {FORMAT!r} {VERSION}; {AGAIN}"
        )
    meta = build(Meta, content, str(path / META))
    for name in (TOKENS, INDEX):
        if name not in meta.files:
            raise SeqloomError(f"{path / META}: {name} is not among its files; {AGAIN}")
        if not (path / name).is_file():
            raise SeqloomError(f"{str(path / name)!r} is missing; copy the whole folder, or {AGAIN}")
        size, wanted = (path / name).stat().st_size, meta.files[name].bytes
        if size != wanted:
            raise SeqloomError(f"{path / name}: {size:,} bytes of {wanted:,}; copy it again, or {AGAIN}")
    return meta


def _batches(path: Path, columns: list[str]) -> list[Any]:
    """The record batches of an Arrow file, mapped and not read."""
    pyarrow = pyarrow_for("a token store")
    try:
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        parts = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        for part in parts:
            part.validate(full=path.name == INDEX)
        names = reader.schema.names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SeqloomError(f"{path}: not a readable Arrow file ({error}); copy it again, or {AGAIN}") from None
    if names != columns:
        raise SeqloomError(f"{path}: columns {names}, not {columns}; {AGAIN}")
    return parts


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return frozen(np.concatenate(parts) if parts else [])
