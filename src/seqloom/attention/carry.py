"""Keys and values of documents in pieces, kept from piece to piece, and the gradients that come back for them.

A later piece reads the keys of all earlier ones, so on its way back it has gradients for them. Forwards ascend, and
backwards descend:

    forward    write keys of piece n at their rows        read the rows before them, a view
    backward   read both again                            add gradients for the rows before, take those for the own

So one buffer serves a document in one layer. A piece that is run forward again writes the same numbers to the same
rows. Gradients are sums over many pieces and kept in float32 (float64 for float64). All of it is freed when the first
piece has gone backward: nothing is left at the end of a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from seqloom.errors import SeqloomError


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a document, as one ring index sees it.

    Attributes:
        document: that it belongs to.
        number, of: which piece it is of how many.
        rows: in the buffer of its group in this round.
        start, stop: rows in the document's buffer, which has those of all pieces.
        total: rows of that buffer.
    """

    document: int
    number: int
    of: int
    rows: slice
    start: int
    stop: int
    total: int


@dataclass(slots=True, eq=False)
class _Document:
    """One document in one layer.

    Attributes:
        kv: [rows of all pieces, 2 * kv heads, dim], keys before values.
        written: how many pieces have been forward.
        awaited: the piece whose backward is next.
        gradient: of the first rows of `kv`, as many as the latest piece that read some has before it; None: all zero.
    """

    kv: torch.Tensor
    written: int
    awaited: int
    gradient: torch.Tensor | None = None


class Carry:
    """What one rank carries from piece to piece in one step; all its rounds and stages share it."""

    __slots__ = ("_kept", "backward")

    def __init__(self, *, backward: bool = True) -> None:
        """Start empty.

        Args:
            backward: whether a backward follows. Without one, a document is freed after its last piece's forward.
        """
        self.backward = backward
        self._kept: dict[tuple[int, int], _Document] = {}

    @property
    def bytes(self) -> int:
        """Memory of keys, values and gradients that are held now."""
        held = [each for kept in self._kept.values() for each in (kept.kv, kept.gradient) if each is not None]
        return sum(each.numel() * each.itemsize for each in held)

    def check_empty(self) -> None:
        """Refuse what is left at the end of a step."""
        if self._kept:
            layer, document = min(self._kept)
            kept = self._kept[layer, document]
            raise SeqloomError(
                f"keys and values of {len(self._kept)} documents x layers are left, such as document {document} in "
                f"layer {layer}, whose piece {kept.awaited} has not gone backward: every piece that goes forward goes "
                "backward in the same step; evaluate with Carry(backward=False), and call clear() after an error"
            )

    def clear(self) -> None:
        """Forget everything, as after a step that was given up."""
        self._kept.clear()

    def write(self, layer: int, piece: Piece, k: torch.Tensor, v: torch.Tensor) -> None:
        """Keep the keys and values [rows of the piece, kv heads, dim] of a piece that goes forward, maybe again."""
        kept = self._kept.get((layer, piece.document))
        if kept is None:
            room = k.new_empty((piece.total, 2 * k.shape[1], k.shape[2]))
            kept = _Document(room, written=0, awaited=piece.of - 1)
        if piece.number > kept.written or piece.number > kept.awaited:
            early = piece.number > kept.written
            missing = f"piece {kept.written} has not been forward" if early else "its backward is done"
            raise SeqloomError(
                f"layer {layer}: piece {piece.number} of document {piece.document} goes forward, but {missing}; run "
                "the pieces of a document forward in order, and all of them before the first backward"
            )
        self._kept[layer, piece.document] = kept
        heads = k.shape[1]
        kept.kv[piece.start : piece.stop, :heads] = k
        kept.kv[piece.start : piece.stop, heads:] = v
        kept.written = max(kept.written, piece.number + 1)

    def keys(self, layer: int, piece: Piece) -> torch.Tensor:
        """Return keys and values of a document, [rows of all pieces, 2 * kv heads, dim]; those written are valid."""
        return self._of(layer, piece).kv

    def forwarded(self, layer: int, piece: Piece) -> None:
        """Note that a piece has read what it needs in its forward."""
        if not self.backward and piece.number == piece.of - 1:
            del self._kept[layer, piece.document]

    def begin_backward(self, layer: int, piece: Piece) -> None:
        """Refuse a backward out of turn."""
        kept = self._of(layer, piece)
        if kept.written < piece.of or kept.awaited != piece.number:
            raise SeqloomError(
                f"layer {layer}: piece {piece.number} of document {piece.document} goes backward, but {kept.written} "
                f"of {piece.of} pieces have been forward and the backward of piece {kept.awaited} is next; run all "
                "pieces forward first, then backward in descending order"
            )

    def add(self, layer: int, piece: Piece, first: int, gradient: torch.Tensor) -> None:
        """Add the gradient [rows, 2 * kv heads, dim] that a piece has for rows from `first` to its own, and own it."""
        kept = self._of(layer, piece)
        if kept.gradient is None and first == 0:
            kept.gradient = gradient
            return
        if kept.gradient is None:
            kept.gradient = gradient.new_zeros((piece.start, *gradient.shape[1:]))
        kept.gradient[first : first + len(gradient)] += gradient

    def left(self, layer: int, piece: Piece, first: int) -> torch.Tensor | None:
        """Return what is left for the rows from `first` to those of a piece, to be added to; None: nothing."""
        gradient = self._of(layer, piece).gradient
        return None if gradient is None else gradient[first : piece.start]

    def take(self, layer: int, piece: Piece, total: torch.Tensor) -> None:
        """Add to `total` [rows of the piece, 2 * kv heads, dim] what later pieces have left for it, and close it."""
        kept = self._of(layer, piece)
        if kept.gradient is not None:
            total += kept.gradient[piece.start : piece.stop]
        kept.awaited -= 1
        if piece.number == 0:
            del self._kept[layer, piece.document]

    def _of(self, layer: int, piece: Piece) -> _Document:
        kept = self._kept.get((layer, piece.document))
        if kept is None:
            why = "none was written" if self.backward else "this carry frees them, being made with backward=False"
            raise SeqloomError(
                f"layer {layer}: no keys of document {piece.document} for the backward of piece {piece.number}: {why}; "
                "run every piece once forward and once backward with one Carry()"
            )
        return kept
