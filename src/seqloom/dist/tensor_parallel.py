"""Teams: ranks that share the weights of a stage, and the way of tokens into and out of what they compute together.

A team of t neighbours is the inner part of a group's Ulysses axis. Outside of its regions (attention with its
projections, and the MLP) each member has its own tokens, as ever. Inside, every member has the tokens of all and a
slice of the weights:

    x -> gathered -> q, k, v of own heads -> attention -> o_proj of own heads -> summed
    x -> gathered -> gate, up, down of own columns                            -> summed

Attention is over own heads, which the same member of every other team has too: the column. With ulysses 4 and t = 2

    ranks  0 1 | 2 3 | 4 5 | 6 7      teams          ring 0: ranks 0 to 3, ring 1: ranks 4 to 7
    ranks  0     2     4     6        column of slice 0: ulysses 2 x ring 2
    ranks    1     3     5     7      column of slice 1

What a team holds together is what one rank of the column with `ulysses / t` is dealt, see `Group.token_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, overload

import torch
from torch.autograd.function import once_differentiable

from seqloom.dist.transport import all_to_all
from seqloom.dist.rows import sorting
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily, StageMicroBatch; from seqloom.layout import Layout

if TYPE_CHECKING:
    from seqloom.dist.token_layout import Context


@dataclass(frozen=True, slots=True, eq=False)
class TPGroup:
    """Ranks that share the weights, as one of them sees it in a round.

    Attributes:
        ranks: t neighbours; in a round that has no tokens for them, this rank alone.
        index: of this rank, and so of its slice of the weights.
        counts: tokens of every member.
        order: int64[team tokens] that sorts the rows of all members, one member after the other, into those of the
            column; None: they are sorted already.
        inverse_order: the inverse of `order`.
        collective: the team has a communicator.
        cp_context: the round as attention of this slice sees it, with heads / t: its rows are those of the whole team.
    """

    ranks: tuple[int, ...]
    index: int
    counts: tuple[int, ...]
    order: torch.Tensor | None
    inverse_order: torch.Tensor | None
    collective: bool
    cp_context: Context

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of all members, [team tokens, ...], from those of this one, [tokens, ...]."""
        width = prod(rows.shape[1:])
        sent = rows.reshape(1, -1).expand(len(self.ranks), -1).reshape(-1)
        received = rows.new_empty((sum(self.counts), *rows.shape[1:]))
        self._all_to_all(received, sent, [count * width for count in self.counts], [rows.numel()] * len(self.ranks))
        return received if self.order is None else received.index_select(0, self.order)

    def sum(self, parts: torch.Tensor) -> torch.Tensor:
        """Return this member's rows [tokens, ...] of the sum of all members' [team tokens, ...].

        It is added up in the order of members, in float32 or wider, and rounded once.
        """
        if self.inverse_order is not None:
            parts = parts.index_select(0, self.inverse_order)
        width, own, members = prod(parts.shape[1:]), self.counts[self.index], len(self.ranks)
        received = parts.new_empty((members, own, *parts.shape[1:]))
        sent = parts.contiguous().view(-1)
        self._all_to_all(received, sent, [own * width] * members, [count * width for count in self.counts])
        wide = torch.promote_types(parts.dtype, torch.float32)
        return received.sum(0, dtype=wide).to(parts.dtype)

    def _all_to_all(
        self, output: torch.Tensor, sent: torch.Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int]
    ) -> None:
        if sum(self.counts):  # a team without tokens has nothing to say, and all its members know
            flat, transport = output.view(-1), self.cp_context.transport
            all_to_all(transport, flat, sent, output_sizes, input_sizes, self.ranks, collective=self.collective)


def all_gather_rows(x: torch.Tensor, context: Context | torch.Tensor) -> torch.Tensor:
    """Return the rows of all members of this rank's team, in the order of the column's spans. All members call it.

    A gradient is summed over the team, each member has that of its own rows.

    Args:
        x: [tokens, ...], rows as `context.spans` says.
        context: of the round; without a team, or as the ticket of a compiled layer, `x` is returned as it is.

    Returns:
        [team tokens, ...], rows as those of `attention_context(context)`.
    """
    team = _team(context)
    return x if team is None else _Gathered.apply(x, team)


def reduce_scatter_rows(x: torch.Tensor, context: Context | torch.Tensor) -> torch.Tensor:
    """Add up the partial sums of all members of this rank's team, each member its own rows. All members call it.

    Every member's part has the gradient of the sum: gradients are gathered.

    Args:
        x: [team tokens, ...], this member's part; rows as those of `attention_context(context)`.
        context: of the round; without a team, or as the ticket of a compiled layer, `x` is returned as it is.

    Returns:
        [tokens, ...], rows as `context.spans` says.
    """
    team = _team(context)
    return x if team is None else _Summed.apply(x, team)


@overload
def attention_context(context: Context) -> Context: ...


@overload
def attention_context(context: torch.Tensor) -> torch.Tensor: ...


def attention_context(context: Context | torch.Tensor) -> Context | torch.Tensor:
    """Return the context for attention over this rank's heads: its team's column, or the one given without a team."""
    team = _team(context)
    return context if team is None else team.cp_context


def _team(context: Context | torch.Tensor) -> TPGroup | None:
    return None if isinstance(context, torch.Tensor) else context.tp_group


class _Gathered(torch.autograd.Function):
    """Rows of the team; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, team: TPGroup) -> torch.Tensor:
        ctx.team = team
        return team.gather(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return ctx.team.sum(gradient), None


class _Summed(torch.autograd.Function):
    """Own rows of the team's sum; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, team: TPGroup) -> torch.Tensor:
        ctx.team = team
        return team.sum(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return ctx.team.gather(gradient), None


def place_in(work: StageMicroBatch, rank: int, tensor: int) -> tuple[tuple[int, ...], int]:
    """Return the ranks of a rank's team and its place among them; a rank without a group is a team of its own.

    Args:
        work: its groups are made of whole teams.
        rank: the one asked for.
        tensor: ranks of a team.
    """
    found = []
    for group in work.groups:
        if rank in group.ranks:
            place = group.ranks.index(rank)
            first = place - place % tensor
            found.append((group.ranks[first : first + tensor], place % tensor))
    if len(set(found)) > 1:
        teams = sorted(ranks for ranks, _ in set(found))
        raise SeqloomError(
            f"rank {rank} is in teams {teams[0]} and {teams[1]} of one round: it has one slice of the weights, so the "
            f"same {tensor} ranks share them in all its groups; cut all groups along the same teams"
        )
    return found[0] if found else ((rank,), 0)


def column_of(work: StageMicroBatch, index: int, tensor: int) -> StageMicroBatch:
    """Return the work of one slice of the weights: of every team its member `index`.

    Args:
        work: its groups are made of whole teams.
        index: of the slice.
        tensor: ranks of a team.
    """
    groups = tuple(
        replace(group, ranks=group.ranks[index::tensor], ulysses=group.ulysses // tensor) for group in work.groups
    )
    return replace(work, groups=groups, attention=None)


def tp_group_of(
    ranks: tuple[int, ...], index: int, blocks: Sequence[Layout], column: Context, family: GroupFamily | None
) -> TPGroup:
    """Work out how the rows of a team's members become those of its column. Nothing is communicated.

    Args:
        ranks, index: the team and this rank's place in it.
        blocks: who holds what, of every group that the team is in.
        column: of this slice.
        family: blocks with a communicator; None: none has one.
    """
    held = [sorted(span for layout in blocks for span in layout.spans(rank)) for rank in ranks]
    order, places = sorting([span for share in held for span in share], column.spans, column.device)
    run = ranks == tuple(range(ranks[0], ranks[0] + len(ranks)))
    known = family is not None and run and family.contains(ranks[0], len(ranks))
    counts = tuple(sum(span.tokens for span in share) for share in held)
    return TPGroup(ranks, index, counts, order, places, known, column)
