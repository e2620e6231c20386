"""How a rank computes its groups: what a pass over one group is, and the pieces of local work that fill its waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from seqloom.attention.kernels.kernel import Gradients, Prepared, Saved
from seqloom.attention.rows import RowIndex
from seqloom.attention.tiles import PreparedTile
from seqloom.attention.ulysses import Exchange

Tensors = tuple[torch.Tensor, ...]
Meanwhile = Callable[[int], None]
"""Called with the number of an exchange while that is under way: what there is to do then."""


class Waits(NamedTuple):
    """Bytes that arrive in every exchange of a forward and of a backward, in order."""

    ahead: tuple[int, ...]
    back: tuple[int, ...]


class Shared(ABC):
    """Attention whose keys come from other ranks: a kernel's `Prepared` that waits for messages and can be filled."""

    __slots__ = ()

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Prepared.forward`."""

    @abstractmethod
    def backward(self, dout: torch.Tensor, saved: Saved, meanwhile: Meanwhile) -> Gradients:
        """Return (dq, dk, dv), see `Prepared.backward`."""

    @abstractmethod
    def waits(self, row: int, wide_row: int) -> Waits:
        """Return what arrives, given the bytes of a row of keys and values and of a row of their gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Documents of one rank, cut into runs that are computed at different times: one cut for each pass."""

    ahead: tuple[PreparedTile, ...]
    back: tuple[PreparedTile, ...]

    def forward(self, piece: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Return (out, lse) of one run."""
        tile = self.ahead[piece]
        return tile.prepared.forward(q[tile.queries], k[tile.keys], v[tile.keys])

    def backward(self, piece: int, dout: torch.Tensor, saved: Saved) -> Tensors:
        """Return (dq, dk, dv) of one run."""
        tile = self.back[piece]
        rows = tile.queries
        part = Saved(saved.q[rows], saved.k[rows], saved.v[rows], saved.out[rows], saved.lse[:, rows])
        return tile.prepared.backward(dout[rows], part)


class Filler(NamedTuple):
    """A piece of local work: the number of its call among the rank's, and of the piece."""

    call: int
    piece: int


class Fillers(NamedTuple):
    """What is computed during exchanges of a forward and of a backward; those during which nothing is are left out."""

    ahead: dict[int, tuple[Filler, ...]]
    back: dict[int, tuple[Filler, ...]]


def plainly(compute: Callable[[], Tensors]) -> Tensors:
    """Compute what is asked for."""
    return compute()


@dataclass(frozen=True, slots=True, eq=False)
class GroupCall:
    """How a rank computes the attention of one group.

    Attributes:
        rows: of the local buffer.
        exchange: heads for tokens; None without Ulysses.
        inner: a kernel's prepared segments, or the same in pieces; or what shares keys with other ranks.
        fillers: of the waits of `inner`.
        answer: returns (out, lse) of a forward by computing them, or from what was kept of an earlier one.
        alone: whether it is a kernel's call and nothing else: no messages, no pieces.
    """

    rows: RowIndex
    exchange: Exchange | None
    inner: Prepared | Pieces | Shared
    fillers: Fillers = Fillers({}, {})  # noqa: RUF009 - never changed
    answer: Callable[[Callable[[], Tensors]], Tensors] = plainly
    alone: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note what every layer asks."""
        object.__setattr__(self, "alone", self.exchange is None and not isinstance(self.inner, Pieces | Shared))


class Aside:
    """The local work of one pass. A piece is computed in the wait it was given to, or else when it is asked for."""

    __slots__ = ("_compute", "_done")

    def __init__(self, compute: Callable[[Filler], Tensors]) -> None:
        """Start with nothing done."""
        self._compute = compute
        self._done: dict[Filler, Tensors] = {}

    def run(self, fillers: Iterable[Filler]) -> None:
        """Compute these now."""
        for each in fillers:
            self._done[each] = self._compute(each)

    def results(self, call: int, pieces: int) -> list[Tensors]:
        """Return what all pieces of a call gave, in their order."""
        every = [Filler(call, piece) for piece in range(pieces)]
        self.run(each for each in every if each not in self._done)
        return [self._done.pop(each) for each in every]
