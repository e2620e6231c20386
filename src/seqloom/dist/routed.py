"""What one rank does in a routed move: in every stage, which elements it sends from where, and receives to where.

A message lies in its sender's tensor, in the room of its receiver, and meanwhile in parts on the ranks that pass it on.
All of this is index work on the host, done once for all layers; `route.py` runs it.
"""

from __future__ import annotations

import numpy as np
import threading
import torch
from bisect import bisect_right
from bisect import insort
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import groupby
from operator import itemgetter
from seqloom.dist.transport import Handle
from seqloom.dist.transport import P2PTensor
from seqloom.dist.transport import Transport
from seqloom.layout import Move
from seqloom.layout import Route
from seqloom.layout.route import staged
from typing import NamedTuple


class Store(IntEnum):
    """Where a rank has elements of a message: in one of its own, in one for it, or in the buffer for passing on."""

    SENT = 0
    WANTED = 1
    RELAY = 2


class Place(NamedTuple):
    """Elements `start .. stop - 1` of a store; `item` is the message (0 in the buffer for passing on)."""

    store: Store
    item: int
    start: int
    stop: int


class Load(NamedTuple):
    """What goes to, or comes from, one rank in a stage: places one after the other."""

    peer: int
    places: tuple[Place, ...]

    @property
    def size(self) -> int:
        """Elements."""
        return sum(place.stop - place.start for place in self.places)


class Stage(NamedTuple):
    """One exchange as a rank sees it."""

    sends: tuple[Load, ...]
    receives: tuple[Load, ...]


@dataclass(frozen=True, slots=True)
class RoutedTransfer:
    """One rank's part of a routed move: index work, done once and run by every layer.

    Attributes:
        stages: those in which it sends or receives.
        relayed: elements it only passes on.
    """

    stages: tuple[Stage, ...]
    relayed: int

    @classmethod
    def of(cls, move: Move, route: Route, node_size: int, rank: int) -> RoutedTransfer:
        """Work out what `rank` does in a move; all ranks give the same move, route and node size.

        Args:
            move: one axis; an item is a message, of one sender.
            route: how it crosses nodes.
            node_size: ranks per node.
            rank: the one asked for.
        """
        holdings, stages = _Holdings(move, rank), []
        for stage in staged(move, route, node_size):
            sends = _loads(stage, stage.sender == rank, stage.receiver, holdings.find)
            receives = _loads(stage, stage.receiver == rank, stage.sender, holdings.take_in)
            if sends or receives:
                stages.append(Stage(sends, receives))
        return cls(tuple(stages), holdings.relayed)

    @property
    def received_elements(self) -> int:
        """Elements that this rank receives, for itself or for others."""
        return sum(load.size for stage in self.stages for load in stage.receives)


class _Run(NamedTuple):
    """Elements `start .. stop - 1` of a message that lie at `at` of a store."""

    start: int
    stop: int
    store: Store
    at: int


class _Holdings:
    """What a rank holds of which message, while a move goes on."""

    def __init__(self, move: Move, rank: int) -> None:
        self.relayed = 0
        self._runs: dict[int, list[_Run]] = {}
        self._wanted: dict[int, list[_Run]] = {}
        boxes = zip(*(column.tolist() for column in move.columns()), strict=True)
        for sender, receiver, item, start, stop in boxes:
            if sender == rank and item not in self._runs:
                self._runs[item] = [_Run(0, int(move.stop.max()), Store.SENT, 0)]
            if receiver == rank:
                wanted = self._wanted.setdefault(item, [])
                at = wanted[-1].at + wanted[-1].stop - wanted[-1].start if wanted else 0
                wanted.append(_Run(start, stop, Store.WANTED, at))

    def find(self, item: int, start: int, stop: int) -> list[Place]:
        """Return where elements of a message lie."""
        runs, found = self._runs[item], []
        for run in runs[bisect_right(runs, start, key=lambda run: run.start) - 1 :]:
            if run.start >= stop:
                break
            low, high = max(run.start, start), min(run.stop, stop)
            shift = run.at - run.start
            found.append(Place(run.store, 0 if run.store == Store.RELAY else item, low + shift, high + shift))
        return found

    def take_in(self, item: int, start: int, stop: int) -> list[Place]:
        """Make room for elements of a message, where this rank wants them or for passing on; return where."""
        edge = start
        for run in self._wanted.get(item, ()):
            low, high = max(run.start, start), min(run.stop, stop)
            if low < high:
                self._set_aside(item, edge, low)
                self._hold(item, _Run(low, high, Store.WANTED, run.at + low - run.start))
                edge = high
        self._set_aside(item, edge, stop)
        return self.find(item, start, stop)

    def _set_aside(self, item: int, start: int, stop: int) -> None:
        if stop > start:
            self._hold(item, _Run(start, stop, Store.RELAY, self.relayed))
            self.relayed += stop - start

    def _hold(self, item: int, run: _Run) -> None:
        insort(self._runs.setdefault(item, []), run)


def _loads(
    move: Move, chosen: np.ndarray, peer: np.ndarray, places: Callable[[int, int, int], list[Place]]
) -> tuple[Load, ...]:
    """Return the chosen boxes of a stage by peer, in the order of the move: both sides find the same one."""
    boxes = zip(*(column[chosen].tolist() for column in (peer, move.item, move.start, move.stop)), strict=True)
    by_peer = groupby(boxes, key=itemgetter(0))
    return tuple(Load(rank, _touching(place for _, *box in own for place in places(*box))) for rank, own in by_peer)


def _touching(places: Iterable[Place]) -> tuple[Place, ...]:
    """Join places that follow each other."""
    joined: list[Place] = []
    for place in places:
        if joined and joined[-1][:2] == place[:2] and joined[-1].stop == place.start:
            joined[-1] = joined[-1]._replace(stop=place.stop)
        else:
            joined.append(place)
    return tuple(joined)


# ---- merged: comm.route
# Routed transfers: messages between nodes that travel in parts through several ranks, see `plan.route`.
#
# A routed move is a row of exchanges, the stages. Every rank of the party runs those in which it sends or receives:
# its
# own messages, what it wants of others, and what it only passes on. All ranks run them in one order, each after the
# one
# before, so they meet without waiting in a circle. What arrives is bit for bit what was sent.
#
# The stages follow each other while the caller computes: on a stream of their own where waiting is done by streams,
# and
# in a thread otherwise. Meanwhile this rank must not use the transport for anything else.


Units = dict[int, torch.Tensor]
"""Messages by item, as bytes [elements, unit]."""


def _as_units(messages: Mapping[int, torch.Tensor], unit: int) -> Units:
    """View contiguous tensors as elements of `unit` bytes."""
    return {
        item: message.detach().view(-1).view(torch.uint8).view(message.nbytes // unit, unit)
        for item, message in messages.items()
    }


def start_routed(
    passage: RoutedTransfer,
    transport: Transport,
    sent: Mapping[int, torch.Tensor],
    wanted: Mapping[int, torch.Tensor],
    *,
    unit: int,
    device: torch.device,
) -> Handle:
    """Start one rank's part of a routed move. Until `wait` of the handle it must not use the transport otherwise.

    Args:
        passage: what the rank does.
        transport: this rank's.
        sent: its messages by item, contiguous; element k of a message is its bytes `k * unit .. (k + 1) * unit - 1`.
        wanted: rooms for the elements that it wants of every item, one after the other.
        unit: bytes of an element of the move.
        device: where what is passed on is kept.
    """
    aside = torch.empty((passage.relayed, unit), dtype=torch.uint8, device=device)
    return _Transit(passage.stages, transport, _as_units(sent, unit), _as_units(wanted, unit), aside)


class _Transit:
    """A routed transfer under way."""

    def __init__(
        self, stages: tuple[Stage, ...], transport: Transport, sent: Units, wanted: Units, aside: torch.Tensor
    ) -> None:
        self._transport, self._device = transport, aside.device
        self._stores = {Store.SENT: sent, Store.WANTED: wanted, Store.RELAY: {0: aside}}
        self._under_way: _Exchange | None = None
        self._thread: threading.Thread | None = None
        self._stream: torch.cuda.Stream | None = None
        self._error: BaseException | None = None
        if len(stages) > 1 and aside.is_cuda and transport.waits_in_stream:
            self._stream = _side_stream(aside.device)
            self._stream.wait_stream(torch.cuda.current_stream(aside.device))
            with torch.cuda.stream(self._stream):
                for stage in stages:
                    self._finish(self._begin(stage))
        elif len(stages) > 1:
            stream = torch.cuda.current_stream(aside.device) if aside.is_cuda else None
            arguments = (self._begin(stages[0]), stages[1:], stream)
            self._thread = threading.Thread(target=self._go_on, args=arguments, daemon=True)
            self._thread.start()
        elif stages:
            self._under_way = self._begin(stages[0])

    def wait(self) -> None:
        """See `Handle.wait`. Until then the messages are kept, so that nobody uses their memory again."""
        if self._under_way is not None:
            self._finish(self._under_way)
        if self._thread is not None:
            self._thread.join()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._under_way = self._thread = self._stream = None
        if self._error is not None:
            raise self._error

    def _go_on(self, first: _Exchange, others: tuple[Stage, ...], stream: torch.cuda.Stream | None) -> None:
        """Run what follows the first stage, in a thread of its own; what goes wrong there is raised by `wait`."""
        try:
            with torch.no_grad(), nullcontext() if stream is None else torch.cuda.stream(stream):
                self._finish(first)
                for stage in others:
                    self._finish(self._begin(stage))
        except BaseException as error:
            self._error = error

    def _begin(self, stage: Stage) -> _Exchange:
        """Start the exchange of a stage."""
        sends = [P2PTensor(load.peer, self._packed(load)) for load in stage.sends]
        rooms = [P2PTensor(load.peer, self._room(load)) for load in stage.receives]
        return _Exchange(self._transport.exchange(sends, rooms), stage, rooms, sends)

    def _finish(self, exchange: _Exchange) -> None:
        """Wait for an exchange and put what came where it belongs."""
        exchange.handle.wait()
        for load, room in zip(exchange.stage.receives, exchange.rooms, strict=True):
            if len(load.places) > 1:
                pieces = room.tensor.split([place.stop - place.start for place in load.places])
                for place, piece in zip(load.places, pieces, strict=True):
                    self._at(place).copy_(piece)

    def _at(self, place: Place) -> torch.Tensor:
        return self._stores[place.store][place.item][place.start : place.stop]

    def _packed(self, load: Load) -> torch.Tensor:
        """Return what a load consists of as one tensor: a view of a single place."""
        parts = [self._at(place) for place in load.places]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _room(self, load: Load) -> torch.Tensor:
        """Return where a load can be received: a single place itself."""
        first = self._at(load.places[0])
        return first if len(load.places) == 1 else first.new_empty((load.size, first.shape[1]))


class _Exchange(NamedTuple):
    """A stage under way, where its loads arrive, and what it sends: its memory is not used again meanwhile."""

    handle: Handle
    stage: Stage
    rooms: list[P2PTensor]
    sends: list[P2PTensor]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which routed stages follow each other."""
    return torch.cuda.Stream(device)
