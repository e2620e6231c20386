"""Messages between stages of a pipeline: one rank to one other, in order, beside everything else that travels.

A lane and a direction between two ranks is a way of its own. Messages of a way arrive in the order sent; ways do not
wait for each other, nor for the other verbs. So a receive may be started long before its message is sent.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple, Protocol

from seqloom.errors import SeqloomError


class Lane(StrEnum):
    """What a message is: hidden states on their way to the next stage, or gradients on their way back."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Way(NamedTuple):
    """From one rank to another on one lane."""

    lane: Lane
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


def check_peer(rank: int, ranks: int, peer: int, lane: Lane) -> None:
    """Refuse a message to nobody, or to oneself."""
    if peer == rank or not 0 <= peer < ranks:
        raise SeqloomError(
            f"rank {rank} has a message on lane {lane} with rank {peer}: messages join two of the ranks "
            f"0 .. {ranks - 1}; what stays on a rank is handed over without one"
        )
