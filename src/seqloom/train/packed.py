"""Batches of a data set that is packed ahead: hierarchical balance packing decides which documents make a step."""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel
from seqloom.planners.hbp import choose_levels, hbp


class PackedSteps:
    """The batches of every epoch: the same levels, and an order of steps of its own. See `data.Steps`."""

    def __init__(self, lengths: np.ndarray, cost: CostModel, tokens: int, seed: int) -> None:
        """Choose the lengths of packs.

        Args:
            lengths: int64[n] tokens of every document.
            cost: prices packs.
            tokens: of a step, at most.
            seed: of the order of steps.
        """
        self._lengths, self._cost, self._tokens, self._seed = lengths, cost, tokens, seed
        self._levels = choose_levels(lengths, cost, tokens)

    def __call__(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents of an epoch, step after step, and where steps begin."""
        packing = hbp(self._lengths, self._cost, self._tokens, levels=self._levels, seed=self._seed + epoch)
        return packing.documents, packing.pack_starts[packing.step_starts]
