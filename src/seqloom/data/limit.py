"""Documents longer than a limit: refused, truncated or dropped, and counted."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from seqloom.data.source import IGNORED, Source, check_span, frozen
from seqloom.errors import SeqloomError, unknown

TooLong = Literal["refuse", "truncate", "drop"]
"""What happens to a document above the limit. truncate keeps its beginning."""


class Limited:
    """A source whose documents have at most `max_length` tokens; a `Source` itself.

    Attributes:
        documents: int64[n], for every document its number in the source behind.
        truncated, dropped: documents to which it happened.
        lost: tokens that are in the source behind and not here.
    """

    def __init__(self, source: Source, max_length: int, too_long: TooLong = "refuse") -> None:
        """Look at the lengths, and read the labels of truncated documents, whose counts change."""
        check_policy(max_length, too_long)
        lengths, valid = np.array(source.lengths), np.array(source.valid)
        long = np.flatnonzero(lengths > max_length)
        if len(long) and too_long == "refuse":
            raise refused(
                f"document {long[0]}", int(lengths[long[0]]), max_length, f"{len(long):,} of {len(lengths):,}"
            )
        self._source, self._max_length = source, max_length
        self.truncated = self.dropped = 0
        kept = np.arange(len(lengths))
        if too_long == "drop":
            kept, self.dropped = np.flatnonzero(lengths <= max_length), len(long)
        else:
            self.truncated = len(long)
            for document in long.tolist():
                valid[document] = (source.labels(document, 0, max_length - 1) != IGNORED).sum()
        if not len(kept):
            raise SeqloomError(f"every document is longer than {max_length:,} tokens; raise the limit, or truncate")
        self.documents = frozen(kept)
        self._lengths, self._valid = frozen(np.minimum(lengths, max_length)[kept]), frozen(valid[kept])
        self.lost = int(lengths.sum() - self._lengths.sum())

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
        return self._source.vocabulary

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the ids of positions `start .. stop - 1`, int64[stop - start]."""
        check_span("the limited source", self._lengths, document, start, stop)
        return self._source.tokens(int(self.documents[document]), start, stop)

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the labels of positions `start .. stop - 1`, int64[stop - start]."""
        check_span("the limited source", self._lengths, document, start, stop)
        labels = self._source.labels(int(self.documents[document]), start, stop)
        if start < stop == self._lengths[document]:
            labels[-1] = IGNORED  # what followed is cut away
        return labels


def check_policy(max_length: int | None, too_long: str) -> None:
    """Refuse a limit or a policy that does not exist."""
    if too_long not in get_args(TooLong):
        raise unknown("policy for documents that are too long", too_long, get_args(TooLong))
    if max_length is not None and max_length < 2:
        raise SeqloomError(f"a maximum length of {max_length}; it must be at least 2, a token and the one it predicts")


def refused(place: str, length: int, max_length: int, share: str | None = None) -> SeqloomError:
    """The error for a document above the limit when the policy is to refuse."""
    many = f" ({share} documents are)" if share else ""
    return SeqloomError(
        f"{place} has {length:,} tokens, more than the maximum length {max_length:,}{many}; raise the maximum, "
        "or choose what happens to such documents: truncate or drop"
    )
