"""The network as the engine sees it: `Transport`, a few collective and point-to-point verbs.

`TorchTransport` runs them on torch.distributed, `ThreadTransport` among threads of one process (tests, `seqloom
verify`), `SingleRankTransport` on one rank. All of them follow NCCL's rules: the ranks of a communicator call the same
verbs in the same order with matching sizes and dtypes, messages carry no tags, and sends that cross are in one
`exchange`.

Pipeline stages use `send` and `receive`. Each `P2PChannel` (direction, sender, receiver) delivers its messages in the
order sent and waits neither for other channels nor for the other verbs, so a receive may start long before the send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import numpy as np
import torch

from seqloom.errors import SeqloomError


class P2PDirection(StrEnum):
    """Hidden states to the next stage (forward), or their gradients to the previous one (backward)."""

    FORWARD = "forward"
    BACKWARD = "backward"


class P2PChannel(NamedTuple):
    """Messages of one direction from one rank to another."""

    direction: P2PDirection
    sender: int
    receiver: int

    @property
    def peers(self) -> tuple[int, int]:
        """The two ranks, the lower one first."""
        low, high = sorted((self.sender, self.receiver))
        return low, high


class P2PTensor(NamedTuple):
    """A contiguous tensor sent to, or received from, a peer rank."""

    peer: int
    tensor: torch.Tensor


class Handle(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Return when received tensors may be read and sent ones overwritten (on a GPU: in stream order)."""


class Message(Handle, Protocol):
    """A `send` or `receive` in flight."""

    def done(self) -> bool:
        """Whether `wait` is known to return at once; a transport that cannot tell says no until `wait` returned."""


class Transport(Protocol):
    """One rank's connection to the others. Ranks are global; a block is an ascending run of them."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def ranks(self) -> int:
        """Size of the world."""

    @property
    def waits_in_stream(self) -> bool:
        """Whether `wait` of a handle blocks only the current CUDA stream, not the caller."""

    @property
    def background(self) -> Transport:
        """The same ranks with `exchange` on a second world communicator, for traffic that overlaps the computation.

        Exchanges here and there do not wait for each other.
        """

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """Send one chunk of `input` to every rank of `block` and fill `output` with the chunks received.

        Args:
            output, input: contiguous, one axis, same dtype. Chunks follow each other in block order.
            output_sizes, input_sizes: elements of every chunk; zero is allowed.
            block: ranks of the communicator, this one included; one of the fixed family.
        """

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Handle:
        """Start all these sends and receives at once, on the world communicator (batch_isend_irecv).

        Tensors between the same two ranks arrive in the order listed.
        """

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int]) -> None:
        """Fill `output` [len(block) * n] with the `input` [n] of every rank of `block`, in block order."""

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """Replace `tensor` by its sum over the ranks of `block`, bit for bit the same on all of them."""

    def connect(self, channels: Iterable[P2PChannel]) -> None:
        """Set up channels for `send` and `receive`. Both ends name a channel before its first message.

        Ranks may name different channels; naming a connected one again costs nothing.
        """

    def send(self, tensor: torch.Tensor, peer: int, direction: P2PDirection) -> Message:
        """Start to send a contiguous tensor of at least one element to another rank."""

    def receive(self, tensor: torch.Tensor, peer: int, direction: P2PDirection) -> Message:
        """Start to receive the next message of `peer` into a contiguous tensor of its size and dtype."""


class Completed:
    """The handle of a transfer that is over."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


def check_peer(rank: int, ranks: int, peer: int, direction: P2PDirection) -> None:
    """Refuse a message to the rank itself or to a rank outside the world."""
    if peer == rank or not 0 <= peer < ranks:
        raise SeqloomError(
            f"rank {rank} has a {direction} message with rank {peer}: messages join two of the ranks 0 .. {ranks - 1}; "
            "copy what stays on a rank"
        )


def exchange_nonempty(transport: Transport, sends: Iterable[P2PTensor], receives: Iterable[P2PTensor]) -> Handle:
    """Start an exchange of the tensors that have elements: both sides know the sizes and leave the others out."""
    outgoing = [each for each in sends if each.tensor.numel()]
    incoming = [each for each in receives if each.tensor.numel()]
    return transport.exchange(outgoing, incoming) if outgoing or incoming else Completed()


def all_to_all(
    transport: Transport,
    output: torch.Tensor,
    input: torch.Tensor,
    output_sizes: Sequence[int],
    input_sizes: Sequence[int],
    ranks: Sequence[int],
    *,
    collective: bool,
) -> None:
    """Run `Transport.all_to_all` among any ranks, all of which call it.

    Args:
        output, input, output_sizes, input_sizes: see `Transport.all_to_all`.
        ranks: distinct, in the same order on all of them; this one included.
        collective: whether these ranks have a communicator; otherwise they send and receive on the world's.
    """
    if collective:
        transport.all_to_all(output, input, output_sizes, input_sizes, ranks)
        return
    sent, received = input.split(list(input_sizes)), output.split(list(output_sizes))
    index = list(ranks).index(transport.rank)
    received[index].copy_(sent[index])
    outgoing, incoming = (
        [P2PTensor(peer, chunk) for peer, chunk in zip(ranks, chunks, strict=True) if peer != transport.rank]
        for chunks in (sent, received)
    )
    exchange_nonempty(transport, outgoing, incoming).wait()


def broadcast_bytes(
    transport: Transport, payload: bytes | None, *, root: int = 0, device: torch.device | str = "cpu"
) -> bytes:
    """Return the root's bytes on every rank, in a binary tree of exchanges; all ranks of the world call it.

    `payload` is what the root sends, such as a plan, and None on the others.
    """
    if (payload is None) == (transport.rank == root):
        given = "nothing" if payload is None else f"{len(payload)} bytes"
        raise SeqloomError(f"rank {transport.rank} gave {given} to a broadcast from rank {root}; only the root gives")
    size = torch.tensor([0 if payload is None else len(payload)], dtype=torch.int64, device=device)
    _broadcast(transport, size, root)
    if payload is None:
        content = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
    else:
        content = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy()).to(device)
    if len(content):
        _broadcast(transport, content, root)
    return bytes(content.cpu().numpy())


def _broadcast(transport: Transport, tensor: torch.Tensor, root: int) -> None:
    """Fill `tensor` on all ranks with the root's: in hop k the first 2^k ranks each serve one more."""
    ranks = transport.ranks
    index, reached = (transport.rank - root) % ranks, 1
    while reached < ranks:
        child, parent = index + reached, index - reached
        sends = [P2PTensor((child + root) % ranks, tensor)] if index < reached and child < ranks else []
        receives = [P2PTensor((parent + root) % ranks, tensor)] if 0 <= parent < reached else []
        exchange_nonempty(transport, sends, receives).wait()
        reached *= 2
