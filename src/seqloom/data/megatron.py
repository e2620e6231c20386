"""Megatron's .bin / .idx pairs, read where they lie.

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
from typing import Any, Literal

import numpy as np

from seqloom.data.source import check_ids, check_span, frozen, shifted
from seqloom.errors import SeqloomError, unknown

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""The type behind every code. 6 and 7 are no ids."""

Unit = Literal["document", "sequence"]


class MegatronSource:
    """A .bin / .idx pair; a `Source` in which every token but the first counts.

    Empty documents are left out; `empty` says how many.
    """

    def __init__(self, prefix: str | Path, *, vocabulary: int, unit: Unit = "document") -> None:
        """Map the files.

        Args:
            prefix: path without the suffix, or one of the two files.
            vocabulary: ids are below this; the files do not say it.
            unit: what a document is here: one of Megatron's documents, with all its sequences one after the other,
                or a single sequence.
        """
        if unit not in ("document", "sequence"):
            raise unknown("unit", unit, ("document", "sequence"))
        if vocabulary < 1:
            raise SeqloomError(f"a vocabulary of {vocabulary}; it needs at least one id")
        self.prefix, self._vocabulary = without_suffix(prefix), vocabulary
        self._unit: Unit = unit
        index, data = self.prefix.with_name(self.prefix.name + ".idx"), self.prefix.with_name(self.prefix.name + ".bin")
        for path in (index, data):
            if not path.is_file():
                raise SeqloomError(f"{str(path)!r} does not exist; a Megatron data set is a .bin and an .idx file")
        self._type, sizes, offsets, documents = _read_index(index)
        if unit == "sequence":
            documents = np.arange(len(sizes) + 1)
        # Sequences without tokens hold nothing, so dropping them leaves every document what it was.
        filled = sizes > 0
        documents = np.concatenate([[0], np.cumsum(filled)])[documents]
        self._offsets, self._firsts = offsets[filled], np.concatenate([[0], np.cumsum(sizes[filled], dtype=np.int64)])
        kept = documents[1:] > documents[:-1]
        self._begins = documents[:-1][kept]
        self._lengths = frozen(self._firsts[documents[1:][kept]] - self._firsts[self._begins])
        self._valid = frozen(self._lengths - 1)
        self.empty = int((~kept).sum())
        self._data = _map_data(data, self._type, self._offsets, sizes[filled])

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
        return self._vocabulary

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the ids of positions `start .. stop - 1`, int64[stop - start]."""
        check_span(str(self.prefix), self._lengths, document, start, stop)
        ids = np.empty(stop - start, dtype=np.int64)
        first = int(self._firsts[self._begins[document]]) + start
        sequence = int(np.searchsorted(self._firsts, first, side="right")) - 1
        done = 0
        while done < len(ids):
            skipped = first + done - int(self._firsts[sequence])
            count = min(int(self._firsts[sequence + 1]) - first - done, len(ids) - done)
            offset = int(self._offsets[sequence]) + skipped * self._type.itemsize
            ids[done : done + count] = np.frombuffer(self._data, self._type, count, offset)
            done, sequence = done + count, sequence + 1
        check_ids(ids, self._vocabulary, f"{self.prefix}, document {document}", start)
        return ids

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the labels of positions `start .. stop - 1`, int64[stop - start]."""
        check_span(str(self.prefix), self._lengths, document, start, stop)
        last = min(stop + 1, int(self._lengths[document]))
        return shifted(self.tokens(document, min(start + 1, last), last), None, stop - start)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._lengths)

    def __repr__(self) -> str:
        """Say how much there is."""
        return f"MegatronSource({str(self.prefix)!r}: {len(self):,} documents, {int(self._lengths.sum()):,} tokens)"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the path: another process maps the files itself."""
        return partial(MegatronSource, self.prefix, vocabulary=self._vocabulary, unit=self._unit), ()


def without_suffix(path: str | Path) -> Path:
    """Return the prefix of a pair, given itself or one of the two files."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def _read_index(path: Path) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Type of the ids; tokens and offset of every sequence; the document index. int64 each."""
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
    kind = np.dtype(TYPES[code])
    if kind.kind == "f":
        raise SeqloomError(f"{path}: holds {kind.name} values, not token ids; name the data set of ids")
    wanted, size = HEADER.size + 12 * sequences + 8 * entries, path.stat().st_size
    if size == wanted + sequences and sequences:
        raise SeqloomError(f"{path}: a multimodal index, with a mode for every sequence; only text is read")
    if size != wanted:
        raise SeqloomError(f"{path}: {size:,} bytes where its header asks for {wanted:,}; copy it again")
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
    return kind, sizes, offsets, documents


def _map_data(path: Path, kind: np.dtype, offsets: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """The bytes of the .bin, after checking that every sequence lies inside."""
    size = path.stat().st_size
    if not len(sizes):
        raise SeqloomError(f"{path}: every sequence of its index is empty; at least one token is needed")
    last = int((offsets + sizes * kind.itemsize).max())
    if (offsets < 0).any() or last > size:
        raise SeqloomError(f"{path}: {size:,} bytes, but its index reaches to {last:,}; it is truncated, copy it again")
    return np.memmap(path, dtype=np.uint8, mode="r")
