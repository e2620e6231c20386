"""Routed exchanges of a ring or gather: messages between nodes go through proxy ranks, so that all NICs share them.

All ranks of the group and its proxies derive the same moves, and from them each its own part. An element of these
moves is `unit` bytes: a key and a value of one head, as they lie in a message, or a row of latents. Gradients are the
same number of elements, or a multiple of it where they are wider.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from seqloom.attention.context_parallel.overlap import ContextParallelAttention, ExchangeBytes, Overlap
from seqloom.attention.kernels.interface import Gradients, Saved
from seqloom.attention.latent import HeadExpansion
from seqloom.attention.merge import sum_dtype
from seqloom.attention.tiles import ZigzagChunks, visible_runs
from seqloom.dist.routed import RoutedHandle, RoutedTransfer
from seqloom.dist.transport import Handle, Transport
from seqloom.layout import Move
from seqloom.plan import Group

Box = tuple[int, int, int, int, int]
"""Sender, receiver, item, start and stop."""


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExchanges:
    """One rank's part in the routed exchanges of a group.

    Attributes:
        forward, backward: its part in every exchange of a forward and of a backward, in order.
        unit: bytes of an element.
        device: of buffers for messages that are passed on.
    """

    transport: Transport
    forward: tuple[RoutedTransfer, ...]
    backward: tuple[RoutedTransfer, ...]
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
        """Derive the part of the transport's rank in the moves of a group's forward and backward."""
        assert group.route is not None  # the caller has asked
        distinct = dict.fromkeys((*moves[0], *moves[1]))  # in most rings nearly all exchanges are equal
        parts = {move: RoutedTransfer.of(move, group.route, node_size, transport.rank) for move in distinct}
        forward, backward = (tuple(parts[move] for move in pass_moves) for pass_moves in moves)
        return cls(transport, forward, backward, unit, device)

    def start(
        self, transfer: RoutedTransfer, sent: Mapping[int, torch.Tensor], wanted: Mapping[int, torch.Tensor]
    ) -> Handle:
        """Start an exchange: messages of this rank by item, and buffers for those to it."""
        return RoutedHandle(transfer, self.transport, sent, wanted, unit=self.unit, device=self.device)


@dataclass(frozen=True, slots=True, eq=False)
class ProxyRank(ContextParallelAttention):
    """A rank that only passes on a group's messages, without a row of its own."""

    routed: RoutedExchanges

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        overlap: Overlap,
        expansion: HeadExpansion | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take part in the exchanges of a forward."""
        self._pass_on(self.routed.forward, overlap)
        return q.new_empty(q.shape), q.new_empty((q.shape[1], 0), dtype=sum_dtype(q.dtype))

    def backward(
        self, dout: torch.Tensor, saved: Saved, overlap: Overlap, expansion: HeadExpansion | None = None
    ) -> Gradients:
        """Take part in the exchanges of a backward."""
        self._pass_on(self.routed.backward, overlap)
        return saved.q.new_empty(saved.q.shape), saved.k.new_empty(saved.k.shape), saved.v.new_empty(saved.v.shape)

    def exchange_bytes(self, kv_row: int, gradient_row: int) -> ExchangeBytes:
        """See `ContextParallelAttention.exchange_bytes`; the messages are for others."""
        transfers, unit = (self.routed.forward, self.routed.backward), self.routed.unit
        forward, backward = (tuple(one.received_elements * unit for one in some) for some in transfers)
        return forward, backward

    def _pass_on(self, transfers: Sequence[RoutedTransfer], overlap: Overlap) -> None:
        for exchange, transfer in enumerate(transfers):
            handle = self.routed.start(transfer, {}, {})
            overlap(exchange)
            handle.wait()


def key_item(rank: int) -> int:
    """Return the item number of the keys and values that a rank sends."""
    return 2 * rank


def gradient_item(rank: int) -> int:
    """Return the item number of the gradients that a rank passes on in a ring."""
    return 2 * rank + 1


def returned_item(sender: int, receiver: int) -> int:
    """Return the item number of the gradients that a rank returns to another one after a gather."""
    return (sender << 32) + receiver


def ring_moves(group: Group, rows: int, widths: Sequence[int], wide: int) -> tuple[list[Move], list[Move]]:
    """Return the exchanges of a ring, see `ring.py`: those of forward, and those of backward.

    Every message has as many `rows` as the longest, so that hardly any two exchanges differ.

    Args:
        widths: elements of a row, for every Ulysses index.
        wide: elements of a gradient for one of a key and value.
    """
    blocks, keys, gradients = group.ulysses_groups(), [], []
    for block, after in zip(blocks, (*blocks[1:], blocks[0]), strict=True):
        for sender, receiver, width in zip(block, after, widths, strict=True):
            keys.append((sender, receiver, key_item(sender), 0, rows * width))
            gradients.append((sender, receiver, gradient_item(sender), 0, rows * width * wide))
    first, middle, last = _move(keys), _move(keys + gradients), _move(gradients)
    return [first] * (group.ring - 1), [first, *[middle] * (group.ring - 2), last, last]


def gather_moves(
    group: Group, chunks: Sequence[ZigzagChunks], widths: Sequence[int], wide: int, *, causal: bool, window: int | None
) -> tuple[list[Move], list[Move]]:
    """Return the exchanges of a gather, see `gather.py`: the keys that an index sees, and their gradients back.

    Arguments are those of `ring_moves`, with the chunks of every ring index and the mask.
    """
    blocks, there, back = group.ulysses_groups(), [], []
    for reader in chunks:
        for holder, runs in zip(chunks, visible_runs(chunks, reader, causal=causal, window=window), strict=True):
            if reader is holder:
                continue
            pairs = zip(blocks[holder.index], blocks[reader.index], widths, strict=True)
            for sender, receiver, width in pairs:
                there += [(sender, receiver, key_item(sender), low * width, high * width) for low, high in runs]
                rows = sum(high - low for low, high in runs)
                back.append((receiver, sender, returned_item(receiver, sender), 0, rows * width * wide))
    return [_move(there)], [_move(there), _move(back)]


def _move(boxes: Iterable[Box]) -> Move:
    """Return the move of those boxes that are not empty."""
    filled = [box for box in boxes if box[4] > box[3]]
    return Move(*np.array(filled, dtype=np.int64).reshape(-1, 5).T)
