"""One hop of a relay: a bundle's pieces, packed into one message per pair of ranks, sent, and put where they belong.

A hop has a source end and a target end, each with tensors of this rank's boxes. Values go from the first to the second.
Gradients go back: what a rank got from another it gives to that one, which adds up what comes.
"""

from __future__ import annotations

import torch
from collections import deque
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from seqloom.dist.reshard_index import Box
from seqloom.dist.reshard_index import Index
from seqloom.dist.reshard_index import Strip
from seqloom.dist.reshard_index import boxes_of
from seqloom.dist.reshard_index import index_bundles
from seqloom.dist.transport import Handle
from seqloom.dist.transport import P2PTensor
from seqloom.dist.transport import Transport
from seqloom.dist.transport import exchange_nonempty
from seqloom.errors import SeqloomError
from seqloom.layout.layout import Layout
from seqloom.layout.move import hops_of_rank
from seqloom.plan.parameter_layout import Weight
from seqloom.plan.parameter_layout import bundles as bundles_of
from typing import NamedTuple


Tensors = Mapping[int, torch.Tensor]


class InFlight(NamedTuple):
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


class ReshardHop:
    """One rank's part of a hop, of all bundles."""

    def __init__(self, indices: Sequence[Index], transport: Transport, device: torch.device) -> None:
        """Keep the index work of every bundle; see `index_bundles`."""
        self._indices, self._transport, self._device = tuple(indices), transport, device

    def volume(self, bundle: int) -> tuple[int, int]:
        """Return the elements of a bundle that leave this rank with values, and that come."""
        return self._indices[bundle].outgoing, self._indices[bundle].incoming

    def send(self, bundle: int, held: Tensors, dtype: torch.dtype) -> InFlight:
        """Start to bring values from tensors of the source end, {weight: [rows, columns]}, to the target end."""
        index = self._indices[bundle]
        leaving = [form for form in index.forms if form.peers != (index.rank,)]
        sent = self._new(sum(form.size for form in leaving), dtype)
        outgoing = []
        for form, message in zip(leaving, sent.split([form.size for form in leaving]), strict=True):
            _pack(message, held, form.strips)
            outgoing += [P2PTensor(peer, message) for peer in form.peers if peer != index.rank]
        received = self._new(index.incoming, dtype)
        handle = exchange_nonempty(self._transport, outgoing, _messages(index, received))
        return InFlight(handle, sent, received, {})

    def put(self, bundle: int, flight: InFlight, held: Tensors, result: Tensors) -> None:
        """Fill tensors of the target end with what has come, and with what was here, in `held`, already."""
        for source, target in self._indices[bundle].local:
            if result[target.weight] is not held[source.weight]:
                target.in_box(result[target.weight]).copy_(source.in_box(held[source.weight]))
        for strip in self._indices[bundle].strips:
            strip.in_box(result[strip.weight]).copy_(strip.in_buffer(flight.received))

    def send_back(self, bundle: int, held: Tensors, dtype: torch.dtype) -> InFlight:
        """Start to bring gradients from tensors of the target end to the source end; what is not held is zero."""
        index = self._indices[bundle]
        sent = self._new(index.incoming, dtype)
        own = self._new(sum(source.size for source, _ in index.local), dtype)
        _pack(sent, held, index.strips)
        _pack(own, held, [target for _, target in index.local])
        ends = [(peer, form.size) for form in index.forms for peer in form.peers if peer != index.rank]
        received = self._new(index.outgoing, dtype)
        messages = received.split([size for _, size in ends])
        incoming = [P2PTensor(peer, part) for (peer, _), part in zip(ends, messages, strict=True)]
        handle = exchange_nonempty(self._transport, _messages(index, sent), incoming)
        return InFlight(handle, sent, received, dict(incoming) | {index.rank: own})

    def add(self, bundle: int, flight: InFlight, wide: torch.dtype, result: Tensors) -> None:
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


def _messages(index: Index, buffer: torch.Tensor) -> list[P2PTensor]:
    """Cut the target end's buffer into messages."""
    parts = buffer.split([size for _, size in index.messages])
    return [P2PTensor(peer, part) for (peer, _), part in zip(index.messages, parts, strict=True)]


# ---- merged: comm.pending
# Bundles of a relay under way, in one hop or in two: the second begins when the first has arrived.
#
# All ranks begin their exchanges in one order. Where waiting is done by streams of a GPU, both hops are started at
# once,
# on a stream of their own, so the orders of the starts are those of the exchanges:
#
#     stream     hop 1 of bundle 0, hop 2 of bundle 0, hop 1 of bundle 1, hop 2 of bundle 1, ..
#
# Where the caller itself waits, it has to begin the second hops. They begin one after the other as the bundles were
# started, up to the one that is asked for: when it is waited for, or before (`Pending.go_on`).
#
#     caller     hop 1 of bundles 0 .. n, .. asked for bundle 1: hop 2 of bundle 0, hop 2 of bundle 1, ..
#
# Until then other ranks of the node wait for this one, which must not wait for them meanwhile.


Result = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Leg:
    """A hop under way.

    Attributes:
        handle: to wait for.
        kept: what must stay in memory until then.
        finish: called after that, of the last hop: gives what this rank holds.
        onward: the same, of a hop that another follows: starts that.
    """

    handle: Handle
    kept: object
    finish: Callable[[], Result] | None = None
    onward: Callable[[], Leg] | None = None


class Pending:
    """A bundle under way."""

    def __init__(self, leg: Leg, line: deque[Pending]) -> None:
        """Follow a bundle from its first hop on; `line`: those before it whose second hop has not begun."""
        self._leg: Leg | None = leg
        self._result: Result = {}
        self._line = line
        if leg.onward is not None:
            line.append(self)

    def go_on(self) -> None:
        """Begin the second hop, if there is one, after those of the bundles before; waits for first hops only."""
        while self in self._line:
            self._line.popleft()._take_off()

    def wait(self) -> Result:
        """Return what this rank holds after the move: {weight: [rows, columns] of its box}. Waiting twice is fine.

        On a GPU it is in the current stream's order, where the transport waits in stream; the host goes on.
        """
        self.go_on()
        if self._leg is not None and self._leg.finish is not None:
            self._leg.handle.wait()
            with torch.no_grad():
                self._result = self._leg.finish()
            self._leg = None
        return self._result

    @torch.no_grad()
    def _take_off(self) -> None:
        if self._leg is not None and self._leg.onward is not None:
            self._leg.handle.wait()
            self._leg = self._leg.onward()


def in_stream(begin: Callable[[], Leg], device: torch.device, used: Iterable[torch.Tensor]) -> Pending:
    """Run all hops of a bundle on a stream of their own, behind what the current one has been given so far.

    Args:
        begin: starts the first hop.
        device: of the stream.
        used: tensors that may be dropped meanwhile; their memory is kept.
    """
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        result = Pending(begin(), deque()).wait()
    done = torch.cuda.Event()
    done.record(stream)
    for tensor in used:
        tensor.record_stream(stream)
    return Pending(Leg(_Done(done, result, device), None, lambda: result), deque())


@dataclass(frozen=True, slots=True)
class _Done:
    """The end of a bundle on the relays' stream."""

    event: torch.cuda.Event
    result: Result
    device: torch.device

    def wait(self) -> None:
        """Let the current stream wait; what was made on the other may then be used, and dropped, on this one."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.event)
        for tensor in self.result.values():
            tensor.record_stream(current)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all relays of a device: what they exchange has one order."""
    return torch.cuda.Stream(device)


# ---- merged: comm.relay
# Weights on their way: from the layout in which they are kept to the one in which they are computed with, and back.
#
#     kept, used = optimiser_layout(weights, ranks), compute_layout(weights, pipelines)
#     relay = Relay(weights, kept, used, transport, device=device)
#     copies = relay.start(3, masters, torch.bfloat16).wait()         # bundle 3: {weight: [rows, columns]}
#     sums = relay.start_sum(3, gradients, torch.float32).wait()      # {weight: [rows, columns] of the masters'
# boxes}
#
# Every element travels once to every rank that needs it and has none, in one message per pair of ranks and bundle.
# The
# way back is the same with both ends exchanged: what a rank got from another it gives back to that one, which adds
# up
# what comes.
#
# Where several ranks of a node need what only ranks of other nodes have, it crosses the network once and goes on
# inside
# the node: two hops, see `plan.landing`. Gradients are then summed inside the node before they cross.
#
# All ranks that hold something of a bundle, in the source or in the target, start it, all bundles in one order; the
# others may. Several may be under way. They share the transport's `exchange` with everything else that uses it.
# With two
# hops, see `pending`: ranks also have to wait alike, or call `Pending.go_on`, before they use it for anything else.


class Volume(NamedTuple):
    """Elements of weights that leave this rank for others, and that come from others."""

    sent: int
    received: int


class Resharder:
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
            node_size: ranks per node. Nothing crosses to a node twice, where ranks have different rows in the source;
                where several hold something, one of the receiver's node sends it. None: all ranks are alike.
            bundles: what moves together; None: `plan.weights.bundles`.
        """
        self.bundles = tuple(map(tuple, bundles_of(weights) if bundles is None else bundles))
        self.source, self.target = (boxes_of(layout, transport.rank) for layout in (source, target))
        self._names = [weight.name for weight in weights]
        self._device, self._streams = torch.device(device), transport.waits_in_stream
        # A rank lands only what it wants: after the first hop that is in the tensors of its target boxes.
        moves = hops_of_rank(transport.rank, source, target, node_size=node_size)
        self._hops = [
            ReshardHop(index_bundles(move, transport.rank, self.bundles, held, self.target), transport, self._device)
            for move, held in zip(moves, (self.source, self.target), strict=False)
        ]
        self._line: deque[Pending] = deque()

    def volume(self, bundle: int | None = None) -> Volume:
        """Return what `start` moves, of one bundle or of all; `start_sum` moves the same the other way."""
        chosen = range(len(self.bundles)) if bundle is None else (bundle,)
        ends = [hop.volume(each) for hop in self._hops for each in chosen]
        return Volume(sum(left for left, _ in ends), sum(came for _, came in ends))

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
        rooms = self._rooms(bundle, self.target, into or {}, dtype)
        held = self._views(bundle, self.source, tensors)
        self._refuse_missing(bundle, held)

        def begin() -> Leg:
            first, *others = self._hops
            flight = first.send(bundle, held, dtype)

            def landed() -> Result:
                result = self._filled(bundle, held, rooms, dtype)
                first.put(bundle, flight, held, result)
                return result

            if not others:
                return Leg(flight.handle, flight, landed)
            return Leg(flight.handle, flight, onward=lambda: _passed_on(others[0], bundle, landed(), dtype))

        return self._under_way(begin, {})

    @torch.no_grad()
    def start_sum(self, bundle: int, tensors: Tensors, dtype: torch.dtype, *, into: Tensors | None = None) -> Pending:
        """Start to bring a bundle's gradients to the source's boxes, where those of all holders are added.

        Each holder's part goes where `start` brings its value from: to the only rank that has it in the source, or to
        one of several, which then have parts of the sum. Sums are in float32 or wider, in one order: parts of ranks
        with the same boxes in rank order, then the sums of these in the order of their first ranks. In two hops a node
        has one part of what it does not own: its ranks' in this order, added to that of the rank where they land.

        What is given belongs to the relay from here on: in two hops that rank adds to it, where it is wide enough.
        With one hop it may be changed after this call (on a GPU: in this stream).

        Args:
            bundle: number.
            tensors: {weight: contiguous tensor of this rank's target box}; a weight that is not there counts as zero.
            dtype: of the gradients on their way, the same on all ranks; the sender casts. Sums of a node cross in
                float32 or wider.
            into: {weight: contiguous tensor of the source box, in `dtype` or float32, whichever is wider}: `wait` adds
                the sums to it. For weights that are not there it makes a tensor.
        """
        wide = torch.promote_types(dtype, torch.float32)
        rooms = self._rooms(bundle, self.source, into or {}, wide)
        held = self._views(bundle, self.target, tensors)

        def begin() -> Leg:
            if len(self._hops) == 1:
                return self._home(bundle, held, dtype, rooms)
            second = self._hops[1]
            flight = second.send_back(bundle, held, dtype)

            def onward() -> Leg:
                return self._home(bundle, self._node_sums(bundle, second, flight, held, wide), wide, rooms)

            return Leg(flight.handle, (flight, held), onward=onward)

        return self._under_way(begin, held)

    def _under_way(self, begin: Callable[[], Leg], used: Tensors) -> Pending:
        """Start a bundle; what is `used` may be dropped by the caller."""
        if len(self._hops) > 1 and self._streams and self._device.type == "cuda":
            return in_stream(begin, self._device, used.values())
        return Pending(begin(), self._line)

    def _filled(self, bundle: int, held: Tensors, rooms: Tensors, dtype: torch.dtype) -> Result:
        """Return tensors for the target's boxes: the rooms, those that are right already, and new ones."""
        result = dict(rooms)
        for weight, box in self._boxes(bundle, self.target):
            if weight not in rooms:
                shared = self.source.get(weight) == box and held[weight].dtype == dtype
                result[weight] = held[weight] if shared else self._new(box, dtype)
        return result

    def _node_sums(self, bundle: int, second: ReshardHop, flight: InFlight, held: Tensors, wide: torch.dtype) -> Result:
        """Return the target's boxes with the parts of the node's other ranks added, where they land here."""
        sums = dict(held)
        for weight in second.collected(bundle):
            sums[weight] = held[weight].to(wide) if weight in held else self._new(self.target[weight], wide).zero_()
        second.add(bundle, flight, wide, sums)
        return sums

    def _home(self, bundle: int, held: Tensors, dtype: torch.dtype, rooms: Tensors) -> Leg:
        """Start the hop to the source's boxes, where all that comes is added."""
        first, wide = self._hops[0], torch.promote_types(dtype, torch.float32)
        flight = first.send_back(bundle, held, dtype)

        def added() -> Result:
            result = dict(rooms)
            for weight, box in self._boxes(bundle, self.source):
                if weight not in rooms:
                    result[weight] = self._new(box, wide).zero_()
            first.add(bundle, flight, wide, result)
            return result

        return Leg(flight.handle, flight, added)

    def _new(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((box.rows, box.columns), dtype=dtype, device=self._device)

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


def _passed_on(second: ReshardHop, bundle: int, result: Result, dtype: torch.dtype) -> Leg:
    """Start the hop inside the node, from what has landed to the whole boxes."""
    flight = second.send(bundle, result, dtype)

    def finish() -> Result:
        second.put(bundle, flight, result, result)
        return result

    return Leg(flight.handle, flight, finish)
