"""Mixtures: several sources as one, and an order of their documents that keeps to weights.

A source is drawn from in passes: no document comes again before all others of its source have come. An epoch ends
when the first source has been gone through; the others go on from there in the next one. So no document is twice in an
epoch, and what an epoch has follows from its number alone: nothing but the sampler's cursor is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from heapq import heappop, heappush
from itertools import accumulate
from typing import Any, Literal

import numpy as np

from seqloom.data.megatron import MegatronSource
from seqloom.data.source import Source
from seqloom.data.store import TokenStore
from seqloom.errors import SeqloomError

WeighBy = Literal["tokens", "documents"]
"""What a weight is the share of."""


class JoinedSource(Source):
    """The documents of several sources, one source after the other.

    Attributes:
        parts: the sources.
        starts: int64[parts], number of each part's first document.
    """

    def __init__(self, parts: Sequence[Source]) -> None:
        """Join at least one source."""
        self.parts = tuple(parts)
        self.starts = np.cumsum([0, *(len(part) for part in parts[:-1])])
        lengths, valid = (
            np.concatenate(columns) for columns in zip(*((p.lengths, p.valid) for p in parts), strict=True)
        )
        name = " + ".join(part.name for part in parts)
        super().__init__(name, lengths, valid, max(part.vocabulary for part in parts))

    def _place(self, document: int) -> tuple[Source, int]:
        """Return the part that has a document, and its number there."""
        part = int(np.searchsorted(self.starts, document, side="right")) - 1
        return self.parts[part], document - int(self.starts[part])

    def _read(self, document: int, start: int, stop: int) -> np.ndarray:
        part, number = self._place(document)
        return part.tokens(number, start, stop)

    def rows(self, document: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """See `Source.rows`."""
        self._check_span(document, start, stop)
        part, number = self._place(document)
        return part.rows(number, start, stop)


def check_same_vocabulary(sources: Sequence[Source]) -> None:
    """Refuse sources whose ids are of different tokenizers, as far as they say so; Megatron pairs say nothing."""
    telling = [source for source in sources if not isinstance(source, MegatronSource)]
    for source in telling[1:]:
        if source.vocabulary != telling[0].vocabulary:
            raise SeqloomError(
                f"{telling[0].name} has a vocabulary of {telling[0].vocabulary:,} ids, {source.name} one of "
                f"{source.vocabulary:,}; prepare both with the model's tokenizer"
            )
    stores = [source for source in sources if isinstance(source, TokenStore) and source.meta.tokenizer is not None]
    for store in stores[1:]:
        if store.meta.tokenizer != stores[0].meta.tokenizer:
            raise SeqloomError(
                f"{stores[0].path} and {store.path} were prepared with different tokenizers, so that an id means one "
                "thing here and another there; prepare both with the model's tokenizer"
            )


class Mixture:
    """Which documents of joined sources an epoch has, and in which order.

    Every source has its share of the documents in any part of an epoch, within one document. A share of tokens is one
    of documents, by the mean length of each source: it is exact over whole passes.

    Attributes:
        documents: of each source.
        per_epoch: documents of each source in an epoch, on average; epochs have one more or less.
    """

    def __init__(
        self, lengths: Sequence[np.ndarray], weights: Sequence[float], *, by: WeighBy = "tokens", seed: int = 0
    ) -> None:
        """Weigh sources with documents of these `lengths`, int64[n] tokens each; weights need not add up to 1.

        The weight 0.1 is one tenth and not its nearest binary number: 1 and 9 are the same weights as 0.1 and 0.9.
        """
        filled = len(lengths) > 0 and all(map(len, lengths))
        if not filled or len(lengths) != len(weights) or not all(weight > 0 for weight in weights):
            raise SeqloomError("a mixture needs sources with documents, and a weight above 0 for each")
        self.documents = tuple(map(len, lengths))
        rates = [Fraction(repr(float(weight))) for weight in weights]
        if by == "tokens":
            rates = [rate / Fraction(int(n.sum()), len(n)) for rate, n in zip(rates, lengths, strict=True)]
        shortest = min(count / rate for count, rate in zip(self.documents, rates, strict=True))
        self.per_epoch = tuple(rate * shortest for rate in rates)
        self._seed = seed
        self._starts = [0, *accumulate(self.documents)]
        # One order of each source for the whole run: any `documents` draws of it that follow each other are distinct.
        self._walks = [self._shuffle(count, _WALK, source) for source, count in enumerate(self.documents)]
        self._take_turns = lru_cache(maxsize=2)(take_turns)

    def order(self, epoch: int) -> np.ndarray:
        """Return the documents of an epoch in order, int64[n], as numbers of the joined sources."""
        begin, end = self.drawn(epoch), self.drawn(epoch + 1)
        turns = self._take_turns(tuple(stop - start for start, stop in zip(begin, end, strict=True)))
        order = np.empty(len(turns), dtype=np.int64)
        for source, (start, stop) in enumerate(zip(begin, end, strict=True)):
            order[turns == source] = self._starts[source] + self._draw(source, start, stop, epoch)
        return order

    def drawn(self, epoch: int) -> list[int]:
        """Return how many documents of each source the epochs before this one have."""
        return [(rate * epoch + Fraction(1, 2)).__floor__() for rate in self.per_epoch]

    def state_dict(self) -> dict[str, Any]:
        """Return what tells this mixture from another, ready for JSON."""
        return {
            "documents": list(self.documents),
            "per_epoch": list(map(str, self.per_epoch)),
            "seed": self._seed,
        }

    def _draw(self, source: int, start: int, stop: int, epoch: int) -> np.ndarray:
        """Draws `start .. stop - 1` of a source: those of one pass shuffled anew, then those of the next."""
        count = self.documents[source]
        first, split = start % count, min(stop - start, count - start % count)
        walk = self._walks[source]
        parts = walk[first : first + split], walk[: stop - start - split]
        shuffled = [part[self._shuffle(len(part), _DRAW, source, epoch, k)] for k, part in enumerate(parts)]
        return np.concatenate(shuffled)

    def _shuffle(self, count: int, *words: int) -> np.ndarray:
        """An order of so many by seed and words; by sorting keys, as in `Sampler`."""
        keys = np.random.Philox(np.random.SeedSequence([self._seed, *words])).random_raw(count)
        return np.argsort(keys, kind="stable")


def take_turns(counts: Sequence[int]) -> np.ndarray:
    """Spread sources evenly: the source of every place, int64[sum of counts], each as often as it counts.

    Of n places the first m have between floor(m c / n) and ceil(m c / n) of a source that counts c. That is: its number
    k may come from place floor(k n / c) on and must have come before ceil((k + 1) n / c). In no run of places do more
    numbers have to come than there are places, so the earliest deadline first keeps all of them.
    """
    total = sum(counts)
    numbers = [np.arange(count) for count in counts]
    sources = np.repeat(np.arange(len(counts)), counts)
    frees = [k * total // count for k, count in zip(numbers, counts, strict=True) if count]
    deadlines = [-(-(k + 1) * total // count) for k, count in zip(numbers, counts, strict=True) if count]
    free = np.concatenate(frees)
    by_time = np.argsort(free, kind="stable")
    keys, free = (np.concatenate(deadlines) * len(counts) + sources)[by_time], free[by_time]
    turns, waiting, before = np.empty(total, dtype=np.int64), [], 0
    for block in range(0, total, _BLOCK):  # lists of Python's integers are fast and large
        stop = min(block + _BLOCK, total)
        released = np.searchsorted(free, np.arange(block, stop), side="right").tolist()
        ready, offset = keys[before : released[-1]].tolist(), before
        for place, until in enumerate(released, block):
            for key in ready[before - offset : until - offset]:
                heappush(waiting, key)
            before = until
            turns[place] = heappop(waiting)
    return turns % len(counts)


_BLOCK = 1 << 16
_WALK, _DRAW = 0x77616C6B, 0x64726177
"""Beside a seed: draws of a mixture are none of another shuffle."""
