"""What packing a run's documents before it starts would do: other steps of the same documents, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seqloom.cost import CostModel
from seqloom.errors import SeqloomError
from seqloom.planners.hbp import Balance, Packing, hbp, plain_packing

PACKINGS: dict[str, Callable[[np.ndarray, CostModel, int], Packing]] = {"hbp": hbp, "first-fit": plain_packing}


@dataclass(frozen=True, slots=True)
class Repacked:
    """The documents of some steps, packed as one data set.

    Attributes:
        tokens_per_step: that no step exceeds.
        balance: by the name of the packing.
        refused: why there is none; "" where there is.
    """

    tokens_per_step: int
    balance: dict[str, Balance]
    refused: str = ""


def repacked(batches: Sequence[np.ndarray], cost: CostModel) -> Repacked:
    """Pack the documents of these batches, int64[n] tokens each, into steps as large as the batches are on average."""
    lengths = np.concatenate(list(batches))
    occupied = cost.tokens(lengths)
    most = max(-(-int(occupied.sum()) // len(batches)), int(occupied.max()))
    try:
        found = {name: packing(lengths, cost, most).balance for name, packing in PACKINGS.items()}
    except SeqloomError as error:  # a model that only pipelines hold, or a document that only pieces of it fit
        return Repacked(most, {}, str(error))
    return Repacked(most, found)
