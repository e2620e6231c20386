"""Ulysses all-to-all: some tokens of all heads become all tokens of some heads, and back.

In a block of u ranks, rank j works on the j-th of u even runs of the query heads and on the kv heads that these
read; a kv head is replicated only on ranks whose query heads share it. q, k and v travel together, one exchange in
and one out, forward and backward. For rank j a sender packs, row by row,

    [ query heads of j | key heads of j | value heads of j ]

so that a rank receives [all rows, its heads, dim], of which q, k and v are views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from seqloom.attention.merge import sum_dtype
from seqloom.dist.rank_tokens import BoundGroup
from seqloom.dist.transport import Transport, all_to_all
from seqloom.plan.round import even_ranges

Ranges = tuple[tuple[int, int], ...]
"""First head and one past the last, for every rank of a block."""


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """Which rank of a block has which heads; the same as `Group.head_layout` says.

    Attributes:
        heads, kv_heads: of the model.
        query, kv: the heads of every rank of the block.
        even: every rank has as many heads of each kind as the others. Then one strided copy serves all ranks.
    """

    heads: int
    kv_heads: int
    query: Ranges
    kv: Ranges
    even: bool

    @classmethod
    def of(cls, heads: int, kv_heads: int, ulysses: int) -> HeadSplit:
        """Split evenly, the first ranks one head more."""
        group = heads // kv_heads
        query = tuple(even_ranges(heads, ulysses))
        kv = tuple((low // group, -(-high // group)) for low, high in query)
        return cls(heads, kv_heads, query, kv, _is_even(query) and _is_even(kv))

    @property
    def replicated(self) -> bool:
        """Whether a kv head is on several ranks."""
        return any(first[1] > second[0] for first, second in pairwise(self.kv))

    def counts(self, rank: int) -> tuple[int, int]:
        """Return how many query heads and kv heads a rank of the block has."""
        (low, high), (kv_low, kv_high) = self.query[rank], self.kv[rank]
        return high - low, kv_high - kv_low

    def kv_index(self, rank: int) -> tuple[int, ...] | None:
        """Return the local kv head of every local query head of a rank; None when they share them equally."""
        (low, high), (kv_low, kv_high) = self.query[rank], self.kv[rank]
        group = self.heads // self.kv_heads
        found = tuple(head // group - kv_low for head in range(low, high))
        each, rest = divmod(high - low, kv_high - kv_low)
        return None if not rest and found == tuple(h // each for h in range(high - low)) else found


@dataclass(frozen=True, slots=True, eq=False)
class UlyssesExchange:
    """One rank's part of the all-to-all among the ranks of its block; `split` says which of them has which heads."""

    transport: Transport
    bound: BoundGroup
    split: HeadSplit

    def to_heads(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Exchange q, k, v (or one tensor of query heads alone): all heads of own rows for own heads of all rows.

        Tensors [own rows, heads or kv heads, dim] become [all rows, own heads, dim], views of one buffer.
        """
        ranges = (self.split.query, self.split.kv, self.split.kv)[: len(tensors)]
        widths = [sum(high - low for low, high in own) for own in zip(*ranges, strict=True)]
        bound, rows, dim = self.bound, self.bound.tokens, tensors[0].shape[2]
        width = widths[bound.ulysses_index]
        output_sizes, input_sizes = [count * width * dim for count in bound.counts], [rows * w * dim for w in widths]
        sent = tensors[0].new_empty(sum(input_sizes))
        if self.split.even:
            _pack_even(sent.view(len(widths), rows, width, dim), tensors, ranges)
        else:
            _pack(sent.split(input_sizes), tensors, ranges)
        received = sent.new_empty(sum(output_sizes))
        self._all_to_all(received, sent, output_sizes, input_sizes)
        buffer = received.view(-1, width, dim)
        if bound.order is not None:
            buffer = buffer.index_select(0, bound.order)
        return buffer.split([high - low for low, high in (own[bound.ulysses_index] for own in ranges)], dim=1)

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Exchange an output [all rows, own heads, dim] for [own rows, all heads, dim]."""
        received, pieces = self._return_rows(out, [high - low for low, high in self.split.query])
        if self.split.even:
            return _side_by_side(received.view(len(self.bound.block), -1, *out.shape[1:]))
        return torch.cat(pieces, dim=1)

    def gradients_to_tokens(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange gradients [all rows, own heads or kv heads, dim] for [own rows, all of them, dim], in `dtype`.

        Those of a kv head on several ranks are summed in float32, then rounded.
        """
        heads, kv_heads = dq.shape[1], dk.shape[1]
        fused = dq.new_empty((len(dq), heads + 2 * kv_heads, dq.shape[2]), dtype=dtype)
        fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :] = dq, dk, dv
        query, kv = ([high - low for low, high in own] for own in (self.split.query, self.split.kv))
        received, pieces = self._return_rows(fused, [q + 2 * k for q, k in zip(query, kv, strict=True)])
        if self.split.even:
            dq, dkv = received.view(len(self.bound.block), -1, *fused.shape[1:]).split([heads, 2 * kv_heads], dim=2)
            dkv = _join_kv_gradients_even(dkv.unflatten(2, (2, -1)), self.split)
            return _side_by_side(dq), dkv[:, 0], dkv[:, 1]
        dq = torch.cat([piece[:, :count] for piece, count in zip(pieces, query, strict=True)], dim=1)
        both = [piece[:, count:].unflatten(1, (2, -1)) for piece, count in zip(pieces, query, strict=True)]
        dkv = _join_kv_gradients(both, self.split)
        return dq, dkv[:, 0], dkv[:, 1]

    def _return_rows(self, tensor: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Send every rank its rows of `tensor` [all rows, own width, dim].

        Returns the received elements, flat, and as [own rows, width, dim] of every rank (none when heads are even).
        """
        if self.bound.inverse_order is not None:
            tensor = tensor.index_select(0, self.bound.inverse_order)
        rows, dim, row = self.bound.tokens, tensor.shape[2], tensor.shape[1] * tensor.shape[2]
        sizes = [rows * width * dim for width in widths]
        received = tensor.new_empty(sum(sizes))
        self._all_to_all(received, tensor.reshape(-1), sizes, [count * row for count in self.bound.counts])
        if self.split.even:
            return received, []
        pieces = received.split(sizes)
        return received, [piece.view(rows, width, dim) for piece, width in zip(pieces, widths, strict=True)]

    def _all_to_all(
        self, output: torch.Tensor, input: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> None:
        block = self.bound.block
        if sum(self.bound.counts):  # all ranks of a block without rows skip it
            # A run of ranks has a communicator; those of one weight slice of several TP groups have none.
            collective = block[-1] - block[0] == len(block) - 1
            all_to_all(self.transport, output, input, output_sizes, input_sizes, block, collective=collective)


def _is_even(ranges: Ranges) -> bool:
    """Whether every rank has as many heads as the others, shared by equally many ranks."""
    width, distinct = ranges[0][1], len(set(ranges))
    each = len(ranges) // distinct
    return ranges == tuple((rank // each * width, rank // each * width + width) for rank in range(len(ranges)))


def _pack(pieces: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], ranges: Sequence[Ranges]) -> None:
    """Fill the flat piece of every rank with its heads of each tensor, row by row."""
    rows, _, dim = tensors[0].shape
    for rank, piece in enumerate(pieces):
        parts = [tensor[:, slice(*own[rank])] for tensor, own in zip(tensors, ranges, strict=True)]
        width = sum(part.shape[1] for part in parts)
        torch.cat(parts, dim=1, out=piece.view(rows, width, dim))


def _pack_even(packed: torch.Tensor, tensors: Sequence[torch.Tensor], ranges: Sequence[Ranges]) -> None:
    """Fill [ranks, rows, heads of a rank, dim]: one copy per tensor, also where ranks share a head."""
    start = 0
    for tensor, own in zip(tensors, ranges, strict=True):
        width, distinct = own[0][1], len(set(own))
        target = packed[:, :, start : start + width].unflatten(0, (distinct, -1))
        target.copy_(tensor.unflatten(1, (distinct, width)).transpose(0, 1).unsqueeze(1))
        start += width


def _side_by_side(parts: torch.Tensor) -> torch.Tensor:
    """[ranks, rows, heads of a rank, dim] -> [rows, heads, dim]."""
    return parts.transpose(0, 1).flatten(1, 2)


def _join_kv_gradients(parts: list[torch.Tensor], split: HeadSplit) -> torch.Tensor:
    """Join [rows, 2, kv heads of a rank, dim] of all ranks to [rows, 2, kv heads, dim], in rank order."""
    if not split.replicated:
        return torch.cat(parts, dim=2)
    rows, both, _, dim = parts[0].shape
    total = parts[0].new_zeros((rows, both, split.kv_heads, dim), dtype=sum_dtype(parts[0].dtype))
    for part, (low, high) in zip(parts, split.kv, strict=True):
        total[:, :, low:high] += part
    return total.to(parts[0].dtype)


def _join_kv_gradients_even(parts: torch.Tensor, split: HeadSplit) -> torch.Tensor:
    """Join [ranks, rows, 2, kv heads of a rank, dim] to [rows, 2, kv heads, dim]."""
    if split.replicated:
        shared = parts.unflatten(0, (split.kv_heads // parts.shape[3], -1))
        parts = shared.sum(1, dtype=sum_dtype(parts.dtype)).to(parts.dtype)
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)
