"""The token store: documents on disk, memory-mapped, so that a rank reads only its own spans.

    FOLDER/
      tokens.arrow   one column `token`, all documents one after the other
      index.arrow    per document: `length`, `valid`, `ignored` (runs of tokens that the loss does not count)
      meta.json      vocabulary, tokenizer, totals, and size and digest of the two files above

Both .arrow files are plain Arrow IPC files: any Arrow reader opens them. `StoreWriter` writes a store document by
document in constant memory, in a folder NAME.partial-* that gets its final name when everything is on disk: a run that
is killed leaves no store. `open_source` opens a store, a Megatron pair or a synthetic corpus.
"""

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
from seqloom.data.source import SYNTHETIC, Source, SyntheticSource, check_ids
from seqloom.errors import SeqloomError
from seqloom.reader import build, read_mapping

TOKENS, INDEX, META = "tokens.arrow", "index.arrow", "meta.json"
FORMAT, VERSION = "seqloom tokens", 1
TOKENS_PER_RECORD_BATCH = 1 << 20
"""4 MiB of int32."""
DOCUMENTS_PER_RECORD_BATCH = 1 << 15
_WAY_OUT = "prepare it again"


def open_source(path: str | Path, *, vocabulary: int | None = None) -> Source:
    """Open a token store (a folder), a Megatron pair (its prefix, .bin or .idx), or a synthetic corpus (`toy:600`).

    `vocabulary` is the model's. A Megatron pair needs it; a store with more ids is refused.
    """
    if str(path).startswith(SYNTHETIC):
        source: Source = SyntheticSource.parse(str(path))
    else:
        path = Path(path)
        prefix = without_suffix(path)
        if not path.is_dir() and prefix.with_name(prefix.name + ".idx").exists():
            if vocabulary is None:
                raise SeqloomError(f"{str(path)!r} is a Megatron data set, which does not name its vocabulary; give it")
            return MegatronSource(prefix, vocabulary=vocabulary)
        source = TokenStore(path)
    if vocabulary is not None and source.vocabulary > vocabulary:
        raise SeqloomError(
            f"{str(path)!r} was made with {source.vocabulary:,} ids, the model has {vocabulary:,}; "
            "prepare the data with the model's tokenizer"
        )
    return source


def import_pyarrow(purpose: str) -> ModuleType:
    """Return pyarrow with its file formats, or say how to install it; `purpose` begins the message."""
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError as error:
        raise SeqloomError(
            f"{purpose} needs the package 'pyarrow' ({error}); install the extra 'data': pip install 'seqloom[data]'"
        ) from None
    return pyarrow


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and digest of a file of the store."""

    __pydantic_config__ = {"extra": "ignore"}  # noqa: RUF012 - a misspelt key makes the right one missing

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class StoreMetadata:
    """Content of meta.json."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    format: str
    version: int
    vocabulary: int  # ids are below this
    dtype: str  # of the ids on disk, int32 or int64
    documents: int
    tokens: int
    valid: int  # labels that the loss counts
    longest: int  # document, tokens
    files: dict[str, FileDigest]  # every other file
    tokenizer: dict[str, Any] | None = None  # its kind and digest; None when ids were given
    prepared: dict[str, Any] = field(default_factory=dict)  # policies and counts, free of dates and paths

    @classmethod
    def read(cls, path: Path) -> StoreMetadata:
        """Read meta.json of a store, and check that the files beside it have the sizes that it names."""
        if not (path / META).is_file():
            wrong = "has no meta.json" if path.is_dir() else "is a file" if path.exists() else "does not exist"
            raise SeqloomError(f"{str(path)!r} is no token store, it {wrong}; make one with `seqloom data prepare`")
        content = read_mapping(path / META)
        known = content.get("format"), content.get("version")
        if known != (FORMAT, VERSION):
            raise SeqloomError(
                f"{path / META}: format {known[0]!r} version {known[1]!r}, not {FORMAT!r} {VERSION}; {_WAY_OUT}"
            )
        meta = build(cls, content, str(path / META))
        for name in (TOKENS, INDEX):
            if name not in meta.files:
                raise SeqloomError(f"{path / META}: {name} is not among its files; {_WAY_OUT}")
            if not (path / name).is_file():
                raise SeqloomError(f"{str(path / name)!r} is missing; copy the whole folder, or {_WAY_OUT}")
            size, expected = (path / name).stat().st_size, meta.files[name].bytes
            if size != expected:
                raise SeqloomError(f"{path / name}: {size:,} bytes of {expected:,}; copy it again, or {_WAY_OUT}")
        return meta


class TokenStore(Source):
    """A store opened for reading. Reading is safe from several threads, and a pickle is its path."""

    def __init__(self, path: str | Path) -> None:
        """Open a folder that `StoreWriter` wrote; refuse one that is truncated or does not agree with itself."""
        self.path = Path(path)
        self.meta = StoreMetadata.read(self.path)
        tokens = _read_arrow(self.path / TOKENS, ["token"])
        self._token_batches = [batch.column("token").to_numpy() for batch in tokens]
        self._batch_starts = np.cumsum([0, *map(len, self._token_batches)])
        index = _read_arrow(self.path / INDEX, ["length", "valid", "ignored"])
        lengths, valid = (
            _concatenate([batch.column(name).to_numpy() for batch in index]) for name in ("length", "valid")
        )
        super().__init__(str(self.path), lengths, valid, self.meta.vocabulary)
        self._token_starts = np.concatenate([[0], np.cumsum(self.lengths)])
        ignored = [batch.column("ignored") for batch in index]
        edges_per_document = np.concatenate([[0], *(np.diff(part.offsets.to_numpy()) for part in ignored)])
        self._run_ends = np.cumsum(edges_per_document)
        self._runs = _concatenate([part.flatten().to_numpy() for part in ignored])
        self._check_totals(runs_are_pairs=not (edges_per_document % 2).any())

    def verify(self) -> None:
        """Read everything once and compare it with the digests of meta.json; refuse a store that was changed."""
        for name, digest in self.meta.files.items():
            with (self.path / name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != digest.sha256:
                raise SeqloomError(f"{self.path / name}: its digest is not the one in {META}; it changed, {_WAY_OUT}")

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        first = self._token_starts[document] + start
        ids = np.empty(stop - start, dtype=np.int64)
        batch = int(np.searchsorted(self._batch_starts, first, side="right")) - 1
        done = 0
        while done < len(ids):
            offset = int(first + done - self._batch_starts[batch])
            piece = self._token_batches[batch][offset : offset + len(ids) - done]
            ids[done : done + len(piece)] = piece
            done, batch = done + len(piece), batch + 1
        check_ids(ids, self.vocabulary, f"{self.path}, document {document}", start)
        return ids

    def _loss_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        low, high = self._run_ends[document], self._run_ends[document + 1]
        if low == high:
            return None
        mask = np.ones(stop - start, dtype=bool)
        for begin, end in self._runs[low:high].reshape(-1, 2):
            mask[max(begin - start, 0) : max(end - start, 0)] = False
        return mask

    def _check_totals(self, *, runs_are_pairs: bool) -> None:
        totals = {
            "documents": len(self.lengths),
            "tokens": int(self._batch_starts[-1]),
            "valid": int(self.valid.sum()),
            "longest": int(self.lengths.max(initial=0)),
        }
        for name, value in totals.items():
            expected = getattr(self.meta, name)
            if value != expected:
                raise SeqloomError(f"{self.path}: {value:,} {name}, but {META} says {expected:,}; {_WAY_OUT}")
        short = self.lengths.min(initial=1) < 1
        if short or self._token_starts[-1] != totals["tokens"] or not runs_are_pairs:
            raise SeqloomError(f"{self.path}: the lengths of {INDEX} do not cut the ids of {TOKENS}; {_WAY_OUT}")

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        """Pickle the path: another process maps the files itself."""
        return TokenStore, (self.path,)


def _read_arrow(path: Path, columns: list[str]) -> list[Any]:
    """Map the record batches of an Arrow file without reading them."""
    pyarrow = import_pyarrow("a token store")
    try:
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate(full=path.name == INDEX)
        names = reader.schema.names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SeqloomError(f"{path}: not a readable Arrow file ({error}); copy it again, or {_WAY_OUT}") from None
    if names != columns:
        raise SeqloomError(f"{path}: columns {names}, not {columns}; {_WAY_OUT}")
    return batches


def _concatenate(columns: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)


class StoreWriter:
    """Use as a context manager: leaving it normally creates the store, leaving it by an error leaves nothing.

    with StoreWriter("corpus", vocabulary=257) as writer:
        writer.add([72, 105, 256])

    Attributes:
        prepared: goes into meta.json; may be filled until the writer is left.
        documents, tokens, valid, longest: totals so far.
    """

    def __init__(self, path: str | Path, *, vocabulary: int, tokenizer: dict[str, Any] | None = None) -> None:
        """Check that `path` can be created; ids are below `vocabulary`, and `tokenizer` goes into meta.json."""
        self._pyarrow = import_pyarrow("a token store")
        self.path = Path(path)
        require_new_folder(self.path)
        if vocabulary < 1:
            raise SeqloomError(f"a vocabulary of {vocabulary}; it needs at least one id")
        self.prepared: dict[str, Any] = {}
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self._dtype = np.dtype(np.int32 if vocabulary <= 1 << 31 else np.int64)
        self._buffer, self._filled = np.empty(TOKENS_PER_RECORD_BATCH, dtype=self._dtype), 0
        self._index: list[tuple[int, int, list[int]]] = []
        self.documents = self.tokens = self.valid = self.longest = 0

    def __enter__(self) -> StoreWriter:
        """Create the partial folder and its files."""
        arrow = self._pyarrow
        self._folder = self.path.with_name(f"{self.path.name}.partial-{secrets.token_hex(4)}")
        self._folder.mkdir()
        self._index_schema = arrow.schema(
            [("length", arrow.int64()), ("valid", arrow.int64()), ("ignored", arrow.large_list(arrow.int64()))]
        )
        self._token_schema = arrow.schema([("token", arrow.from_numpy_dtype(self._dtype))])
        try:
            self._token_file = _HashedFile(self._folder / TOKENS)
            self._index_file = _HashedFile(self._folder / INDEX)
            self._token_writer = arrow.ipc.new_file(self._token_file, self._token_schema)
            self._index_writer = arrow.ipc.new_file(self._index_file, self._index_schema)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        return self

    def add(self, tokens: ArrayLike, loss_mask: ArrayLike | None = None, *, where: str | None = None) -> None:
        """Add a document of integers[n], n >= 1; `where` names its file and line in messages.

        The mask, bool[n], says whether the loss counts the prediction of each token; None counts all. The first token
        is never predicted.
        """
        ids, where = np.asarray(tokens), where or f"document {self.documents}"
        if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
            raise SeqloomError(f"{where}: {ids.dtype}{list(ids.shape)}; it must be integers, at least one")
        check_ids(ids, self._vocabulary, where)
        valid, ignored = len(ids) - 1, []
        if loss_mask is not None:
            mask = np.asarray(loss_mask, dtype=bool)
            if mask.shape != ids.shape:
                raise SeqloomError(f"{where}: a mask of {mask.size} for {len(ids)} tokens; give one each")
            valid, ignored = int(mask[1:].sum()), _run_edges(~mask)
        self._append(ids)
        self._index.append((len(ids), valid, ignored))
        self.documents, self.tokens, self.valid = self.documents + 1, self.tokens + len(ids), self.valid + valid
        self.longest = max(self.longest, len(ids))
        if len(self._index) == DOCUMENTS_PER_RECORD_BATCH:
            self._flush_index()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the store, or delete what was written."""
        try:
            if kind is None:
                self._finish()
        finally:
            self._token_file.close()
            self._index_file.close()
            shutil.rmtree(self._folder, ignore_errors=True)  # not there any more when it was renamed

    def _append(self, ids: np.ndarray) -> None:
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
            self._token_writer.write_batch(self._pyarrow.record_batch([column], schema=self._token_schema))
            self._filled = 0

    def _flush_index(self) -> None:
        if self._index:
            columns = [
                self._pyarrow.array(values, type=part.type)
                for values, part in zip(zip(*self._index, strict=True), self._index_schema, strict=True)
            ]
            self._index_writer.write_batch(self._pyarrow.record_batch(columns, schema=self._index_schema))
            self._index.clear()

    def _finish(self) -> None:
        if not self.documents:
            raise SeqloomError(f"{str(self.path)!r}: no document to store; a store needs at least one")
        self._flush_tokens()
        self._flush_index()
        self._token_writer.close()
        self._index_writer.close()
        meta = StoreMetadata(
            FORMAT,
            VERSION,
            self._vocabulary,
            self._dtype.name,
            *(self.documents, self.tokens, self.valid, self.longest),
            files={TOKENS: self._token_file.sync(), INDEX: self._index_file.sync()},
            tokenizer=self._tokenizer,
            prepared=dict(self.prepared),
        )
        with _HashedFile(self._folder / META) as file:
            file.write((json.dumps(asdict(meta), indent=2, ensure_ascii=False) + "\n").encode())
            file.sync()
        require_new_folder(self.path)
        os.rename(self._folder, self.path)
        sync_folder(self.path.absolute().parent)


class _HashedFile(io.RawIOBase):
    """A file that counts and hashes what is written to it; a write that fails raises a SeqloomError."""

    def __init__(self, path: Path) -> None:
        self._path, self._bytes, self._sha256 = path, 0, hashlib.sha256()
        self._file = path.open("wb")

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._bytes

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            raise self._error(error) from None
        self._sha256.update(data)
        self._bytes += memoryview(data).nbytes
        return memoryview(data).nbytes

    def sync(self) -> FileDigest:
        """Flush everything to the disk; return size and digest."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._error(error) from None
        return FileDigest(self._bytes, self._sha256.hexdigest())

    def close(self) -> None:
        if not self.closed:
            super().close()
            with suppress(OSError):  # a file without `sync` is deleted anyway
                self._file.close()

    def _error(self, error: OSError) -> SeqloomError:
        return SeqloomError(
            f"{self._path}: cannot be written ({error.strerror or error}); make room, or choose another place"
        )


def require_new_folder(path: Path) -> None:
    """Refuse, before any work, a folder that exists already or cannot be created."""
    if path.exists() or path.is_symlink():
        raise SeqloomError(f"{str(path)!r} exists; choose another folder, or remove it first")
    if not path.absolute().parent.is_dir():
        raise SeqloomError(f"{str(path)!r} needs the folder {str(path.parent)!r}, which does not exist; make it")


def _run_edges(mask: np.ndarray) -> list[int]:
    """Starts and stops of the runs of True, alternating."""
    return np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a power failure, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
