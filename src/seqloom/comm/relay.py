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
from seqloom.comm.relay_index import Box, Index, Strip, boxes_of, index_bundles
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
            transport: this rank's.
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

        What is given may be changed after this call (on a GPU: in this stream); what is returned as it was given may
        not.

        Args:
            bundle: number.
            tensors: {weight: contiguous tensor of this rank's source box, [rows, columns] or any shape of as many
                elements}; other weights are ignored.
            dtype: of the values on their way and after it, the same on all ranks; the sender casts.
            into: {weight: contiguous tensor of the target box, in `dtype`}: filled until `wait` returns. For weights
                that are not there a tensor is made; or the given one is returned itself, where the source's box is
                the target's and the dtype is right.
        """
        index, into = self._indices[bundle], into or {}
        self._refuse_missing(bundle, tensors)
        held = self._views(bundle, self.source, tensors)
        sent = self._new(sum(form.size for form in index.forms), dtype)
        received = self._new(index.incoming, dtype)
        outgoing, base = [], 0
        for form in index.forms:
            _fill(sent, held, form.strips, base)
            outgoing += [Parcel(peer, sent[base : base + form.size]) for peer in form.peers]
            base += form.size
        handle = exchange_filled(self._transport, outgoing, _messages(index, received))

        result = {}
        for weight, box in self._boxes(bundle, self.target):
            if weight in into:
                result[weight] = box.view(self._checked(weight, into[weight], dtype), self._names[weight])
            elif self.source.get(weight) == box and held[weight].dtype == dtype:
                result[weight] = held[weight]
            else:
                result[weight] = self._new(box.rows * box.columns, dtype).view(box.rows, box.columns)
        for source, target in index.local:
            if result[target.weight] is not held[source.weight]:
                target.in_box(result[target.weight]).copy_(source.in_box(held[source.weight]))

        def finish() -> dict[int, torch.Tensor]:
            for strip in index.strips:
                strip.in_box(result[strip.weight]).copy_(strip.in_buffer(received))
            return result

        return Pending(handle, sent, finish)

    @torch.no_grad()
    def start_sum(self, bundle: int, tensors: Tensors, dtype: torch.dtype, *, into: Tensors | None = None) -> Pending:
        """Start to bring a bundle's gradients to the source's boxes, where those of all holders are added.

        Sums are in float32 or wider, in rank order. Each holder's part goes where `start` brings its value from: to
        the only rank that has it in the source, or to one of several, which then have parts of the sum. What is given
        may be changed after this call (on a GPU: in this stream).

        Args:
            bundle: number.
            tensors: {weight: contiguous tensor of this rank's target box}; a weight that is not there counts as zero.
            dtype: of the gradients on their way, the same on all ranks; the sender casts.
            into: {weight: contiguous tensor of the source box, in float32 or wider}: added to in `wait`. For weights
                that are not there a tensor is made.
        """
        index, into = self._indices[bundle], into or {}
        held = self._views(bundle, self.target, tensors)
        sent = self._new(index.incoming, dtype)
        received = self._new(index.outgoing, dtype)
        own = self._new(sum(source.size for source, _ in index.local), dtype)
        _fill(sent, held, index.strips)
        _fill(own, held, [target for _, target in index.local])
        parts: list[tuple[int, Sequence[Strip], torch.Tensor]] = [
            (self._transport.rank, [source for source, _ in index.local], own)
        ]
        base = 0
        for form in index.forms:
            for peer in form.peers:
                parts.append((peer, form.strips, received[base : base + form.size]))
                base += form.size
        incoming = [Parcel(peer, part) for peer, _, part in parts[1:]]
        handle = exchange_filled(self._transport, _messages(index, sent), incoming)
        wide = torch.promote_types(dtype, torch.float32)

        def finish() -> dict[int, torch.Tensor]:
            result = {}
            for weight, box in self._boxes(bundle, self.source):
                if weight in into:
                    result[weight] = box.view(self._checked(weight, into[weight], wide), self._names[weight])
                else:
                    result[weight] = torch.zeros((box.rows, box.columns), dtype=wide, device=self._device)
            for _, strips, part in sorted(parts, key=lambda each: each[0]):
                for strip in strips:
                    strip.in_box(result[strip.weight]).add_(strip.in_buffer(part))
            return result

        return Pending(handle, sent, finish)

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _boxes(self, bundle: int, boxes: Mapping[int, Box]) -> Iterator[tuple[int, Box]]:
        return ((weight, boxes[weight]) for weight in self.bundles[bundle] if weight in boxes)

    def _views(self, bundle: int, boxes: Mapping[int, Box], tensors: Tensors) -> dict[int, torch.Tensor]:
        """Return the tensors of a bundle's boxes as [rows, columns]."""
        given = ((weight, box) for weight, box in self._boxes(bundle, boxes) if weight in tensors)
        return {weight: box.view(tensors[weight], self._names[weight]) for weight, box in given}

    def _refuse_missing(self, bundle: int, tensors: Tensors) -> None:
        missing = next((weight for weight, _ in self._boxes(bundle, self.source) if weight not in tensors), None)
        if missing is not None:
            raise SeqloomError(f"{self._names[missing]}: this rank holds a part of it and gives none; give its tensor")

    def _checked(self, weight: int, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if tensor.dtype != dtype:
            name = self._names[weight]
            raise SeqloomError(f"{name}: a tensor of {tensor.dtype} to be filled with {dtype}; make it {dtype}")
        return tensor


def _fill(buffer: torch.Tensor, held: Tensors, strips: Sequence[Strip], base: int = 0) -> None:
    """Copy pieces of tensors to their places in a buffer; what is not held is zero."""
    for strip in strips:
        place = strip.in_buffer(buffer, base)
        if strip.weight in held:
            place.copy_(strip.in_box(held[strip.weight]))
        else:
            place.zero_()


def _messages(index: Index, buffer: torch.Tensor) -> list[Parcel]:
    """Cut the target end's buffer into messages."""
    parts = buffer.split([size for _, size in index.messages])
    return [Parcel(peer, part) for (peer, _), part in zip(index.messages, parts, strict=True)]
