"""What is sent meets what is received: first come, first met, for every communicator and pair of ranks.

Every verb is a bundle of sides here. An all-to-all sends a piece to each rank of its block and receives one from
each; an all-gather sends the same piece to all; an all-reduce does too and adds what it gets. So there is one rule
of matching, and one place where the two sides of a mistake are known.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable

import torch

from seqloom.comm.lanes import Lane
from seqloom.comm.meeting import Meeting, Operation, Side
from seqloom.errors import SeqloomError


class Matching:
    """The operations of all ranks of one run. What is received is copied when the two sides meet."""

    advice = "every receive needs a send of its peer, and all ranks of a block must call its verbs"

    def __init__(self, ranks: int) -> None:
        """Start without any operation."""
        self.ranks = ranks
        self.meeting = Meeting(ranks, self.explain, self.advice)
        self._numbers: Counter[tuple[object, ...]] = Counter()
        self._open: defaultdict[tuple[object, int, int, bool], deque[Side]] = defaultdict(deque)

    def post(
        self,
        rank: int,
        verb: str,
        block: tuple[int, ...] | None,
        sends: Iterable[tuple[int, torch.Tensor]],
        receives: Iterable[tuple[int, torch.Tensor]],
        lane: Lane | None = None,
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
