"""Writing a token store: document by document, in constant memory, all or nothing.

The files are written in a folder beside the wanted one, which gets its name when everything is on the disk. A run
that is killed leaves no store; what it may leave is a folder NAME.partial-*, which can be removed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from seqloom.data.arrow import pyarrow_for
from seqloom.data.source import check_ids
from seqloom.data.store import FORMAT, INDEX, META, TOKENS, VERSION, FileMark, Meta
from seqloom.errors import SeqloomError

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
