"""Which query sees which key: rectangles of the attention matrix, stored as columns.

A segment joins rows `q_start .. q_stop` of a query buffer with rows `k_start .. k_stop` of a key buffer. `offset` is
the position of its first query minus that of its first key, so inside a segment query a sees key b when

    not causal  or  b <= a + offset            (b is not later than a)
    no window   or  a + offset - b < window    (b is one of the last `window` tokens, a itself included)

Packed documents, the tiles of a ring step, a piece with its prefix: all are segments, and every kernel reads them.

A prefix language model shows the first tokens of a document, its prefix, to each other. That is two segments: a square
of these tokens without a mask, and the others, causal, over all tokens.

Chunked attention (Llama 4) hides tokens of another chunk of `attention_chunk` tokens, counted from the first of the
document. It is no rule of a segment: an attention chunk is a segment of its own, as if it were a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from seqloom.errors import SeqloomError
from seqloom.layout import Span


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Rectangles under one mask rule. In one `Segments` no query row and no key row is in two rectangles.

    Attributes:
        q_start, q_stop, k_start, k_stop, offset: int64[n].
        causal: later keys are hidden.
        window: how many tokens a query sees, itself included; None: all. Needs `causal`.
    """

    q_start: np.ndarray
    q_stop: np.ndarray
    k_start: np.ndarray
    k_stop: np.ndarray
    offset: np.ndarray
    causal: bool = True
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and (not self.causal or self.window < 1):
            raise SeqloomError(
                f"window {self.window} with causal={self.causal}: a window counts back from the query and needs at "
                "least 1 token and a causal mask; leave the window out, or set causal"
            )
        for start, stop, what in ((self.q_start, self.q_stop, "query"), (self.k_start, self.k_stop, "key")):
            order = np.argsort(start, kind="stable")
            if np.any(stop <= start) or np.any(stop[order][:-1] > start[order][1:]):
                raise SeqloomError(f"{what} rows of segments are empty or overlap; give every row to one segment")

    @classmethod
    def of(cls, rows: Iterable[Sequence[int]], *, causal: bool = True, window: int | None = None) -> Segments:
        """Build from (q_start, q_stop, k_start, k_stop, offset) rows."""
        table = np.array(list(rows), dtype=np.int64).reshape(-1, 5)
        return cls(*table.T, causal=causal, window=window)

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int],
        *,
        causal: bool = True,
        window: int | None = None,
        attention_chunk: int | None = None,
    ) -> Segments:
        """Documents of these lengths one after the other, cut into attention chunks; queries and keys are the same."""
        column = np.asarray(lengths, dtype=np.int64)
        column = column[column > 0]
        if attention_chunk is not None:
            zero = np.zeros_like(column)
            column = np.diff(attention_chunks(zero, column, attention_chunk)[1:], axis=0)[0]
        stop = np.cumsum(column)
        start = stop - column
        return cls(start, stop, start, stop, np.zeros_like(start), causal=causal, window=window)

    def __len__(self) -> int:
        return len(self.q_start)

    @property
    def q_len(self) -> np.ndarray:
        """Queries of every segment, int64[n]."""
        return self.q_stop - self.q_start

    @property
    def k_len(self) -> np.ndarray:
        """Keys of every segment, int64[n]."""
        return self.k_stop - self.k_start

    def rows(self) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield (q_start, q_stop, k_start, k_stop, offset) of every segment, as plain integers."""
        columns = (self.q_start, self.q_stop, self.k_start, self.k_stop, self.offset)
        yield from zip(*(column.tolist() for column in columns), strict=True)

    def select(self, chosen: np.ndarray) -> Segments:
        """Return the segments with these indices, or those where a bool[n] is true."""
        columns = (self.q_start, self.q_stop, self.k_start, self.k_stop, self.offset)
        return Segments(*(column[chosen] for column in columns), causal=self.causal, window=self.window)

    def unmasked(self) -> np.ndarray:
        """Return for every segment whether all its queries see all its keys, bool[n]."""
        if not self.causal:
            return np.ones(len(self), dtype=bool)
        every = self.offset >= self.k_len - 1
        if self.window is not None:
            every &= self.q_len - 1 + self.offset < self.window
        return every

    def tiles(self) -> np.ndarray:
        """Return which segments are tiles without mask, bool[n]; under a causal rule a square is none of them."""
        square = (self.q_len == self.k_len) & (self.offset == 0)
        return self.unmasked() & ~(square & self.causal)

    def windowed(self) -> np.ndarray:
        """Return for every segment whether the window hides a key from some query, bool[n]."""
        if self.window is None:
            return np.zeros(len(self), dtype=bool)
        return self.q_len - 1 + self.offset >= self.window

    def area(self) -> np.ndarray:
        """Return how many (query, key) pairs every segment holds, int64[n]: what its attention has to compute."""
        if not self.causal:
            return self.q_len * self.k_len
        pairs = _pairs_behind(self.q_len, self.k_len, self.offset)
        if self.window is not None:
            pairs -= _pairs_behind(self.q_len, self.k_len, self.offset - self.window)
        return pairs


@dataclass(frozen=True, slots=True)
class MaskRule:
    """Which tokens of a document see each other in an attention call.

    Attributes:
        causal, window, attention_chunk: see `attention`.
        prefixes: how many of its first tokens see each other, by document; others have none. In a call that is not
            causal all tokens do anyway.
    """

    causal: bool = True
    window: int | None = None
    attention_chunk: int | None = None
    prefixes: Mapping[int, int] = field(default_factory=dict)

    def packed(self, lengths: Sequence[int]) -> Segments:
        """Return documents one after the other over themselves, without their prefixes."""
        options = {"causal": self.causal, "window": self.window, "attention_chunk": self.attention_chunk}
        return Segments.packed(lengths, **options)

    def prefixes_of(self, spans: Sequence[Span]) -> np.ndarray | None:
        """Return the prefix of every span's document, int64[spans]; None: there is none."""
        found = np.array([self.prefixes.get(span.document, 0) for span in spans], dtype=np.int64)
        return found if self.causal and found.any() else None


def attention_chunks(first: np.ndarray, last: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the attention chunks of tokens `first .. last` of documents, in order: document, start and stop.

    Chunks are counted from token 0 of a document, so the first and the last of them may be shorter than `size`.
    """
    counts = -(-last // size) - first // size
    document = np.repeat(np.arange(len(counts)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = ((first // size)[document] + number) * size
    return document, np.maximum(start, first[document]), np.minimum(start + size, last[document])


def _pairs_behind(q_len: np.ndarray, k_len: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """Count pairs with b <= a + offset: query a sees min(k_len, max(0, a + offset + 1)) keys."""
    first = np.clip(-offset, 0, q_len)  # the first query that sees a key
    full = np.clip(k_len - 1 - offset, first, q_len)  # the first query that sees all of them
    rising = full - first
    return rising * (first + offset + 1) + rising * (rising - 1) // 2 + (q_len - full) * k_len
