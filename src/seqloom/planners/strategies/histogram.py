"""Lengths of a data set as a few sums per class: what a step of it holds on average."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

CLASSES = 48
"""Classes of length, beside those that end where a scheme's memory ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Documents of one step by class of length, rising.

    Attributes:
        edges: int64[classes] the longest document of each class, tokens.
        count: float64[classes] documents of a step; may be below 1.
        tokens: float64[classes] their tokens.
        squares: float64[classes] their squared tokens.
    """

    edges: np.ndarray
    count: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(
        cls, lengths: np.ndarray, tokens_per_step: int | None = None, ends: Iterable[int] = (), classes: int = CLASSES
    ) -> Histogram:
        """Sort documents into classes of about equal tokens.

        Args:
            lengths: int64[n] tokens of the data's documents.
            tokens_per_step: of one optimiser step; None: the lengths are one step.
            ends: lengths at which a class must end, tokens: the longest documents of schemes.
            classes: to make, beside those.
        """
        rising = np.sort(np.asarray(lengths, dtype=np.int64))
        upto = np.cumsum(rising)
        cuts = np.searchsorted(upto, np.linspace(0, upto[-1], classes + 1)[1:])
        wanted = {int(length) for length in rising[np.minimum(cuts, len(rising) - 1)]}
        wanted |= {int(end) for end in ends if rising[0] <= end < rising[-1]}
        edges = np.array(sorted(wanted | {int(rising[-1])}), dtype=np.int64)
        stops = np.searchsorted(rising, edges, side="right")
        filled = np.diff(stops, prepend=0) > 0
        edges, stops = edges[filled], stops[filled]
        starts = np.concatenate([[0], stops[:-1]])
        scale = 1.0 if tokens_per_step is None else tokens_per_step / float(upto[-1])
        values = rising.astype(np.float64)
        sums = [np.add.reduceat(column, starts) * scale for column in (np.ones_like(values), values, values * values)]
        return cls(rising[stops - 1], *sums)

    def upto(self, length: int, tokens: float | None = None) -> Histogram:
        """The classes up to this length, with as many tokens as before, or as given."""
        keep = self.edges <= length
        kept = float(self.tokens[keep].sum())
        scale = (float(self.tokens.sum()) if tokens is None else tokens) / kept
        return Histogram(
            self.edges[keep], self.count[keep] * scale, self.tokens[keep] * scale, self.squares[keep] * scale
        )
