"""Matches sends with receives between ranks that are threads of one process, and detects deadlocks.

Every verb is a set of one-sided transfers (`Side`). An all-to-all sends a chunk to each rank of its block and receives
one from each; an all-gather sends the same tensor to all; an all-reduce does too and adds what it receives. So there is
one matching rule, first come, first matched, for every communicator and pair of ranks. Every rank that waits does so
here, so `MessageMatcher` sees at once when all ranks wait and none can go on.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from seqloom.dist.transport import Channel
from seqloom.errors import SeqloomError


class Stopped(BaseException):
    """Ends a rank after another one has failed. Not an Exception, so that no rank catches it by accident."""


@dataclass(slots=True, eq=False)
class Side:
    """One end of a transfer: the flat tensor that a rank sends to `peer`, or receives from it."""

    operation: Operation
    peer: int
    tensor: torch.Tensor
    sends: bool
    matched: bool = False

    def __str__(self) -> str:
        """For example: sends 12 float32 to rank 1."""
        verb, preposition = ("sends", "to") if self.sends else ("receives", "from")
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{verb} {self.tensor.numel()} {dtype} {preposition} rank {self.peer}"


@dataclass(slots=True, eq=False)
class Operation:
    """One verb called by one rank: the `number`-th on its communicator, done when every side is matched.

    Attributes:
        block: ranks of the communicator; None: the world, in the communicator of a channel.
        channel: of an exchange; None: a verb of a block.
    """

    rank: int
    verb: str
    block: tuple[int, ...] | None
    number: int
    channel: Channel | None = None
    sides: list[Side] = field(default_factory=list)
    open_sides: int = 0
    done: bool = False

    def __str__(self) -> str:
        """For example: exchange #3, or all_to_all #0 on ranks (4, 5, 6, 7)."""
        return f"{self.verb} #{self.number}" + ("" if self.block is None else f" on ranks {self.block}")

    @property
    def communicator(self) -> object:
        """Operations are matched within a communicator, where those of one rank keep their order."""
        return self.block, self.channel

    @property
    def queue(self) -> tuple[object, int]:
        """The operations of this rank on the communicator."""
        return self.communicator, self.rank

    def missing(self) -> str:
        """Say what this operation still waits for."""
        if self.block is None:
            return ", ".join(str(side) for side in self.sides if not side.matched)
        silent = sorted({side.peer for side in self.sides if not side.matched})
        return f"no word from rank{'s' * (len(silent) != 1)} {', '.join(map(str, silent))}"


class MessageMatcher:
    """The operations of all ranks of one run. A received tensor is copied when its two sides are matched.

    Attributes:
        blocks: whether `post` waits for the other sides.
        lock: held by whoever reads or changes the state.
        failure: the first error of any rank, which ends the run.
    """

    blocks = False
    advice = "every receive needs a send of its peer, and all ranks of a block must call its verbs"

    def __init__(self, ranks: int) -> None:
        """Start without any operation."""
        self.ranks = ranks
        self.lock = threading.Lock()
        self.failure: BaseException | None = None
        self._wake = [threading.Condition(self.lock) for _ in range(ranks)]
        self._waiting: dict[int, Operation] = {}
        self._ended: set[int] = set()
        self._numbers: Counter[tuple[object, int]] = Counter()
        self._open: defaultdict[tuple[object, int, int, bool], deque[Side]] = defaultdict(deque)

    def post(
        self,
        rank: int,
        verb: str,
        block: tuple[int, ...] | None,
        sends: Iterable[tuple[int, torch.Tensor]],
        receives: Iterable[tuple[int, torch.Tensor]],
        channel: Channel | None = None,
    ) -> Operation:
        """Start a verb of `rank`: flat tensors for, and from, other ranks (or itself), in order."""
        with self.lock:
            self._stop_if_failed()
            operation = Operation(rank, verb, block, 0, channel)
            operation.sides = [Side(operation, peer, tensor, True) for peer, tensor in sends]
            operation.sides += [Side(operation, peer, tensor, False) for peer, tensor in receives]
            operation.open_sides = len(operation.sides)
            operation.number = self._numbers[operation.queue]
            self._numbers[operation.queue] += 1
            self.start(operation)
            if self.blocks:
                self._wait_until_done(operation)
            return operation

    def wait(self, operation: Operation) -> None:
        """Return when all sides of `operation` are matched; a deadlock is an error at once."""
        with self.lock:
            self._stop_if_failed()
            self._wait_until_done(operation)

    def leave(self, rank: int) -> None:
        """Note that the body of `rank` has returned: it will match nothing any more."""
        with self.lock:
            self._stop_if_failed()
            self._ended.add(rank)
            self._refuse_deadlock(rank)

    def start(self, operation: Operation) -> None:
        """Match the sides of `operation` with what other ranks have started. Needs `lock`."""
        if not operation.sides:
            self.finish(operation)
        for side in operation.sides:
            self._match(side)

    def deliver(self, send: Side, receive: Side) -> None:
        """Copy the tensor between two matched sides. Needs `lock`.

        On a GPU the host waits for the copy: it is in the stream of whichever side came last, not of who waits for it.
        """
        receive.tensor.copy_(send.tensor)
        if receive.tensor.is_cuda:
            torch.cuda.current_stream(receive.tensor.device).synchronize()

    def finish(self, operation: Operation) -> None:
        """Mark an operation whose sides are all matched as done and wake its rank if it waits. Needs `lock`."""
        operation.done = True
        if self._waiting.get(operation.rank) is operation:
            del self._waiting[operation.rank]
            self._wake[operation.rank].notify()

    def fail(self, error: BaseException, rank: int | None = None) -> None:
        """End the run with `error`, unless it has failed before, and wake all ranks."""
        with self.lock:
            self._fail(error, rank)

    def refuse(self, error: BaseException, rank: int) -> NoReturn:
        """End the run with `error`, found by `rank`, and raise it there. Needs `lock`."""
        self._fail(error, rank)
        raise error

    def describe(self, rank: int) -> str | None:
        """Say what `rank` waits for; None if it does not wait here. Needs `lock`."""
        operation = self._waiting.get(rank)
        if operation is not None:
            return f"rank {rank} waits for {operation}: {operation.missing()}"
        return f"rank {rank} has ended" if rank in self._ended else None

    def _match(self, side: Side) -> None:
        """Pair `side` with the oldest open one of its peer, or leave it open."""
        communicator, rank = side.operation.communicator, side.operation.rank
        waiting = self._open[communicator, side.peer, rank, not side.sends]
        if not waiting:
            self._open[communicator, rank, side.peer, side.sends].append(side)
            return
        other = waiting.popleft()
        send, receive = (side, other) if side.sends else (other, side)
        if (error := _mismatch(send, receive)) is not None:
            self.refuse(error, rank)
        self.deliver(send, receive)
        for matched in (send, receive):
            matched.matched = True
            matched.operation.open_sides -= 1
        for operation in dict.fromkeys((send.operation, receive.operation)):
            if not operation.open_sides:
                self.finish(operation)

    def _wait_until_done(self, operation: Operation) -> None:
        """Sleep, without `lock`, until all sides are matched. Needs `lock`."""
        while not operation.done:
            self._waiting[operation.rank] = operation
            self._refuse_deadlock(operation.rank)
            self._wake[operation.rank].wait()
            self._stop_if_failed()

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise Stopped

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
        lines = "".join(f"\n  {self.describe(other)}" for other in range(self.ranks))
        error = SeqloomError(f"deadlock, every rank waits and none can go on:{lines}\n{self.advice}")
        self.refuse(error, rank)


def _mismatch(send: Side, receive: Side) -> SeqloomError | None:
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
