"""Megatron's .bin / .idx pairs, memory-mapped as a `Source`.

The index, little-endian and without gaps:

    9 bytes    MMIDIDX, two zeros
    uint64     version, 1
    uint8      code of the ids' type
    uint64     sequences
    uint64     entries of the document index: documents + 1
    int32[]    tokens of every sequence
    int64[]    byte offset of every sequence in the .bin
    int64[]    document index: document d is the sequences `index[d] .. index[d + 1] - 1`
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from seqloom.data.source import Source, check_ids
from seqloom.errors import SeqloomError

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""numpy type of every code. 6 and 7 are no ids."""


class MegatronSource(Source):
    """A .bin / .idx pair in which the loss counts every token but the first of a document.

    A document is all sequences of one of Megatron's documents, one after the other; those without tokens are left out.
    """

    def __init__(self, prefix: str | Path, *, vocabulary: int) -> None:
        """Map the files that `prefix` names without a suffix, or by one of them.

        The files do not say below what `vocabulary` their ids are.
        """
        if vocabulary < 1:
            raise SeqloomError(f"a vocabulary of {vocabulary}; it needs at least one id")
        self.prefix = without_suffix(prefix)
        index, data = (self.prefix.with_name(self.prefix.name + suffix) for suffix in (".idx", ".bin"))
        for path in (index, data):
            if not path.is_file():
                raise SeqloomError(f"{str(path)!r} does not exist; a Megatron data set is a .bin and an .idx file")
        self._dtype, sizes, offsets, documents = _read_index(index)
        nonempty = sizes > 0  # a document without its empty sequences is the same document
        documents = np.concatenate([[0], np.cumsum(nonempty)])[documents]
        self._offsets = offsets[nonempty]
        self._token_starts = np.concatenate([[0], np.cumsum(sizes[nonempty], dtype=np.int64)])
        filled = documents[1:] > documents[:-1]
        self._first_sequences = documents[:-1][filled]
        lengths = self._token_starts[documents[1:][filled]] - self._token_starts[self._first_sequences]
        self._bytes = _map_data(data, self._dtype, self._offsets, sizes[nonempty])
        super().__init__(str(self.prefix), lengths, lengths - 1, vocabulary)

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        ids = np.empty(stop - start, dtype=np.int64)
        first = int(self._token_starts[self._first_sequences[document]]) + start
        sequence = int(np.searchsorted(self._token_starts, first, side="right")) - 1
        done = 0
        while done < len(ids):
            skipped = first + done - int(self._token_starts[sequence])
            count = min(int(self._token_starts[sequence + 1]) - first - done, len(ids) - done)
            offset = int(self._offsets[sequence]) + skipped * self._dtype.itemsize
            ids[done : done + count] = np.frombuffer(self._bytes, self._dtype, count, offset)
            done, sequence = done + count, sequence + 1
        check_ids(ids, self.vocabulary, f"{self.prefix}, document {document}", start)
        return ids

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path: another process maps the files itself."""
        return partial(MegatronSource, self.prefix, vocabulary=self.vocabulary), ()


def without_suffix(path: str | Path) -> Path:
    """Return the prefix of a pair, given the prefix or one of the two files."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Type of the ids; tokens and byte offset of every sequence; the document index. int64 each."""
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER.size:
        raise SeqloomError(
            f"{path}: not a Megatron index, it does not begin with MMIDIDX; write it as an mmap data set"
        )
    _, version, code, sequences, entries = HEADER.unpack(header)
    if version != 1:
        raise SeqloomError(f"{path}: version {version} of the index; only version 1 is known, write it again")
    if code not in TYPES:
        raise SeqloomError(f"{path}: code {code} for the type of the ids; known are {', '.join(map(str, TYPES))}")
    dtype = np.dtype(TYPES[code])
    if dtype.kind == "f":
        raise SeqloomError(f"{path}: holds {dtype.name} values, not token ids; name the data set of ids")
    expected, size = HEADER.size + 12 * sequences + 8 * entries, path.stat().st_size
    if size == expected + sequences and sequences:
        raise SeqloomError(f"{path}: a multimodal index, with a mode for every sequence; only text is read")
    if size != expected:
        raise SeqloomError(f"{path}: {size:,} bytes where its header asks for {expected:,}; copy it again")
    if not sequences:
        raise SeqloomError(f"{path}: no sequences; at least one is needed")
    content = np.memmap(path, dtype=np.uint8, mode="r")
    sizes = np.frombuffer(content, "<i4", sequences, HEADER.size).astype(np.int64)
    offsets = np.frombuffer(content, "<i8", sequences, HEADER.size + 4 * sequences).astype(np.int64)
    documents = np.frombuffer(content, "<i8", entries, HEADER.size + 12 * sequences).astype(np.int64)
    ends = documents[[0, -1]].tolist() if entries > 1 else documents.tolist()
    if ends != [0, sequences] or (np.diff(documents) < 0).any():
        raise SeqloomError(
            f"{path}: its document index must rise from 0 to {sequences:,}, the sequences; write it again"
        )
    return dtype, sizes, offsets, documents


def _map_data(path: Path, dtype: np.dtype, offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Map the bytes of the .bin, after checking that every sequence lies inside."""
    size = path.stat().st_size
    if not len(sizes):
        raise SeqloomError(f"{path}: every sequence of its index is empty; at least one token is needed")
    last = int((offsets + sizes * dtype.itemsize).max())
    if (offsets < 0).any() or last > size:
        raise SeqloomError(f"{path}: {size:,} bytes, but its index reaches to {last:,}; it is truncated, copy it again")
    return np.memmap(path, dtype=np.uint8, mode="r")
