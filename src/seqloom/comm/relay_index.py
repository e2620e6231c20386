"""One rank's part of a relay as index work: where pieces of weights lie in its tensors, and where in fused buffers.

All of this is done on the host, once for a pair of layouts; `relay.py` runs it. A rank has one end of the move as its
source boxes, and the other as its target boxes. With the optimiser's layout of 4 ranks as the source, and a whole copy
on rank 2 as the target, rank 2 receives a bundle of two weights a and b like this:

    buffer     | a from 0 | b from 0 | a from 1 | b from 1 | a from 3 | b from 3 |
    tensors    | a from 0 | a from 1 | its own a | a from 3 |   | b from 0 | b from 1 | its own b | b from 3 |

Pieces of one size at one distance are a strip, and a strip is copied by one call, however many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from seqloom.errors import SeqloomError
from seqloom.plan.layout import Layout
from seqloom.plan.move import Move


class Box(NamedTuple):
    """What a rank holds of a weight: rows `start .. stop - 1` of columns `start2 .. stop2 - 1`."""

    start: int
    stop: int
    start2: int
    stop2: int

    @property
    def rows(self) -> int:
        """Rows of the tensor that holds it."""
        return self.stop - self.start

    @property
    def columns(self) -> int:
        """Columns of the tensor that holds it."""
        return self.stop2 - self.start2

    def view(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a contiguous tensor that holds this box as [rows, columns]."""
        if tensor.numel() != self.rows * self.columns or not tensor.is_contiguous():
            raise SeqloomError(
                f"{name}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} for {self.rows} rows x "
                f"{self.columns} columns of the weight; give a contiguous tensor of as many elements"
            )
        return tensor.detach().view(self.rows, self.columns)


class Strip(NamedTuple):
    """Pieces [rows, columns] of a weight, at equal distances in the tensor of its box and in a buffer.

    Attributes:
        weight: index.
        rows, columns: of each piece.
        width: columns of the tensor.
        at, step: elements of the tensor before the first piece, and from one to the next.
        place, stride: the same in the buffer, where each piece is contiguous.
        count: pieces.
    """

    weight: int
    rows: int
    columns: int
    width: int
    at: int
    place: int
    step: int = 0
    stride: int = 0
    count: int = 1

    @property
    def size(self) -> int:
        """Elements of all pieces."""
        return self.count * self.rows * self.columns

    def in_box(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the pieces as a view [count, rows, columns] of the weight's tensor."""
        strides = (self.step, self.width, 1)
        return tensor.as_strided((self.count, self.rows, self.columns), strides, tensor.storage_offset() + self.at)

    def in_buffer(self, buffer: torch.Tensor, base: int = 0) -> torch.Tensor:
        """Return the pieces as a view [count, rows, columns] of a buffer, whose first `base` elements are skipped."""
        strides, offset = (self.stride, self.columns, 1), buffer.storage_offset() + base + self.place
        return buffer.as_strided((self.count, self.rows, self.columns), strides, offset)


class Form(NamedTuple):
    """The same boxes for one or more ranks: strips whose places count from the beginning of a message."""

    strips: tuple[Strip, ...]
    size: int
    peers: tuple[int, ...]


class Local(NamedTuple):
    """A piece that stays on this rank: in its source tensor, and in its target tensor; places are those of a buffer."""

    source: Strip
    target: Strip


@dataclass(frozen=True, slots=True)
class Index:
    """One rank's part of moving one bundle.

    Attributes:
        forms: the source end; values are packed once for all ranks of a form, sums come from each of them.
        strips: the target end; places count from the beginning of the buffer for all ranks.
        messages: (rank, elements) in the order of that buffer, ranks ascending.
        local: what stays here.
    """

    forms: tuple[Form, ...]
    strips: tuple[Strip, ...]
    messages: tuple[tuple[int, int], ...]
    local: tuple[Local, ...]

    @property
    def outgoing(self) -> int:
        """Elements of the source that go to other ranks."""
        return sum(form.size * len(form.peers) for form in self.forms)

    @property
    def incoming(self) -> int:
        """Elements of the target that come from other ranks."""
        return sum(size for _, size in self.messages)


def boxes_of(layout: Layout, rank: int) -> dict[int, Box]:
    """Return what a rank holds, by weight; refuse several boxes of one weight."""
    mine = layout.among([rank])
    found = {item: Box(*box) for item, *box in zip(*(column.tolist() for column in mine.columns()[1:]), strict=True)}
    if len(found) < len(mine):
        raise SeqloomError(f"rank {rank} holds several boxes of one weight; a relay moves one box per rank and weight")
    return found


def index_bundles(
    move: Move, rank: int, bundles: Sequence[Sequence[int]], source: Mapping[int, Box], target: Mapping[int, Box]
) -> tuple[Index, ...]:
    """Work out a rank's part of every bundle.

    Args:
        move: what the rank sends and receives, at least; two axes.
        rank: this one.
        bundles: weights of each, by index.
        source, target: boxes of this rank.
    """
    number = np.full(1 + max([0, *move.item.tolist()]), -1, dtype=np.int64)
    for k, bundle in enumerate(bundles):
        inside = [weight for weight in bundle if weight < len(number)]
        number[inside] = k
    bundle = number[move.item]
    sends, receives = move.sender == rank, move.receiver == rank
    forms = _by_bundle(move, bundle, move.receiver, sends & ~receives)
    strips = _by_bundle(move, bundle, move.sender, receives & ~sends)
    local = _by_bundle(move, bundle, move.sender, sends & receives)
    return tuple(
        Index(
            _forms(forms.get(k, []), source),
            *_buffer(strips.get(k, []), target),
            tuple(map(Local, _pieces(local.get(k, []), source), _pieces(local.get(k, []), target))),
        )
        for k in range(len(bundles))
    )


_Piece = tuple[int, int, int, int, int, int]  # peer, weight, start, stop, start2, stop2


def _by_bundle(move: Move, bundle: np.ndarray, peer: np.ndarray, chosen: np.ndarray) -> dict[int, list[_Piece]]:
    """Return the chosen boxes of every bundle, sorted by peer, weight and place: in one order on both ends."""
    columns = [bundle, peer, *move.columns()[2:]]
    chosen = np.flatnonzero(chosen & (bundle >= 0))
    order = chosen[np.lexsort([columns[k][chosen] for k in (5, 3, 2, 1, 0)])]
    rows = zip(*(column[order].tolist() for column in columns), strict=True)
    return {k: [row[1:] for row in own] for k, own in groupby(rows, key=itemgetter(0))}


def _pieces(boxes: Iterable[_Piece], held: Mapping[int, Box]) -> list[Strip]:
    """Return boxes as strips of one piece, one after the other in a buffer."""
    found, place = [], 0
    for _, weight, start, stop, start2, stop2 in boxes:
        box = held[weight]
        at = (start - box.start) * box.columns + start2 - box.start2
        found.append(Strip(weight, stop - start, stop2 - start2, box.columns, at, place))
        place += found[-1].size
    return found


def _forms(boxes: list[_Piece], held: Mapping[int, Box]) -> tuple[Form, ...]:
    """Return the messages of every peer; equal ones are one form."""
    peers: dict[tuple[Strip, ...], list[int]] = {}
    for peer, own in groupby(boxes, key=itemgetter(0)):
        peers.setdefault(tuple(_pieces(own, held)), []).append(peer)
    return tuple(Form(strips, sum(strip.size for strip in strips), tuple(own)) for strips, own in peers.items())


def _buffer(boxes: list[_Piece], held: Mapping[int, Box]) -> tuple[tuple[Strip, ...], tuple[tuple[int, int], ...]]:
    """Return the strips of a buffer with the messages of all peers, and the size of every message."""
    pieces = _pieces(boxes, held)
    pairs = groupby(zip(boxes, pieces, strict=True), key=lambda pair: pair[0][0])
    messages = tuple((peer, sum(piece.size for _, piece in own)) for peer, own in pairs)
    return tuple(_joined(sorted(pieces, key=lambda piece: (piece.weight, piece.at)))), messages


def _joined(pieces: Iterable[Strip]) -> list[Strip]:
    """Join pieces of one size at equal distances, sorted by weight and place in its tensor."""
    found: list[Strip] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and last[:4] == piece[:4]:
            before = last.count - 1
            step, stride = piece.at - last.at - before * last.step, piece.place - last.place - before * last.stride
            if (not before and stride > 0) or (step, stride) == (last.step, last.stride):
                found[-1] = last._replace(step=step, stride=stride, count=last.count + 1)
                continue
        found.append(piece)
    return found
