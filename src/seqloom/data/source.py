"""Sources of tokenized documents: the interface that sampler and ranks read, a length limit on it, a synthetic corpus.

Everything that feeds a step is a `Source`. `seqloom.data.store.open_source` opens the ones on disk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike

from seqloom.describe import sample
from seqloom.errors import SeqloomError, unknown_name

IGNORE_INDEX = -100
"""Label of a position that the loss does not count, as in torch and transformers."""


class Source(ABC):
    """Documents `0 .. len(lengths) - 1`, each of at least one token, read by span.

    Labels are shifted here, before a plan cuts a document: the label of position p is token p + 1 if the loss counts
    it, else -100, and the last position has none. So a rank that holds `[start:stop)` needs no token of its neighbour.

        tokens    t0   t1   t2   t3
        labels    t1   t2   t3  -100

    Attributes:
        name: of the corpus, for messages.
        lengths: int64[documents], tokens of every document.
        valid: int64[documents], labels of every document that the loss counts.
        vocabulary: every id is below this.
    """

    def __init__(self, name: str, lengths: ArrayLike, valid: ArrayLike, vocabulary: int) -> None:
        """Store the columns read-only."""
        self.name, self.vocabulary = name, vocabulary
        self.lengths, self.valid = read_only(lengths), read_only(valid)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the ids of positions `start .. stop - 1`, int64[stop - start]."""
        self._check_span(document, start, stop)
        return self._read(document, start, stop)

    def labels(self, document: int, start: int, stop: int) -> np.ndarray:
        """Return the labels of positions `start .. stop - 1`, int64[stop - start]."""
        return self.rows(document, start, stop)[1]

    def rows(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and labels of positions `start .. stop - 1`, int64[stop - start] each; tokens are read once."""
        self._check_span(document, start, stop)
        last = min(stop + 1, int(self.lengths[document]))  # the label of the last position is the token after it
        ids = self._read(document, start, last)
        following, mask = ids[1:], self._loss_mask(document, min(start + 1, last), last)
        labels = np.full(stop - start, IGNORE_INDEX, dtype=np.int64)
        labels[: len(following)] = following if mask is None else np.where(mask, following, IGNORE_INDEX)
        return ids[: stop - start], labels

    @abstractmethod
    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Read the ids of a span that exists, int64[stop - start]."""

    def _loss_mask(self, document: int, start: int, stop: int) -> np.ndarray | None:
        """Whether the loss counts each token of a span, bool[stop - start]; None: all of them."""
        return None

    def _check_span(self, document: int, start: int, stop: int) -> None:
        if not 0 <= document < len(self):
            raise SeqloomError(f"{self.name}: document {document} of {len(self):,}; they are numbered from 0")
        if not 0 <= start <= stop <= self.lengths[document]:
            raise SeqloomError(
                f"{self.name}, document {document}: [{start}:{stop}) is not inside its "
                f"{int(self.lengths[document]):,} tokens; read spans of 0 <= start <= stop <= length"
            )

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        tokens = int(self.lengths.sum())
        return f"{type(self).__name__}({self.name!r}: {len(self):,} documents, {tokens:,} tokens)"


def check_ids(ids: np.ndarray, vocabulary: int, where: str, first: int = 0) -> None:
    """Refuse ids outside 0 .. vocabulary - 1; `where` names file and document, `first` the first id's position."""
    if not ids.size or (ids.min() >= 0 and ids.max() < vocabulary):
        return
    at = int(np.flatnonzero((ids < 0) | (ids >= vocabulary))[0])
    raise SeqloomError(
        f"{where}: token {first + at} is {int(ids[at])}, outside the vocabulary 0 .. {vocabulary - 1}; "
        "use the tokenizer that wrote the ids, or give the vocabulary that they need"
    )


def read_only(values: ArrayLike) -> np.ndarray:
    """Return a read-only int64 copy."""
    column = np.array(values, dtype=np.int64)
    column.flags.writeable = False
    return column


TooLong = Literal["refuse", "truncate", "drop"]
"""What happens to a document above the maximum length; truncate keeps its beginning."""


class LengthLimitedSource(Source):
    """Documents of another source, at most `max_length` tokens each: longer ones are refused, truncated or dropped.

    Attributes:
        documents: int64[n], number of every document in the other source.
        truncated, dropped: number of documents that were.
        lost_tokens: tokens of the other source that are not here.
    """

    def __init__(self, source: Source, max_length: int, too_long: TooLong = "refuse") -> None:
        """Select the documents; count the valid labels of truncated ones anew."""
        check_length_policy(max_length, too_long)
        lengths, valid = np.array(source.lengths), np.array(source.valid)
        long = np.flatnonzero(lengths > max_length)
        if len(long) and too_long == "refuse":
            share = f"{len(long):,} of {len(lengths):,}"
            raise too_long_error(f"document {long[0]}", int(lengths[long[0]]), max_length, share)
        self.dropped, self.truncated = (len(long), 0) if too_long == "drop" else (0, len(long))
        if too_long == "drop":
            documents = np.flatnonzero(lengths <= max_length)
        else:
            documents = np.arange(len(lengths))
            for document in long.tolist():
                valid[document] = (source.labels(document, 0, max_length - 1) != IGNORE_INDEX).sum()
        if not len(documents):
            raise SeqloomError(f"every document is longer than {max_length:,} tokens; raise the limit, or truncate")
        limited = np.minimum(lengths, max_length)[documents]
        super().__init__(f"{source.name} up to {max_length:,} tokens", limited, valid[documents], source.vocabulary)
        self._source, self.documents = source, read_only(documents)
        self.lost_tokens = int(lengths.sum() - self.lengths.sum())

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self._source.tokens(int(self.documents[document]), start, stop)

    def rows(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Source.rows`; the last position of a truncated document has no label."""
        self._check_span(document, start, stop)
        ids, labels = self._source.rows(int(self.documents[document]), start, stop)
        if start < stop == self.lengths[document]:
            labels[-1] = IGNORE_INDEX
        return ids, labels


class DocumentSubset(Source):
    """Some documents of another source, in the order in which they are named.

    Attributes:
        documents: int64[n], number of every document in the other source.
    """

    def __init__(self, source: Source, documents: ArrayLike, name: str) -> None:
        """Select documents; `name` is for messages."""
        self._source, self.documents = source, read_only(documents)
        lengths, valid = source.lengths[self.documents], source.valid[self.documents]
        super().__init__(name, lengths, valid, source.vocabulary)

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self._source.tokens(int(self.documents[document]), start, stop)

    def rows(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Source.rows`."""
        self._check_span(document, start, stop)
        return self._source.rows(int(self.documents[document]), start, stop)


def split_source(source: Source, share: float, *, seed: int) -> tuple[DocumentSubset, DocumentSubset]:
    """Return the documents of training and, for evaluation, a share of all documents, at least one; each in order.

    Which ones follows from seed and number of documents alone, on any machine.
    """
    count = max(1, round(share * len(source)))
    if count >= len(source):
        raise SeqloomError(
            f"a share of {share:g} of the {len(source):,} documents of {source.name} for evaluation leaves none to "
            "train on; lower data.validation_share, or name other documents in data.validation"
        )
    keys = np.random.Philox(np.random.SeedSequence([seed, _SPLIT])).random_raw(len(source))
    aside = np.zeros(len(source), dtype=bool)
    aside[np.argsort(keys, kind="stable")[:count]] = True
    training, evaluation = np.flatnonzero(~aside), np.flatnonzero(aside)
    return (
        DocumentSubset(source, training, f"{source.name} without those of evaluation"),
        DocumentSubset(source, evaluation, f"{source.name}, those of evaluation"),
    )


def check_length_policy(max_length: int | None, too_long: str) -> None:
    """Refuse an unknown policy, and a limit below two tokens."""
    if too_long not in get_args(TooLong):
        raise unknown_name("policy for documents that are too long", too_long, get_args(TooLong))
    if max_length is not None and max_length < 2:
        raise SeqloomError(f"a maximum length of {max_length}; it must be at least 2, a token and the one it predicts")


def too_long_error(where: str, length: int, max_length: int, share: str | None = None) -> SeqloomError:
    """Build the error of a document above the limit under the policy "refuse"."""
    many = f" ({share} documents are)" if share else ""
    return SeqloomError(
        f"{where} has {length:,} tokens, more than the maximum length {max_length:,}{many}; raise the maximum, "
        "or choose what happens to such documents: truncate or drop"
    )


_SPLIT = 0x73706C6974
"""Beside a seed: the draw of a split is none of a shuffle."""
SYNTHETIC = "toy:"
"""Prefix of a synthetic corpus in a config: toy:600 has 600 documents, toy:600:1 the same number from seed 1."""
_LONGEST = 4_096
_END_OF_DOCUMENT = 256
_SUBJECTS = ("the loom", "a weaver", "the shuttle", "one thread", "the pattern", "a long warp", "the short weft")
_VERBS = ("crosses", "follows", "holds", "meets", "carries", "turns", "binds")
_OBJECTS = ("the frame", "every row", "the next one", "a knot", "the whole cloth", "its neighbour", "the edge")


class SyntheticSource(Source):
    """Byte-level sentences of a tiny grammar, in documents as long as those of Wikipedia up to a limit.

    A tiny model learns something from it. Same arguments, same documents: every rank generates them for itself.
    """

    def __init__(self, documents: int, max_length: int = _LONGEST, *, seed: int = 0) -> None:
        """Generate so many documents, the longest of at most `max_length` tokens."""
        if documents < 1 or max_length < 2:
            raise SeqloomError(f"{documents} synthetic documents of up to {max_length} tokens; make 1 of 2 at least")
        lengths = np.clip(sample("wikipedia", documents, seed=seed), 2, max_length)
        super().__init__("the synthetic corpus", lengths, lengths - 1, vocabulary=_END_OF_DOCUMENT + 1)
        generator = np.random.default_rng(seed)
        self._documents = [_sentences(generator, int(length)) for length in lengths]

    @classmethod
    def parse(cls, name: str) -> SyntheticSource:
        """Generate the corpus that `toy:DOCUMENTS` or `toy:DOCUMENTS:SEED` names."""
        numbers = name.removeprefix(SYNTHETIC).split(":")
        if not 1 <= len(numbers) <= 2 or not all(number.isdecimal() for number in numbers):
            raise SeqloomError(
                f"{name!r} is no synthetic corpus; write toy:600 for 600 documents, toy:600:1 for other ones"
            )
        documents, seed = (*map(int, numbers), 0)[:2]
        return cls(documents, seed=seed)

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        return self._documents[document][start:stop].astype(np.int64)


def _sentences(generator: np.random.Generator, length: int) -> np.ndarray:
    """Sentences as bytes, cut at the length, with the end-of-document id last; int16[length]."""
    text = b""
    while len(text) < length:
        subject, verb, end = generator.integers(7, size=3).tolist()
        text += f"{_SUBJECTS[subject]} {_VERBS[verb]} {_OBJECTS[end]}. ".encode()
    ids = np.frombuffer(text[:length], dtype=np.uint8).astype(np.int16)
    ids[-1] = _END_OF_DOCUMENT
    return ids
