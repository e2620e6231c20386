"""The network as the engine sees it: `Transport`, a few collective and point-to-point verbs.

`TorchTransport` runs them on torch.distributed, `ThreadTransport` among threads of one process (tests, `seqloom
verify`), `SingleRankTransport` on one rank. All of them follow NCCL's rules: the ranks of a communicator call the same
verbs in the same order with matching sizes and dtypes, messages carry no tags, and sends that cross are in one
`exchange`.

Exchanges use one of a few world communicators, the `Channel`s. Those of one channel run one after the other on every
rank; channels do not wait for each other.

A call may block the host until its other side is called too: NCCL does so when a pair of ranks first meets, and a GPU
whose kernel waits for a peer does so to whoever must drain it first (a kernel's first launch, an allocation). So the
calls of all ranks have one global order, see `dist.strict_transport`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from seqloom.errors import SeqloomError


class Channel(IntEnum):
    """A world communicator for exchanges.

    Messages between pipeline stages have four, so that what a stage receives does not wait behind what it sends:
    forward or backward, from pipeline ranks of even number or of odd number.
    """

    LAYERS = 0  # rings and token redistribution inside the layers
    PARAMETERS = 1  # parameters and gradients, while layers compute
    FORWARD_EVEN = 2
    FORWARD_ODD = 3
    BACKWARD_EVEN = 4
    BACKWARD_ODD = 5

    @classmethod
    def of_message(cls, pp_rank: int, *, forward: bool) -> Channel:
        """Return the channel of a message that leaves a pipeline rank for the next stage, or the previous one."""
        return cls((cls.FORWARD_EVEN if forward else cls.BACKWARD_EVEN) + pp_rank % 2)


class P2PTensor(NamedTuple):
    """A contiguous tensor sent to, or received from, a peer rank."""

    peer: int
    tensor: torch.Tensor


class Handle(Protocol):
    """A transfer in flight."""

    def wait(self) -> None:
        """Return when received tensors may be read and sent ones overwritten (on a GPU: in stream order)."""


class Exchange(Handle, Protocol):
    """An exchange in flight."""

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

    def on(self, channel: Channel) -> Transport:
        """Return the same ranks with `exchange` on another channel."""

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

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Exchange:
        """Start all these sends and receives at once, on the communicator of the channel (batch_isend_irecv).

        Tensors between the same two ranks arrive in the order listed.
        """

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int], sizes: Sequence[int] | None = None
    ) -> None:
        """Fill `output` with the `input` of every rank of `block`, in block order.

        Args:
            output, input: contiguous, same dtype.
            sizes: elements of the input of every rank; zero is allowed. None: all inputs have as many.
        """

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """Replace `tensor` by its sum over the ranks of `block`, bit for bit the same on all of them."""

    def broadcast(self, payload: bytes | None, *, root: int = 0) -> bytes:
        """Return the root's bytes, such as a plan, on every rank; others give None. The host waits for them."""


class Completed:
    """The handle of a transfer that is over."""

    __slots__ = ()

    def wait(self) -> None:
        """Return at once."""

    def done(self) -> bool:
        """Return True."""
        return True


def exchange_nonempty(transport: Transport, sends: Iterable[P2PTensor], receives: Iterable[P2PTensor]) -> Exchange:
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


def all_gather(
    transport: Transport,
    output: torch.Tensor,
    input: torch.Tensor,
    sizes: Sequence[int],
    ranks: Sequence[int],
    *,
    collective: bool,
) -> None:
    """Run `Transport.all_gather` among any ranks, all of which call it.

    Args:
        output, input, sizes: see `Transport.all_gather`; with one axis.
        ranks: distinct, in the same order on all of them; this one included.
        collective: whether these ranks have a communicator; otherwise they send and receive on the world's.
    """
    if collective:
        transport.all_gather(output, input, ranks, sizes)
    else:
        gather_by_exchange(transport, output, input, sizes, ranks)


def gather_by_exchange(
    transport: Transport, output: torch.Tensor, input: torch.Tensor, sizes: Sequence[int], ranks: Sequence[int]
) -> None:
    """Send this rank's `input` to all `ranks` and receive theirs; arguments are those of `all_gather`."""
    chunks = output.view(-1).split(list(sizes))
    chunks[list(ranks).index(transport.rank)].copy_(input.view(-1))
    others = [P2PTensor(peer, chunk) for peer, chunk in zip(ranks, chunks, strict=True) if peer != transport.rank]
    exchange_nonempty(transport, [P2PTensor(each.peer, input) for each in others], others).wait()


def check_payload(rank: int, payload: bytes | None, root: int) -> None:
    """Refuse a broadcast to which another rank than the root gives bytes, or the root none."""
    if (payload is None) == (rank == root):
        given = "nothing" if payload is None else f"{len(payload)} bytes"
        raise SeqloomError(f"rank {rank} gave {given} to a broadcast from rank {root}; only the root gives")
