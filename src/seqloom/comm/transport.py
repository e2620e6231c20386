"""What the engine asks of a network: a handful of verbs, behind which stand processes, threads or a checker.

The rules are NCCL's, whatever stands behind: every rank of a communicator calls the same verbs in the same order
with matching sizes and types, messages carry no tags, and sends that cross must be in one `exchange`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from seqloom.comm.lanes import Lane, Message, Way


class Parcel(NamedTuple):
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
    def aside(self) -> Transport:
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

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> Handle:
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

    def connect(self, ways: Iterable[Way]) -> None:
        """Make ways ready for `send` and `receive`. Both ends of a way name it, before the first message on it.

        Every rank may name other ways; what is ready already costs nothing.
        """
        ...

    def send(self, tensor: torch.Tensor, peer: int, lane: Lane) -> Message:
        """Start to send a contiguous tensor of at least one element to another rank; see `lanes`."""
        ...

    def receive(self, tensor: torch.Tensor, peer: int, lane: Lane) -> Message:
        """Start to receive the next message of `peer` on a lane into a contiguous tensor of its size and dtype."""
        ...
