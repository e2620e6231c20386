"""The bound context: what a round's work means for one rank, decided once and read by every layer.

`bind` does the index work of a round on the host: which tokens the rank holds, in which groups it takes part, with
whom it exchanges how many rows. Layers then only move and compute.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
import torch

from seqloom.comm.transport import Transport
from seqloom.comm.upload import on_device
from seqloom.errors import SeqloomError
from seqloom.plan import Group, Layout, Span, Work

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class BoundGroup:
    """A group as one of its ranks sees it.

    The buffer of a ring index is what its block holds together, rows sorted by document and position.

    Attributes:
        group: the group of the plan.
        ulysses_index, ring_index: place of this rank.
        block: ranks of this ring index, the Ulysses communicator.
        ring_ranks: ranks of this Ulysses index, by ring index.
        spans: of this ring index, sorted by document and position.
        counts: rows of every rank of the block.
        rows: the group's rows in the local buffer; an index int64[rows] when they are not one run.
        order: int64[rows of the block] that sorts the rows of all ranks of the block, one rank after the other, into
            the buffer of the ring index; None when they are sorted already.
        places: the inverse of `order`.
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
    places: torch.Tensor | None

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
        spans: tokens of the local buffer, in the order of its rows.
        positions: int64[tokens], the place of every token in its document.
        documents: int64[tokens], the document of every token.
        groups: those this rank is in, in the order of the work.
        node_size: ranks per node; None: not known.
    """

    __slots__ = ("_kept", "documents", "groups", "node_size", "positions", "spans", "transport", "work")

    def __init__(
        self,
        work: Work,
        transport: Transport,
        spans: tuple[Span, ...],
        positions: torch.Tensor,
        documents: torch.Tensor,
        groups: tuple[BoundGroup, ...],
        node_size: int | None = None,
        kept: dict[Hashable, object] | None = None,
    ) -> None:
        """Keep what `bind` has found; `kept`: what was built from it already, shared with another view of it."""
        self.work, self.transport, self.spans = work, transport, spans
        self.positions, self.documents, self.groups = positions, documents, groups
        self.node_size = node_size
        self._kept: dict[Hashable, object] = {} if kept is None else kept

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
    work: Work,
    transport: Transport,
    *,
    device: torch.device | str = "cpu",
    node_size: int | None = None,
) -> Context:
    """Work out what one stage's share of a round means for the rank of `transport`. Nothing is communicated.

    Args:
        work: the same on all ranks.
        transport: this rank's.
        device: where the local tensors live.
        node_size: ranks per node. A group whose traffic is routed needs it; others only work better with it.
    """
    _check_ranks(work, transport)
    _check_routes(work, transport, node_size)
    _check_layouts(work)
    _check_documents(work)
    rank, device = transport.rank, torch.device(device)
    own = [group for group in work.groups if rank in group.ranks]
    blocks = [_block_layout(group, rank) for group in own]
    # A document is in one group, so sorting by document is all it takes to join the spans of the groups.
    held = sorted((span, number) for number, layout in enumerate(blocks) for span in layout.spans(rank))
    spans = tuple(span for span, _ in held)
    documents, starts, stops = _columns(spans)
    lengths = stops - starts
    firsts, owner = np.cumsum(lengths) - lengths, np.array([number for _, number in held], dtype=np.int64)
    groups = []
    for number, (group, layout) in enumerate(zip(own, blocks, strict=True)):
        rows = rows_of(firsts[owner == number], lengths[owner == number])
        groups.append(_bind_group(group, rank, layout, rows, device))
    return Context(
        work,
        transport,
        spans,
        positions=on_device(expand(starts, lengths), device),
        documents=on_device(np.repeat(documents, lengths), device),
        groups=tuple(groups),
        node_size=node_size,
    )


def expand(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the runs `start .. start + length - 1` one after the other, int64[sum of lengths]."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def rows_of(starts: np.ndarray, lengths: np.ndarray) -> slice | np.ndarray:
    """Return runs of rows as a slice when they follow each other, else as an index."""
    if not len(starts):
        return slice(0, 0)
    ends = starts + lengths
    if np.array_equal(starts[1:], ends[:-1]):
        return slice(int(starts[0]), int(ends[-1]))
    return expand(starts, lengths)


def _block_layout(group: Group, rank: int) -> Layout:
    """Who in the block of `rank` holds what: a ring index is a group of its own, of the chunks it was dealt."""
    index = group.ranks.index(rank) // group.ulysses
    return Group(group.blocks()[index], group.ulysses, 1, tuple(group.ring_spans(index))).token_layout()


def _bind_group(group: Group, rank: int, layout: Layout, rows: slice | np.ndarray, device: torch.device) -> BoundGroup:
    ring_index, ulysses_index = divmod(group.ranks.index(rank), group.ulysses)
    block = group.blocks()[ring_index]
    spans = tuple(sorted(group.ring_spans(ring_index)))
    held = [layout.spans(peer) for peer in block]
    order, places = _sorting([span for share in held for span in share], spans, device)
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
        places=places,
    )


def _sorting(
    pieces: Sequence[Span], spans: Sequence[Span], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `order` and `places` of tokens that lie as `pieces` say and shall lie as the sorted `spans` say.

    Pieces are parts of the spans, or of two that touch.
    """
    document, start, stop = _columns(spans)
    first = np.cumsum(stop - start) - (stop - start)
    wanted, begin, end = _columns(pieces)
    width = 1 + int(stop.max(initial=0))
    at = np.searchsorted(document * width + start, wanted * width + begin, side="right") - 1
    rows, lengths = first[at] + begin - start[at], end - begin
    if np.array_equal(rows, np.cumsum(lengths) - lengths):
        return None, None
    places = on_device(expand(rows, lengths), device)
    return inverse(places), places


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes `order`, int64[n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _columns(spans: Sequence[Span]) -> np.ndarray:
    """Documents, starts and stops, int64[3, n]."""
    return np.array(spans, dtype=np.int64).reshape(-1, 3).T


def _check_ranks(work: Work, transport: Transport) -> None:
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


def _check_routes(work: Work, transport: Transport, node_size: int | None) -> None:
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


def _check_layouts(work: Work) -> None:
    for name, layout in (("attention", work.attention), ("linear", work.linear)):
        if layout is None:
            continue
        derived = Layout.union(group.token_layout() for group in work.groups)
        if layout != derived:
            raise SeqloomError(
                f"the {name} layout of the work, {layout}, is not the one that its groups give, {derived}; "
                f"moving tokens between layouts is not supported yet: leave the {name} layout out"
            )


def _check_documents(work: Work) -> None:
    seen: set[int] = set()
    for document, _, _ in work.spans():
        if document in seen:
            raise SeqloomError(
                f"document {document} is twice in one round's work; a document, or a piece of one, belongs to one "
                "group of a round: give the other piece to another round"
            )
        seen.add(document)
