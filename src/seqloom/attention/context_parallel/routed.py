"""The exchanges of a routed group, as moves that all ranks of its party know, and a rank's part in each of them.

An element of these moves is `unit` bytes: a key and a value of one head, as they lie in a message. Gradients are the
same number of elements, or a multiple of it where they are wider.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from seqloom.attention.context_parallel.overlap import ContextParallelAttention, Meanwhile, Waits
from seqloom.attention.kernels.interface import Gradients, Saved
from seqloom.attention.lse import sum_dtype
from seqloom.attention.tiles import Chunks, visible_runs
from seqloom.dist.routed import RoutedTransfer, start_routed
from seqloom.dist.transport import Handle, Transport
from seqloom.layout import Move
from seqloom.plan import Group

Box = tuple[int, int, int, int, int]
"""Sender, receiver, item, start and stop."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExchanges:
    """The routed exchanges of a group, as one rank of its party sees them.

    Attributes:
        transport: this rank's.
        ahead, back: its part in every exchange of a forward and of a backward, in order.
        unit: bytes of an element.
        device: where what is passed on is kept.
    """

    transport: Transport
    ahead: tuple[RoutedTransfer, ...]
    back: tuple[RoutedTransfer, ...]
    unit: int
    device: torch.device

    @classmethod
    def of(
        cls,
        transport: Transport,
        group: Group,
        moves: tuple[Sequence[Move], Sequence[Move]],
        unit: int,
        device: torch.device,
        node_size: int,
    ) -> RoutedExchanges:
        """Work out the part of the transport's rank in the moves of a group's forward and backward."""
        known: dict[Move, RoutedTransfer] = {}  # in most rings nearly all exchanges are alike

        def part(move: Move) -> RoutedTransfer:
            if move not in known and group.route is not None:
                known[move] = RoutedTransfer.of(move, group.route, node_size, transport.rank)
            return known[move]

        ahead, back = (tuple(part(move) for move in way) for way in moves)
        return cls(transport, ahead, back, unit, device)

    def start(
        self, passage: RoutedTransfer, sent: Mapping[int, torch.Tensor], wanted: Mapping[int, torch.Tensor]
    ) -> Handle:
        """Start an exchange: messages of this rank by item, and rooms for those to it."""
        return start_routed(passage, self.transport, sent, wanted, unit=self.unit, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class ProxyRank(ContextParallelAttention):
    """A rank that only passes on what a group sends, without a row of its own."""

    roads: RoutedExchanges

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take part in the exchanges of a forward."""
        self._pass_on(self.roads.ahead, meanwhile)
        return q.new_empty(q.shape), q.new_empty((q.shape[1], 0), dtype=sum_dtype(q.dtype))

    def backward(self, dout: torch.Tensor, saved: Saved, meanwhile: Meanwhile) -> Gradients:
        """Take part in the exchanges of a backward."""
        self._pass_on(self.roads.back, meanwhile)
        return saved.q.new_empty(saved.q.shape), saved.k.new_empty(saved.k.shape), saved.v.new_empty(saved.v.shape)

    def waits(self, row: int, wide_row: int) -> Waits:
        """See `Shared.waits`; what arrives is for others."""
        ahead, back = (
            tuple(each.received_elements * self.roads.unit for each in way)
            for way in (self.roads.ahead, self.roads.back)
        )
        return Waits(ahead, back)

    def _pass_on(self, passages: Sequence[RoutedTransfer], meanwhile: Meanwhile) -> None:
        for exchange, passage in enumerate(passages):
            handle = self.roads.start(passage, {}, {})
            meanwhile(exchange)
            handle.wait()


def keys_of(rank: int) -> int:
    """Return the item of the keys and values that a rank sends."""
    return 2 * rank


def gradients_of(rank: int) -> int:
    """Return the item of the gradients that a rank passes on in a ring."""
    return 2 * rank + 1


def returned(sender: int, receiver: int) -> int:
    """Return the item of the gradients that a rank returns to another one after a gather."""
    return (sender << 32) + receiver


def ring_moves(group: Group, rows: int, widths: Sequence[int], wide: int) -> tuple[list[Move], list[Move]]:
    """Return the exchanges of a ring, see `ring.py`: those of forward, and those of backward.

    Every message has as many rows as the longest, so that hardly any two exchanges differ.

    Args:
        group: ulysses x ring.
        rows: of every message.
        widths: elements of a row, for every Ulysses index.
        wide: elements of a gradient for one of a key and value.
    """
    blocks, keys, gradients = group.ulysses_groups(), [], []
    for block, after in zip(blocks, (*blocks[1:], blocks[0]), strict=True):
        for sender, receiver, width in zip(block, after, widths, strict=True):
            keys.append((sender, receiver, keys_of(sender), 0, rows * width))
            gradients.append((sender, receiver, gradients_of(sender), 0, rows * width * wide))
    first, middle, last = _move(keys), _move(keys + gradients), _move(gradients)
    return [first] * (group.ring - 1), [first, *[middle] * (group.ring - 2), last, last]


def gather_moves(
    group: Group, chunks: Sequence[Chunks], widths: Sequence[int], wide: int, *, causal: bool, window: int | None
) -> tuple[list[Move], list[Move]]:
    """Return the exchanges of a gather, see `gather.py`: what an index sees, and back the gradients of that.

    Arguments are those of `ring_moves`, with the chunks of every ring index and the mask.
    """
    blocks, there, back = group.ulysses_groups(), [], []
    for reader in chunks:
        for holder, runs in zip(chunks, visible_runs(chunks, reader, causal=causal, window=window), strict=True):
            if reader is holder:
                continue
            pairs = zip(blocks[holder.index], blocks[reader.index], widths, strict=True)
            for sender, receiver, width in pairs:
                there += [(sender, receiver, keys_of(sender), low * width, high * width) for low, high in runs]
                rows = sum(high - low for low, high in runs)
                back.append((receiver, sender, returned(receiver, sender), 0, rows * width * wide))
    return [_move(there)], [_move(there), _move(back)]


def _move(boxes: Iterable[Box]) -> Move:
    """A move of those boxes that hold something."""
    filled = [box for box in boxes if box[4] > box[3]]
    return Move(*np.array(filled, dtype=np.int64).reshape(-1, 5).T)
