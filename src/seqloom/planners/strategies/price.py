"""What a scheme costs: a micro-batch takes ``c + sum(a s^2 + b s)`` on each stage, forward and backward.

Three numbers and a longest length are all that choosing and assigning look at. They come from published tables or are
fitted to a cost model; the plan that is made in the end is priced in full again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from seqloom.planners.strategies.values import Scheme


@dataclass(frozen=True, slots=True)
class SchemeCost:
    """Prices of one scheme.

    Attributes:
        square: a, ns per token squared of a document.
        linear: b, ns per token.
        fixed: c, ns of a micro-batch before any document.
        longest: tokens that a micro-batch may hold, and so of the longest document.
    """

    square: float
    linear: float
    fixed: int
    longest: int

    def documents_ns(self, lengths: np.ndarray) -> np.ndarray:
        """int64[n] ns that documents of these lengths, tokens, add to a micro-batch on a stage."""
        tokens = np.asarray(lengths, dtype=np.float64)
        return np.rint(self.square * (tokens * tokens) + self.linear * tokens).astype(np.int64)

    def micro_batch_ns(self, lengths: np.ndarray) -> int:
        """ns of one micro-batch of these documents on a stage, forward and backward."""
        return self.fixed + int(self.documents_ns(lengths).sum())


SchemeCosts = Mapping[Scheme, SchemeCost]
"""Prices of every scheme that a cluster and a model allow."""
