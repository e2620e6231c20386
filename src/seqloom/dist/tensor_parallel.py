"""Tensor parallelism inside a group: TP ranks share the weights of a stage and compute each other's tokens.

A TP group of t neighbours is the inner part of a group's Ulysses axis. Outside of its regions (attention with its
projections, and the MLP) each rank has its own tokens (Megatron's sequence parallelism). Inside, every rank has the
tokens of all and a slice of the weights:

    x -> all_gather_rows -> q, k, v of own heads -> attention -> o_proj of own heads -> reduce_scatter_rows
    x -> all_gather_rows -> gate, up, down of own columns                            -> reduce_scatter_rows

Embedding and head may be cut, too, by rows of the vocabulary: `models.adapter.cut_embedding`, `models.loss`.

Attention over a slice's heads involves the rank with that slice in every TP group. `TPGroup.cp_context` is the round
among these. With ulysses 4 and t = 2

    ranks  0 1 | 2 3 | 4 5 | 6 7      TP groups      ring 0: ranks 0 to 3, ring 1: ranks 4 to 7
    ranks  0     2     4     6        slice 0: ulysses 2 x ring 2
    ranks    1     3     5     7      slice 1

A TP group holds together what `Group.token_layout` gives one rank of a group with `ulysses / t`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.autograd.function import once_differentiable

from seqloom.dist.rows import sort_order
from seqloom.dist.transport import all_gather, all_to_all
from seqloom.errors import SeqloomError
from seqloom.layout import Layout
from seqloom.plan import GroupFamily, StageMicroBatch

if TYPE_CHECKING:
    from seqloom.dist.rank_tokens import Context

RowMove = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class TPGroup:
    """The ranks that share the weights, as one of them sees it in a round.

    Attributes:
        ranks: t neighbours; in a round that has no tokens for them, this rank only.
        index: of this rank, and so of its slice of the weights.
        counts: tokens of every rank.
        order: int64[tokens of the TP group] that sorts the rows of all ranks, one rank after the other, into those of
            `cp_context`; None: they are sorted already.
        inverse_order: the inverse of `order`.
        collective: whether these ranks have a communicator.
        cp_context: the round as attention of this slice sees it, with heads / t; its rows are those of the TP group.
    """

    ranks: tuple[int, ...]
    index: int
    counts: tuple[int, ...]
    order: torch.Tensor | None
    inverse_order: torch.Tensor | None
    collective: bool
    cp_context: Context

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks, [tokens of the TP group, ...], from this rank's [tokens, ...]."""
        sizes, transport = [count * prod(rows.shape[1:]) for count in self.counts], self.cp_context.transport
        received = rows.new_empty((sum(self.counts), *rows.shape[1:]))
        if sum(self.counts):  # all ranks know when there are no tokens
            flat = received.view(-1), rows.contiguous().view(-1)
            all_gather(transport, *flat, sizes, self.ranks, collective=self.collective)
        return received if self.order is None else received.index_select(0, self.order)

    def own_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows [tokens, ...] of those of all ranks."""
        rows = rows if self.inverse_order is None else rows.index_select(0, self.inverse_order)
        return rows.split(self.counts)[self.index]

    def reduce_scatter(self, partial: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows [tokens, ...] of the sum of all ranks' [tokens of the TP group, ...].

        Adds in rank order, in float32 or wider, and rounds once.
        """
        if self.inverse_order is not None:
            partial = partial.index_select(0, self.inverse_order)
        width, own, ranks = prod(partial.shape[1:]), self.counts[self.index], len(self.ranks)
        received = partial.new_empty((ranks, own, *partial.shape[1:]))
        sizes = [count * width for count in self.counts]
        self._all_to_all(received, partial.contiguous(), [own * width] * ranks, sizes)
        return received.sum(0, dtype=torch.promote_types(partial.dtype, torch.float32)).to(partial.dtype)

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return the columns of all ranks, [tokens of the TP group, t * width], from this rank's [.., width]."""
        tokens, width = x.shape
        received = x.new_empty((len(self.ranks), tokens, width))
        if sum(self.counts):
            flat, sizes = (received.view(-1), x.contiguous().view(-1)), [x.numel()] * len(self.ranks)
            all_gather(self.cp_context.transport, *flat, sizes, self.ranks, collective=self.collective)
        return received.transpose(0, 1).flatten(1)

    def reduce_scatter_columns(self, partial: torch.Tensor) -> torch.Tensor:
        """Return this rank's columns of the sum of all ranks' [tokens of the TP group, t * width], added like rows."""
        sent = partial.unflatten(1, (len(self.ranks), -1)).transpose(0, 1).contiguous()
        received = torch.empty_like(sent)
        self._all_to_all(received, sent, *[[sent[0].numel()] * len(self.ranks)] * 2)
        return received.sum(0, dtype=torch.promote_types(partial.dtype, torch.float32)).to(partial.dtype)

    def split_parts(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return this rank's columns of every part, side by side, from its columns of all parts in a row.

        queries of width 4, keys and values of width 2, t = 2    rank 0  q0 q1 q2 q3  ->  q0 q1 k0 v0
                                                                 rank 1  k0 k1 v0 v1  ->  q2 q3 k1 v1
        """
        pieces = self._pieces(self.index, widths)
        columns = x.split([width for _, width in pieces], dim=1)
        sent = (
            [each for each, (to, _) in zip(columns, pieces, strict=True) if to == rank]
            for rank in range(len(self.ranks))
        )
        whole = [torch.cat(each or [x[:, :0]], dim=1) for each in sent]
        return torch.cat(self._exchange_columns(whole, self._widths_from_row(widths)), dim=1)

    def join_parts(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Return what `split_parts` was given."""
        pieces = self._pieces(self.index, widths)
        own = [[width for to, width in pieces if to == rank] for rank in range(len(self.ranks))]
        received = self._exchange_columns(x.split(self._widths_from_row(widths), dim=1), [sum(each) for each in own])
        columns = [iter(each.split(cuts, dim=1)) for each, cuts in zip(received, own, strict=True)]
        return torch.cat([next(columns[to]) for to, _ in pieces], dim=1)

    def _pieces(self, rank: int, widths: Sequence[int]) -> list[tuple[int, int]]:
        """Cut a rank's columns of all parts in a row: the index of the rank that a piece is for, and its width."""
        ranks, start, found = len(self.ranks), 0, []
        first, stop = (k * sum(widths) // ranks for k in (rank, rank + 1))
        for to, width in ((to, width // ranks) for width in widths for to in range(ranks)):
            inside = min(start + width, stop) - max(start, first)
            if inside > 0:
                found.append((to, inside))
            start += width
        return found

    def _widths_from_row(self, widths: Sequence[int]) -> list[int]:
        """Return how many of this rank's columns of the parts each rank has in its row."""
        every = (self._pieces(rank, widths) for rank in range(len(self.ranks)))
        return [sum(width for to, width in pieces if to == self.index) for pieces in every]

    def _exchange_columns(self, columns: Sequence[torch.Tensor], widths: Sequence[int]) -> list[torch.Tensor]:
        """Send every rank its columns [tokens, ..]; return those from each rank, [tokens, width]."""
        tokens, sent = len(columns[0]), torch.cat([each.reshape(-1) for each in columns])
        sizes, received = [tokens * width for width in widths], sent.new_empty(tokens * sum(widths))
        self._all_to_all(received, sent, sizes, [each.numel() for each in columns])
        return [each.view(tokens, width) for each, width in zip(received.split(sizes), widths, strict=True)]

    def _all_to_all(
        self, output: torch.Tensor, sent: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> None:
        if sum(self.counts):  # all ranks know when there are no tokens
            flat, transport = (output.view(-1), sent.view(-1)), self.cp_context.transport
            all_to_all(transport, *flat, output_sizes, input_sizes, self.ranks, collective=self.collective)


def all_gather_rows(x: torch.Tensor, context: Context | torch.Tensor) -> torch.Tensor:
    """Return the rows of all ranks of this rank's TP group, in the order of `cp_context`. All of them call it.

    Backward reduce-scatters the gradient.

    Args:
        x: [tokens, ...], rows as in `context.spans`.
        context: of the round; without a TP group, or as the opaque handle of a compiled layer, `x` is returned.

    Returns:
        [tokens of the TP group, ...], rows as in `attention_context(context).spans`.
    """
    tp_group = _tp_group(context)
    return x if tp_group is None else RowFunction.apply(tp_group.all_gather, tp_group.reduce_scatter, x)


def reduce_scatter_rows(x: torch.Tensor, context: Context | torch.Tensor) -> torch.Tensor:
    """Sum the partial results of all ranks of this rank's TP group; each gets its own rows. All of them call it.

    Backward all-gathers the gradient.

    Args:
        x: [tokens of the TP group, ...], this rank's summand; rows as in `attention_context(context).spans`.
        context: of the round; without a TP group, or as the opaque handle of a compiled layer, `x` is returned.

    Returns:
        [tokens, ...], rows as in `context.spans`.
    """
    tp_group = _tp_group(context)
    return x if tp_group is None else RowFunction.apply(tp_group.reduce_scatter, tp_group.all_gather, x)


def all_gather_columns(x: torch.Tensor, tp_group: TPGroup) -> torch.Tensor:
    """Return what all ranks of a TP group have of the same rows, side by side. All of them call it.

    Backward sums the gradients of all ranks, and each gets those of its own columns.

    Args:
        x: [tokens of the TP group, width].

    Returns:
        [tokens of the TP group, t * width].
    """
    return RowFunction.apply(tp_group.all_gather_columns, tp_group.reduce_scatter_columns, x)


def split_parts(x: torch.Tensor, widths: Sequence[int], tp_group: TPGroup) -> torch.Tensor:
    """Exchange columns of a fused projection, such as gate and up in a row, for own ones of each. All ranks call it.

    Args:
        x: [tokens of the TP group, width / t]: the `TPGroup.index`-th of t equal parts of all columns.
        widths: of the parts, each a multiple of t.

    Returns:
        [tokens of the TP group, width / t]: the `TPGroup.index`-th of t equal parts of every part, side by side.
    """
    split, join = (partial(move, widths=widths) for move in (tp_group.split_parts, tp_group.join_parts))
    return RowFunction.apply(split, join, x)


@overload
def attention_context(context: Context) -> Context: ...


@overload
def attention_context(context: torch.Tensor) -> torch.Tensor: ...


def attention_context(context: Context | torch.Tensor) -> Context | torch.Tensor:
    """Return the context for attention over this rank's heads: `cp_context` of its TP group, or the one given."""
    tp_group = _tp_group(context)
    return context if tp_group is None else tp_group.cp_context


def _tp_group(context: Context | torch.Tensor) -> TPGroup | None:
    return None if isinstance(context, torch.Tensor) else context.tp_group


class RowFunction(torch.autograd.Function):
    """Moves the rows of tensors by one function, and gradients by another one, its transpose."""

    @staticmethod
    def forward(ctx: Any, run: RowMove, transpose: RowMove, *tensors: torch.Tensor) -> Any:  # noqa: D102
        ctx.transpose = transpose
        return run(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]  # noqa: D102
        moved = ctx.transpose(*gradients)
        return None, None, *(moved if isinstance(moved, tuple) else (moved,))


def tp_ranks_of(work: StageMicroBatch, rank: int, tensor: int) -> tuple[tuple[int, ...], int]:
    """Return the ranks of a rank's TP group and its index among them; a rank without a group has one of its own."""
    found = set()
    for group in work.groups:
        if rank in group.ranks:
            place = group.ranks.index(rank)
            first = place - place % tensor
            found.add((group.ranks[first : first + tensor], place % tensor))
    if len(found) > 1:
        first, second, *_ = sorted(ranks for ranks, _ in found)
        raise SeqloomError(
            f"rank {rank} is in TP groups {first} and {second} of one round: it has one slice of the weights, so the "
            f"same {tensor} ranks share them in all its groups; cut all groups along the same TP groups"
        )
    return found.pop() if found else ((rank,), 0)


def slice_of(work: StageMicroBatch, index: int, tensor: int) -> StageMicroBatch:
    """Return the work of one slice of the weights: of every TP group its rank `index`."""
    groups = tuple(
        replace(group, ranks=group.ranks[index::tensor], ulysses=group.ulysses // tensor) for group in work.groups
    )
    return replace(work, groups=groups, attention=None)


def bind_tp_group(
    ranks: tuple[int, ...], index: int, blocks: Sequence[Layout], cp_context: Context, family: GroupFamily | None
) -> TPGroup:
    """Compute how the rows of a TP group's ranks become those of `cp_context`. Communicates nothing.

    `blocks` say who holds what, in every group that the TP group is in.
    """
    held = [sorted(span for layout in blocks for span in layout.spans(rank)) for rank in ranks]
    order = sort_order([span for spans in held for span in spans], cp_context.spans, cp_context.device)
    counts = tuple(sum(span.tokens for span in spans) for spans in held)
    return TPGroup(ranks, index, counts, *order, has_communicator(ranks, family), cp_context)


def has_communicator(ranks: tuple[int, ...], family: GroupFamily | None) -> bool:
    """Return whether these ranks are a block of the family; without a family none is."""
    run = ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
    return family is not None and run and family.contains(ranks[0], len(ranks))
