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
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from seqloom.data.megatron import MegatronSource, without_suffix
from seqloom.data.source import SYNTHETIC, Source, SyntheticSource, check_ids
from seqloom.errors import SeqloomError, import_extra
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


def _import_pyarrow() -> Any:
    return import_extra("a token store", "data", "pyarrow", "pyarrow.ipc")


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
        self._ids = _map_arrow(self.path / TOKENS, ["token"]).column("token")
        index = _map_arrow(self.path / INDEX, ["length", "valid", "ignored"])
        lengths, valid = (index.column(name).to_numpy() for name in ("length", "valid"))
        super().__init__(str(self.path), lengths, valid, self.meta.vocabulary)
        self._token_starts = np.concatenate([[0], np.cumsum(self.lengths)])
        edges = [part.flatten().to_numpy() for part in index.column("ignored").chunks]
        edges_per_document = [np.diff(part.offsets.to_numpy()) for part in index.column("ignored").chunks]
        self._edges = np.concatenate([np.empty(0, dtype=np.int64), *edges])
        self._edge_starts = np.cumsum(np.concatenate([[0], *edges_per_document]))
        self._check_totals()

    def verify(self) -> None:
        """Read everything once and compare it with the digests of meta.json; refuse a store that was changed."""
        for name, digest in self.meta.files.items():
            with (self.path / name).open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if sha256 != digest.sha256:
                raise SeqloomError(f"{self.path / name}: its digest is not the one in {META}; it changed, {_WAY_OUT}")

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        ids = self._ids.slice(int(self._token_starts[document]) + start, stop - start).to_numpy().astype(np.int64)
        check_ids(ids, self.vocabulary, f"{self.path}, document {document}", start)
        return ids

    def _loss_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        low, high = self._edge_starts[document : document + 2]
        if low == high:
            return None
        mask = np.ones(stop - start, dtype=bool)
        for begin, end in self._edges[low:high].reshape(-1, 2):
            mask[max(begin - start, 0) : max(end - start, 0)] = False
        return mask

    def _check_totals(self) -> None:
        totals = {
            "documents": len(self.lengths),
            "tokens": len(self._ids),
            "valid": int(self.valid.sum()),
            "longest": int(self.lengths.max(initial=0)),
        }
        for name, value in totals.items():
            expected = getattr(self.meta, name)
            if value != expected:
                raise SeqloomError(f"{self.path}: {value:,} {name}, but {META} says {expected:,}; {_WAY_OUT}")
        short, unpaired = self.lengths.min(initial=1) < 1, (self._edge_starts % 2).any()
        if short or unpaired or self._token_starts[-1] != totals["tokens"]:
            raise SeqloomError(f"{self.path}: the lengths of {INDEX} do not cut the ids of {TOKENS}; {_WAY_OUT}")

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        """Pickle the path: another process maps the files itself."""
        return TokenStore, (self.path,)


def _map_arrow(path: Path, columns: list[str]) -> Any:
    """Return the table of an Arrow file, mapped and not read."""
    pyarrow = _import_pyarrow()
    try:
        table = pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
        table.validate(full=path.name == INDEX)
        found = table.column_names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise SeqloomError(f"{path}: not a readable Arrow file ({error}); copy it again, or {_WAY_OUT}") from None
    if found != columns:
        raise SeqloomError(f"{path}: columns {found}, not {columns}; {_WAY_OUT}")
    return table


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
        self._pyarrow = _import_pyarrow()
        self.path = Path(path)
        require_new_folder(self.path)
        if vocabulary < 1:
            raise SeqloomError(f"a vocabulary of {vocabulary}; it needs at least one id")
        self.prepared: dict[str, Any] = {}
        self._vocabulary, self._tokenizer = vocabulary, tokenizer
        self._dtype = np.dtype(np.int32 if vocabulary <= 1 << 31 else np.int64)
        self._pending_ids: list[np.ndarray] = []
        self._pending_tokens = 0
        self._pending_rows: list[dict[str, Any]] = []
        self.documents = self.tokens = self.valid = self.longest = 0

    def __enter__(self) -> StoreWriter:
        arrow = self._pyarrow
        self._folder = self.path.with_name(f"{self.path.name}.partial-{secrets.token_hex(4)}")
        self._folder.mkdir()
        self._index_schema = arrow.schema(
            [("length", arrow.int64()), ("valid", arrow.int64()), ("ignored", arrow.large_list(arrow.int64()))]
        )
        self._token_schema = arrow.schema([("token", arrow.from_numpy_dtype(self._dtype))])
        try:
            self._token_file, self._index_file = (_HashedFile(self._folder / name) for name in (TOKENS, INDEX))
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
            valid, edges = int(mask[1:].sum()), np.diff(~mask, prepend=False, append=False)
            ignored = np.flatnonzero(edges).tolist()  # where runs of ignored tokens start and stop
        self._pending_ids.append(ids.astype(self._dtype))
        self._pending_tokens += len(ids)
        if self._pending_tokens >= TOKENS_PER_RECORD_BATCH:
            self._flush_tokens()
        self._pending_rows.append({"length": len(ids), "valid": valid, "ignored": ignored})
        if len(self._pending_rows) == DOCUMENTS_PER_RECORD_BATCH:
            self._flush_index()
        self.documents, self.tokens, self.valid = self.documents + 1, self.tokens + len(ids), self.valid + valid
        self.longest = max(self.longest, len(ids))

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            for file in (self._token_file, self._index_file):
                with suppress(OSError):  # a file without `sync` is deleted anyway
                    file.close()
            shutil.rmtree(self._folder, ignore_errors=True)  # not there any more when it was renamed

    def _flush_tokens(self, *, last: bool = False) -> None:
        """Write full record batches, and with `last` the rest."""
        ids = np.concatenate(self._pending_ids)
        rest = 0 if last else len(ids) % TOKENS_PER_RECORD_BATCH
        table = self._pyarrow.table([ids[: len(ids) - rest]], schema=self._token_schema)
        self._token_writer.write_table(table, max_chunksize=TOKENS_PER_RECORD_BATCH)
        self._pending_ids, self._pending_tokens = [ids[len(ids) - rest :]], rest

    def _flush_index(self) -> None:
        rows = self._pyarrow.RecordBatch.from_pylist(self._pending_rows, schema=self._index_schema)
        self._index_writer.write_batch(rows)
        self._pending_rows = []

    def _finish(self) -> None:
        if not self.documents:
            raise SeqloomError(f"{str(self.path)!r}: no document to store; a store needs at least one")
        self._flush_tokens(last=True)
        if self._pending_rows:
            self._flush_index()
        self._token_writer.close()
        self._index_writer.close()
        meta = StoreMetadata(
            *(FORMAT, VERSION, self._vocabulary, self._dtype.name),
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


class _HashedFile(io.BufferedWriter):
    """A file that hashes what is written to it; a write that fails raises a SeqloomError."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._path, self._sha256 = path, hashlib.sha256()

    def write(self, data: Any, /) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            raise self._error(error) from None
        self._sha256.update(data)
        return count

    def sync(self) -> FileDigest:
        """Flush everything to the disk; return size and digest."""
        try:
            self.flush()
            os.fsync(self.fileno())
        except OSError as error:
            raise self._error(error) from None
        return FileDigest(self.tell(), self._sha256.hexdigest())

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


def sync_folder(folder: Path) -> None:
    """Make a new name in a folder survive a power failure, where the system can do that."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
