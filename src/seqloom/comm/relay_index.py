"""The index work of a relay, done on the host once for a pair of layouts: columns of numbers, whatever the ranks.

A box that moves is a piece here. A rank of a thousand has a hundred thousand of them, in a few thousand strips.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from seqloom.comm.relay_parts import Box, Form, Index, Local, Strip
from seqloom.errors import SeqloomError
from seqloom.plan.layout import Layout
from seqloom.plan.move import Move


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
