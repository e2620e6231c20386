"""Routed transfers: messages between nodes that travel in parts through several ranks, see `plan.route`.

A routed move is a row of exchanges, the stages. Every rank of the party runs those in which it sends or receives: its
own messages, what it wants of others, and what it only passes on. All ranks run them in one order, each after the one
before, so they meet without waiting in a circle. What arrives is bit for bit what was sent.

The stages follow each other while the caller computes: on a stream of their own where waiting is done by streams, and
in a thread otherwise. Meanwhile this rank must not use the transport for anything else.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import NamedTuple

import torch

from seqloom.comm.passage import Load, Passage, Place, Stage, Store
from seqloom.comm.transport import Handle, Parcel, Transport

Units = dict[int, torch.Tensor]
"""Messages by item, as bytes [elements, unit]."""


def _as_units(messages: Mapping[int, torch.Tensor], unit: int) -> Units:
    """View contiguous tensors as elements of `unit` bytes."""
    return {
        item: message.detach().view(-1).view(torch.uint8).view(message.nbytes // unit, unit)
        for item, message in messages.items()
    }


def start_routed(
    passage: Passage,
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
        sends = [Parcel(load.peer, self._packed(load)) for load in stage.sends]
        rooms = [Parcel(load.peer, self._room(load)) for load in stage.receives]
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
    rooms: list[Parcel]
    sends: list[Parcel]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a device on which routed stages follow each other."""
    return torch.cuda.Stream(device)
