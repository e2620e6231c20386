"""One rank's part of a relay: where pieces of weights lie in its tensors, and where in fused buffers.

A rank has one end of the move as its source boxes, and the other as its target boxes. With the optimiser's layout of
4 ranks as the source, and a whole copy on rank 2 as the target, rank 2 receives a bundle of two weights a and b like
this:

    buffer     | a from 0 | b from 0 | a from 1 | b from 1 | a from 3 | b from 3 |
    tensors    | a from 0 | a from 1 | its own a | a from 3 |   | b from 0 | b from 1 | its own b | b from 3 |

Pieces of one size at one distance are a strip, and a strip is copied by one call, however many ranks there are.
"""

from __future__ import annotations

import numpy as np
import torch
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from seqloom.errors import SeqloomError
from seqloom.layout.layout import Layout
from seqloom.layout.move import Move
from typing import NamedTuple


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

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the pieces as a view [count, rows, columns] of a flat buffer."""
        strides, offset = (self.stride, self.columns, 1), buffer.storage_offset() + self.place
        return buffer.as_strided((self.count, self.rows, self.columns), strides, offset)


class Form(NamedTuple):
    """The same boxes for one or more ranks, ascending: strips whose places count from the beginning of a message.

    This rank is among them where it keeps these boxes itself.
    """

    strips: tuple[Strip, ...]
    size: int
    peers: tuple[int, ...]


class Local(NamedTuple):
    """A piece that stays on this rank: in its source tensor, and in its target tensor.

    The places are those of a message to itself.
    """

    source: Strip
    target: Strip


@dataclass(frozen=True, slots=True)
class Index:
    """One rank's part of moving one bundle.

    Attributes:
        rank: this one.
        forms: the source end; values are packed once for all ranks of a form, sums come from each of them.
        strips: the target end; places count from the beginning of the buffer for all other ranks.
        messages: (rank, elements) in the order of that buffer, ranks ascending.
        local: what stays here.
    """

    rank: int
    forms: tuple[Form, ...]
    strips: tuple[Strip, ...]
    messages: tuple[tuple[int, int], ...]
    local: tuple[Local, ...]

    @property
    def outgoing(self) -> int:
        """Elements of the source that go to other ranks."""
        return sum(form.size for form in self.forms for peer in form.peers if peer != self.rank)

    @property
    def incoming(self) -> int:
        """Elements of the target that come from other ranks."""
        return sum(size for _, size in self.messages)


# ---- merged: comm.relay_index
# The index work of a relay, done on the host once for a pair of layouts: columns of numbers, whatever the ranks.
#
# A box that moves is a piece here. A rank of a thousand has a hundred thousand of them, in a few thousand strips.


def boxes_of(layout: Layout, rank: int) -> dict[int, Box]:
    """Return what a rank holds, by weight; refuse several boxes of one weight."""
    mine = layout.restrict([rank])
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
    last = max([int(move.item.max(initial=0)), *(max(bundle, default=0) for bundle in bundles)])
    number = np.full(last + 1, -1)
    for k, bundle in enumerate(bundles):
        number[list(bundle)] = k
    moved = number[move.item]
    sends, receives = move.sender == rank, move.receiver == rank
    leaving = _Pieces.of(move, moved, move.receiver, sends, source)
    coming = _Pieces.of(move, moved, move.sender, receives & ~sends, target)
    here = [_Pieces.of(move, moved, move.sender, receives & sends, boxes) for boxes in (source, target)]
    return tuple(
        Index(
            rank,
            leaving.of_bundle(k).forms(),
            coming.of_bundle(k).strips(),
            coming.of_bundle(k).messages(),
            tuple(map(Local, *(each.of_bundle(k).single() for each in here))),
        )
        for k in range(len(bundles))
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces in one end's tensors, sorted by bundle, peer, weight and place: one order on both ends of a message.

    Attributes:
        bundle, peer: int64[n].
        table: int64[n, 5], the first five fields of a strip.
    """

    bundle: np.ndarray
    peer: np.ndarray
    table: np.ndarray

    @classmethod
    def of(
        cls, move: Move, bundle: np.ndarray, peer: np.ndarray, chosen: np.ndarray, held: Mapping[int, Box]
    ) -> _Pieces:
        """Find the chosen boxes of a move, where they are in a bundle, in the tensors of `held` boxes."""
        chosen = np.flatnonzero(chosen & (bundle >= 0))
        bundle, peer, item, *edges = (column[chosen] for column in (bundle, peer, *move.columns()[2:]))
        order = np.lexsort([peer, bundle])  # which leaves boxes of a pair as all moves have them: by item and place
        bundle, peer, item, start, stop, start2, stop2 = (column[order] for column in (bundle, peer, item, *edges))
        weights = np.array(sorted(held), dtype=np.int64)
        boxes = np.array([held[weight] for weight in weights.tolist()], dtype=np.int64).reshape(-1, 4)
        first, _, left, right = boxes[np.searchsorted(weights, item)].T
        at = (start - first) * (right - left) + start2 - left
        return cls(bundle, peer, np.stack((item, stop - start, stop2 - start2, right - left, at), axis=1))

    @property
    def sizes(self) -> np.ndarray:
        """Elements of every piece."""
        return self.table[:, 1] * self.table[:, 2]

    def of_bundle(self, number: int) -> _Pieces:
        """Return the pieces of one bundle."""
        here = slice(*np.searchsorted(self.bundle, [number, number + 1]))
        return _Pieces(self.bundle[here], self.peer[here], self.table[here])

    def of_peers(self) -> Iterator[tuple[int, _Pieces]]:
        """Yield the pieces of every peer."""
        edges = [*np.flatnonzero(np.diff(self.peer, prepend=-1)).tolist(), len(self.peer)]
        for low, high in pairwise(edges):
            yield int(self.peer[low]), _Pieces(self.bundle[low:high], self.peer[low:high], self.table[low:high])

    def placed(self) -> np.ndarray:
        """Return the first six fields of a strip for every piece, int64[n, 6], one after the other in a buffer."""
        return np.column_stack((self.table, np.cumsum(self.sizes) - self.sizes))

    def single(self) -> tuple[Strip, ...]:
        """Return every piece as a strip, one after the other in a buffer."""
        return tuple(Strip(*row) for row in self.placed().tolist())

    def forms(self) -> tuple[Form, ...]:
        """Return the message of every peer; equal ones are one form."""
        found: dict[bytes, tuple[_Pieces, list[int]]] = {}
        for peer, pieces in self.of_peers():
            found.setdefault(pieces.table.tobytes(), (pieces, []))[1].append(peer)
        return tuple(Form(each.single(), int(each.sizes.sum()), tuple(peers)) for each, peers in found.values())

    def messages(self) -> tuple[tuple[int, int], ...]:
        """Return the elements of every peer's message."""
        return tuple((peer, int(pieces.sizes.sum())) for peer, pieces in self.of_peers())

    def strips(self) -> tuple[Strip, ...]:
        """Return the strips of a buffer with the messages of all peers: pieces of one size at equal distances."""
        if not len(self.table):
            return ()
        placed = self.placed()[np.lexsort([self.table[:, 4], self.table[:, 0]])]
        steps = np.diff(placed[:, 4:], axis=0)
        alike = (placed[1:, :4] == placed[:-1, :4]).all(axis=1) & (steps[:, 1] > 0)
        found = []
        for low, high in _runs(alike, steps):
            step, stride = steps[low].tolist() if high > low else (0, 0)
            strip = Strip(*placed[low].tolist())
            found.append(strip._replace(step=step, stride=stride, count=high - low + 1))
        return tuple(found)


def _runs(alike: np.ndarray, steps: np.ndarray) -> Iterator[tuple[int, int]]:
    """Cut pieces into runs of like ones at equal distances; yield the first and the last piece of each.

    Args:
        alike: bool[n - 1], whether a piece and the next may be in one run.
        steps: int64[n - 1, 2], the distances between them.
    """
    changes = np.ones(len(alike), dtype=bool)
    changes[1:] = ~alike[1:] | ~alike[:-1] | (steps[1:] != steps[:-1]).any(axis=1)
    edges = [*np.flatnonzero(changes).tolist(), len(alike)]
    free = 0  # the first piece that is in no run yet
    for low, high in pairwise(edges):  # links low .. high - 1 are equal
        if alike[low] and high > free:
            yield free, high
            free = high + 1
        elif free == low:
            yield low, low
            free = low + 1
    if free <= len(alike):
        yield free, len(alike)
