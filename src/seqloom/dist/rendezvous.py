"""Where ranks that are threads of one process meet: who waits for what, who has failed, who can never go on.

Every rank that waits does so here, so the meeting knows at once when all of them wait and nobody is left to help.
"""

from __future__ import annotations

import threading
import torch
from collections import Counter
from collections import defaultdict
from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import field
from seqloom.dist.transport import P2PDirection
from seqloom.errors import SeqloomError
from typing import NoReturn


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
    lane: P2PDirection | None = None
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


class Rendezvous:
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


# ---- merged: comm.matching
# What is sent meets what is received: first come, first met, for every communicator and pair of ranks.
#
# Every verb is a bundle of sides here. An all-to-all sends a piece to each rank of its block and receives one from
# each; an all-gather sends the same piece to all; an all-reduce does too and adds what it gets. So there is one
# rule
# of matching, and one place where the two sides of a mistake are known.


class MessageMatcher:
    """The operations of all ranks of one run. What is received is copied when the two sides meet."""

    advice = "every receive needs a send of its peer, and all ranks of a block must call its verbs"

    def __init__(self, ranks: int) -> None:
        """Start without any operation."""
        self.ranks = ranks
        self.meeting = Rendezvous(ranks, self.explain, self.advice)
        self._numbers: Counter[tuple[object, ...]] = Counter()
        self._open: defaultdict[tuple[object, int, int, bool], deque[Side]] = defaultdict(deque)

    def post(
        self,
        rank: int,
        verb: str,
        block: tuple[int, ...] | None,
        sends: Iterable[tuple[int, torch.Tensor]],
        receives: Iterable[tuple[int, torch.Tensor]],
        lane: P2PDirection | None = None,
        *,
        aside: bool = False,
    ) -> Operation:
        """Start a verb of `rank`: flat tensors for, and from, other ranks (or itself), in order."""
        with self.meeting.lock:
            self.meeting.go_on()
            operation = Operation(rank, verb, block, 0, lane, aside)
            operation.sides = [Side(operation, peer, tensor, True) for peer, tensor in sends]
            operation.sides += [Side(operation, peer, tensor, False) for peer, tensor in receives]
            operation.open_sides = len(operation.sides)
            operation.number = self._numbers[operation.queue]
            self._numbers[operation.queue] += 1
            self.start(operation)
            return operation

    def wait(self, operation: Operation) -> None:
        """Return when all sides of `operation` have met the other."""
        self.meeting.wait(operation)

    def leave(self, rank: int) -> None:
        """Note that the body of `rank` has returned."""
        self.meeting.end(rank)

    def explain(self, operation: Operation) -> str:
        """Say what an operation that is not done waits for."""
        return operation.missing()

    def start(self, operation: Operation) -> None:
        """Let the sides of `operation` meet what other ranks have started. Needs the lock."""
        if not operation.sides:
            self.finish(operation)
        for side in operation.sides:
            self._meet(side)

    def deliver(self, send: Side, receive: Side) -> None:
        """Hand over a parcel whose sides agree."""
        receive.tensor.copy_(send.tensor)

    def finish(self, operation: Operation) -> None:
        """Note that all sides of `operation` have met."""
        self.meeting.complete(operation)

    def _meet(self, side: Side) -> None:
        """Pair `side` with the oldest open one of its peer, or leave it open."""
        channel, rank = side.operation.channel, side.operation.rank
        waiting = self._open[channel, side.peer, rank, not side.sends]
        if not waiting:
            self._open[channel, rank, side.peer, side.sends].append(side)
            return
        other = waiting.popleft()
        send, receive = (side, other) if side.sends else (other, side)
        if (error := _disagreement(send, receive)) is not None:
            self.meeting.refuse(error, rank)
        self.deliver(send, receive)
        for met in (send, receive):
            met.met = True
            met.operation.open_sides -= 1
        for operation in dict.fromkeys((send.operation, receive.operation)):
            if not operation.open_sides:
                self.finish(operation)


def _disagreement(send: Side, receive: Side) -> SeqloomError | None:
    """Return the error of two sides that differ in verb, size or dtype."""
    verbs = send.operation.verb == receive.operation.verb
    if verbs and send.tensor.numel() == receive.tensor.numel() and send.tensor.dtype == receive.tensor.dtype:
        return None
    rule = "sizes and dtypes of both sides must be the same"
    if not verbs:
        rule = "all ranks of a block must call the same verbs in the same order"
    return SeqloomError(
        f"rank {send.operation.rank} {send.operation} {send}, but "
        f"rank {receive.operation.rank} {receive.operation} {receive}; {rule}"
    )
