"""A stage: ranks, a range of layers and a tensor-parallel degree; and that range as a part of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Stage:
    """Ranks that run layers `layers[0] .. layers[1] - 1`.

    Several stages of a pipeline may have the same ranks, see `Pipeline`.

    With a tensor degree t above 1 the weights are split over t neighbours: ranks 0 to t - 1 of the stage, the
    next t, and so on. Tokens and heads are then
    split over these ranks exactly as over Ulysses ranks, so tensor ranks are the innermost part of a group's
    Ulysses axis: every group of the stage has a `ulysses` that is a multiple of t.
    """

    ranks: tuple[int, ...]
    layers: tuple[int, int]
    tensor: int = 1


class Part(NamedTuple):
    """Layers `first .. stop - 1` of a model with `of` layers: what a stage of a pipeline has of it.

    A part that begins also embeds; one that ends also has the final norm, the vocabulary projection and the loss.
    """

    first: int
    stop: int
    of: int

    @property
    def begins(self) -> bool:
        """Whether it takes token ids; others take hidden states."""
        return self.first == 0

    @property
    def ends(self) -> bool:
        """Whether it gives the sum of token losses; others give hidden states."""
        return self.stop == self.of
