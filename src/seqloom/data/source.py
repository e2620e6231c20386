"""A source: documents of token ids with their labels, read span by span. Everything that feeds a step is one."""

from __future__ import annotations

from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import ArrayLike

from seqloom.describe import sample
from seqloom.errors import SeqloomError, unknown

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


# ---- merged: data.limit
# Documents longer than a limit: refused, truncated or dropped, and counted.


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


# ---- merged: data.toy
# A small corpus made up on the spot: documents of very unequal lengths that a tiny model can learn something of.


VOCABULARY = 257
"""Bytes, and one id that ends a document."""
END = 256
NAME = "toy:"
"""How a config names it: toy:600 for so many documents, toy:600:1 with another seed."""
LONGEST = 4_096
"""Tokens of a document that is opened by name, at most."""
_SUBJECTS = ("the loom", "a weaver", "the shuttle", "one thread", "the pattern", "a long warp", "the short weft")
_VERBS = ("crosses", "follows", "holds", "meets", "carries", "turns", "binds")
_OBJECTS = ("the frame", "every row", "the next one", "a knot", "the whole cloth", "its neighbour", "the edge")


class ToySource:
    """Sentences of a tiny grammar in documents as long as those of Wikipedia, up to a limit; a `Source`.

    Same arguments, same documents, anywhere: every rank makes them for itself.
    """

    def __init__(self, documents: int, max_length: int, *, seed: int = 0) -> None:
        """Make the documents.

        Args:
            documents: how many.
            max_length: longest one, tokens, at least 2.
            seed: of lengths and sentences.
        """
        if documents < 1 or max_length < 2:
            raise SeqloomError(f"{documents} made-up documents of up to {max_length} tokens; make 1 of 2 at least")
        lengths = np.clip(sample("wikipedia", documents, seed=seed), 2, max_length)
        draw = np.random.default_rng(seed)
        self._documents = [_document(draw, int(length)) for length in lengths]
        self._lengths = frozen(lengths)

    @property
    def lengths(self) -> np.ndarray:
        """int64[documents], tokens."""
        return self._lengths

    @property
    def valid(self) -> np.ndarray:
        """int64[documents], labels that count: all but the last."""
        return self._lengths - 1

    @property
    def vocabulary(self) -> int:
        """Ids are below this."""
        return VOCABULARY

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the ids of positions `start .. stop - 1`, int64[stop - start]."""
        check_span("the made-up corpus", self._lengths, document, start, stop)
        return self._documents[document][start:stop].astype(np.int64)

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the labels of positions `start .. stop - 1`, int64[stop - start]."""
        check_span("the made-up corpus", self._lengths, document, start, stop)
        return shifted(self._documents[document][start + 1 : stop + 1], None, stop - start)


def toy_source(name: str) -> ToySource:
    """Make the corpus that `toy:DOCUMENTS` or `toy:DOCUMENTS:SEED` names."""
    numbers = name.removeprefix(NAME).split(":")
    if not 1 <= len(numbers) <= 2 or not all(number.isdecimal() for number in numbers):
        raise SeqloomError(f"{name!r} is no made-up corpus; write toy:600 for 600 documents, toy:600:1 for other ones")
    documents, seed = (*map(int, numbers), 0)[:2]
    return ToySource(documents, LONGEST, seed=seed)


def _document(draw: np.random.Generator, length: int) -> np.ndarray:
    """Sentences, cut where the length ends; int16[length]."""
    text = b""
    while len(text) < length:
        subject, verb, end = draw.integers(7, size=3).tolist()
        text += f"{_SUBJECTS[subject]} {_VERBS[verb]} {_OBJECTS[end]}. ".encode()
    ids = np.frombuffer(text[:length], dtype=np.uint8).astype(np.int16)
    ids[-1] = END
    return ids
