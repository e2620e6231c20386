"""Remapping: rows of tokens from the layout of linear layers to that of attention, and back.

Both layouts hold every token once, so rows only change places: each rank sends what another shall hold, in one
message for all tensors that go together, and the way back is the same with both ends exchanged. A move stays among
the ranks of a shard group, which run the same rounds. They meet in one all-to-all where they have a communicator, and
send and receive otherwise. All index work is done when the round is bound.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from seqloom.dist.transport import all_to_all
from seqloom.dist.rows import columns, expand, first_rows, inverse
from seqloom.dist.transport import Transport
from seqloom.dist.rows import on_device
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily, StageMicroBatch; from seqloom.layout import Layout
from seqloom.errors import PlanError
from seqloom.layout.move import Move, move_between

if TYPE_CHECKING:
    from seqloom.dist.token_layout import Context

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True, eq=False)
class OneWay:
    """One rank's part of a move of rows.

    Attributes:
        transport: this rank's.
        ranks: of the shard group, ascending.
        collective: the shard group has a communicator.
        sends, receives: rows for and from every rank of the shard group; what this rank keeps is among both.
        taken: int64[rows], the rows as they are sent, one receiver after the other; None: as they lie.
        order: int64[rows], sorts what came, one sender after the other, into the buffer; None: it is sorted.
    """

    transport: Transport
    ranks: tuple[int, ...]
    collective: bool
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    taken: torch.Tensor | None
    order: torch.Tensor | None

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """Return tensors [rows before, width, ...] of one dtype as [rows after, width, ...], in memory of their own."""
        flat = [tensor.flatten(1) for tensor in tensors]
        if self.taken is not None:
            flat = [each.index_select(0, self.taken) for each in flat]
        sent = torch.cat(flat, dim=1) if len(flat) > 1 else flat[0].contiguous()
        received = sent.new_empty((sum(self.receives), sent.shape[1]))
        self._send(received, sent)
        if self.order is not None:
            received = received.index_select(0, self.order)
        parts = received.split([each.shape[1] for each in flat], dim=1)
        return tuple(part.unflatten(1, tensor.shape[1:]) for part, tensor in zip(parts, tensors, strict=True))

    def _send(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        """Fill `received` [rows, width] from what all ranks of the shard group have `sent` [rows, width]."""
        width = sent.shape[1]
        into, out_of = ([count * width for count in counts] for counts in (self.receives, self.sends))
        flat = received.view(-1), sent.view(-1)
        all_to_all(self.transport, *flat, into, out_of, self.ranks, collective=self.collective)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRedistribute:
    """A way and the way back, which gradients take."""

    there: OneWay
    back: OneWay

    def reversed(self) -> TokenRedistribute:
        """Return the crossing from where this one leads."""
        return TokenRedistribute(self.back, self.there)

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """Move rows there."""
        return self.there(*tensors)

    def backward(self, *gradients: torch.Tensor) -> Tensors:
        """Move gradients of what came back to what it came from."""
        return self.back(*gradients)


def redistribute_tokens(crossing: TokenRedistribute, *tensors: torch.Tensor) -> Tensors:
    """Move tensors [rows, width, ...] of one dtype together, with gradients. All ranks of the shard group call it."""
    return _Cross.apply(crossing, *tensors)


def remapped(
    x: torch.Tensor, context: Context | torch.Tensor, compute: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return `compute(x)`, run on the tokens of the linear layout in a round that remaps around the MLP.

    Args:
        x: [tokens, width, ...], rows as `context.spans` says.
        context: of the round; in a compiled layer its ticket, and then nothing moves.
        compute: treats every row by itself.

    Returns:
        [tokens, width, ...], rows as those of `x`.
    """
    crossing = None if isinstance(context, torch.Tensor) else context.mlp_redistribute
    if crossing is None:
        return compute(x)
    (inside,) = redistribute_tokens(crossing, x)
    return redistribute_tokens(crossing.reversed(), compute(inside))[0]


class _Cross(torch.autograd.Function):
    """Rows change places; nothing is kept."""

    @staticmethod
    def forward(ctx: Any, crossing: TokenRedistribute, *tensors: torch.Tensor) -> Tensors:
        ctx.crossing = crossing
        return crossing.forward(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        return None, *ctx.crossing.backward(*gradients)


def bind_redistribute(
    work: StageMicroBatch,
    transport: Transport,
    device: torch.device,
    shard_groups: Sequence[Sequence[int]] | None = None,
    family: GroupFamily | None = None,
) -> TokenRedistribute | None:
    """Work out this rank's part of the move from the linear to the attention layout. Nothing is communicated.

    Args:
        work: the same on all ranks.
        transport: this rank's.
        device: where the local tensors live.
        shard groups: ranks that run the same rounds, all of them; None: all ranks do.
        family: blocks with a communicator; None: none has one.

    Returns:
        None where nothing of the rank's shard group moves.
    """
    if work.linear is None:
        return None
    everyone = tuple(range(transport.ranks))
    shard_group = next((tuple(each) for each in shard_groups or (everyone,) if transport.rank in each), (transport.rank,))
    shard_group = tuple(sorted(shard_group))
    near = tuple(group for group in work.groups if not set(group.ranks).isdisjoint(shard_group))
    attention = StageMicroBatch(near, work.checkpoint).attention_layout().among(shard_group)
    linear = work.linear.among(shard_group)
    move = _move(linear, attention, shard_group, transport.rank)
    if not move.remote.any():
        return None
    taken, sends = _side(move, move.sender, move.receiver, linear, transport.rank, shard_group)
    placed, receives = _side(move, move.receiver, move.sender, attention, transport.rank, shard_group)
    known = family is not None and shard_group[-1] - shard_group[0] == len(shard_group) - 1 and family.contains(shard_group[0], len(shard_group))
    take, place = (None if _is_sorted(rows) else on_device(rows, device) for rows in (taken, placed))
    ends = transport, shard_group, known
    return TokenRedistribute(
        OneWay(*ends, sends, receives, take, None if place is None else inverse(place)),
        OneWay(*ends, receives, sends, place, None if take is None else inverse(take)),
    )


def _side(
    move: Move, mine: np.ndarray, theirs: np.ndarray, layout: Layout, rank: int, shard_group: tuple[int, ...]
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the rows of this rank's end of a move, one peer after the other, and how many each peer has."""
    here = mine == rank
    peers, pieces = theirs[here], np.stack((move.item[here], move.start[here], move.stop[here]))
    order = np.argsort(peers, kind="stable")  # boxes of a pair of ranks stay as all moves have them: by item and start
    pieces, lengths = pieces[:, order], move.sizes[here][order]
    rows = expand(first_rows(columns(layout.spans(rank)), pieces), lengths)
    counts = np.bincount(np.searchsorted(shard_group, peers[order]), weights=lengths, minlength=len(shard_group))
    return rows, tuple(int(count) for count in counts)


def _is_sorted(rows: np.ndarray) -> bool:
    return np.array_equal(rows, np.arange(len(rows)))


def _move(linear: Layout, attention: Layout, shard_group: tuple[int, ...], rank: int) -> Move:
    """Return the move between the layouts of a shard group. Refuse layouts that do not hold the same tokens, each once."""
    if linear.axes != 1:
        raise SeqloomError(f"a linear layout with {linear.axes} axes: it holds whole tokens; use one axis")
    held, wanted = (int(layout.sizes.sum()) for layout in (linear, attention))
    try:
        if held == wanted:  # and every token that attention wants is there: then no token is there twice
            return move_between(linear, attention)
    except PlanError:
        pass
    raise SeqloomError(
        f"the linear layout puts {held} tokens on ranks {_shown(shard_group)}, which hold {wanted} in attention, or other "
        f"ones: a remap leaves every token once, on ranks that share parameter shards, as these do with rank {rank}; "
        "let the linear layout spread what they hold, leave it out, or shard parameters over more ranks"
    )


def _shown(ranks: tuple[int, ...]) -> str:
    run = len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1))
    return f"{ranks[0]} to {ranks[-1]}" if run else ", ".join(map(str, ranks))
