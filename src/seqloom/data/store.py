"""The one door to pyarrow, which is an extra."""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from seqloom.data.megatron import MegatronSource, without_suffix
from seqloom.data.source import NAME, Source, check_ids, check_span, frozen, shifted, toy_source
from seqloom.errors import SeqloomError
from seqloom.reader import build, read_mapping


def pyarrow_for(what: str) -> ModuleType:
    """Return pyarrow with its file formats, or say how to get it.

    Args:
        what: what needs it, the beginning of the message.
    """
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise SeqloomError(
            f"{what} needs the package 'pyarrow' ({error}); install the extra 'data': pip install 'seqloom[data]'"
        ) from None
    return pyarrow


# ---- merged: data.store
# The token store: documents on disk, memory-mapped, so that a rank touches only the spans that it reads.
#
#     FOLDER/
#       tokens.arrow   one column `token`, all documents one after the other
#       index.arrow    per document: `length`, `valid`, `ignored` (runs of tokens that the loss does not count)
#       meta.json      vocabulary, tokenizer, totals, and size and digest of the two files above
#
# Both .arrow files are plain Arrow IPC files: any Arrow reader opens them.


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


# ---- merged: data.writer
# Writing a token store: document by document, in constant memory, all or nothing.
#
# The files are written in a folder beside the wanted one, which gets its name when everything is on the disk. A run
# that is killed leaves no store; what it may leave is a folder NAME.partial-*, which can be removed.


TOKENS_PER_PART = 1 << 20
"""Tokens of a record batch: 4 MiB of int32."""
DOCUMENTS_PER_PART = 1 << 15
"""Documents of a record batch of the index."""


class StoreWriter:
    """Use as a context manager: leaving it normally makes the store appear, leaving it by an error leaves nothing.

    with StoreWriter("corpus", vocabulary=257) as writer:
        writer.add([72, 105, 256])
    """

    def __init__(self, path: str | Path, *, vocabulary: int, tokenizer: dict[str, Any] | None = None) -> None:
        """Begin a store.

        Args:
            path: the folder to make; it must not exist.
            vocabulary: ids are below this; int32 on disk as long as it allows.
            tokenizer: what made the ids, kept in meta.json.
        """
        self._pyarrow = pyarrow_for("a token store")
        self.path = Path(path)
        require_new(self.path)
        if vocabulary < 1:
            raise SeqloomError(f"a vocabulary of {vocabulary}; it needs at least one id")
        self.prepared: dict[str, Any] = {}
        """Goes into meta.json; may be filled until the store is closed."""
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self._dtype = np.dtype(np.int32 if vocabulary <= 1 << 31 else np.int64)
        self._buffer, self._filled = np.empty(TOKENS_PER_PART, dtype=self._dtype), 0
        self._index: list[tuple[int, int, list[int]]] = []
        self.documents = self.tokens = self.valid = self.longest = 0

    def __enter__(self) -> StoreWriter:
        """Make the folder beside."""
        arrow = self._pyarrow
        self._folder = self.path.with_name(f"{self.path.name}.partial-{secrets.token_hex(4)}")
        self._folder.mkdir()
        self._columns = arrow.schema(
            [("length", arrow.int64()), ("valid", arrow.int64()), ("ignored", arrow.large_list(arrow.int64()))]
        )
        self._token = arrow.schema([("token", arrow.from_numpy_dtype(self._dtype))])
        try:
            self._token_file = _Marked(self._folder / TOKENS)
            self._index_file = _Marked(self._folder / INDEX)
            self._token_writer = arrow.ipc.new_file(self._token_file, self._token)
            self._index_writer = arrow.ipc.new_file(self._index_file, self._columns)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def add(self, tokens: ArrayLike, counted: ArrayLike | None = None, *, place: str | None = None) -> None:
        """Add a document.

        Args:
            tokens: integers[n], n >= 1.
            counted: bool[n], whether the loss counts the prediction of each token; None counts all. The first token
                is never predicted.
            place: where it comes from, for messages; without it, its number.
        """
        ids, place = np.asarray(tokens), place or f"document {self.documents}"
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise SeqloomError(f"{place}: {ids.dtype}{list(ids.shape)}; it must be integers, at least one")
        check_ids(ids, self._vocabulary, place)
        valid, runs = len(ids) - 1, []
        if counted is not None:
            mask = np.asarray(counted, dtype=bool)
            if mask.shape != ids.shape:
                raise SeqloomError(f"{place}: a mask of {mask.size} for {len(ids)} tokens; give one each")
            valid, runs = int(mask[1:].sum()), _runs(~mask)
        self._put(ids)
        self._index.append((len(ids), valid, runs))
        self.documents, self.tokens, self.valid = self.documents + 1, self.tokens + len(ids), self.valid + valid
        self.longest = max(self.longest, len(ids))
        if len(self._index) == DOCUMENTS_PER_PART:
            self._flush_index()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish, or throw everything away."""
        try:
            if kind is None:
                self._finish()
        finally:
            self._token_file.close()
            self._index_file.close()
            shutil.rmtree(self._folder, ignore_errors=True)  # gone already when it got its name

    def _put(self, ids: np.ndarray) -> None:
        done = 0
        while done < len(ids):
            piece = ids[done : done + len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(piece)] = piece
            self._filled, done = self._filled + len(piece), done + len(piece)
            if self._filled == len(self._buffer):
                self._flush_tokens()

    def _flush_tokens(self) -> None:
        if self._filled:
            column = self._pyarrow.array(self._buffer[: self._filled])
            self._token_writer.write_batch(self._pyarrow.record_batch([column], schema=self._token))
            self._filled = 0

    def _flush_index(self) -> None:
        if self._index:
            columns = [
                self._pyarrow.array(values, type=part.type)
                for values, part in zip(zip(*self._index, strict=True), self._columns, strict=True)
            ]
            self._index_writer.write_batch(self._pyarrow.record_batch(columns, schema=self._columns))
            self._index.clear()

    def _finish(self) -> None:
        if not self.documents:
            raise SeqloomError(f"{str(self.path)!r}: no document to store; a store needs at least one")
        self._flush_tokens()
        self._flush_index()
        self._token_writer.close()
        self._index_writer.close()
        marks = {TOKENS: self._token_file.finish(), INDEX: self._index_file.finish()}
        totals = (self.documents, self.tokens, self.valid, self.longest)
        meta = Meta(
            FORMAT, VERSION, self._vocabulary, self._dtype.name, *totals, marks, self._tokenizer, dict(self.prepared)
        )
        with _Marked(self._folder / META) as file:
            file.write((json.dumps(asdict(meta), indent=2, ensure_ascii=False) + "\n").encode())
            file.finish()
        require_new(self.path)
        os.rename(self._folder, self.path)
        _sync_folder(self.path.absolute().parent)


class _Marked(io.RawIOBase):
    """A file that counts and digests what is written to it, and says in our words why it cannot be written."""

    def __init__(self, path: Path) -> None:
        self._path, self._bytes, self._digest = path, 0, hashlib.sha256()
        self._file = path.open("wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._refusal(error) from None
        self._digest.update(data)
        self._bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def finish(self) -> FileMark:
        """Bring everything to the disk; return the mark."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refusal(error) from None
        return FileMark(self._bytes, self._digest.hexdigest())

    def close(self) -> None:
        if not self.closed:
            super().close()
            with suppress(OSError):  # what was not brought to the disk by `finish` is thrown away
                self._file.close()

    def _refusal(self, error: OSError) -> SeqloomError:
        return SeqloomError(
            f"{self._path}: cannot be written ({error.strerror or error}); make room, or choose another place"
        )


def require_new(path: Path) -> None:
    """Refuse, before any work, a folder that is there already or cannot be made."""
    if path.exists() or path.is_symlink():
        raise SeqloomError(f"{str(path)!r} exists; choose another folder, or remove it first")
    if not path.absolute().parent.is_dir():
        raise SeqloomError(f"{str(path)!r} needs the folder {str(path.parent)!r}, which does not exist; make it")


def _runs(mask: np.ndarray) -> list[int]:
    """Starts and stops of the runs of True, one after the other."""
    edges = np.diff(mask.astype(np.int8), prepend=0, append=0)
    return np.flatnonzero(edges).tolist()


def _sync_folder(folder: Path) -> None:
    """Bring a new name to the disk, where the system can do that for a folder."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---- merged: data.opening
# One door to every source on disk.


def open_source(path: str | Path, *, vocabulary: int | None = None) -> Source:
    """Open a token store (a folder), a Megatron pair (its prefix, .bin or .idx), or a made-up corpus (`toy:600`).

    Args:
        path: what to open.
        vocabulary: ids of the model. A Megatron pair needs it; a store that has more is refused.
    """
    if str(path).startswith(NAME):
        return _fitting(toy_source(str(path)), str(path), vocabulary)
    path = Path(path)
    prefix = without_suffix(path)
    if not path.is_dir() and prefix.with_name(prefix.name + ".idx").exists():
        if vocabulary is None:
            raise SeqloomError(f"{str(path)!r} is a Megatron data set, which does not name its vocabulary; give it")
        return MegatronSource(prefix, vocabulary=vocabulary)
    return _fitting(TokenStore(path), str(path), vocabulary)


def _fitting(source: Source, name: str, vocabulary: int | None) -> Source:
    """Return the source, unless it has ids that the model does not."""
    if vocabulary is not None and source.vocabulary > vocabulary:
        raise SeqloomError(
            f"{name!r} was made with {source.vocabulary:,} ids, the model has {vocabulary:,}; "
            "prepare the data with the model's tokenizer"
        )
    return source
