"""Documents that a plan has in several pieces, each in a round of its own."""

from __future__ import annotations

import numpy as np
import torch
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import replace
from functools import partial
from itertools import pairwise
from seqloom.dist.redistribute import TokenRedistribute
from seqloom.dist.redistribute import bind_redistribute
from seqloom.dist.rows import columns
from seqloom.dist.rows import expand
from seqloom.dist.rows import on_device
from seqloom.dist.rows import rows_of
from seqloom.dist.rows import sorting
from seqloom.dist.tensor_parallel import TPGroup
from seqloom.dist.tensor_parallel import column_of
from seqloom.dist.tensor_parallel import place_in
from seqloom.dist.tensor_parallel import tp_group_of
from seqloom.dist.transport import Transport
from seqloom.errors import SeqloomError
from seqloom.layout import Layout
from seqloom.layout import Span
from seqloom.plan import Group
from seqloom.plan import GroupFamily
from seqloom.plan import Plan
from seqloom.plan import Remap
from seqloom.plan import StageMicroBatch
from typing import TypeVar
from typing import cast


def pieces_of_plan(plan: Plan) -> dict[int, tuple[Span, ...]]:
    """Return all pieces, in order, of every document that the plan has in more than one."""
    found: dict[int, list[Span]] = {}
    for pipeline in plan.pipelines:
        for current in pipeline.rounds:
            for span in current.work[0].spans():  # all stages of a pipeline work on the same tokens
                if span.tokens < plan.documents[span.document]:
                    found.setdefault(span.document, []).append(span)
    return {document: tuple(sorted(spans)) for document, spans in found.items()}


def pieces_of_round(work: StageMicroBatch, pieces: Mapping[int, tuple[Span, ...]]) -> dict[int, tuple[Span, ...]]:
    """Return the pieces of those documents of a round that are in several; refuse what cannot be true."""
    found = {}
    for span in work.spans():
        every = pieces.get(span.document, ())
        if len(every) < 2:
            continue
        edges = [0, *(piece.stop for piece in every)]
        told = [(piece.start, piece.stop) for piece in every]
        if told != list(pairwise(edges)) or any(piece.tokens < 1 for piece in every):
            raise SeqloomError(
                f"document {span.document} in pieces {told}: pieces begin at token 0 and follow each other without "
                "gaps; give all pieces of the document in order, as pieces_of_plan does"
            )
        if span not in every:
            raise SeqloomError(
                f"document {span.document} is at tokens {span.start} to {span.stop} in this round, its pieces are "
                f"{told}: give the pieces of the plan that the round belongs to"
            )
        found[span.document] = every
    return found


def check_documents(work: StageMicroBatch) -> None:
    """Refuse a round with two pieces of one document."""
    seen: set[int] = set()
    for document, _, _ in work.spans():
        if document in seen:
            raise SeqloomError(
                f"document {document} is twice in one round's work; a document, or a piece of one, belongs to one "
                "group of a round: give the other piece to another round"
            )
        seen.add(document)


# ---- merged: comm.checks
# What `bind` refuses before anything is communicated: the value, the rule and the way out.


def check_work(work: StageMicroBatch, transport: Transport, node_size: int | None, tensor: int) -> None:
    """Refuse work that the ranks of a transport cannot do; the same on all of them.

    Args:
        work, transport, node_size, tensor: see `bind`.
    """
    _check_ranks(work, transport)
    _check_routes(work, transport, node_size)
    _check_layouts(work)
    check_documents(work)
    if tensor != 1:
        _check_teams(work, tensor)


def _check_ranks(work: StageMicroBatch, transport: Transport) -> None:
    for group in work.groups:
        name = f"a group on ranks {group.ranks} with ulysses {group.ulysses} x ring {group.ring}"
        beyond = [rank for rank in group.ranks if not 0 <= rank < transport.ranks]
        if beyond:
            raise SeqloomError(
                f"{name}: rank {beyond[0]} is not among the {transport.ranks} ranks of the transport; "
                f"bind a plan made for {transport.ranks} ranks, or start at least {max(beyond) + 1}"
            )
        if len(set(group.ranks)) < group.degree or group.ulysses * group.ring != group.degree or not group.ranks:
            raise SeqloomError(f"{name}: it needs ulysses x ring different ranks; list every rank once")
        for block in group.blocks():
            if block != tuple(range(block[0], block[0] + group.ulysses)):
                raise SeqloomError(
                    f"{name}: ranks {block} exchange heads and must be an ascending run, "
                    f"for example {tuple(range(min(block), min(block) + group.ulysses))}"
                )


def _check_routes(work: StageMicroBatch, transport: Transport, node_size: int | None) -> None:
    for group in work.groups:
        if group.route is None:
            continue
        name = f"a group on ranks {group.ranks} routed through proxies {group.route.proxies}"
        beyond = [rank for rank in group.route.proxies if not 0 <= rank < transport.ranks]
        if beyond:
            raise SeqloomError(
                f"{name}: rank {beyond[0]} is not among the {transport.ranks} ranks of the transport; "
                "choose proxies among them, or leave the route out"
            )
        if node_size is None:
            raise SeqloomError(
                f"{name}: which ranks share a node is not known; bind with node_size=..., or leave the route out"
            )


def _check_layouts(work: StageMicroBatch) -> None:
    if work.attention is not None and work.attention != (derived := replace(work, attention=None).attention_layout()):
        raise SeqloomError(
            f"the attention layout of the work, {work.attention}, is not the one that its groups give, {derived}: "
            "groups deal their tokens to ranks in one way, which their kernels and rings rely on; leave the attention "
            "layout out, and give tokens other places in the linear layout"
        )


def _check_teams(work: StageMicroBatch, tensor: int) -> None:
    for group in work.groups:
        if tensor < 1 or group.ulysses % tensor:
            raise SeqloomError(
                f"tensor degree {tensor} for a group on ranks {group.ranks} with ulysses {group.ulysses}: teams are "
                f"the inner part of the Ulysses axis; use a degree that divides {group.ulysses}"
            )
        if group.route is not None:
            raise SeqloomError(
                f"tensor degree {tensor} for a group on ranks {group.ranks} with a route: weight slices exchange keys "
                "by themselves, from rank to rank; leave the route out, or use tensor degree 1"
            )
    if work.linear is not None:
        raise SeqloomError(
            f"tensor degree {tensor} for work with a linear layout: a team computes its linear layers together, on the "
            "tokens it has in attention; leave the linear layout out, or use tensor degree 1"
        )


# ---- merged: comm.context
# The bound context: what a round's work means for one rank, decided once and read by every layer.
#
# `bind` does the index work of a round on the host: which tokens the rank holds, in which groups it takes part,
# with
# whom it exchanges how many rows. Layers then only move and compute.


T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class BoundGroup:
    """A group as one of its ranks sees it.

    The buffer of a ring index is what its block holds together, rows sorted by document and position.

    Attributes:
        group: the group of the plan.
        ulysses_index, ring_index: place of this rank.
        block: ranks of this ring index, the Ulysses communicator; in the column of a team they are no run.
        ring_ranks: ranks of this Ulysses index, by ring index.
        spans: of this ring index, sorted by document and position.
        counts: rows of every rank of the block.
        rows: the group's rows in the local buffer; an index int64[rows] when they are not one run.
        order: int64[rows of the block] that sorts the rows of all ranks of the block, one rank after the other, into
            the buffer of the ring index; None when they are sorted already.
        inverse_order: the inverse of `order`.
    """

    group: Group
    ulysses_index: int
    ring_index: int
    block: tuple[int, ...]
    ring_ranks: tuple[int, ...]
    spans: tuple[Span, ...]
    counts: tuple[int, ...]
    rows: slice | torch.Tensor
    order: torch.Tensor | None
    inverse_order: torch.Tensor | None

    @property
    def tokens(self) -> int:
        """Rows of this rank."""
        return self.counts[self.ulysses_index]


class Context:
    """One rank's view of a round. A rank without tokens, or in no group, has one too. Nothing in it is replaced.

    Not a dataclass: torch's FSDP looks for tensors in those among a layer's arguments, field by field, at every call.

    Attributes:
        work: what was bound.
        transport: the door to other ranks.
        spans: tokens of the local buffer, in the order of its rows: of the linear layout in a round that remaps around
            attention, else of the attention layout.
        positions: int64[tokens], the place of every token in its document.
        documents: int64[tokens], the document of every token.
        groups: those this rank is in, in the order of the work; their rows are of the attention layout.
        attention_redistribute: from the model's tokens to those of attention; None where these are the same.
        mlp_redistribute: from the model's tokens to those of the MLP; None where these are the same.
        node_size: ranks per node; None: not known.
        pieces: for every document of the round that is in pieces, all of its pieces, in order.
        kv_cache: keys and values of earlier pieces of a document (`attention.KVCache`); None: no document is in pieces.
        tp_group: ranks that share the weights with this one, and what attention sees of the round; None: tensor degree 1.
        saved_attention: results of attention that selective checkpointing keeps (`attention.api.SavedAttention`);
            None: nothing is kept. Set on a copy of the context, for one layer.
    """

    __slots__ = (
        "_kept",
        "attention_redistribute",
        "mlp_redistribute",
        "kv_cache",
        "documents",
        "groups",
        "node_size",
        "pieces",
        "positions",
        "saved_attention",
        "spans",
        "tp_group",
        "transport",
        "work",
    )

    def __init__(
        self,
        work: StageMicroBatch,
        transport: Transport,
        spans: tuple[Span, ...],
        positions: torch.Tensor,
        documents: torch.Tensor,
        groups: tuple[BoundGroup, ...],
        node_size: int | None = None,
        crossing: TokenRedistribute | None = None,
        pieces: Mapping[int, tuple[Span, ...]] | None = None,
        kv_cache: object | None = None,
        tp_group: TPGroup | None = None,
    ) -> None:
        """Keep what `bind` has found.

        Args:
            work, transport, spans, positions, documents, groups, node_size, pieces, kv_cache, tp_group: see the attributes.
            crossing: from the linear to the attention layout; None where these are the same.
        """
        self.work, self.transport, self.spans = work, transport, spans
        self.positions, self.documents, self.groups = positions, documents, groups
        self.node_size, self.pieces, self.kv_cache, self.tp_group = node_size, pieces or {}, kv_cache, tp_group
        around = work.remap if crossing is not None else None
        self.attention_redistribute = crossing if around == Remap.ATTENTION else None
        self.mlp_redistribute = crossing.reversed() if crossing is not None and around == Remap.MLP else None
        self.saved_attention: object | None = None
        self._kept: dict[Hashable, object] = {}

    @property
    def rank(self) -> int:
        """This rank."""
        return self.transport.rank

    @property
    def tokens(self) -> int:
        """Rows of the local buffer."""
        return len(self.positions)

    @property
    def device(self) -> torch.device:
        """Where the tensors of this rank live."""
        return self.positions.device

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """Return what was built for `key` before, or build it now. The key must name all the value depends on."""
        if key not in self._kept:
            self._kept[key] = build()
        return cast("T", self._kept[key])


def bind(
    work: StageMicroBatch,
    transport: Transport,
    *,
    device: torch.device | str = "cpu",
    node_size: int | None = None,
    shard_groups: Sequence[Sequence[int]] | None = None,
    family: GroupFamily | None = None,
    pieces: Mapping[int, tuple[Span, ...]] | None = None,
    kv_cache: object | None = None,
    tensor: int = 1,
) -> Context:
    """Work out what one stage's share of a round means for the rank of `transport`. Nothing is communicated.

    Args:
        work: the same on all ranks.
        transport: this rank's.
        device: where the local tensors live.
        node_size: ranks per node. A group whose traffic is routed needs it; others only work better with it.
        shard groups, family: where tokens may change places if the work has a linear layout, see `bind_crossing`; a team
            that is a block of the family meets on its communicator.
        pieces: for every document that the plan has in several pieces, all of them, in order.
        kv_cache: an `attention.KVCache`, one for all rounds of a step; needed where the work has such a document.
        tensor: ranks that share the weights, the inner part of every group's Ulysses axis; see `team`.
    """
    check_work(work, transport, node_size, tensor)
    in_pieces, device = pieces_of_round(work, pieces or {}), torch.device(device)
    view = partial(_view, transport=transport, device=device, node_size=node_size, pieces=in_pieces, kv_cache=kv_cache)
    blocks, tp_group = _block_layouts(work, transport.rank), None
    if tensor > 1:
        ranks, index = place_in(work, transport.rank, tensor)
        column = column_of(work, index, tensor)
        tp_group = tp_group_of(ranks, index, blocks, view(column, _block_layouts(column, transport.rank)), family)
    return view(work, blocks, crossing=bind_redistribute(work, transport, device, shard_groups, family), tp_group=tp_group)


def _view(
    work: StageMicroBatch,
    blocks: Sequence[Layout],
    *,
    transport: Transport,
    device: torch.device,
    node_size: int | None,
    pieces: Mapping[int, tuple[Span, ...]],
    kv_cache: object | None,
    crossing: TokenRedistribute | None = None,
    tp_group: TPGroup | None = None,
) -> Context:
    """Do the index work of a rank's groups, whose blocks hold their tokens as `blocks` say."""
    rank = transport.rank
    own = [group for group in work.groups if rank in group.ranks]
    # A document is in one group, so sorting by document is all it takes to join the spans of the groups.
    held = sorted((span, number) for number, layout in enumerate(blocks) for span in layout.spans(rank))
    spans = tuple(span for span, _ in held)
    _, starts, stops = columns(spans)
    lengths = stops - starts
    firsts, owner = np.cumsum(lengths) - lengths, np.array([number for _, number in held], dtype=np.int64)
    groups = []
    for number, (group, layout) in enumerate(zip(own, blocks, strict=True)):
        rows = rows_of(firsts[owner == number], lengths[owner == number])
        groups.append(_bind_group(group, rank, layout, rows, device))
    if crossing is not None and work.linear is not None and work.remap == Remap.ATTENTION:
        spans = work.linear.spans(rank)
    documents, starts, stops = columns(spans)
    return Context(
        work,
        transport,
        spans,
        positions=on_device(expand(starts, stops - starts), device),
        documents=on_device(np.repeat(documents, stops - starts), device),
        groups=tuple(groups),
        node_size=node_size,
        crossing=crossing,
        pieces=pieces,
        kv_cache=kv_cache,
        tp_group=tp_group,
    )


def _block_layouts(work: StageMicroBatch, rank: int) -> list[Layout]:
    """Who in the block of `rank` holds what, for every group it is in.

    A ring index is a group of its own, of the chunks it was dealt.
    """
    layouts = []
    for group in work.groups:
        if rank in group.ranks:
            index = group.ranks.index(rank) // group.ulysses
            block = Group(group.blocks()[index], group.ulysses, 1, tuple(group.ring_spans(index)))
            layouts.append(block.token_layout())
    return layouts


def _bind_group(group: Group, rank: int, layout: Layout, rows: slice | np.ndarray, device: torch.device) -> BoundGroup:
    ring_index, ulysses_index = divmod(group.ranks.index(rank), group.ulysses)
    block = group.blocks()[ring_index]
    spans = tuple(sorted(group.ring_spans(ring_index)))
    held = [layout.spans(peer) for peer in block]
    order, places = sorting([span for share in held for span in share], spans, device)
    return BoundGroup(
        group,
        ulysses_index,
        ring_index,
        block,
        ring_ranks=group.ranks[ulysses_index :: group.ulysses],
        spans=spans,
        counts=tuple(sum(span.tokens for span in share) for share in held),
        rows=rows if isinstance(rows, slice) else on_device(rows, device),
        order=order,
        inverse_order=places,
    )
