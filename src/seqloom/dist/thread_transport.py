"""Ranks as threads of one process: for tests, `seqloom verify`, and several ranks on one GPU.

    results = run_ranks(4, lambda transport: work(transport))

CUDA tensors are copied on the current stream, which threads share unless they take one for a use of its own: what a
rank launched before it sends is in the copy. Backward runs in the calling thread, since autograd's one thread per
device cannot serve ranks that wait for each other.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Self, TypeVar, cast

import torch

from seqloom.dist.message_matching import MessageMatcher, Operation, Stopped
from seqloom.dist.strict_transport import StrictMessageMatcher
from seqloom.dist.torch_transport import check_block
from seqloom.dist.transport import Channel, Exchange, P2PTensor, Transport, check_payload
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily

T = TypeVar("T")
GRACE_S = 5.0
"""Seconds that ranks may take to notice that another one has failed."""


def run_ranks(
    world: int,
    body: Callable[[Transport], T],
    *,
    strict: bool = False,
    family: GroupFamily | None = None,
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `body` as ranks 0 .. world - 1 in new threads and return the results in rank order; see `Ranks.run`."""
    with Ranks(world) as ranks:
        return ranks.run(body, strict=strict, family=family, timeout_s=timeout_s)


class Ranks:
    """Threads, one per rank, that serve many runs: libraries have caches per thread that are slow to fill."""

    def __init__(self, world: int) -> None:
        """Start `world` threads."""
        if world < 1:
            raise SeqloomError(f"{world} ranks: a run needs at least 1")
        self._tasks: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(world)]
        self._threads = [
            threading.Thread(target=_serve, args=(tasks,), name=f"rank {rank}", daemon=True)
            for rank, tasks in enumerate(self._tasks)
        ]
        self._stuck: set[int] = set()
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads."""
        for rank, (tasks, thread) in enumerate(zip(self._tasks, self._threads, strict=True)):
            tasks.put(None)
            if rank not in self._stuck:
                thread.join(GRACE_S)

    def run(
        self,
        body: Callable[[Transport], T],
        *,
        strict: bool = False,
        family: GroupFamily | None = None,
        timeout_s: float = 60.0,
    ) -> list[T]:
        """Run `body` on every rank at once and return the results in rank order.

        The first error of any rank stops the others at their next verb and is raised here, with a note that
        names the rank. When all ranks wait for each other, the error says at once who waits for what.

        Args:
            strict: enforce NCCL's rules, see `strict_transport.py`.
            family: if given, blocks outside it are refused.
            timeout_s: seconds after which the run is given up.
        """
        if self._stuck:
            raise SeqloomError(f"ranks {sorted(self._stuck)} are still busy with a run that failed; make new Ranks")
        world = len(self._tasks)
        matcher = StrictMessageMatcher(world) if strict else MessageMatcher(world)
        results: list[T | None] = [None] * world
        ended: SimpleQueue[int] = SimpleQueue()

        def run_rank(rank: int) -> None:
            try:
                results[rank] = body(ThreadTransport(rank, matcher, family))
                matcher.leave(rank)
            except Stopped:
                pass  # another rank's failure is the one to report
            except BaseException as error:
                matcher.fail(error, rank)
            finally:
                ended.put(rank)

        for rank, tasks in enumerate(self._tasks):
            tasks.put(lambda rank=rank: run_rank(rank))
        try:
            self._stuck = self._await(matcher, ended, timeout_s)
        except BaseException as error:  # an interrupt of the caller ends the ranks too
            matcher.fail(error)
            raise
        if matcher.failure is not None:
            raise matcher.failure
        return cast("list[T]", results)

    def _await(self, matcher: MessageMatcher, ended: SimpleQueue[int], timeout_s: float) -> set[int]:
        """Wait for all ranks to end; return those that do not, although the run has failed."""
        running = set(range(len(self._tasks)))
        deadline = time.monotonic() + timeout_s
        while running:
            if matcher.failure is not None:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            try:
                running.discard(ended.get(timeout=max(0.0, deadline - time.monotonic())))
            except Empty:
                if matcher.failure is not None:
                    break
                matcher.fail(self._timeout_error(matcher, running, timeout_s))
                deadline = time.monotonic() + GRACE_S
        return running

    def _timeout_error(self, matcher: MessageMatcher, running: set[int], timeout_s: float) -> SeqloomError:
        """Build the error of a run that has not ended: where every running rank is."""
        with matcher.lock:
            places = {rank: matcher.describe(rank) for rank in sorted(running)}
        frames = sys._current_frames()
        for rank, place in places.items():
            if place is None:
                last = traceback.extract_stack(frames.get(self._threads[rank].ident or 0))[-1]
                places[rank] = f"rank {rank} runs {last.filename}:{last.lineno} in {last.name}"
        lines = "".join(f"\n  {place}" for place in places.values())
        return SeqloomError(f"not done after {timeout_s:g} s; give a larger timeout_s or see where ranks are:{lines}")


class ThreadTransport:
    """The `Transport` of one rank of a run."""

    waits_in_stream = False  # ranks meet on the host

    def __init__(
        self, rank: int, matcher: MessageMatcher, family: GroupFamily | None, channel: Channel = Channel.LAYERS
    ) -> None:
        """Join a run as `rank`; exchanges are on this channel."""
        self.rank, self.ranks, self._family, self._channel = rank, matcher.ranks, family, channel
        self._run_matcher = matcher

    @property
    def _matcher(self) -> MessageMatcher:
        return self._run_matcher

    def on(self, channel: Channel) -> Transport:
        """Return this transport on another channel."""
        return ThreadTransport(self.rank, self._matcher, self._family, channel)

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        block: Sequence[int],
    ) -> None:
        """Post a send and a receive for every rank of the block."""
        sent = _chunks("all_to_all input", input, input_sizes, block)
        self._collective("all_to_all", block, sent, _chunks("all_to_all output", output, output_sizes, block))

    def exchange(self, sends: Sequence[P2PTensor], receives: Sequence[P2PTensor]) -> Exchange:
        """Post all sends and receives."""
        for peer, _ in (*sends, *receives):
            if not 0 <= peer < self.ranks:
                raise SeqloomError(
                    f"rank {self.rank} exchanges with rank {peer}; ranks are 0 .. {self.ranks - 1}: use a transport "
                    "that reaches it"
                )
        outgoing = [(peer, _flat("sent tensor", tensor)) for peer, tensor in sends]
        incoming = [(peer, _flat("received tensor", tensor)) for peer, tensor in receives]
        verb = "exchange" if self._channel == Channel.LAYERS else f"exchange of {self._channel.name}"
        matcher = self._matcher
        return _Handle(matcher, matcher.post(self.rank, verb, None, outgoing, incoming, self._channel))

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, block: Sequence[int], sizes: Sequence[int] | None = None
    ) -> None:
        """Send the input to every rank of the block."""
        received = _chunks("all_gather output", output, sizes or [input.numel()] * len(block), block)
        self._collective("all_gather", block, [_flat("all_gather input", input)] * len(block), received)

    def all_reduce(self, tensor: torch.Tensor, block: Sequence[int]) -> None:
        """Send the tensor to every rank; add in block order, in the dtype of the tensor."""
        flat = _flat("all_reduce tensor", tensor)
        parts = [torch.empty_like(flat) for _ in block]
        self._collective("all_reduce", block, [flat] * len(block), parts)
        total = parts[0]
        for part in parts[1:]:
            total += part
        flat.copy_(total)

    def broadcast(self, payload: bytes | None, *, root: int = 0) -> bytes:
        """Send the size and then the bytes to every rank."""
        check_payload(self.rank, payload, root)
        content = torch.tensor([len(payload or b"")], dtype=torch.int64)
        for read in (True, False):
            others = [peer for peer in range(self.ranks) if peer != root] if self.rank == root else []
            receives = [] if self.rank == root else [P2PTensor(root, content)]
            self.exchange([P2PTensor(peer, content) for peer in others], receives).wait()
            if read:
                given = torch.frombuffer(bytearray(payload), dtype=torch.uint8) if payload else None
                content = torch.empty(int(content), dtype=torch.uint8) if given is None else given
        return bytes(content.numpy())

    def _collective(
        self, verb: str, block: Sequence[int], sends: Sequence[torch.Tensor], receives: Sequence[torch.Tensor]
    ) -> None:
        """Run a verb of a block: `sends` and `receives` hold a tensor for every rank of it."""
        ranks = tuple(block)
        check_block(ranks, self.rank, self.ranks, self._family)
        outgoing, incoming = zip(ranks, sends, strict=True), zip(ranks, receives, strict=True)
        matcher = self._matcher
        matcher.wait(matcher.post(self.rank, verb, ranks, outgoing, incoming))


class SingleRankTransport(ThreadTransport):
    """The transport of a world with one rank, which receives what it sends."""

    def __init__(self) -> None:
        """Start without any state: every verb is matched with itself."""
        super().__init__(0, MessageMatcher(1), None)

    @property
    def _matcher(self) -> MessageMatcher:
        return MessageMatcher(1)

    def on(self, channel: Channel) -> Transport:
        """Return itself."""
        return self


class _Handle:
    """A started exchange of one rank."""

    def __init__(self, matcher: MessageMatcher, operation: Operation) -> None:
        self._matcher, self._operation = matcher, operation

    def wait(self) -> None:
        """See `Handle.wait`."""
        self._matcher.wait(self._operation)

    def done(self) -> bool:
        """See `Exchange.done`."""
        return self._operation.done


def _serve(tasks: SimpleQueue[Callable[[], None] | None]) -> None:
    """Run tasks until there is a None."""
    with torch.autograd.set_multithreading_enabled(False):
        while (task := tasks.get()) is not None:
            task()


def _flat(what: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with one axis, outside autograd; refuse a tensor that is not contiguous."""
    if not tensor.is_contiguous():
        raise SeqloomError(
            f"{what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
            "pass a contiguous tensor"
        )
    return tensor.detach().view(-1)


def _chunks(what: str, tensor: torch.Tensor, sizes: Sequence[int], block: Sequence[int]) -> Sequence[torch.Tensor]:
    """Split a tensor into the chunks of a block's ranks."""
    if len(sizes) != len(block) or sum(sizes) != tensor.numel() or min(sizes, default=0) < 0:
        raise SeqloomError(
            f"{what} of {tensor.numel()} elements in chunks of {list(sizes)} for {len(block)} ranks: give every rank "
            "a chunk of 0 or more elements, which add up to the tensor"
        )
    return _flat(what, tensor).split(list(sizes))
