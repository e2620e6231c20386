"""Gathered keys: every ring index receives, in one exchange, the keys and values that its queries can see.

Forward is one exchange. Backward gathers again (nothing gathered is kept), computes, and returns the gradients in
one exchange more, in float32, where they are added in ring order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from seqloom.attention.context_parallel.overlap import ContextParallelAttention, Meanwhile, Waits
from seqloom.attention.context_parallel.routed import RoutedExchanges, keys_of, returned
from seqloom.attention.kernels.interface import Gradients, Saved
from seqloom.attention.lse import Joins, Sum, Total, sum_dtype
from seqloom.attention.tiles import GatherSchedule, PreparedTile, add_key_gradients, backward_tiles, forward_tiles
from seqloom.dist.rows import RowIndex, add, count, inverse_permutation, on_device, take
from seqloom.dist.transport import Handle, P2PTensor, Transport, exchange_nonempty


@dataclass(frozen=True, slots=True, eq=False)
class Gather(ContextParallelAttention):
    """One rank's part of a gather.

    Attributes:
        transport: this rank's.
        ranks: of the ring, by ring index.
        index: of this rank.
        sends: rows of the own buffer that every ring index wants.
        counts: rows that come from every ring index, the own ones too.
        order: sorts what came by document and position; None: it is sorted.
        places: the inverse of `order`.
        tiles: over the own queries and the sorted keys.
        joins: how partial results are joined.
        roads: how exchanges cross nodes; None: from rank to rank.
    """

    transport: Transport
    ranks: tuple[int, ...]
    index: int
    sends: tuple[RowIndex, ...]
    counts: tuple[int, ...]
    order: torch.Tensor | None
    places: torch.Tensor | None
    tiles: tuple[PreparedTile, ...]
    joins: Joins
    roads: RoutedExchanges | None

    @classmethod
    def of(
        cls,
        transport: Transport,
        ranks: tuple[int, ...],
        index: int,
        schedule: GatherSchedule,
        tiles: tuple[PreparedTile, ...],
        joins: Joins,
        device: torch.device,
        roads: RoutedExchanges | None = None,
    ) -> Gather:
        """Put a schedule's index arrays on a device; `tiles` are the schedule's, prepared."""
        sends = tuple(rows if isinstance(rows, slice) else on_device(rows, device) for rows in schedule.sends)
        order = places = None
        if schedule.order is not None:
            order = on_device(schedule.order, device)
            places = inverse_permutation(order)
        return cls(transport, ranks, index, sends, schedule.counts, order, places, tiles, joins, roads)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) over the keys of all ring indices. `out` has the dtype of q."""
        total = Total(q, self.joins)
        forward_tiles(self.tiles, total, q, self._gathered(k, v, meanwhile))
        return total.result()

    def backward(self, dout: torch.Tensor, saved: Saved, meanwhile: Meanwhile) -> Gradients:
        """Return (dq, dk, dv) of the own rows: dq in the dtype of q, dk and dv in `sum_dtype`."""
        kv = self._gathered(saved.k, saved.v, meanwhile)
        dq = Sum(saved.q, self.joins)
        found = backward_tiles(self.tiles, dout, saved, kv, dq)
        dkv = add_key_gradients(None, len(kv), found, self.joins)
        if dkv is None:
            dkv = kv.new_empty(kv.shape, dtype=sum_dtype(kv.dtype))
        dk, dv = self._returned(dkv, meanwhile).tensor_split(2, dim=1)
        return dq.result(), dk, dv

    def waits(self, row: int, wide_row: int) -> Waits:
        """See `Shared.waits`."""
        came = sum(self.counts) - self.counts[self.index]
        home = sum(count(rows) for n, rows in enumerate(self.sends) if n != self.index)
        return Waits((row * came,), (row * came, wide_row * home))

    def _gathered(self, k: torch.Tensor, v: torch.Tensor, meanwhile: Meanwhile) -> torch.Tensor:
        """Return the visible keys and values [sum of counts, 2 * kv heads, dim], sorted."""
        kv = torch.cat((k, v), dim=1)
        came = kv.new_empty((sum(self.counts), *kv.shape[1:]))
        pieces = came.split(self.counts)
        handle = self._start_gathering(kv, pieces)
        pieces[self.index].copy_(kv)
        meanwhile(0)
        handle.wait()
        return came if self.order is None else came.index_select(0, self.order)

    def _start_gathering(self, kv: torch.Tensor, rooms: Sequence[torch.Tensor]) -> Handle:
        """Start to send every index the rows it sees, and to receive those seen here."""
        if self.roads is None:
            sends = [kv if n == self.index else take(kv, rows) for n, rows in enumerate(self.sends)]
            return exchange_nonempty(self.transport, self._parcels(sends), self._parcels(rooms))
        here = self.ranks[self.index]
        wanted = {keys_of(rank): room for rank, room in self._parcels(rooms)}
        return self.roads.start(self.roads.ahead[0], {keys_of(here): kv}, wanted)

    def _start_returning(self, pieces: Sequence[torch.Tensor], rooms: Sequence[torch.Tensor]) -> Handle:
        """Start to send gradients home, and to receive those of the own rows."""
        if self.roads is None:
            return exchange_nonempty(self.transport, self._parcels(pieces), self._parcels(rooms))
        here = self.ranks[self.index]
        sent = {returned(here, rank): piece for rank, piece in self._parcels(pieces)}
        wanted = {returned(rank, here): room for rank, room in self._parcels(rooms)}
        return self.roads.start(self.roads.back[1], sent, wanted)

    def _returned(self, dkv: torch.Tensor, meanwhile: Meanwhile) -> torch.Tensor:
        """Send gradients of gathered rows home; return the sum of those of the own rows."""
        if self.places is not None:
            dkv = dkv.index_select(0, self.places)
        pieces = dkv.split(self.counts)
        total = pieces[self.index]
        wanted = [len(total) if n == self.index else count(rows) for n, rows in enumerate(self.sends)]
        came = [dkv.new_empty((rows, *dkv.shape[1:])) for rows in wanted]
        handle = self._start_returning(pieces, came)
        meanwhile(1)
        handle.wait()
        for n, rows in enumerate(self.sends):
            if n != self.index:
                add(total, rows, came[n])
        return total

    def _parcels(self, tensors: Sequence[torch.Tensor]) -> list[P2PTensor]:
        """A parcel for, or from, every other rank of the ring."""
        return [P2PTensor(self.ranks[n], tensor) for n, tensor in enumerate(tensors) if n != self.index]
