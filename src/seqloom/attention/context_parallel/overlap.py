"""How a rank computes its groups: what a pass over one group is, and the pieces of local work that fill its waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from seqloom.attention.context_parallel.ulysses import Exchange
from seqloom.attention.kernels.interface import Gradients, Kernel, Prepared, Saved
from seqloom.attention.masks import Segments
from seqloom.attention.tiles import Heads, PreparedTile, prepare
from seqloom.dist.rows import RowIndex
from seqloom.plan import Group

Tensors = tuple[torch.Tensor, ...]
Meanwhile = Callable[[int], None]
"""Called with the number of an exchange while that is under way: what there is to do then."""


class Waits(NamedTuple):
    """Bytes that arrive in every exchange of a forward and of a backward, in order."""

    ahead: tuple[int, ...]
    back: tuple[int, ...]


class ContextParallelAttention(ABC):
    """Attention whose keys come from other ranks: a kernel's `Prepared` that waits for messages and can be filled."""

    __slots__ = ()

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meanwhile: Meanwhile
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse), see `Prepared.forward`."""

    @abstractmethod
    def backward(self, dout: torch.Tensor, saved: Saved, meanwhile: Meanwhile) -> Gradients:
        """Return (dq, dk, dv), see `Prepared.backward`."""

    @abstractmethod
    def waits(self, row: int, wide_row: int) -> Waits:
        """Return what arrives, given the bytes of a row of keys and values and of a row of their gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Documents of one rank, cut into runs that are computed at different times: one cut for each pass."""

    ahead: tuple[PreparedTile, ...]
    back: tuple[PreparedTile, ...]

    def forward(self, piece: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        """Return (out, lse) of one run."""
        tile = self.ahead[piece]
        return tile.prepared.forward(q[tile.queries], k[tile.keys], v[tile.keys])

    def backward(self, piece: int, dout: torch.Tensor, saved: Saved) -> Tensors:
        """Return (dq, dk, dv) of one run."""
        tile = self.back[piece]
        rows = tile.queries
        part = Saved(saved.q[rows], saved.k[rows], saved.v[rows], saved.out[rows], saved.lse[:, rows])
        return tile.prepared.backward(dout[rows], part)


class OverlapTask(NamedTuple):
    """A piece of local work: the number of its call among the rank's, and of the piece."""

    call: int
    piece: int


class OverlapTasks(NamedTuple):
    """What is computed during exchanges of a forward and of a backward; those during which nothing is are left out."""

    ahead: dict[int, tuple[OverlapTask, ...]]
    back: dict[int, tuple[OverlapTask, ...]]


def plainly(compute: Callable[[], Tensors]) -> Tensors:
    """Compute what is asked for."""
    return compute()


@dataclass(frozen=True, slots=True, eq=False)
class GroupCall:
    """How a rank computes the attention of one group.

    Attributes:
        rows: of the local buffer.
        exchange: heads for tokens; None without Ulysses.
        inner: a kernel's prepared segments, or the same in pieces; or what shares keys with other ranks.
        fillers: of the waits of `inner`.
        answer: returns (out, lse) of a forward by computing them, or from what was kept of an earlier one.
        alone: whether it is a kernel's call and nothing else: no messages, no pieces.
    """

    rows: RowIndex
    exchange: Exchange | None
    inner: Prepared | Pieces | ContextParallelAttention
    fillers: OverlapTasks = OverlapTasks({}, {})  # noqa: RUF009 - never changed
    answer: Callable[[Callable[[], Tensors]], Tensors] = plainly
    alone: bool = field(init=False)

    def __post_init__(self) -> None:
        """Note what every layer asks."""
        object.__setattr__(
            self, "alone", self.exchange is None and not isinstance(self.inner, Pieces | ContextParallelAttention)
        )


class OverlapQueue:
    """The local work of one pass. A piece is computed in the wait it was given to, or else when it is asked for."""

    __slots__ = ("_compute", "_done")

    def __init__(self, compute: Callable[[OverlapTask], Tensors]) -> None:
        """Start with nothing done."""
        self._compute = compute
        self._done: dict[OverlapTask, Tensors] = {}

    def run(self, fillers: Iterable[OverlapTask]) -> None:
        """Compute these now."""
        for each in fillers:
            self._done[each] = self._compute(each)

    def results(self, call: int, pieces: int) -> list[Tensors]:
        """Return what all pieces of a call gave, in their order."""
        every = [OverlapTask(call, piece) for piece in range(pieces)]
        self.run(each for each in every if each not in self._done)
        return [self._done.pop(each) for each in every]


# ---- merged: attention.fillers
# Fillers: documents that lie on one rank whole are computed while its other groups wait for messages.
#
# A rank in a ring, with documents of its own (L), works like this; `=` is a message under way, `|` the end of a
# wait:
#
#     messages  ====0=====|====1=====|====2=====|
#     ring      tile 0    |tile 1    |tile 2    |tile 3
#     local           L L |      L L |      L L |
#
# Local work sends nothing, so where it is done changes neither the order of messages nor what a document gives. It
# is
# cut at documents, in proportion to the bytes that arrive in each exchange: in those of groups that join nodes
# where
# there are any, else in those of all rings.


LEAST = 2**16
"""Query rows x heads with which a call still fills a GPU. A CPU takes one document after the other anyway."""


class Draft(NamedTuple):
    """A call before it is filled.

    Attributes:
        group: that it belongs to.
        rows, exchange, inner: see `GroupCall`; `inner` is None for documents of this rank alone, which are cut first.
        waits: for messages; None where there are none that could be filled.
    """

    group: Group
    rows: RowIndex
    exchange: Exchange | None = None
    inner: Prepared | ContextParallelAttention | None = None
    waits: Waits | None = None


class _Wait(NamedTuple):
    """An exchange of a call, and the bytes that arrive in it."""

    call: int
    exchange: int
    size: int


class _Document(NamedTuple):
    """Rows of a local call."""

    call: int
    start: int
    stop: int


def filled(
    drafts: Sequence[Draft], heads: Heads, kernel: Kernel, mask: dict[str, Any], node_size: int | None
) -> tuple[GroupCall, ...]:
    """Return the calls of a rank, the local ones cut into pieces that fill the waits of the others.

    Args:
        drafts: in the order of the work.
        heads: of a local group: all.
        kernel: what computes documents.
        mask: causal and window.
        node_size: ranks per node; None: not known.
    """
    documents = _local_documents(drafts)
    hosts = [n for n, draft in enumerate(drafts) if draft.waits is not None]
    between = [
        n for n in hosts if node_size is not None and len({r // node_size for r in drafts[n].group.participants}) > 1
    ]
    least = LEAST if heads.shape.device.type == "cuda" else 0
    places, tiles = [], []  # which fillers in which wait, and the pieces of every local call
    for way in range(2):  # forward and backward
        sizes = {n: waits[way] for n in between or hosts if (waits := drafts[n].waits) is not None}
        places_to_fill = [_Wait(n, *wait) for n, own in sizes.items() for wait in enumerate(own)]
        chosen = _share_out(documents, places_to_fill, heads.shape.heads, least, mask)
        cut, at = _cut(documents, chosen, heads, kernel, mask)
        tiles.append(cut)
        places.append(at)
        if not hosts:  # nothing to wait for: one call, the same in both passes
            break
    calls = []
    for n, (_, rows, exchange, inner, _) in enumerate(drafts):
        if inner is None:
            inner = Pieces(*(tuple(cut[n]) for cut in tiles)) if hosts else tiles[0][n][0].prepared
        own = ({wait.exchange: tuple(found) for wait, found in at.items() if wait.call == n} for at in places)
        calls.append(GroupCall(rows, exchange, inner, OverlapTasks(*own) if n in hosts else OverlapTasks({}, {})))
    return tuple(calls)


def _local_documents(drafts: Sequence[Draft]) -> list[_Document]:
    """Return the documents of groups of one rank, call by call, in the order of their rows."""
    found = []
    for n, draft in enumerate(drafts):
        if draft.inner is None:
            ends = np.cumsum([0, *(span.tokens for span in sorted(draft.group.spans))]).tolist()
            found += [_Document(n, start, stop) for start, stop in pairwise(ends) if stop > start]
    return found


def _share_out(
    documents: Sequence[_Document], waits: Sequence[_Wait], heads: int, least: int, mask: dict[str, Any]
) -> list[_Wait | None]:
    """Return the wait in which each document is computed; None where there is no wait.

    Waits are filled in their order, in proportion to their bytes; short ones are left out while they would get less
    than `least` query rows x heads.
    """
    lengths = np.array([document.stop - document.start for document in documents], dtype=np.int64)
    used = sorted((wait for wait in waits if wait.size), key=lambda wait: -wait.size)
    while len(used) > 1 and used[-1].size * int(lengths.sum()) * heads < least * sum(wait.size for wait in used):
        used.pop()
    if not used or not documents:
        return [None] * len(documents)
    used.sort(key=waits.index)
    area = Segments.packed(lengths.tolist(), **mask).area().astype(np.float64)
    edges = np.cumsum([wait.size for wait in used]) / sum(wait.size for wait in used)
    middle = (np.cumsum(area) - area / 2) / area.sum()
    return [used[at] for at in np.searchsorted(edges[:-1], middle).tolist()]


def _cut(
    documents: Sequence[_Document], chosen: Sequence[_Wait | None], heads: Heads, kernel: Kernel, mask: dict[str, Any]
) -> tuple[dict[int, list[PreparedTile]], dict[_Wait, list[OverlapTask]]]:
    """Prepare every run of documents of one call and wait; return the runs by call, and those of every wait."""
    tiles: dict[int, list[PreparedTile]] = {}
    places: dict[_Wait, list[OverlapTask]] = {}
    pairs = zip(documents, chosen, strict=True)
    for (call, wait), run in groupby(pairs, key=lambda pair: (pair[0].call, pair[1])):
        own = [document for document, _ in run]
        rows = slice(own[0].start, own[-1].stop)
        segments = Segments.packed([each.stop - each.start for each in own], **mask)
        made = tiles.setdefault(call, [])
        if wait is not None:
            places.setdefault(wait, []).append(OverlapTask(call, len(made)))
        made.append(PreparedTile(prepare(kernel, segments, heads), rows, rows))
    return tiles, places
