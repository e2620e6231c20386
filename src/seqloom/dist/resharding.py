"""Moves weights from the layout in which they are stored to the one in which they are computed with, and back.

    stored, used = optimiser_layout(weights, ranks), compute_layout(weights, pipelines)
    resharder = Resharder(weights, stored, used, transport, device=device)
    copies = resharder.start_copy(3, masters, torch.bfloat16).wait()        # bucket 3: {weight: [rows, columns]}
    sums = resharder.start_reduce(3, gradients, torch.float32).wait()       # {weight: [rows, columns] of the masters}

Every element travels once to every rank that needs it and has none, in one message per pair of ranks and bucket.
Gradients go the inverse way: a rank returns to each sender the gradient of what it received, and the sender adds up.

Two hops: where several ranks of a node need what only ranks of other nodes have, it crosses the network once and is
shared inside the node, see `layout.move.reshard_moves_of_rank`. Gradients are summed inside the node before they cross.

All ranks that hold something of a bucket, in source or target, start it, all buckets in one order; the others may.
Several may be in flight. They share the transport's `exchange` with everything else that uses it. With NCCL both hops
of a bucket are queued at once on a stream of their own. Otherwise the caller starts second hops, in the order of the
buckets, when it waits or calls `InFlight.start_second_hop`. Until then other ranks of the node wait for this one, which
must not wait for them meanwhile: ranks wait in the same order, or start second hops before any other exchange.

The index work of a pair of layouts is done once on the host. With the optimiser's layout of 4 ranks as the source and a
whole copy on rank 2 as the target, rank 2 receives a bucket of two weights a and b like this:

    buffer     | a from 0 | b from 0 | a from 1 | b from 1 | a from 3 | b from 3 |
    tensors    | a from 0 | a from 1 | its own a | a from 3 |   | b from 0 | b from 1 | its own b | b from 3 |

Pieces of one size at one distance make one `Strip`, which one call copies, however many ranks there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from seqloom.dist.transport import Handle, P2PTensor, Transport, exchange_nonempty
from seqloom.errors import SeqloomError
from seqloom.layout import Layout
from seqloom.layout.move import Move, reshard_moves_of_rank
from seqloom.plan.parameter_layout import Weight, layer_buckets

Tensors = Mapping[int, torch.Tensor]
"""{weight: tensor of this rank's box}."""
Result = dict[int, torch.Tensor]


class Box(NamedTuple):
    """Rows `start .. stop - 1` and columns `start2 .. stop2 - 1` of a weight."""

    start: int
    stop: int
    start2: int
    stop2: int

    @property
    def rows(self) -> int:
        """Rows of its tensor."""
        return self.stop - self.start

    @property
    def columns(self) -> int:
        """Columns of its tensor."""
        return self.stop2 - self.start2

    def view(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Return a contiguous tensor that holds this box as [rows, columns]."""
        if tensor.numel() != self.rows * self.columns or not tensor.is_contiguous():
            raise SeqloomError(
                f"{name}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} for {self.rows} rows x "
                f"{self.columns} columns of the weight; give a contiguous tensor of as many elements"
            )
        return tensor.detach().view(self.rows, self.columns)


def boxes_of(layout: Layout, rank: int) -> dict[int, Box]:
    """Return what a rank holds, by weight; refuse several boxes of one weight."""
    mine = layout.restrict([rank])
    found = {item: Box(*box) for item, *box in zip(*(column.tolist() for column in mine.columns()[1:]), strict=True)}
    if len(found) < len(mine):
        raise SeqloomError(
            f"rank {rank} holds several boxes of one weight; resharding moves one box per rank and weight"
        )
    return found


class Resharder:
    """One rank's moves of weights between two layouts. The constructor does all index work: reuse it.

    Attributes:
        source, target: {weight: Box} of this rank; weights of which it has nothing are left out.
        buckets: weights of every bucket, by index.
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
        buckets: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Compute this rank's part. Communicates nothing.

        Args:
            weights: items of the layouts are their indices.
            source: who has what before; holds all that the target asks for.
            target: who shall have what after. Neither gives a rank two boxes of one weight.
            transport: this rank's; one whose exchanges nothing else uses, where buckets overlap the computation.
            node_size: ranks per node. Nothing crosses to a node twice, where ranks have different rows in the source;
                where several hold something, one of the receiver's node sends it. None: nodes do not matter.
            buckets: what moves together; None: `plan.parameter_layout.layer_buckets`.
        """
        self.buckets = tuple(map(tuple, layer_buckets(weights) if buckets is None else buckets))
        self.source, self.target = (boxes_of(layout, transport.rank) for layout in (source, target))
        self._names = [weight.name for weight in weights]
        self._device = torch.device(device)
        # After the first hop a rank has nothing but parts of its target boxes, in their tensors.
        moves = reshard_moves_of_rank(transport.rank, source, target, node_size=node_size)
        indices = (
            index_buckets(move, transport.rank, self.buckets, held, self.target)
            for move, held in zip(moves, (self.source, self.target), strict=False)
        )
        self._hops = [tuple(_Hop(index, transport, self._device) for index in hop) for hop in indices]
        self._on_stream = len(moves) > 1 and transport.waits_in_stream and self._device.type == "cuda"
        self._first_hops: deque[InFlight] = deque()

    def start_copy(self, bucket: int, tensors: Tensors, dtype: torch.dtype, *, into: Tensors | None = None) -> InFlight:
        """Start to copy a bucket's values to the target's boxes. `tensors` must not change until `wait` has returned.

        Args:
            tensors: {weight: contiguous tensor of this rank's source box, [rows, columns] or any shape of as many
                elements}; weights of other buckets are ignored.
            dtype: of the values in flight and afterwards, the same on all ranks; the sender casts.
            into: {weight: contiguous tensor of the target box, in `dtype`}, filled by `wait`. For other weights `wait`
                allocates a tensor; or it returns the given one itself, where the source's box is the target's and the
                dtype is right.
        """
        outputs = self._outputs(bucket, self.target, into or {}, dtype)
        held = self._views(bucket, self.source, tensors)
        for weight, box in self._boxes(bucket, self.source):
            if weight not in held:
                raise SeqloomError(
                    f"{self._names[weight]}: no tensor from a rank that holds {box.rows} rows x {box.columns} columns "
                    "of it; give what the source layout says it holds"
                )
        return self._start(self._copy_hops(bucket, held, outputs, dtype), ())

    def start_reduce(
        self, bucket: int, tensors: Tensors, dtype: torch.dtype, *, into: Tensors | None = None
    ) -> InFlight:
        """Start to sum a bucket's gradients into the source's boxes.

        Each holder's gradient goes to the rank that `start_copy` brings its value from: to the only one that has it in
        the source, or to one of several, which then have parts of the sum. Sums are in float32 or wider, in a fixed
        order: gradients of ranks with the same boxes in rank order, then the sums of these in the order of their first
        ranks. With two hops a node sends one sum of what it does not own: its ranks' in this order, added to that of
        the rank that sends.

        `tensors` belong to the resharder from here on: with two hops it adds to them, where they are wide enough. With
        one hop they may be changed after this call (on a GPU: in this stream).

        Args:
            tensors: {weight: contiguous tensor of this rank's target box}; a weight that is left out counts as zero.
            dtype: of the gradients in flight, the same on all ranks; the sender casts. Sums of a node cross in float32
                or wider.
            into: {weight: contiguous tensor of the source box, in `dtype` or float32, whichever is wider}: `wait` adds
                the sums to it. For other weights it allocates a tensor.
        """
        outputs = self._outputs(bucket, self.source, into or {}, torch.promote_types(dtype, torch.float32))
        held = self._views(bucket, self.target, tensors)
        return self._start(self._reduce_hops(bucket, held, outputs, dtype), held.values())

    @torch.no_grad()
    def _start(self, hops: Hops, tensors: Iterable[torch.Tensor]) -> InFlight:
        """Start a bucket's first hop, or all hops on a stream; the caller may drop `tensors`."""
        if self._on_stream:
            return _OnStream(hops, self._device, tensors)
        started = InFlight(hops, self._first_hops)
        if len(self._hops) > 1:
            self._first_hops.append(started)
        return started

    def _copy_hops(self, bucket: int, held: Tensors, outputs: Tensors, dtype: torch.dtype) -> Hops:
        result: Result = {}
        for hop in (each[bucket] for each in self._hops):
            received = yield from hop.send(held, dtype)
            for weight, box in self._boxes(bucket, self.target):
                if weight in outputs:
                    result[weight] = outputs[weight]
                elif weight not in result:
                    shared = self.source.get(weight) == box and held[weight].dtype == dtype
                    result[weight] = held[weight] if shared else self._empty(box, dtype)
            hop.unpack(received, held, result)
            held = result
        return result

    def _reduce_hops(self, bucket: int, held: Tensors, outputs: Tensors, dtype: torch.dtype) -> Hops:
        wide, sums = torch.promote_types(dtype, torch.float32), dict(outputs)
        for number in reversed(range(len(self._hops))):
            hop = self._hops[number][bucket]
            parts = yield from hop.send_back(held, dtype)
            if number:
                sums, added = dict(held), {weight: self.target[weight] for weight in hop.weights_sent()}
            else:
                sums, added = dict(outputs), dict(self._boxes(bucket, self.source))
            for weight, box in added.items():
                sums[weight] = sums[weight].to(wide) if weight in sums else self._empty(box, wide).zero_()
            hop.add(parts, wide, sums)
            held, dtype = sums, wide
        return sums

    def _empty(self, box: Box, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty((box.rows, box.columns), dtype=dtype, device=self._device)

    def _outputs(self, bucket: int, boxes: Mapping[int, Box], into: Tensors, dtype: torch.dtype) -> Result:
        """Return the tensors to fill as [rows, columns]; refuse one of another dtype."""
        found = self._views(bucket, boxes, into)
        for weight, output in found.items():
            if output.dtype != dtype:
                raise SeqloomError(
                    f"{self._names[weight]}: a tensor of {output.dtype} to be filled with {dtype}; make it {dtype}"
                )
        return found

    def _boxes(self, bucket: int, boxes: Mapping[int, Box]) -> Iterator[tuple[int, Box]]:
        return ((weight, boxes[weight]) for weight in self.buckets[bucket] if weight in boxes)

    def _views(self, bucket: int, boxes: Mapping[int, Box], tensors: Tensors) -> Result:
        """Return the tensors of a bucket's boxes as [rows, columns]."""
        given = ((weight, box) for weight, box in self._boxes(bucket, boxes) if weight in tensors)
        return {weight: box.view(tensors[weight], self._names[weight]) for weight, box in given}


Hops = Generator[Handle, None, Result]
"""Starts one hop after the other; yields the handle of each, which is waited for before the next `next`."""


class InFlight:
    """A bucket in flight."""

    def __init__(self, hops: Hops, queue: deque[InFlight]) -> None:
        """Start the first hop; `queue` has the buckets whose second hop has not started, in order."""
        self._hops, self._queue = hops, queue
        self._handle = next(hops)
        self._result: Result | None = None

    def start_second_hop(self) -> None:
        """Start the second hop, if there is one, after those of earlier buckets; waits for first hops only."""
        while self in self._queue:
            self._queue.popleft()._advance()

    def wait(self) -> Result:
        """Return what this rank holds after the move: {weight: [rows, columns] of its box}. Waiting twice is fine.

        On a GPU it is in the current stream's order, where the transport waits in stream; the host goes on.
        """
        self.start_second_hop()
        while self._result is None:
            self._advance()
        return self._result

    @torch.no_grad()
    def _advance(self) -> None:
        self._handle.wait()
        try:
            self._handle = next(self._hops)
        except StopIteration as end:
            self._result = end.value


class _OnStream(InFlight):
    """A bucket whose hops are all queued on the resharding stream, behind what the current stream was given before."""

    def __init__(self, hops: Hops, device: torch.device, tensors: Iterable[torch.Tensor]) -> None:
        stream = _stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            super().__init__(hops, deque())
            super().wait()
        self._device, self._done = device, stream.record_event()
        for tensor in tensors:
            tensor.record_stream(stream)

    def wait(self) -> Result:
        """Let the current stream wait; tensors of the other may then be used, and dropped, on this one."""
        result, current = super().wait(), torch.cuda.current_stream(self._device)
        current.wait_event(self._done)
        for tensor in result.values():
            tensor.record_stream(current)
        return result


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream on which all resharders of a device exchange, in one order."""
    return torch.cuda.Stream(device)


class _Hop:
    """One rank's part of one hop of one bucket: packs, exchanges and unpacks.

    `send` and `send_back` yield the handle of their exchange and keep what leaves alive until it has.
    """

    def __init__(self, index: BucketIndex, transport: Transport, device: torch.device) -> None:
        self._index, self._transport, self._device = index, transport, device

    def send(self, held: Tensors, dtype: torch.dtype) -> Generator[Handle, None, torch.Tensor]:
        """Send values from tensors of the source end, {weight: [rows, columns]}; return the buffer of all messages."""
        rank = self._index.rank
        outgoing = [each for each in self._index.outgoing if each.peers != (rank,)]
        sent = self._empty(sum(each.size for each in outgoing), dtype)
        sends = []
        for each, message in zip(outgoing, sent.split([each.size for each in outgoing]), strict=True):
            _pack(message, held, each.strips)
            sends += [P2PTensor(peer, message) for peer in each.peers if peer != rank]
        received = self._empty(self._index.received_size, dtype)
        yield exchange_nonempty(self._transport, sends, _split(received, self._index.messages))
        return received

    def unpack(self, received: torch.Tensor, held: Tensors, result: Tensors) -> None:
        """Fill tensors of the target end with what was received, and with what is in `held` here already."""
        for source, target in self._index.local:
            if result[target.weight] is not held[source.weight]:
                target.in_tensor(result[target.weight]).copy_(source.in_tensor(held[source.weight]))
        for strip in self._index.incoming:
            strip.in_tensor(result[strip.weight]).copy_(strip.in_buffer(received))

    def send_back(self, held: Tensors, dtype: torch.dtype) -> Generator[Handle, None, dict[int, torch.Tensor]]:
        """Send gradients from tensors of the target end; what is not held is zero.

        Returns:
            {rank: its message}, this rank's own included.
        """
        index = self._index
        sent = self._empty(index.received_size, dtype)
        own = self._empty(sum(source.size for source, _ in index.local), dtype)
        _pack(sent, held, index.incoming)
        _pack(own, held, [target for _, target in index.local])
        ends = [(peer, each.size) for each in index.outgoing for peer in each.peers if peer != index.rank]
        receives = _split(self._empty(sum(size for _, size in ends), dtype), ends)
        yield exchange_nonempty(self._transport, _split(sent, index.messages), receives)
        return dict(receives) | {index.rank: own}

    def add(self, parts: Tensors, wide: torch.dtype, result: Tensors) -> None:
        """Add the received gradients to tensors of the source end: those of ranks with the same boxes in rank order."""
        for each in self._index.outgoing:
            total = parts[each.peers[0]].to(wide, copy=len(each.peers) > 1)
            for peer in each.peers[1:]:
                total += parts[peer]
            for strip in each.strips:
                strip.in_tensor(result[strip.weight]).add_(strip.in_buffer(total))

    def weights_sent(self) -> frozenset[int]:
        """Return the weights of which other ranks send gradients to this one."""
        return frozenset(strip.weight for each in self._index.outgoing for strip in each.strips)

    def _empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)


def _split(buffer: torch.Tensor, messages: Sequence[tuple[int, int]]) -> list[P2PTensor]:
    """Split a buffer into messages, given as (peer, elements)."""
    parts = buffer.split([size for _, size in messages])
    return [P2PTensor(peer, part) for (peer, _), part in zip(messages, parts, strict=True)]


def _pack(buffer: torch.Tensor, held: Tensors, strips: Sequence[Strip]) -> None:
    """Copy pieces of tensors into a buffer; what is not held is zero."""
    for strip in strips:
        packed = strip.in_buffer(buffer)
        if strip.weight in held:
            packed.copy_(strip.in_tensor(held[strip.weight]))
        else:
            packed.zero_()


class Strip(NamedTuple):
    """Pieces [rows, columns] of a weight, at equal distances in the tensor of its box and in a buffer.

    Attributes:
        rows, columns: of each piece.
        width: columns of the tensor.
        tensor_start, buffer_start: elements before the first piece; in the buffer each piece is contiguous.
        tensor_step, buffer_step: elements from one piece to the next.
    """

    weight: int
    rows: int
    columns: int
    width: int
    tensor_start: int
    buffer_start: int
    tensor_step: int = 0
    buffer_step: int = 0
    count: int = 1

    @property
    def size(self) -> int:
        """Elements of all pieces."""
        return self.count * self.rows * self.columns

    def in_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the pieces as a view [count, rows, columns] of the weight's tensor."""
        strides, offset = (self.tensor_step, self.width, 1), tensor.storage_offset() + self.tensor_start
        return tensor.as_strided((self.count, self.rows, self.columns), strides, offset)

    def in_buffer(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the pieces as a view [count, rows, columns] of a flat buffer."""
        strides, offset = (self.buffer_step, self.columns, 1), buffer.storage_offset() + self.buffer_start
        return buffer.as_strided((self.count, self.rows, self.columns), strides, offset)


class Outgoing(NamedTuple):
    """A message with the same boxes for one or more ranks, ascending, packed once.

    This rank is among the peers where it keeps these boxes itself.
    """

    strips: tuple[Strip, ...]
    size: int
    peers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BucketIndex:
    """One rank's part of moving one bucket.

    Attributes:
        outgoing: of the source end; buffer positions count from the beginning of a message.
        incoming: of the target end; buffer positions count from the beginning of the buffer of all messages.
        messages: (rank, elements) in the order of that buffer, ranks ascending.
        local: (in the source tensor, in the target tensor) of every piece that stays; buffer positions are those of a
            message to itself.
    """

    rank: int
    outgoing: tuple[Outgoing, ...]
    incoming: tuple[Strip, ...]
    messages: tuple[tuple[int, int], ...]
    local: tuple[tuple[Strip, Strip], ...]

    @property
    def received_size(self) -> int:
        """Elements of the target that come from other ranks."""
        return sum(size for _, size in self.messages)


def index_buckets(
    move: Move, rank: int, buckets: Sequence[Sequence[int]], source: Mapping[int, Box], target: Mapping[int, Box]
) -> tuple[BucketIndex, ...]:
    """Compute a rank's part of every bucket, as columns of numbers: one rank of a thousand has 100,000 pieces.

    The move has two axes, and at least what the rank sends and receives between its source and target boxes.
    """
    last = max([int(move.item.max(initial=0)), *(max(bucket, default=0) for bucket in buckets)])
    number = np.full(last + 1, -1)
    for k, bucket in enumerate(buckets):
        number[list(bucket)] = k
    moved = number[move.item]
    sends, receives = move.sender == rank, move.receiver == rank
    leaving = _Pieces.of(move, moved, move.receiver, sends, source)
    coming = _Pieces.of(move, moved, move.sender, receives & ~sends, target)
    staying = [_Pieces.of(move, moved, move.sender, receives & sends, boxes) for boxes in (source, target)]
    return tuple(
        BucketIndex(
            rank,
            leaving.of_bucket(k).outgoing(),
            coming.of_bucket(k).strips(),
            coming.of_bucket(k).messages(),
            tuple(zip(*(end.of_bucket(k).single() for end in staying), strict=True)),
        )
        for k in range(len(buckets))
    )


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Pieces in one end's tensors, sorted by bucket, peer, weight and position: the same order on both ends.

    Attributes:
        bucket, peer: int64[n].
        table: int64[n, 5], the first five fields of a strip.
    """

    bucket: np.ndarray
    peer: np.ndarray
    table: np.ndarray

    @classmethod
    def of(
        cls, move: Move, bucket: np.ndarray, peer: np.ndarray, chosen: np.ndarray, held: Mapping[int, Box]
    ) -> _Pieces:
        """Find the chosen boxes of a move, where they are in a bucket, in the tensors of `held` boxes."""
        chosen = np.flatnonzero(chosen & (bucket >= 0))
        bucket, peer, item, *edges = (column[chosen] for column in (bucket, peer, *move.columns()[2:]))
        order = np.lexsort([peer, bucket])  # leaves boxes of a pair as all moves have them: by item and position
        bucket, peer, item, start, stop, start2, stop2 = (column[order] for column in (bucket, peer, item, *edges))
        weights = np.array(sorted(held), dtype=np.int64)
        boxes = np.array([held[weight] for weight in weights.tolist()], dtype=np.int64).reshape(-1, 4)
        first, _, left, right = boxes[np.searchsorted(weights, item)].T
        tensor_start = (start - first) * (right - left) + start2 - left
        return cls(bucket, peer, np.stack((item, stop - start, stop2 - start2, right - left, tensor_start), axis=1))

    @property
    def sizes(self) -> np.ndarray:
        """Elements of every piece."""
        return self.table[:, 1] * self.table[:, 2]

    def of_bucket(self, number: int) -> _Pieces:
        """Return the pieces of one bucket."""
        here = slice(*np.searchsorted(self.bucket, [number, number + 1]))
        return _Pieces(self.bucket[here], self.peer[here], self.table[here])

    def by_peer(self) -> Iterator[tuple[int, _Pieces]]:
        """Yield the pieces of every peer."""
        edges = [*np.flatnonzero(np.diff(self.peer, prepend=-1)).tolist(), len(self.peer)]
        for low, high in pairwise(edges):
            yield int(self.peer[low]), _Pieces(self.bucket[low:high], self.peer[low:high], self.table[low:high])

    def packed(self) -> np.ndarray:
        """Return the first six fields of a strip for every piece, int64[n, 6], one after the other in a buffer."""
        return np.column_stack((self.table, np.cumsum(self.sizes) - self.sizes))

    def single(self) -> tuple[Strip, ...]:
        """Return every piece as a strip, one after the other in a buffer."""
        return tuple(Strip(*row) for row in self.packed().tolist())

    def outgoing(self) -> tuple[Outgoing, ...]:
        """Return the message of every peer; peers with the same pieces share one."""
        found: dict[bytes, tuple[_Pieces, list[int]]] = {}
        for peer, pieces in self.by_peer():
            found.setdefault(pieces.table.tobytes(), (pieces, []))[1].append(peer)
        return tuple(Outgoing(each.single(), int(each.sizes.sum()), tuple(peers)) for each, peers in found.values())

    def messages(self) -> tuple[tuple[int, int], ...]:
        """Return the elements of every peer's message."""
        return tuple((peer, int(pieces.sizes.sum())) for peer, pieces in self.by_peer())

    def strips(self) -> tuple[Strip, ...]:
        """Return the strips of a buffer with the messages of all peers: pieces of one size at equal distances."""
        if not len(self.table):
            return ()
        packed = self.packed()[np.lexsort([self.table[:, 4], self.table[:, 0]])]
        steps = np.diff(packed[:, 4:], axis=0)
        joinable = (packed[1:, :4] == packed[:-1, :4]).all(axis=1) & (steps[:, 1] > 0)
        found = []
        for low, high in _runs(joinable, steps):
            tensor_step, buffer_step = steps[low].tolist() if high > low else (0, 0)
            strip = Strip(*packed[low].tolist())
            found.append(strip._replace(tensor_step=tensor_step, buffer_step=buffer_step, count=high - low + 1))
        return tuple(found)


def _runs(joinable: np.ndarray, steps: np.ndarray) -> Iterator[tuple[int, int]]:
    """Group pieces into runs at equal distances; yield the first and the last piece of each.

    Args:
        joinable: bool[n - 1], whether a piece and the next may be in one run.
        steps: int64[n - 1, 2], the distances between them.
    """
    changes = np.ones(len(joinable), dtype=bool)
    changes[1:] = ~joinable[1:] | ~joinable[:-1] | (steps[1:] != steps[:-1]).any(axis=1)
    edges = [*np.flatnonzero(changes).tolist(), len(joinable)]
    free = 0  # the first piece that is in no run yet
    for low, high in pairwise(edges):  # links low .. high - 1 are equal
        if joinable[low] and high > free:
            yield free, high
            free = high + 1
        elif free == low:
            yield low, low
            free = low + 1
    if free <= len(joinable):
        yield free, len(joinable)
