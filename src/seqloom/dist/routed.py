"""Routed transfers (Zeppelin): messages between nodes that travel in parts through several proxies, one per NIC.

`layout.route_move` cuts a routed move into exchanges that follow each other, the steps. Every rank of the group runs
those in which it sends or receives: its own messages, what it wants of others, and what it only forwards. All ranks run
them in one order, so no cycle of waits can arise. The received bytes are those sent.

`RoutedTransfer` is the index work of one rank, done once on the host and run by every layer. The steps follow each
other while the caller computes: on a stream of their own where the transport waits in stream, in a thread otherwise.
Meanwhile this rank must not use the transport for anything else.
"""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import torch

from seqloom.dist.transport import P2PTensor, Transport
from seqloom.layout import Move, Route
from seqloom.layout.route import route_move


class Buffer(IntEnum):
    """Where a rank has elements of a message: in one that it sends, in one that it wants, or in the forward buffer."""

    SEND = 0
    RECEIVE = 1
    FORWARD = 2


class BufferSlice(NamedTuple):
    """Elements `start .. stop - 1` of a buffer; `item` is the message (0 in the forward buffer)."""

    buffer: Buffer
    item: int
    start: int
    stop: int


class PeerSlices(NamedTuple):
    """What a rank sends to, or receives from, one peer in a step: slices one after the other."""

    peer: int
    slices: tuple[BufferSlice, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(each.stop - each.start for each in self.slices)


RouteStep = tuple[tuple[PeerSlices, ...], tuple[PeerSlices, ...]]
"""One exchange as a rank sees it: sends and receives."""


@dataclass(frozen=True, slots=True)
class RoutedTransfer:
    """One rank's part of a routed move.

    Attributes:
        steps: those in which it sends or receives.
        forwarded: elements of its forward buffer.
    """

    steps: tuple[RouteStep, ...]
    forwarded: int

    @classmethod
    def of(cls, move: Move, route: Route, node_size: int, rank: int) -> RoutedTransfer:
        """Compute what `rank` does in a move; all ranks give the same move, route and node size.

        Args:
            move: one axis; an item is a message, of one sender.
        """
        elements, steps = _Elements(move, rank), []
        for step in route_move(move, route, node_size):
            sends = _by_peer(step, step.sender == rank, step.receiver, elements.find)
            receives = _by_peer(step, step.receiver == rank, step.sender, elements.receive)
            if sends or receives:
                steps.append((sends, receives))
        return cls(tuple(steps), elements.forwarded)

    @property
    def received_elements(self) -> int:
        """Elements that this rank receives, for itself or for others."""
        return sum(each.size for _, receives in self.steps for each in receives)


class _Run(NamedTuple):
    """Elements `start .. stop - 1` of a message that lie at `at` of a buffer."""

    start: int
    stop: int
    buffer: Buffer
    at: int


class _Elements:
    """Which elements of which messages a rank has, and where, while the steps follow each other.

    A search per box: `layout.move_between` on a handful of boxes takes two to three times as long.
    """

    def __init__(self, move: Move, rank: int) -> None:
        self.forwarded = 0
        self._runs: dict[int, list[_Run]] = {}
        self._wanted: dict[int, list[_Run]] = {}
        boxes = zip(*(column.tolist() for column in move.columns()), strict=True)
        for sender, receiver, item, start, stop in boxes:
            if sender == rank and item not in self._runs:
                self._runs[item] = [_Run(0, int(move.stop.max()), Buffer.SEND, 0)]
            if receiver == rank:
                wanted = self._wanted.setdefault(item, [])
                at = wanted[-1].at + wanted[-1].stop - wanted[-1].start if wanted else 0
                wanted.append(_Run(start, stop, Buffer.RECEIVE, at))

    def find(self, item: int, start: int, stop: int) -> Iterator[BufferSlice]:
        """Yield where elements of a message lie."""
        runs = self._runs[item]
        for run in runs[bisect_right(runs, start, key=lambda run: run.start) - 1 :]:
            if run.start >= stop:
                break
            low, high, shift = max(run.start, start), min(run.stop, stop), run.at - run.start
            yield BufferSlice(run.buffer, 0 if run.buffer == Buffer.FORWARD else item, low + shift, high + shift)

    def receive(self, item: int, start: int, stop: int) -> Iterator[BufferSlice]:
        """Place elements of a message where this rank wants them, else in the forward buffer; yield where."""
        edge = start
        for run in self._wanted.get(item, ()):
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                self._forward(item, edge, low)
                insort(self._runs.setdefault(item, []), _Run(low, high, Buffer.RECEIVE, run.at + low - run.start))
                edge = high
        self._forward(item, edge, stop)
        return self.find(item, start, stop)

    def _forward(self, item: int, start: int, stop: int) -> None:
        if stop > start:
            insort(self._runs.setdefault(item, []), _Run(start, stop, Buffer.FORWARD, self.forwarded))
            self.forwarded += stop - start


def _by_peer(
    move: Move, chosen: np.ndarray, peer: np.ndarray, slices: Callable[[int, int, int], Iterator[BufferSlice]]
) -> tuple[PeerSlices, ...]:
    """Return the chosen boxes of a step by peer, in the order of the move, which both ends share."""
    boxes = zip(*(column[chosen].tolist() for column in (peer, move.item, move.start, move.stop)), strict=True)
    by_peer = groupby(boxes, key=itemgetter(0))
    return tuple(
        PeerSlices(rank, _join_touching(each for _, *box in own for each in slices(*box))) for rank, own in by_peer
    )


def _join_touching(slices: Iterator[BufferSlice]) -> tuple[BufferSlice, ...]:
    """Join slices that follow each other in one buffer."""
    joined: list[BufferSlice] = []
    for each in slices:
        if joined and joined[-1][:2] == each[:2] and joined[-1].stop == each.start:
            joined[-1] = joined[-1]._replace(stop=each.stop)
        else:
            joined.append(each)
    return tuple(joined)


class RoutedHandle:
    """One rank's part of a routed move, in flight. Until `wait` the rank must not use the transport otherwise."""

    def __init__(
        self,
        transfer: RoutedTransfer,
        transport: Transport,
        sent: Mapping[int, torch.Tensor],
        wanted: Mapping[int, torch.Tensor],
        *,
        unit: int,
        device: torch.device,
    ) -> None:
        """Start.

        Args:
            sent: its messages by item, contiguous; element k is the bytes `k * unit .. (k + 1) * unit - 1` of it.
            wanted: tensors for the elements that it wants of every item, one after the other.
            unit: bytes of an element of the move.
        """
        steps, forward = transfer.steps, torch.empty((transfer.forwarded, unit), dtype=torch.uint8, device=device)
        self._transport, self._device = transport, forward.device
        messages, targets = (
            {
                item: each.detach().view(-1).view(torch.uint8).view(each.nbytes // unit, unit)
                for item, each in of.items()
            }
            for of in (sent, wanted)
        )
        self._buffers = {Buffer.SEND: messages, Buffer.RECEIVE: targets, Buffer.FORWARD: {0: forward}}
        self._finish: Callable[[], None] | None = None
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._error: BaseException | None = None
        if len(steps) > 1 and forward.is_cuda and transport.waits_in_stream:
            self._stream = _stream(forward.device)
            self._stream.wait_stream(torch.cuda.current_stream(forward.device))
            with torch.cuda.stream(self._stream):
                for step in steps:
                    self._begin(step)()
        elif len(steps) > 1:
            stream = torch.cuda.current_stream(forward.device) if forward.is_cuda else None
            arguments = (self._begin(steps[0]), steps[1:], stream)
            self._thread = threading.Thread(target=self._run_rest, args=arguments, daemon=True)
            self._thread.start()
        elif steps:
            self._finish = self._begin(steps[0])

    def wait(self) -> None:
        """See `Handle.wait`. Until then the messages stay referenced, so that nobody reuses their memory."""
        if self._finish is not None:
            self._finish()
        if self._thread is not None:
            self._thread.join()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._finish = self._thread = self._stream = None
        if self._error is not None:
            raise self._error

    def _run_rest(
        self, finish_first: Callable[[], None], others: tuple[RouteStep, ...], stream: torch.cuda.Stream | None
    ) -> None:
        """Run the steps after the first in a thread; `wait` raises its error."""
        try:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                finish_first()
                for step in others:
                    self._begin(step)()
        except BaseException as error:
            self._error = error

    def _begin(self, step: RouteStep) -> Callable[[], None]:
        """Start the exchange of a step; return what waits for it and copies what was received into its slices."""
        sends = [P2PTensor(peer, self._packed(slices)) for peer, slices in step[0]]
        receives = [P2PTensor(each.peer, self._target(each)) for each in step[1]]
        handle = self._transport.exchange(sends, receives)

        def finish() -> None:
            handle.wait()
            sends.clear()  # the memory of a message stays referenced until here
            for (_, slices), (_, received) in zip(step[1], receives, strict=True):
                if len(slices) > 1:
                    parts = received.split([each.stop - each.start for each in slices])
                    for each, part in zip(slices, parts, strict=True):
                        self._view(each).copy_(part)

        return finish

    def _view(self, each: BufferSlice) -> torch.Tensor:
        return self._buffers[each.buffer][each.item][each.start : each.stop]

    def _packed(self, slices: tuple[BufferSlice, ...]) -> torch.Tensor:
        """Return slices as one tensor: a view of a single one."""
        parts = [self._view(each) for each in slices]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _target(self, peer: PeerSlices) -> torch.Tensor:
        """Return where slices of a peer can be received: a single one itself."""
        first = self._view(peer.slices[0])
        return first if len(peer.slices) == 1 else first.new_empty((peer.size, first.shape[1]))


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of a device on which the steps of routed transfers follow each other."""
    return torch.cuda.Stream(device)
