"""One hop of a relay: a bundle's pieces, packed into one message per pair of ranks, sent, and put where they belong.

A hop has a source end and a target end, each with tensors of this rank's boxes. Values go from the first to the second.
Gradients go back: what a rank got from another it gives to that one, which adds up what comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from seqloom.comm.parcels import exchange_filled
from seqloom.comm.relay_parts import Index, Strip
from seqloom.comm.transport import Handle, Parcel, Transport

Tensors = Mapping[int, torch.Tensor]


class Flight(NamedTuple):
    """An exchange under way.

    Attributes:
        handle: to wait for.
        sent: what leaves, which stays until it has.
        received: of values, the buffer of all messages.
        parts: of gradients, {rank: its message}; this rank's own is there already.
    """

    handle: Handle
    sent: torch.Tensor
    received: torch.Tensor
    parts: Mapping[int, torch.Tensor]


class Hop:
    """One rank's part of a hop, of all bundles."""

    def __init__(self, indices: Sequence[Index], transport: Transport, device: torch.device) -> None:
        """Keep the index work of every bundle; see `index_bundles`."""
        self._indices, self._transport, self._device = tuple(indices), transport, device

    def volume(self, bundle: int) -> tuple[int, int]:
        """Return the elements of a bundle that leave this rank with values, and that come."""
        return self._indices[bundle].outgoing, self._indices[bundle].incoming

    def send(self, bundle: int, held: Tensors, dtype: torch.dtype) -> Flight:
        """Start to bring values from tensors of the source end, {weight: [rows, columns]}, to the target end."""
        index = self._indices[bundle]
        leaving = [form for form in index.forms if form.peers != (index.rank,)]
        sent = self._new(sum(form.size for form in leaving), dtype)
        outgoing = []
        for form, message in zip(leaving, sent.split([form.size for form in leaving]), strict=True):
            _pack(message, held, form.strips)
            outgoing += [Parcel(peer, message) for peer in form.peers if peer != index.rank]
        received = self._new(index.incoming, dtype)
        handle = exchange_filled(self._transport, outgoing, _messages(index, received))
        return Flight(handle, sent, received, {})

    def put(self, bundle: int, flight: Flight, held: Tensors, result: Tensors) -> None:
        """Fill tensors of the target end with what has come, and with what was here, in `held`, already."""
        for source, target in self._indices[bundle].local:
            if result[target.weight] is not held[source.weight]:
                target.in_box(result[target.weight]).copy_(source.in_box(held[source.weight]))
        for strip in self._indices[bundle].strips:
            strip.in_box(result[strip.weight]).copy_(strip.in_buffer(flight.received))

    def send_back(self, bundle: int, held: Tensors, dtype: torch.dtype) -> Flight:
        """Start to bring gradients from tensors of the target end to the source end; what is not held is zero."""
        index = self._indices[bundle]
        sent = self._new(index.incoming, dtype)
        own = self._new(sum(source.size for source, _ in index.local), dtype)
        _pack(sent, held, index.strips)
        _pack(own, held, [target for _, target in index.local])
        ends = [(peer, form.size) for form in index.forms for peer in form.peers if peer != index.rank]
        received = self._new(index.outgoing, dtype)
        messages = received.split([size for _, size in ends])
        incoming = [Parcel(peer, part) for (peer, _), part in zip(ends, messages, strict=True)]
        handle = exchange_filled(self._transport, _messages(index, sent), incoming)
        return Flight(handle, sent, received, dict(incoming) | {index.rank: own})

    def add(self, bundle: int, flight: Flight, wide: torch.dtype, result: Tensors) -> None:
        """Add to tensors of the source end what has come: parts of ranks with the same boxes in rank order first."""
        for form in self._indices[bundle].forms:
            total = flight.parts[form.peers[0]].to(wide, copy=len(form.peers) > 1)
            for peer in form.peers[1:]:
                total += flight.parts[peer]
            for strip in form.strips:
                strip.in_box(result[strip.weight]).add_(strip.in_buffer(total))

    def collected(self, bundle: int) -> frozenset[int]:
        """Return the weights of which others give gradients to this rank."""
        return frozenset(strip.weight for form in self._indices[bundle].forms for strip in form.strips)

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)


def _pack(buffer: torch.Tensor, held: Tensors, strips: Sequence[Strip]) -> None:
    """Copy pieces of tensors to their places in a buffer; what is not held is zero."""
    for strip in strips:
        place = strip.in_buffer(buffer)
        if strip.weight in held:
            place.copy_(strip.in_box(held[strip.weight]))
        else:
            place.zero_()


def _messages(index: Index, buffer: torch.Tensor) -> list[Parcel]:
    """Cut the target end's buffer into messages."""
    parts = buffer.split([size for _, size in index.messages])
    return [Parcel(peer, part) for (peer, _), part in zip(index.messages, parts, strict=True)]
