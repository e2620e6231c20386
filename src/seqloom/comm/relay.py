"""Weights on their way: from the layout in which they are kept to the one in which they are computed with, and back.

    kept, used = optimiser_layout(weights, ranks), compute_layout(weights, pipelines)
    relay = Relay(weights, kept, used, transport, device=device)
    copies = relay.start(3, masters, torch.bfloat16).wait()         # bundle 3: {weight: [rows, columns]}
    sums = relay.start_sum(3, gradients, torch.float32).wait()      # {weight: [rows, columns] of the masters' boxes}

Every element travels once to every rank that needs it and has none, in one message per pair of ranks and bundle. The
way back is the same with both ends exchanged: what a rank got from another it gives back to that one, which adds up
what comes.

All ranks that hold something of a bundle, in the source or in the target, start it, all bundles in one order; the
others may. Several may be under way. They share the transport's `exchange` with everything else that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from seqloom.comm.parcels import exchange_filled
from seqloom.comm.relay_index import boxes_of, index_bundles
from seqloom.comm.relay_parts import Box, Index, Strip
from seqloom.comm.transport import Handle, Parcel, Transport
from seqloom.errors import SeqloomError
from seqloom.plan.layout import Layout
from seqloom.plan.rank_move import move_of_rank
from seqloom.plan.weights import Weight
from seqloom.plan.weights import bundles as bundles_of

Tensors = Mapping[int, torch.Tensor]


class Volume(NamedTuple):
    """Elements of weights that leave this rank for others, and that come from others."""

    sent: int
    received: int


class Pending:
    """A bundle under way."""

    def __init__(self, handle: Handle, sent: torch.Tensor, finish: Callable[[], dict[int, torch.Tensor]]) -> None:
        """Wait for `handle`, then `finish`; `sent` stays as long."""
        self._handle: Handle | None = handle
        self._sent: torch.Tensor | None = sent
        self._finish: Callable[[], dict[int, torch.Tensor]] | None = finish
        self._result: dict[int, torch.Tensor] = {}

    def wait(self) -> dict[int, torch.Tensor]:
        """Return what this rank holds after the move: {weight: [rows, columns] of its box}. Waiting twice is fine.

        On a GPU it is in the current stream's order, where the transport waits in stream; the host goes on.
        """
        if self._handle is not None and self._finish is not None:
            self._handle.wait()
            with torch.no_grad():
                self._result = self._finish()
            self._handle = self._sent = self._finish = None
        return self._result


class Relay:
    """One rank's moves of weights between two layouts. All index work is done here: keep it for equal layouts.

    Attributes:
        source, target: {weight: Box} of this rank; a weight that it has nothing of is not there.
        bundles: weights of every bundle, by index.
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        source: Layout,
        target: Layout,
        transport: Transport,
        *,
        device: torch.device | str,
        node_size: int | None = None,
        bundles: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Work out this rank's part. Nothing is communicated.

        Args:
            weights: items of the layouts are their indices.
            source: who has what before; holds all that the target asks for.
            target: who shall have what after. Neither gives a rank two boxes of one weight.
            transport: this rank's; one whose exchanges nothing else uses, where bundles move beside the computation.
            device: of all tensors.
            node_size: ranks per node; where several ranks hold something, one of the receiver's node sends it.
            bundles: what moves together; None: `plan.weights.bundles`.
        """
        self.bundles = tuple(map(tuple, bundles_of(weights) if bundles is None else bundles))
        self.source, self.target = (boxes_of(layout, transport.rank) for layout in (source, target))
        move = move_of_rank(transport.rank, source, target, node_size=node_size)
        self._indices = index_bundles(move, transport.rank, self.bundles, self.source, self.target)
        self._names = [weight.name for weight in weights]
        self._transport, self._device = transport, torch.device(device)

    def volume(self, bundle: int | None = None) -> Volume:
        """Return what `start` moves, of one bundle or of all; `start_sum` moves the same the other way."""
        indices = self._indices if bundle is None else self._indices[bundle : bundle + 1]
        return Volume(sum(each.outgoing for each in indices), sum(each.incoming for each in indices))

    @torch.no_grad()
    def start(self, bundle: int, tensors: Tensors, dtype: torch.dtype, *, into: Tensors | None = None) -> Pending:
        """Start to bring a bundle's values to the target's boxes.

        What is given must stay as it is until `wait` has returned.

        Args:
            bundle: number.
            tensors: {weight: contiguous tensor of this rank's source box, [rows, columns] or any shape of as many
                elements}; weights of other bundles are ignored.
            dtype: of the values on their way and after it, the same on all ranks; the sender casts.
            into: {weight: contiguous tensor of the target box, in `dtype`}, filled by `wait`. For weights that are not
                there `wait` makes a tensor; or it returns the given one itself, where the source's box is the target's
                and the dtype is right.
        """
        index, rooms = self._indices[bundle], self._rooms(bundle, self.target, into or {}, dtype)
        held = self._views(bundle, self.source, tensors)
        self._refuse_missing(bundle, held)
        leaving = [form for form in index.forms if form.peers != (index.rank,)]
        sent = self._new(sum(form.size for form in leaving), dtype)
        outgoing = []
        for form, message in zip(leaving, sent.split([form.size for form in leaving]), strict=True):
            _pack(message, held, form.strips)
            outgoing += [Parcel(peer, message) for peer in form.peers if peer != index.rank]
        received = self._new(index.incoming, dtype)
        handle = exchange_filled(self._transport, outgoing, _messages(index, received))
        return Pending(handle, sent, lambda: self._unpacked(bundle, held, received, rooms))

    @torch.no_grad()
    def start_sum(self, bundle: int, tensors: Tensors, dtype: torch.dtype, *, into: Tensors | None = None) -> Pending:
        """Start to bring a bundle's gradients to the source's boxes, where those of all holders are added.

        Each holder's part goes where `start` brings its value from: to the only rank that has it in the source, or to
        one of several, which then have parts of the sum. Sums are in float32 or wider, in one order: parts of ranks
        with the same boxes in rank order, then the sums of these in the order of their first ranks. What is given may
        be changed after this call (on a GPU: in this stream).

        Args:
            bundle: number.
            tensors: {weight: contiguous tensor of this rank's target box}; a weight that is not there counts as zero.
            dtype: of the gradients on their way, the same on all ranks; the sender casts.
            into: {weight: contiguous tensor of the source box, in `dtype` or float32, whichever is wider}: `wait` adds
                the sums to it. For weights that are not there it makes a tensor.
        """
        wide = torch.promote_types(dtype, torch.float32)
        index, rooms = self._indices[bundle], self._rooms(bundle, self.source, into or {}, wide)
        held = self._views(bundle, self.target, tensors)
        sent = self._new(index.incoming, dtype)
        own = self._new(sum(source.size for source, _ in index.local), dtype)
        _pack(sent, held, index.strips)
        _pack(own, held, [target for _, target in index.local])
        ends = [(peer, form.size) for form in index.forms for peer in form.peers if peer != index.rank]
        received = self._new(index.outgoing, dtype).split([size for _, size in ends])
        incoming = [Parcel(peer, part) for (peer, _), part in zip(ends, received, strict=True)]
        handle = exchange_filled(self._transport, _messages(index, sent), incoming)
        parts = dict(incoming) | {index.rank: own}
        return Pending(handle, sent, lambda: self._added(bundle, parts, wide, rooms))

    def _unpacked(self, bundle: int, held: Tensors, received: torch.Tensor, rooms: Tensors) -> dict[int, torch.Tensor]:
        """Return the target's boxes, filled with what has come and what was here."""
        index, result = self._indices[bundle], dict(rooms)
        for weight, box in self._boxes(bundle, self.target):
            if weight not in rooms:
                shared = self.source.get(weight) == box and held[weight].dtype == received.dtype
                result[weight] = held[weight] if shared else received.new_empty((box.rows, box.columns))
        for source, target in index.local:
            if result[target.weight] is not held[source.weight]:
                target.in_box(result[target.weight]).copy_(source.in_box(held[source.weight]))
        for strip in index.strips:
            strip.in_box(result[strip.weight]).copy_(strip.in_buffer(received))
        return result

    def _added(
        self, bundle: int, parts: Mapping[int, torch.Tensor], wide: torch.dtype, rooms: Tensors
    ) -> dict[int, torch.Tensor]:
        """Return the source's boxes with the sums of all parts, {rank: message}."""
        result = dict(rooms)
        for weight, box in self._boxes(bundle, self.source):
            if weight not in rooms:
                result[weight] = torch.zeros((box.rows, box.columns), dtype=wide, device=self._device)
        for form in self._indices[bundle].forms:
            total = parts[form.peers[0]].to(wide, copy=len(form.peers) > 1)
            for peer in form.peers[1:]:
                total += parts[peer]
            for strip in form.strips:
                strip.in_box(result[strip.weight]).add_(strip.in_buffer(total))
        return result

    def _rooms(
        self, bundle: int, boxes: Mapping[int, Box], into: Tensors, dtype: torch.dtype
    ) -> dict[int, torch.Tensor]:
        """Return the tensors to fill as [rows, columns]; refuse one of another dtype."""
        found = self._views(bundle, boxes, into)
        for weight, room in found.items():
            if room.dtype != dtype:
                raise SeqloomError(
                    f"{self._names[weight]}: a tensor of {room.dtype} to be filled with {dtype}; make it {dtype}"
                )
        return found

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _boxes(self, bundle: int, boxes: Mapping[int, Box]) -> Iterator[tuple[int, Box]]:
        return ((weight, boxes[weight]) for weight in self.bundles[bundle] if weight in boxes)

    def _views(self, bundle: int, boxes: Mapping[int, Box], tensors: Tensors) -> dict[int, torch.Tensor]:
        """Return the tensors of a bundle's boxes as [rows, columns]."""
        given = ((weight, box) for weight, box in self._boxes(bundle, boxes) if weight in tensors)
        return {weight: box.view(tensors[weight], self._names[weight]) for weight, box in given}

    def _refuse_missing(self, bundle: int, held: Tensors) -> None:
        for weight, box in self._boxes(bundle, self.source):
            if weight not in held:
                raise SeqloomError(
                    f"{self._names[weight]}: no tensor from a rank that holds {box.rows} rows x {box.columns} columns "
                    "of it; give what the source layout says it holds"
                )


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
