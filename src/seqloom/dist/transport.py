"""Messages between stages of a pipeline: one rank to one other, in order, beside everything else that travels.

A lane and a direction between two ranks is a way of its own. Messages of a way arrive in the order sent; ways do not
wait for each other, nor for the other verbs. So a receive may be started long before its message is sent.
"""

from __future__ import annotations

import torch
from collections.abc import Iterable
from collections.abc import Sequence
from enum import StrEnum
from seqloom.errors import SeqloomError
from typing import NamedTuple
from typing import Protocol


class P2PDirection(StrEnum):
    """What a message is: hidden states on their way to the next stage, or gradients on their way back."""

    FORWARD = "forward"
    BACKWARD = "backward"


class P2PChannel(NamedTuple):
    """From one rank to another on one lane."""

    lane: P2PDirection
    sender: int
    receiver: int

    @property
    def peers(self) -> tuple[int, int]:
        """The two ranks, the lower one first."""
        low, high = sorted((self.sender, self.receiver))
        return low, high


class Message(Protocol):
    """A message under way; also a `Handle`."""

    def wait(self) -> None:
        """Return when a received tensor may be read and a sent one written (on a GPU: in stream order)."""
        ...

    def done(self) -> bool:
        """Whether `wait` is known to return at once; a transport that cannot tell says no until it has."""
        ...


def check_peer(rank: int, ranks: int, peer: int, lane: P2PDirection) -> None:
    """Refuse a message to nobody, or to oneself."""
    if peer == rank or not 0 <= peer < ranks:
        raise SeqloomError(
            f"rank {rank} has a message on lane {lane} with rank {peer}: messages join two of the ranks "
            f"0 .. {ranks - 1}; what stays on a rank is handed over without one"
        )


# ---- merged: comm.transport
# What the engine asks of a network: a handful of verbs, behind which stand processes, threads or a checker.
#
# The rules are NCCL's, whatever stands behind: every rank of a communicator calls the same verbs in the same order
# with matching sizes and types, messages carry no tags, and sends that cross must be in one `exchange`.


class P2PTensor(NamedTuple):
    """A contiguous tensor for, or from, another rank."""

    peer: int
    tensor: torch.Tensor


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Return when received tensors may be read and sent ones written (on a GPU: in stream order)."""
        ...


class Transport(Protocol):
    """One rank's door to the others. Ranks are numbers of the world; a block is an ascending run of them."""

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def ranks(self) -> int:
        """Size of the world."""
        ...

    @property
    def waits_in_stream(self) -> bool:
        """Whether `wait` of a handle holds up the current stream of the GPU only, not the caller."""
        ...

    @property
    def background(self) -> Transport:
        """The same ranks, but `exchange` runs on a second world communicator: those here and there do not wait.

        For what travels beside the computation, as parameters and gradients do.
        """
        ...

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """Send a piece of `input` to every rank of `block`, fill `output` with the pieces received.

        Args:
            output, input: contiguous, one axis, same dtype. Pieces lie one after the other in block order.
            output_sizes, input_sizes: elements of every piece; zero is fine.
            block: ranks of the communicator, this one among them; one of the fixed family.
        """
        ...

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Handle:
        """Start all these sends and receives at once, on the world communicator.

        Several parcels between the same two ranks arrive in the order they are listed.
        """
        ...

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int]) -> None:
        """Fill `output` [len(block) * n] with the `input` [n] of every rank of `block`, in block order."""
        ...

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """Replace `tensor` by its sum over the ranks of `block`, bit for bit the same on all of them."""
        ...

    def connect(self, ways: Iterable[P2PChannel]) -> None:
        """Make ways ready for `send` and `receive`. Both ends of a way name it, before the first message on it.

        Every rank may name other ways; what is ready already costs nothing.
        """
        ...

    def send(self, tensor: torch.Tensor, peer: int, lane: P2PDirection) -> Message:
        """Start to send a contiguous tensor of at least one element to another rank; see `lanes`."""
        ...

    def receive(self, tensor: torch.Tensor, peer: int, lane: P2PDirection) -> Message:
        """Start to receive the next message of `peer` on a lane into a contiguous tensor of its size and dtype."""
        ...


# ---- merged: comm.parcels
# Exchanges in which empty parcels are left out: both sides know the sizes, so neither waits for nothing.
#
# An all-to-all is one where its ranks have no communicator of their own.


def exchange_nonempty(transport: Transport, sends: Iterable[P2PTensor], receives: Iterable[P2PTensor]) -> Handle:
    """Start an exchange of the parcels that hold something; without any, nothing is called."""
    outgoing = [parcel for parcel in sends if parcel.tensor.numel()]
    incoming = [parcel for parcel in receives if parcel.tensor.numel()]
    return transport.exchange(outgoing, incoming) if outgoing or incoming else _Done()


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
    """Do `Transport.all_to_all` among any ranks, all of which call it.

    Args:
        transport: this rank's.
        output, input, output_sizes, input_sizes: see `Transport.all_to_all`.
        ranks: different ones, in an order on which all agree; this one among them.
        collective: they have a communicator. Otherwise they send and receive on the world's.
    """
    if collective:
        transport.all_to_all(output, input, output_sizes, input_sizes, ranks)
        return
    sent, received = input.split(list(input_sizes)), output.split(list(output_sizes))
    own = list(ranks).index(transport.rank)
    received[own].copy_(sent[own])
    outgoing, incoming = (
        [P2PTensor(peer, part) for peer, part in zip(ranks, parts, strict=True) if peer != transport.rank]
        for parts in (sent, received)
    )
    exchange_nonempty(transport, outgoing, incoming).wait()


class _Done:
    """The handle of an exchange of nothing."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once."""
