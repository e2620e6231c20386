"""Between two stages: which rows of a rank's hidden states go to, or come from, which rank.

Two stages may deal a round's tokens to their ranks in different ways. What one holds and the next needs is a move
like any other. Where both deal alike, every rank has one partner and all of its rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from seqloom.comm import Lane, Way
from seqloom.comm.rows import first_rows, rows_of
from seqloom.comm.upload import on_device
from seqloom.plan import Layout, Remap, Work, move_between


class Share(NamedTuple):
    """Rows of the hidden states on this rank that another one sends, or is sent.

    Attributes:
        peer: the other rank; this one itself where a host's next stage finds them here.
        rows: a run of them, or an index int64[tokens].
        tokens: how many.
    """

    peer: int
    rows: slice | torch.Tensor
    tokens: int


def states_layout(work: Work) -> Layout:
    """Return who holds which tokens between layers, and so between stages."""
    return work.linear_layout() if work.remap == Remap.ATTENTION else work.attention_layout()


def same_groups(work: Work, other: Work, ranks: Sequence[int], others: Sequence[int]) -> bool:
    """Whether two stages' groups are the same but for the ranks, which is often so and quick to see."""
    if any(each.attention is not None or each.linear is not None for each in (work, other)):
        return False
    if len(work.groups) != len(other.groups) or len(ranks) != len(others):
        return False
    place = dict(zip(ranks, others, strict=True))
    return all(
        (a.ulysses, a.ring, a.spans) == (b.ulysses, b.ring, b.spans) and tuple(place[r] for r in a.ranks) == b.ranks
        for a, b in zip(work.groups, other.groups, strict=True)
    )


def alike(source: Layout, target: Layout, ranks: Sequence[int], others: Sequence[int]) -> bool:
    """Whether ranks of equal place in `ranks` and `others` hold the same tokens before and after."""
    if len(source) != len(target) or len(ranks) != len(others):
        return False
    place = dict(zip(ranks, others, strict=True))
    same = all(map(np.array_equal, source.columns()[1:], target.columns()[1:]))
    return same and [place[rank] for rank in source.rank.tolist()] == target.rank.tolist()


def border(
    source: Layout, target: Layout, rank: int, *, sends: bool, device: torch.device | str = "cpu"
) -> tuple[Share, ...]:
    """Return what a rank sends or receives when tokens go from one layout to the other, by peer.

    Args:
        source, target: of the stage before and of the one after.
        rank: the one asked for.
        sends: what it sends from its rows of the source; else what it receives for its rows of the target.
        device: where the rows are.
    """
    move, held = move_between(source, target), source if sends else target
    own, peer = (move.sender, move.receiver) if sends else (move.receiver, move.sender)
    mine, spans = own == rank, np.stack(held.columns()[1:])[:, held.rank == rank]
    boxes, peers = np.stack((move.item, move.start, move.stop))[:, mine], peer[mine]
    starts, lengths = first_rows(spans, boxes), boxes[2] - boxes[1]
    shares = []
    for other in np.unique(peers):
        chosen = peers == other
        rows = rows_of(starts[chosen], lengths[chosen])
        index = rows if isinstance(rows, slice) else on_device(rows, torch.device(device))
        shares.append(Share(int(other), index, int(lengths[chosen].sum())))
    return tuple(shares)


def whole(tokens: int, peer: int) -> tuple[Share, ...]:
    """Return what a rank exchanges with its partner in a stage that deals tokens alike."""
    return (Share(peer, slice(0, tokens), tokens),) if tokens else ()


def ways_of(rank: int, ahead: Sequence[Share], behind: Sequence[Share]) -> Iterator[Way]:
    """Yield the ways of a rank's messages with the stage after it and the stage before it."""
    for shares, out, back in ((ahead, Lane.FORWARD, Lane.BACKWARD), (behind, Lane.BACKWARD, Lane.FORWARD)):
        for peer in {share.peer for share in shares} - {rank}:
            yield Way(out, rank, peer)
            yield Way(back, peer, rank)
