"""Batches: the sequences of one optimiser step. Planning never changes their set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import ArrayLike

from seqloom.describe.lengths import check_lengths
from seqloom.errors import SeqloomError


class Sequence(NamedTuple):
    """One document: an id, unique in its batch, and a length in tokens."""

    id: int
    length: int


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The numbers that tell how uneven a batch is; they, not the name of a data set, predict the gain."""

    count: int
    tokens: int
    mean: float
    """Tokens per sequence; so are median, 99th percentile and longest."""
    median: float
    p99: float
    longest: int
    cv: float
    """Coefficient of variation: standard deviation / mean."""
    top1_square_share: float
    """Share of the sum of squared lengths (attention work) held by the longest 1 % of the sequences."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """The sequences of one optimiser step, as two read-only int64 columns of equal size.

    Equality and hash are by content, so a batch can be a key.
    """

    ids: np.ndarray
    """int64[n], unique."""
    lengths: np.ndarray
    """int64[n], tokens."""

    def __post_init__(self) -> None:
        lengths = check_lengths(self.lengths, what="batch", place=lambda index: f"sequence {index}")
        ids = _checked_ids(self.ids, len(lengths))
        object.__setattr__(self, "lengths", _frozen(lengths))
        object.__setattr__(self, "ids", _frozen(ids))

    @classmethod
    def of(cls, lengths: ArrayLike, ids: ArrayLike | None = None) -> Batch:
        """Make a batch of lengths; ids are 0..n-1 unless given."""
        column = check_lengths(lengths, what="batch", place=lambda index: f"sequence {index}")
        return cls(np.arange(len(column)) if ids is None else np.asarray(ids), column)

    @property
    def tokens(self) -> int:
        """Sum of lengths."""
        return int(self.lengths.sum())

    @property
    def longest(self) -> int:
        """Length of the longest sequence, tokens."""
        return int(self.lengths.max())

    def statistics(self) -> BatchStatistics:
        """Mean, percentiles and how much of the attention work the longest sequences hold."""
        lengths = self.lengths.astype(np.float64)
        squares, top = np.sort(lengths**2), -(-len(self) // 100)
        mean = float(lengths.mean())
        return BatchStatistics(
            count=len(self),
            tokens=self.tokens,
            mean=mean,
            median=float(np.median(lengths)),
            p99=float(np.quantile(lengths, 0.99)),
            longest=self.longest,
            cv=float(lengths.std()) / mean,
            top1_square_share=float(squares[-top:].sum() / squares.sum()),
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[Sequence]:
        return map(Sequence, self.ids.tolist(), self.lengths.tolist())

    @overload
    def __getitem__(self, index: int) -> Sequence: ...
    @overload
    def __getitem__(self, index: slice) -> Batch: ...
    def __getitem__(self, index: int | slice) -> Sequence | Batch:
        """One sequence, or the batch of a slice (which must not be empty)."""
        if isinstance(index, slice):
            return Batch(self.ids[index], self.lengths[index])
        return Sequence(int(self.ids[index]), int(self.lengths[index]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Batch):
            return NotImplemented
        return np.array_equal(self.ids, other.ids) and np.array_equal(self.lengths, other.lengths)

    def __hash__(self) -> int:
        return hash((self.ids.tobytes(), self.lengths.tobytes()))

    def __repr__(self) -> str:
        return f"Batch({len(self):,} sequences, {self.tokens:,} tokens, longest {self.longest:,})"

    def __reduce__(self) -> tuple[type[Batch], tuple[np.ndarray, np.ndarray]]:
        """Pickle through the constructor, so that the columns are read-only again on the other side."""
        return Batch, (self.ids, self.lengths)


def drop_longer(lengths: ArrayLike, max_length: int | None) -> tuple[np.ndarray, int]:
    """Leave out the sequences above ``max_length`` tokens (None: keep all); return the others and how many went."""
    column = check_lengths(lengths)
    if max_length is None:
        return column, 0
    if not isinstance(max_length, int | np.integer):
        raise SeqloomError(f"max_length is {max_length!r}; give a whole number, or None")
    kept = column[column <= max_length]
    if not len(kept):
        raise SeqloomError(
            f"all {len(column):,} sequences are longer than the maximum length {max_length:,}; the shortest "
            f"has {int(column.min()):,} tokens: raise the maximum length"
        )
    return kept, len(column) - len(kept)


def batches_by_count(lengths: ArrayLike, size: int, *, skip: int = 0, count: int | None = None) -> Iterator[Batch]:
    """Cut a stream of lengths into batches of ``size`` sequences, in file order; the last may be shorter.

    Ids are positions in the stream. The first ``skip`` batches are left out; then ``count`` follow, or all. Fewer in
    the stream is an error.
    """
    column = check_lengths(lengths)
    _at_least("batch size", size, 1)
    return _runs(column, np.arange(0, len(column), size), skip, count)


def batches_by_tokens(lengths: ArrayLike, budget: int, *, skip: int = 0, count: int | None = None) -> Iterator[Batch]:
    """Cut a stream of lengths into runs of at most ``budget`` tokens, in file order; else as `batches_by_count`.

    No sequence is ever cut: one that alone exceeds the budget is a batch of its own.
    """
    column = check_lengths(lengths)
    _at_least("token budget", budget, 1)
    ends = np.cumsum(column)
    starts = [0]
    while True:
        before = int(ends[starts[-1] - 1]) if starts[-1] else 0
        stop = max(int(np.searchsorted(ends, before + budget, side="right")), starts[-1] + 1)
        if stop >= len(column):
            return _runs(column, np.array(starts), skip, count)
        starts.append(stop)


def _runs(column: np.ndarray, starts: np.ndarray, skip: int, count: int | None) -> Iterator[Batch]:
    """Batches that begin at ``starts``; refuses at once, before the first batch, a range the stream lacks."""
    _at_least("batches to skip", skip, 0)
    wanted = skip + (1 if count is None else count)
    if count is not None:
        _at_least("number of batches", count, 1)
    if wanted > len(starts):
        raise SeqloomError(
            f"batch {wanted - 1} is wanted (counting from 0) but {len(column):,} sequences make only "
            f"{len(starts):,}; skip or take fewer batches, make them smaller, or give more sequences"
        )
    stops = np.append(starts[1:], len(column))
    last = len(starts) if count is None else skip + count
    return (
        Batch(np.arange(start, stop), column[start:stop])
        for start, stop in zip(starts[skip:last].tolist(), stops[skip:last].tolist(), strict=True)
    )


def _checked_ids(ids: np.ndarray, count: int) -> np.ndarray:
    array = np.asarray(ids)
    if array.shape != (count,):
        raise SeqloomError(f"batch: ids of shape {array.shape} for {count} sequences; give one id per sequence")
    if array.dtype.kind not in "iu":
        raise SeqloomError(f"batch: ids of type {array.dtype}; an id is a whole number, unique in its batch")
    array = array.astype(np.int64, copy=False)
    values, counts = np.unique(array, return_counts=True)
    if len(values) < count:
        raise SeqloomError(
            f"batch: id {int(values[np.argmax(counts)])} is used {int(counts.max())} times; make them unique"
        )
    return array


def _frozen(array: np.ndarray) -> np.ndarray:
    """A read-only array that shares no memory with a writable one."""
    if array.flags.writeable or array.base is not None:
        array = array.copy()
        array.setflags(write=False)
    return array


def _at_least(what: str, value: int, least: int) -> None:
    if value < least:
        raise SeqloomError(f"{what} {value} is too small; it must be at least {least}")
