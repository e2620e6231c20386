"""Weights on their way: from the layout in which they are kept to the one in which they are computed with, and back.

    kept, used = optimiser_layout(weights, ranks), compute_layout(weights, pipelines)
    relay = Relay(weights, kept, used, transport, device=device)
    copies = relay.start(3, masters, torch.bfloat16).wait()         # bundle 3: {weight: [rows, columns]}
    sums = relay.start_sum(3, gradients, torch.float32).wait()      # {weight: [rows, columns] of the masters' boxes}

Every element travels once to every rank that needs it and has none, in one message per pair of ranks and bundle. The
way back is the same with both ends exchanged: what a rank got from another it gives back to that one, which adds up
what comes.

Where several ranks of a node need what only ranks of other nodes have, it crosses the network once and goes on inside
the node: two hops, see `plan.landing`. Gradients are then summed inside the node before they cross.

All ranks that hold something of a bundle, in the source or in the target, start it, all bundles in one order; the
others may. Several may be under way. They share the transport's `exchange` with everything else that uses it. With two
hops, see `pending`: ranks also have to wait alike, or call `Pending.go_on`, before they use it for anything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from seqloom.comm.hop import Flight, Hop, Tensors
from seqloom.comm.pending import Leg, Pending, Result, in_stream
from seqloom.comm.relay_index import boxes_of, index_bundles
from seqloom.comm.relay_parts import Box
from seqloom.comm.transport import Transport
from seqloom.errors import SeqloomError
from seqloom.plan.layout import Layout
from seqloom.plan.rank_move import hops_of_rank
from seqloom.plan.weights import Weight
from seqloom.plan.weights import bundles as bundles_of


class Volume(NamedTuple):
    """Elements of weights that leave this rank for others, and that come from others."""

    sent: int
    received: int


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
            Hop(index_bundles(move, transport.rank, self.bundles, held, self.target), transport, self._device)
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

    def _node_sums(self, bundle: int, second: Hop, flight: Flight, held: Tensors, wide: torch.dtype) -> Result:
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


def _passed_on(second: Hop, bundle: int, result: Result, dtype: torch.dtype) -> Leg:
    """Start the hop inside the node, from what has landed to the whole boxes."""
    flight = second.send(bundle, result, dtype)

    def finish() -> Result:
        second.put(bundle, flight, result, result)
        return result

    return Leg(flight.handle, flight, finish)
