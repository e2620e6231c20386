"""A small corpus made up on the spot: documents of very unequal lengths that a tiny model can learn something of."""

from __future__ import annotations

import numpy as np

from seqloom.data.source import check_span, frozen, shifted
from seqloom.describe import sample
from seqloom.errors import SeqloomError

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
