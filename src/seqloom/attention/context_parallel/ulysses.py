"""Ulysses all-to-all: some tokens of all heads become all tokens of some heads, and back.

In a block of u ranks, rank j works on the j-th of u even runs of the query heads and on the kv heads that these
read; a kv head is replicated only on ranks whose query heads share it. q, k and v travel together, one exchange in
and one out, forward and backward. For rank j a sender packs, row by row,

    [ query heads of j | key heads of j | value heads of j ]

so that a rank receives [all rows, the elements of its heads], of which q, k and v are views. Rows of latents
(`attention.latent`) are one kv head of another width, which all ranks read, and there are no values beside them.
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
        """Exchange q, k, v, or the first of them: all heads of own rows for own heads of all rows.

        Tensors [own rows, heads or kv heads, dim] become [all rows, own heads, dim], views of one buffer.
        """
        ranges = (self.split.query, self.split.kv, self.split.kv)[: len(tensors)]
        shapes = [
            [(high - low, tensor.shape[2]) for (low, high), tensor in zip(own, tensors, strict=True)]
            for own in zip(*ranges, strict=True)
        ]
        widths = [sum(heads * dim for heads, dim in own) for own in shapes]
        bound, rows = self.bound, self.bound.tokens
        own, width = shapes[bound.ulysses_index], widths[bound.ulysses_index]
        output_sizes, input_sizes = [count * width for count in bound.counts], [rows * each for each in widths]
        sent = tensors[0].new_empty(sum(input_sizes))
        if self.split.even:
            _pack_even(sent.view(len(widths), rows, width), tensors, ranges)
        else:
            _pack(sent.split(input_sizes), tensors, ranges)
        received = sent.new_empty(sum(output_sizes))
        self._all_to_all(received, sent, output_sizes, input_sizes)
        buffer = received.view(-1, width)
        if bound.order is not None:
            buffer = buffer.index_select(0, bound.order)
        parts = buffer.split([heads * dim for heads, dim in own], dim=1)
        return tuple(part.unflatten(1, shape) for part, shape in zip(parts, own, strict=True))

    def to_tokens(self, out: torch.Tensor) -> torch.Tensor:
        """Exchange an output [all rows, own heads, dim] for [own rows, all heads, dim]."""
        dim = out.shape[2]
        received = self._return_rows(out.flatten(1), [(high - low) * dim for low, high in self.split.query])
        if isinstance(received, torch.Tensor):
            return _side_by_side(received.unflatten(2, (-1, dim)))
        return torch.cat([part.unflatten(1, (-1, dim)) for part in received], dim=1)

    def gradients_to_tokens(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Exchange gradients [all rows, own heads or kv heads, dim] for [own rows, all of them, dim], in `dtype`.

        Those of a kv head on several ranks are summed in float32, then rounded.
        """
        (_, heads, dim), kv_dim, sides = dq.shape, dk.shape[2], 2 if dv.shape[1] else 1  # latents have no values
        query, keys = heads * dim, dk.shape[1] * kv_dim
        fused = dq.new_empty((len(dq), query + sides * keys), dtype=dtype)
        _fill((dq, dk, dv)[: 1 + sides], fused)
        widths = [(high - low) * dim for low, high in self.split.query]
        every = [
            width + sides * (high - low) * kv_dim for width, (low, high) in zip(widths, self.split.kv, strict=True)
        ]
        received = self._return_rows(fused, every)
        if isinstance(received, torch.Tensor):
            dq, dkv = received.split([query, sides * keys], dim=2)
            dq = _side_by_side(dq.unflatten(2, (-1, dim)))
            dkv = _join_kv_gradients_even(dkv.unflatten(2, (sides, -1, kv_dim)), self.split)
        else:
            parts = [
                part.split([width, part.shape[1] - width], 1) for part, width in zip(received, widths, strict=True)
            ]
            dq = torch.cat([part.unflatten(1, (-1, dim)) for part, _ in parts], dim=1)
            dkv = _join_kv_gradients([part.unflatten(1, (sides, -1, kv_dim)) for _, part in parts], self.split)
        return dq, dkv[:, 0], dkv[:, 1] if sides == 2 else dkv[:, 0, :0]

    def _return_rows(self, tensor: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | list[torch.Tensor]:
        """Send every rank its rows of `tensor` [all rows, own width].

        Returns [own rows, width] of every rank, or [ranks, own rows, width] where heads are even.
        """
        if self.bound.inverse_order is not None:
            tensor = tensor.index_select(0, self.bound.inverse_order)
        rows = self.bound.tokens
        sizes = [rows * width for width in widths]
        received = tensor.new_empty(sum(sizes))
        counts = [count * tensor.shape[1] for count in self.bound.counts]
        self._all_to_all(received, tensor.reshape(-1), sizes, counts)
        if self.split.even:
            return received.view(len(widths), rows, widths[0])
        return [part.view(rows, width) for part, width in zip(received.split(sizes), widths, strict=True)]

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
    for rank, piece in enumerate(pieces):
        _fill([tensor[:, slice(*own[rank])] for tensor, own in zip(tensors, ranges, strict=True)], piece)


def _fill(parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
    """Write [rows, heads, dim] of every part side by side into a target of as many elements, row by row."""
    widths = [part.shape[1] * part.shape[2] for part in parts]
    for part, columns in zip(parts, target.view(len(parts[0]), sum(widths)).split(widths, dim=1), strict=True):
        columns.unflatten(1, part.shape[1:]).copy_(part)


def _pack_even(packed: torch.Tensor, tensors: Sequence[torch.Tensor], ranges: Sequence[Ranges]) -> None:
    """Fill [ranks, rows, elements of a rank's heads]: one copy per tensor, also where ranks share a head."""
    start = 0
    for tensor, own in zip(tensors, ranges, strict=True):
        heads, distinct, dim = own[0][1], len(set(own)), tensor.shape[2]
        target = packed[:, :, start : start + heads * dim].unflatten(2, (heads, dim)).unflatten(0, (distinct, -1))
        target.copy_(tensor.unflatten(1, (distinct, heads)).transpose(0, 1).unsqueeze(1))
        start += heads * dim


def _side_by_side(parts: torch.Tensor) -> torch.Tensor:
    """[ranks, rows, heads of a rank, dim] -> [rows, heads, dim]."""
    return parts.transpose(0, 1).flatten(1, 2)


def _join_kv_gradients(parts: list[torch.Tensor], split: HeadSplit) -> torch.Tensor:
    """Join [rows, sides, kv heads of a rank, dim] of all ranks to [rows, sides, kv heads, dim], in rank order."""
    if not split.replicated:
        return torch.cat(parts, dim=2)
    rows, sides, _, dim = parts[0].shape
    total = parts[0].new_zeros((rows, sides, split.kv_heads, dim), dtype=sum_dtype(parts[0].dtype))
    for part, (low, high) in zip(parts, split.kv, strict=True):
        total[:, :, low:high] += part
    return total.to(parts[0].dtype)


def _join_kv_gradients_even(parts: torch.Tensor, split: HeadSplit) -> torch.Tensor:
    """Join [ranks, rows, sides, kv heads of a rank, dim] to [rows, sides, kv heads, dim]."""
    if split.replicated:
        shared = parts.unflatten(0, (split.kv_heads // parts.shape[3], -1))
        parts = shared.sum(1, dtype=sum_dtype(parts.dtype)).to(parts.dtype)
    return parts.permute(1, 2, 0, 3, 4).flatten(2, 3)
