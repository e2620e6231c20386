"""A source: documents of token ids with their labels, read span by span. Everything that feeds a step is one."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from seqloom.errors import SeqloomError

IGNORED = -100
"""The label of a position that does not count, as torch and transformers spell it."""


class Source(Protocol):
    """Documents `0 .. len(lengths) - 1`, each of at least one token.

    A label is shifted here, before anybody cuts a document: the label of position p is token p + 1 if the loss counts
    it, else -100, and the last position has none. So a rank that holds `[start:stop)` needs no token of its neighbour.

        tokens    t0   t1   t2   t3
        labels    t1   t2   t3  -100
    """

    @property
    def lengths(self) -> np.ndarray:
        """int64[documents], tokens of every document."""
        ...

    @property
    def valid(self) -> np.ndarray:
        """int64[documents], labels of every document that count."""
        ...

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        ...

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the ids of positions `start .. stop - 1`, int64[stop - start]."""
        ...

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the labels of positions `start .. stop - 1`, int64[stop - start]."""
        ...


def check_span(name: str, lengths: np.ndarray, document: int, start: int, stop: int) -> None:
    """Refuse a span that the documents do not have."""
    if not 0 <= document < len(lengths):
        raise SeqloomError(f"{name}: document {document} of {len(lengths):,}; they are numbered from 0")
    if not 0 <= start <= stop <= lengths[document]:
        raise SeqloomError(
            f"{name}, document {document}: [{start}:{stop}) is not inside its {int(lengths[document]):,} tokens; "
            "read spans of 0 <= start <= stop <= length"
        )


def check_ids(ids: np.ndarray, vocabulary: int, place: str, first: int = 0) -> None:
    """Refuse ids outside the vocabulary.

    Args:
        ids: integers, any shape.
        vocabulary: ids are 0 .. vocabulary - 1.
        place: where they stand, for the message.
        first: position of the first id in its document.
    """
    if not ids.size or (ids.min() >= 0 and ids.max() < vocabulary):
        return
    at = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
    raise SeqloomError(
        f"{place}: token {first + at} is {int(ids[at])}, outside the vocabulary 0 .. {vocabulary - 1}; "
        "use the tokenizer that wrote the ids, or give the vocabulary that they need"
    )


def shifted(following: np.ndarray, counted: ArrayLike | None, count: int) -> np.ndarray:
    """Return the labels of `count` positions, int64[count].

    Args:
        following: ids of the positions one later; one less than `count` of them at the end of a document.
        counted: bool, whether the loss counts each of `following`; None counts them all.
        count: positions.
    """
    labels = np.full(count, IGNORED, dtype=np.int64)
    labels[: len(following)] = following if counted is None else np.where(counted, following, IGNORED)
    return labels


def frozen(values: ArrayLike) -> np.ndarray:
    """Return the values as a read-only int64 array."""
    column = np.array(values, dtype=np.int64)
    column.flags.writeable = False
    return column
