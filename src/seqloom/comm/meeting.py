"""Where ranks that are threads of one process meet: who waits for what, who has failed, who can never go on.

Every rank that waits does so here, so the meeting knows at once when all of them wait and nobody is left to help.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from seqloom.comm.lanes import Lane
from seqloom.errors import SeqloomError


class Stopped(BaseException):
    """Ends a rank after another one has failed. Not an Exception, so that no rank survives it by accident."""


@dataclass(slots=True, eq=False)
class Side:
    """One end of a parcel: what a rank sends to `peer`, or receives from it."""

    operation: Operation
    peer: int
    tensor: torch.Tensor
    sends: bool
    met: bool = False

    def __str__(self) -> str:
        """For example: sends 12 float32 to rank 1."""
        verb, way = ("sends", "to") if self.sends else ("receives", "from")
        return f"{verb} {self.tensor.numel()} {str(self.tensor.dtype).removeprefix('torch.')} {way} rank {self.peer}"


@dataclass(slots=True, eq=False)
class Operation:
    """One verb called by one rank: the `number`-th on its communicator, done when every side has met the other.

    Attributes:
        block: ranks of the communicator; None: the world communicator of `exchange`.
        lane: of a message, which has a single side and no communicator.
        aside: on the second world communicator; `block` is None.
    """

    rank: int
    verb: str
    block: tuple[int, ...] | None
    number: int
    lane: Lane | None = None
    aside: bool = False
    sides: list[Side] = field(default_factory=list)
    open_sides: int = 0
    done: bool = False

    def __str__(self) -> str:
        """For example: exchange #3, or all_to_all #0 on ranks (4, 5, 6, 7)."""
        return f"{self.verb} #{self.number}" + ("" if self.block is None else f" on ranks {self.block}")

    @property
    def channel(self) -> object:
        """What the operation shares with those that it may meet."""
        return (self.block, self.aside) if self.lane is None else self.lane

    @property
    def queue(self) -> tuple[object, ...]:
        """What the operation shares with those of its rank that it keeps the order of."""
        if self.lane is None:
            return self.channel, self.rank
        return self.lane, self.rank, self.sides[0].peer, self.sides[0].sends

    def missing(self) -> str:
        """Say what this operation still waits for."""
        if self.block is not None:
            return f"no word from {name_ranks(sorted({side.peer for side in self.sides if not side.met}))}"
        return ", ".join(str(side) for side in self.sides if not side.met)


class Meeting:
    """The state that all ranks of one run share. Whoever reads or changes it holds `lock`."""

    def __init__(self, ranks: int, explain: Callable[[Operation], str], advice: str) -> None:
        """Open a meeting of ranks 0 .. ranks - 1.

        Args:
            explain: says in words what an operation that is not done waits for.
            advice: the way out of a deadlock, for the error.
        """
        self.ranks = ranks
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self._explain = explain
        self._advice = advice
        self._wake = [threading.Condition(self.lock) for _ in range(ranks)]
        self._waiting: dict[int, Operation] = {}
        self._ended: set[int] = set()

    def go_on(self) -> None:
        """Return if no rank has failed, else end the calling one. Needs `lock`."""
        if self.failure is not None:
            raise Stopped

    def wait(self, operation: Operation) -> None:
        """Return when `operation` is done; a deadlock is an error at once."""
        with self.lock:
            self.go_on()
            while not operation.done:
                self._waiting[operation.rank] = operation
                self._refuse_deadlock(operation.rank)
                self._wake[operation.rank].wait()
                self.go_on()

    def complete(self, operation: Operation) -> None:
        """Mark `operation` as done and wake its rank if it waits for it. Needs `lock`."""
        operation.done = True
        if self._waiting.get(operation.rank) is operation:
            del self._waiting[operation.rank]
            self._wake[operation.rank].notify()

    def end(self, rank: int) -> None:
        """Note that the body of `rank` has returned: it will help nobody any more."""
        with self.lock:
            self.go_on()
            self._ended.add(rank)
            self._refuse_deadlock(rank)

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """End the run with `error`, unless it has failed before, and wake all ranks."""
        with self.lock:
            self._fail(error, rank)

    def refuse(self, error: BaseException, rank: int) -> NoReturn:
        """End the run with `error`, found by `rank`, and raise it there. Needs `lock`."""
        self._fail(error, rank)
        raise error

    def standing(self, rank: int) -> str | None:
        """Say what `rank` waits for; None if it does not wait here. Needs `lock`."""
        operation = self._waiting.get(rank)
        if operation is not None:
            return f"rank {rank} waits for {operation}: {self._explain(operation)}"
        return f"rank {rank} has ended" if rank in self._ended else None

    def _fail(self, error: BaseException, rank: int | None) -> None:
        if self.failure is not None:
            return
        if rank is not None:
            error.add_note(f"on rank {rank} of {self.ranks}")
        self.failure = error
        for condition in self._wake:
            condition.notify_all()

    def _refuse_deadlock(self, rank: int) -> None:
        """Fail if every rank that has not ended waits: what they wait for can then never come."""
        if not self._waiting or len(self._waiting) + len(self._ended) < self.ranks:
            return
        lines = "".join(f"\n  {self.standing(other)}" for other in range(self.ranks))
        error = SeqloomError(f"deadlock, every rank waits and none can go on:{lines}\n{self._advice}")
        self.refuse(error, rank)


def name_ranks(ranks: list[int]) -> str:
    """For example: rank 3, or ranks 0, 2, 5."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"
