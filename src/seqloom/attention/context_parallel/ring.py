"""Ring attention: keys and values go round, every ring index computes its tiles with each of them in turn.

In step s index i works on the keys of index j = (i - s) mod ring, while the keys of the next step are under way. Each
step merges its results into the output by log-sum-exp (`merge.OutputAccumulator`). Backward sends keys and values round
again, and their gradients one step behind them, in float32: they are sums that grow with every step, and after the last
one they return to the ranks of their keys.

    exchange    0     1          2          ...   r - 1     r
    keys of     s=1   s=2        s=3        ...
    gradients         after s=0  after s=1  ...   s=r-2     s=r-1, home

In a routed ring all messages are as long as the longest, with rows at their end that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from seqloom.attention.context_parallel.overlap import ContextParallelAttention, ExchangeBytes, Overlap
from seqloom.attention.context_parallel.routed import RoutedExchanges, gradient_item, key_item
from seqloom.attention.kernels.interface import Gradients, Kernel, Saved
from seqloom.attention.latent import HeadExpansion
from seqloom.attention.masks import MaskRule
from seqloom.attention.merge import GradientAccumulator, MergeOps, OutputAccumulator, sum_dtype
from seqloom.attention.tiles import (
    LocalHeads,
    PreparedTile,
    ZigzagChunks,
    add_key_gradients,
    backward_tiles,
    forward_tiles,
    prepare_tiles,
    ring_tiles,
)
from seqloom.dist.routed import RoutedTransfer
from seqloom.dist.transport import Handle, P2PTensor, Transport, exchange_nonempty
from seqloom.plan import Group

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class RingKeys:
    """Keys that go round: those of the round, or the prefix of a document in pieces.

    Attributes:
        counts: rows of every ring index.
        steps: the tiles of every step.
    """

    counts: tuple[int, ...]
    steps: tuple[tuple[PreparedTile, ...], ...]

    @classmethod
    def of_round(cls, group: Group, index: int, heads: LocalHeads, kernel: Kernel, mask: MaskRule) -> RingKeys:
        """Return the keys of a group's tokens in this round, as ring index `index` computes with them."""
        chunks = [ZigzagChunks.of(group, other, mask.attention_chunk) for other in range(group.ring)]
        rule = {"causal": mask.causal, "window": mask.window, "prefix": mask.prefixes_of(sorted(group.spans))}
        queries, steps = heads.tokens(sorted(group.ring_spans(index))), []
        for other in ((index - step) % group.ring for step in range(group.ring)):
            tiles = ring_tiles(chunks[index], chunks[other], **rule)
            steps.append(prepare_tiles(kernel, tiles, heads, queries, heads.tokens(sorted(group.ring_spans(other)))))
        return cls(tuple(each.rows for each in chunks), tuple(steps))


@dataclass(frozen=True, slots=True, eq=False)
class Ring(ContextParallelAttention):
    """One rank's part of a ring.

    Attributes:
        ranks, index: of the ring, and of this rank in it.
        keys: that go round in the same exchanges: those of the round first.
        ops: merge partial results.
        routed: exchanges through proxy ranks; None: from rank to rank.
    """

    transport: Transport
    ranks: tuple[int, ...]
    index: int
    keys: tuple[RingKeys, ...]
    ops: MergeOps
    routed: RoutedExchanges | None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        overlap: Overlap,
        expansion: HeadExpansion | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `ContextParallelAttention.forward`."""
        total, held = OutputAccumulator(q, self.ops), self._pack(k, v)
        for step in range(self.size):
            incoming = self._buffers(held, step + 1, k.dtype) if step + 1 < self.size else []
            transfer = self.routed.forward[step] if self.routed is not None and incoming else None
            handle = self._send_to_next(transfer, (held if incoming else [], incoming))
            for keys, kv in zip(self.keys, held, strict=True):
                for part in forward_tiles(keys.steps[step], q, kv, expansion):
                    total.merge(part)
            overlap(step)
            handle.wait()
            held = incoming or held
        return total.result()

    def backward(
        self, dout: torch.Tensor, saved: Saved, overlap: Overlap, expansion: HeadExpansion | None = None
    ) -> Gradients:
        """Return (dq, dk, dv), see `ContextParallelAttention.backward`."""
        wide, dq = sum_dtype(saved.q.dtype), GradientAccumulator(saved.q, self.ops)
        held, started = self._pack(saved.k, saved.v), self._started_gradients()
        gradients: Tensors = []
        for step in range(self.size):
            incoming = self._buffers(held, step + 1, held[0].dtype) if step + 1 < self.size else []
            arriving = self._buffers(held, step, wide) if step else []
            transfer = None if self.routed is None else self.routed.backward[step]
            handle = self._send_to_next(transfer, (held if incoming else [], incoming), (gradients, arriving))
            parts = [
                backward_tiles(keys.steps[step], dout, saved, kv, dq, expansion)
                for keys, kv in zip(self.keys, held, strict=True)
            ]
            overlap(step)
            handle.wait()
            gradients = []
            for kv, found, so_far in zip(held, parts, arriving or started, strict=True):
                total = add_key_gradients(so_far, len(kv), found, self.ops)
                gradients.append(kv.new_zeros(kv.shape, dtype=wide) if total is None else total)
            held = incoming or held
        if self.size > 1:
            home = self._buffers(held, 0, wide)
            transfer = None if self.routed is None else self.routed.backward[-1]
            handle = self._send_to_next(transfer, ([], []), (gradients, home))
            overlap(self.size)
            handle.wait()
            gradients = home
        dk, dv = self._finish_gradients(gradients, started).tensor_split(2, dim=1)
        return dq.result(), dk, dv

    def exchange_bytes(self, kv_row: int, gradient_row: int) -> ExchangeBytes:
        """See `ContextParallelAttention.exchange_bytes`."""
        rows = [sum(keys.counts[self._holder(step)] for keys in self.keys) for step in range(self.size)]
        kv, gradients = [kv_row * count for count in rows[1:]], [gradient_row * count for count in rows[1:]]
        both = [sum(pair) for pair in zip([*kv, 0], [0, *gradients], strict=True)]
        return tuple(kv), (*both, gradient_row * rows[0])

    @property
    def size(self) -> int:
        """Indices of the ring."""
        return len(self.ranks)

    def _holder(self, step: int) -> int:
        """Ring index whose keys are here in a step."""
        return (self.index - step) % self.size

    def _message_rows(self, keys: RingKeys, step: int) -> int:
        return keys.counts[self._holder(step)] if self.routed is None else max(keys.counts)

    def _pack(self, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Return the local keys and values as messages [rows, 2 * kv heads, dim], one for each of `keys`.

        Latents are one head.
        """
        rows = self._message_rows(self.keys[0], 0)
        if len(k) == rows:
            return [torch.cat((k, v), dim=1)]
        kv = k.new_zeros((rows, k.shape[1] + v.shape[1], k.shape[2]))
        torch.cat((k, v), dim=1, out=kv[: len(k)])
        return [kv]

    def _started_gradients(self) -> list[torch.Tensor | None]:
        """Return gradients of keys to which the first step adds."""
        return [None]

    def _finish_gradients(self, gradients: Tensors, started: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Return dk and dv of this rank's rows, [rows, 2 * kv heads, dim]."""
        return gradients[0][: self.keys[0].counts[self.index]]

    def _buffers(self, like: Tensors, step: int, dtype: torch.dtype) -> Tensors:
        """Return empty buffers for messages that belong to the keys of a step."""
        shape = like[0].shape[1:]
        return [like[0].new_empty((self._message_rows(keys, step), *shape), dtype=dtype) for keys in self.keys]

    def _send_to_next(self, transfer: RoutedTransfer | None, *messages: tuple[Tensors, Tensors]) -> Handle:
        """Send the first of every pair to the next index, receive the second from the one before.

        The first pair has keys and values, the second their gradients.
        """
        rank, after, before = (self.ranks[(self.index + k) % self.size] for k in (0, 1, -1))
        if self.routed is not None and transfer is not None:
            named = list(zip((key_item, gradient_item), messages, strict=False))
            sent = {item(rank): tensor for item, (tensors, _) in named for tensor in tensors}
            wanted = {item(before): buffer for item, (_, buffers) in named for buffer in buffers}
            return self.routed.start(transfer, sent, wanted)
        sends = [P2PTensor(after, tensor) for tensors, _ in messages for tensor in tensors]
        receives = [P2PTensor(before, buffer) for _, buffers in messages for buffer in buffers]
        return exchange_nonempty(self.transport, sends, receives)
