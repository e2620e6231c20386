"""Gathered keys: every ring index receives, in one exchange, the keys and values that its queries can see.

Forward is one exchange. Backward gathers again (gathered keys are not saved), computes, and returns the gradients in
one exchange more, in float32, where they are added in ring order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from seqloom.attention.context_parallel.overlap import ContextParallelAttention, ExchangeBytes, Overlap
from seqloom.attention.context_parallel.routed import RoutedExchanges, key_item, returned_item
from seqloom.attention.kernels.interface import Gradients, Kernel, Saved
from seqloom.attention.latent import HeadExpansion
from seqloom.attention.masks import MaskRule
from seqloom.attention.merge import GradientAccumulator, MergeOps, OutputAccumulator, merge_ops, sum_dtype
from seqloom.attention.tiles import (
    GatherSchedule,
    LocalHeads,
    PreparedTile,
    ZigzagChunks,
    add_key_gradients,
    backward_tiles,
    forward_tiles,
    gather_schedule,
    prepare_tiles,
)
from seqloom.dist.rank_tokens import BoundGroup
from seqloom.dist.rows import add, count, inverse_permutation, take
from seqloom.dist.transport import Handle, P2PTensor, Transport, exchange_nonempty


@dataclass(frozen=True, slots=True, eq=False)
class Gather(ContextParallelAttention):
    """One rank's part of a gather.

    Attributes:
        ranks, index: of the ring, and of this rank in it.
        schedule: what it sends, receives and computes.
        inverse_order: undoes the schedule's order.
        tiles: the schedule's, prepared.
        ops: merge partial results.
        routed: exchanges through proxy ranks; None: from rank to rank.
    """

    transport: Transport
    ranks: tuple[int, ...]
    index: int
    schedule: GatherSchedule
    inverse_order: torch.Tensor | None
    tiles: tuple[PreparedTile, ...]
    ops: MergeOps
    routed: RoutedExchanges | None

    @classmethod
    def of(
        cls,
        transport: Transport,
        bound: BoundGroup,
        heads: LocalHeads,
        kernel: Kernel,
        routed: RoutedExchanges | None,
        mask: MaskRule,
    ) -> Gather:
        """Do the index work of a group."""
        group, index, device = bound.group, bound.ring_index, heads.shape.device
        chunks = [ZigzagChunks.of(group, other, mask.attention_chunk) for other in range(group.ring)]
        rule = {"causal": mask.causal, "window": mask.window, "prefix": mask.prefixes_of(sorted(group.spans))}
        schedule = gather_schedule(chunks, index, device, **rule)
        inverse_order = None if schedule.order is None else inverse_permutation(schedule.order)
        queries, keys = heads.tokens(bound.spans), heads.tokens(schedule.key_spans)
        tiles, ops = prepare_tiles(kernel, schedule.tiles, heads, queries, keys), merge_ops(device, heads.shape.dtype)
        return cls(transport, bound.ring_ranks, index, schedule, inverse_order, tiles, ops, routed)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        overlap: Overlap,
        expansion: HeadExpansion | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `ContextParallelAttention.forward`."""
        total, kv = OutputAccumulator(q, self.ops), self._gather(k, v, overlap)
        for part in forward_tiles(self.tiles, q, kv if expansion is None else expansion(kv)):
            total.merge(part)
        return total.result()

    def backward(
        self, dout: torch.Tensor, saved: Saved, overlap: Overlap, expansion: HeadExpansion | None = None
    ) -> Gradients:
        """Return (dq, dk, dv), see `ContextParallelAttention.backward`.

        Several tiles share keys, so latents are expanded once for all of them.
        """
        gathered = self._gather(saved.k, saved.v, overlap)
        kv, dq = gathered if expansion is None else expansion(gathered), GradientAccumulator(saved.q, self.ops)
        parts = backward_tiles(self.tiles, dout, saved, kv, dq)
        dkv = add_key_gradients(None, len(kv), parts, self.ops)
        if dkv is None:
            dkv = gathered.new_empty(gathered.shape, dtype=sum_dtype(kv.dtype))
        elif expansion is not None:
            dkv, _ = expansion.backward(gathered, *dkv.tensor_split(2, dim=1))
        dk, dv = self._return_gradients(dkv, overlap).tensor_split(2, dim=1)
        return dq.result(), dk, dv

    def exchange_bytes(self, kv_row: int, gradient_row: int) -> ExchangeBytes:
        """See `ContextParallelAttention.exchange_bytes`."""
        received = kv_row * (sum(self.schedule.counts) - self.schedule.counts[self.index])
        returned = gradient_row * sum(count(rows) for n, rows in enumerate(self.schedule.sends) if n != self.index)
        return (received,), (received, returned)

    def _gather(self, k: torch.Tensor, v: torch.Tensor, overlap: Overlap) -> torch.Tensor:
        """Return the visible keys and values [sum of counts, 2 * kv heads, dim], sorted."""
        kv = torch.cat((k, v), dim=1)
        received = kv.new_empty((sum(self.schedule.counts), *kv.shape[1:]))
        buffers = received.split(self.schedule.counts)
        handle = self._start_gather(kv, buffers)
        buffers[self.index].copy_(kv)
        overlap(0)
        handle.wait()
        return received if self.schedule.order is None else received.index_select(0, self.schedule.order)

    def _start_gather(self, kv: torch.Tensor, buffers: Sequence[torch.Tensor]) -> Handle:
        """Start to send every index the rows it sees, and to receive those seen here."""
        if self.routed is None:
            sends = [kv if n == self.index else take(kv, rows) for n, rows in enumerate(self.schedule.sends)]
            return exchange_nonempty(self.transport, self._messages(sends), self._messages(buffers))
        wanted = {key_item(rank): buffer for rank, buffer in self._messages(buffers)}
        return self.routed.start(self.routed.forward[0], {key_item(self.ranks[self.index]): kv}, wanted)

    def _return_gradients(self, dkv: torch.Tensor, overlap: Overlap) -> torch.Tensor:
        """Send gradients of gathered rows home; return the sum of those of the own rows."""
        if self.inverse_order is not None:
            dkv = dkv.index_select(0, self.inverse_order)
        pieces = dkv.split(self.schedule.counts)
        total = pieces[self.index]
        wanted = [len(total) if n == self.index else count(rows) for n, rows in enumerate(self.schedule.sends)]
        received = [dkv.new_empty((rows, *dkv.shape[1:])) for rows in wanted]
        handle = self._start_return(pieces, received)
        overlap(1)
        handle.wait()
        for n, rows in enumerate(self.schedule.sends):
            if n != self.index:
                add(total, rows, received[n])
        return total

    def _start_return(self, pieces: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> Handle:
        """Start to send gradients home, and to receive those of the own rows."""
        if self.routed is None:
            return exchange_nonempty(self.transport, self._messages(pieces), self._messages(buffers))
        own = self.ranks[self.index]
        sent = {returned_item(own, rank): piece for rank, piece in self._messages(pieces)}
        wanted = {returned_item(rank, own): buffer for rank, buffer in self._messages(buffers)}
        return self.routed.start(self.routed.backward[1], sent, wanted)

    def _messages(self, tensors: Sequence[torch.Tensor]) -> list[P2PTensor]:
        """Return a message for, or from, every other rank of the ring."""
        return [P2PTensor(self.ranks[n], tensor) for n, tensor in enumerate(tensors) if n != self.index]
