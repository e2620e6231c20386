"""States of scans between the pieces of a document (Seq1F1B), and their gradients on the way back.

    forward    piece 0 --state--> piece 1 --state--> piece 2
    backward   piece 0 <-gradient- piece 1 <-gradient- piece 2

Every piece is a graph of its own. So a state leaves the graph of its piece as a value (`leave`) and enters that of the
next one (`take`), whose backward leaves the gradient for the backward of the first. A piece that is run forward again,
because its layer is recomputed, finds the state that it began with: a state is dropped by the backward that used it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from seqloom.dist.rank_tokens import Context
from seqloom.errors import SeqloomError
from seqloom.layout import Span


class StateKey(NamedTuple):
    """Whose states these are."""

    layer: int
    scan: str  # of several in a layer
    document: int


class DocumentPiece(NamedTuple):
    """A piece of a document in one scan of a layer."""

    key: StateKey
    number: int
    last: bool


def document_piece(span: Span, context: Context, layer: int | None, name: str) -> DocumentPiece | None:
    """Return which piece of its document a span is in a scan of this name; None: it is the whole document."""
    every = context.pieces.get(span.document)
    if every is None:
        return None
    if layer is None:
        raise SeqloomError(f"{name} of document {span.document}, which is in pieces: states are kept by layer; give it")
    number = every.index(span)
    return DocumentPiece(StateKey(layer, name, span.document), number, number == len(every) - 1)


@dataclass(slots=True, eq=False)
class _DocumentStates:
    """States after pieces, and gradients with respect to them, by the number of the piece."""

    states: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)


class ScanStates:
    """States of all scans of a rank's step over documents in pieces."""

    __slots__ = ("_documents",)

    def __init__(self) -> None:
        """Start empty."""
        self._documents: dict[StateKey, _DocumentStates] = {}

    def __len__(self) -> int:
        """Return how many documents x scans have states."""
        return len(self._documents)

    def first(self) -> StateKey:
        """Return the first of those that have states."""
        return min(self._documents)

    def clear(self) -> None:
        """Free everything."""
        self._documents.clear()

    def take(self, piece: DocumentPiece | None, like: torch.Tensor) -> torch.Tensor | None:
        """Return the state that a piece begins with; None: it is the first, or no piece.

        `like` is an input of its scan, in whose graph the state is to be.
        """
        return None if piece is None or not piece.number else _Take.apply(like, self, piece.key, piece.number)

    def leave(
        self, piece: DocumentPiece | None, out: torch.Tensor, state: torch.Tensor, *, backward: bool
    ) -> torch.Tensor:
        """Keep the state after a piece for the next one; return `out`, whose backward brings the state's gradient.

        After the last piece nothing is kept, and without a `backward` to come all of the document is dropped.
        """
        if piece is not None and not piece.last:
            return _Leave.apply(out, state, self, piece.key, piece.number)
        if piece is not None and not backward:
            self._documents.pop(piece.key, None)
        return out

    def _state(self, key: StateKey, piece: int) -> torch.Tensor:
        found = self._documents.get(key, _DocumentStates()).states.get(piece)
        if found is None:
            raise SeqloomError(
                f"layer {key.layer}: piece {piece + 1} of document {key.document} goes forward, but there is no state "
                f"of piece {piece}; run the pieces of a document forward in order, each of them once"
            )
        return found

    def _keep(self, key: StateKey, piece: int, state: torch.Tensor) -> None:
        self._documents.setdefault(key, _DocumentStates()).states[piece] = state

    def _keep_gradient(self, key: StateKey, piece: int, gradient: torch.Tensor) -> None:
        document = self._documents[key]
        document.gradients[piece] = gradient
        document.states.pop(piece, None)

    def _take_gradient(self, key: StateKey, piece: int) -> torch.Tensor:
        document = self._documents.get(key, _DocumentStates())
        gradient = document.gradients.pop(piece, None)
        if gradient is None:
            raise SeqloomError(
                f"layer {key.layer}: piece {piece} of document {key.document} goes backward before piece {piece + 1}; "
                "run all pieces forward first, then backward in descending order"
            )
        document.states.pop(piece, None)  # of a forward that was run again
        if piece == 0:
            del self._documents[key]
        return gradient


class _Take(torch.autograd.Function):
    """The state of the piece before enters a graph."""

    @staticmethod
    def forward(ctx: Any, like: torch.Tensor, states: ScanStates, key: StateKey, piece: int) -> torch.Tensor:
        ctx.place = states, key, piece - 1
        return states._state(key, piece - 1).clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        states, key, piece = ctx.place
        states._keep_gradient(key, piece, gradient.detach().clone())
        return None, None, None, None


class _Leave(torch.autograd.Function):
    """A state leaves its graph; the backward of its piece waits for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, out: torch.Tensor, state: torch.Tensor, states: ScanStates, key: StateKey, piece: int
    ) -> torch.Tensor:
        ctx.place = states, key, piece
        states._keep(key, piece, state.detach().clone())
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        states, key, piece = ctx.place
        return gradient, states._take_gradient(key, piece), None, None, None
