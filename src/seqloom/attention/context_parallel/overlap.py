"""Overlap: documents that lie on one rank are computed while messages of its other groups are under way.

A rank in a ring, with documents of its own (L), works like this; `=` is an exchange under way, `|` its end:

    messages  ====0=====|====1=====|====2=====|
    ring      tile 0    |tile 1    |tile 2    |tile 3
    local           L L |      L L |      L L |

Local work sends nothing, so where it is done changes neither the order of messages nor the result of a document.
`schedule_overlap` cuts it at documents, in proportion to the bytes that arrive in each exchange: in the exchanges of
groups that span nodes where there are any, else in those of all rings. `OverlapQueue` runs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch

from seqloom.attention.context_parallel.ulysses import UlyssesExchange
from seqloom.attention.kernels.interface import Gradients, Kernel, PreparedAttention, Saved
from seqloom.attention.latent import HeadExpansion
from seqloom.attention.masks import MaskRule
from seqloom.attention.tiles import LocalHeads, PreparedTile, prepare_documents
from seqloom.dist.rows import RowIndex
from seqloom.layout import Span
from seqloom.plan import Group

MIN_ROWS_X_HEADS = 2**16
"""Query rows x heads with which a kernel call still fills a GPU. A CPU takes one document after the other anyway."""

Tensors = tuple[torch.Tensor, ...]
Overlap = Callable[[int], None]
"""Called with the number of an exchange while that is under way; computes the local work scheduled there."""


ExchangeBytes = tuple[tuple[int, ...], tuple[int, ...]]
"""Bytes that arrive in every exchange of a forward and of a backward, in order."""


class ContextParallelAttention(ABC):
    """Attention whose keys come from other ranks: a `PreparedAttention` that calls `overlap` during its exchanges."""

    __slots__ = ()

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        overlap: Overlap,
        expansion: HeadExpansion | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse) over the keys of all ranks. `out` has the dtype of q.

        With an expansion `k` has latents, [rows, 1, width], and `v` no heads: these travel (`attention.latent`).
        """

    @abstractmethod
    def backward(
        self, dout: torch.Tensor, saved: Saved, overlap: Overlap, expansion: HeadExpansion | None = None
    ) -> Gradients:
        """Return (dq, dk, dv) of this rank's rows: dq in the dtype of q, dk and dv in `sum_dtype`."""

    @abstractmethod
    def exchange_bytes(self, kv_row: int, gradient_row: int) -> ExchangeBytes:
        """Return what arrives, given the bytes of a row of keys and values and of a row of their gradients."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalRuns:
    """Documents of one rank, cut into runs that are computed at different times: one cut for each pass."""

    forward_runs: tuple[PreparedTile, ...]
    backward_runs: tuple[PreparedTile, ...]


class OverlapTask(NamedTuple):
    """A run of local documents: the number of its group among the rank's, and of the run."""

    group: int
    run: int


class OverlapSchedule(NamedTuple):
    """Tasks computed during exchanges of a forward and of a backward, by the number of the exchange."""

    forward: dict[int, tuple[OverlapTask, ...]]
    backward: dict[int, tuple[OverlapTask, ...]]


class OverlapQueue:
    """Local work of one pass. A task runs in the exchange it was scheduled in, or else when its result is needed."""

    __slots__ = ("_compute", "_done")

    def __init__(self, compute: Callable[[OverlapTask], Tensors]) -> None:
        self._compute = compute
        self._done: dict[OverlapTask, Tensors] = {}

    def run(self, tasks: Iterable[OverlapTask]) -> None:
        """Compute tasks now."""
        for task in tasks:
            self._done[task] = self._compute(task)

    def results(self, group: int, runs: int) -> list[Tensors]:
        """Return the results of all runs of a group, in their order."""
        tasks = [OverlapTask(group, run) for run in range(runs)]
        self.run(task for task in tasks if task not in self._done)
        return [self._done.pop(task) for task in tasks]


@dataclass(frozen=True, slots=True, eq=False)
class GroupAttention:
    """How a rank computes the attention of one group.

    Attributes:
        rows: of the local buffer.
        ulysses: exchanges heads for tokens; None without Ulysses.
        inner: a kernel's prepared segments, the same in runs, or attention that exchanges keys with other ranks.
        schedule: local work during the exchanges of `inner`.
        latent: keys and values are made from latents where they are used, and latents travel.
        kernel_only: it is one kernel call: no messages, no runs.
    """

    rows: RowIndex
    ulysses: UlyssesExchange | None
    inner: PreparedAttention | LocalRuns | ContextParallelAttention
    schedule: OverlapSchedule
    latent: bool = False
    kernel_only: bool = field(init=False)

    def __post_init__(self) -> None:
        inner_only = not isinstance(self.inner, LocalRuns | ContextParallelAttention)
        object.__setattr__(self, "kernel_only", self.ulysses is None and inner_only)


# -- scheduling -------------------------------------------------------------------------------------------------------


class UnscheduledGroup(NamedTuple):
    """A group of a rank before its local documents are scheduled.

    Attributes:
        group: of the plan.
        rows, ulysses, inner, latent: see `GroupAttention`; `inner` is None for documents of this rank alone.
        exchange_bytes: of `inner`; None where it has no exchanges.
    """

    group: Group
    rows: RowIndex
    ulysses: UlyssesExchange | None = None
    inner: PreparedAttention | ContextParallelAttention | None = None
    exchange_bytes: ExchangeBytes | None = None
    latent: bool = False


class _Exchange(NamedTuple):
    """An exchange of a group, and the bytes that arrive in it."""

    group: int
    number: int
    size: int


class _Document(NamedTuple):
    """Rows of a document in a local group."""

    group: int
    start: int
    stop: int
    span: Span


def schedule_overlap(
    groups: Sequence[UnscheduledGroup], heads: LocalHeads, kernel: Kernel, mask: MaskRule, node_size: int | None
) -> tuple[GroupAttention, ...]:
    """Return the groups of a rank, the local ones cut into runs that overlap the exchanges of the others.

    `heads` are those of a local group: all.
    """
    documents = _local_documents(groups)
    waiting = {n: group.exchange_bytes for n, group in enumerate(groups) if group.exchange_bytes is not None}
    inter_node = [
        n for n in waiting if node_size and len({rank // node_size for rank in groups[n].group.participants}) > 1
    ]
    min_work = MIN_ROWS_X_HEADS if heads.shape.device.type == "cuda" else 0
    passes = []
    for is_backward in (0, 1) if waiting else (0,):  # nothing to wait for: one call, the same in both passes
        sizes = {n: waiting[n][is_backward] for n in inter_node or waiting}
        exchanges = [_Exchange(n, *numbered) for n, group in sizes.items() for numbered in enumerate(group)]
        chosen = _assign_exchanges(documents, exchanges, heads.shape.heads, min_work, mask)
        passes.append(_prepare_runs(documents, chosen, heads, kernel, mask))
    (forward_runs, forward_tasks), (backward_runs, backward_tasks) = passes[0], passes[-1]
    found = []
    for n, (_, rows, ulysses, inner, _, latent) in enumerate(groups):
        if inner is None:
            runs = LocalRuns(tuple(forward_runs[n]), tuple(backward_runs[n]))
            inner = runs if waiting else runs.forward_runs[0].prepared
        schedule = OverlapSchedule(forward_tasks.get(n, {}), backward_tasks.get(n, {}))
        found.append(GroupAttention(rows, ulysses, inner, schedule, latent))
    return tuple(found)


def _local_documents(groups: Sequence[UnscheduledGroup]) -> list[_Document]:
    """Return the documents of groups of one rank, group by group, in the order of their rows."""
    found = []
    for n, group in enumerate(groups):
        if group.inner is None:
            spans = sorted(group.group.spans)
            edges = pairwise(np.cumsum([0, *(span.tokens for span in spans)]).tolist())
            found += [_Document(n, *own, span) for own, span in zip(edges, spans, strict=True) if span.tokens]
    return found


def _assign_exchanges(
    documents: Sequence[_Document], exchanges: Sequence[_Exchange], heads: int, min_work: int, mask: MaskRule
) -> list[_Exchange | None]:
    """Return the exchange during which each document is computed; None where there is no exchange.

    Exchanges are filled in their order, in proportion to their bytes; small ones are left out while they would get less
    than `min_work` query rows x heads.
    """
    lengths = np.array([document.stop - document.start for document in documents], dtype=np.int64)
    used = sorted((exchange for exchange in exchanges if exchange.size), key=lambda exchange: -exchange.size)
    while len(used) > 1 and used[-1].size * int(lengths.sum()) * heads < min_work * sum(one.size for one in used):
        used.pop()
    if not used or not documents:
        return [None] * len(documents)
    used.sort(key=exchanges.index)
    segments = mask.packed(lengths.tolist())
    first = np.searchsorted(segments.q_start, np.cumsum(lengths) - lengths)  # a document is one segment, or several
    area = np.add.reduceat(segments.area(), first).astype(np.float64)
    edges = np.cumsum([one.size for one in used]) / sum(one.size for one in used)
    middle = (np.cumsum(area) - area / 2) / area.sum()
    return [used[at] for at in np.searchsorted(edges[:-1], middle).tolist()]


def _prepare_runs(
    documents: Sequence[_Document],
    chosen: Sequence[_Exchange | None],
    heads: LocalHeads,
    kernel: Kernel,
    mask: MaskRule,
) -> tuple[dict[int, list[PreparedTile]], dict[int, dict[int, tuple[OverlapTask, ...]]]]:
    """Prepare every run of documents of one group and exchange; return runs by group, tasks by group and exchange."""
    runs: dict[int, list[PreparedTile]] = {}
    tasks: dict[int, dict[int, tuple[OverlapTask, ...]]] = {}
    pairs = zip(documents, chosen, strict=True)
    for (group, exchange), run in groupby(pairs, key=lambda pair: (pair[0].group, pair[1])):
        own = [document for document, _ in run]
        rows = slice(own[0].start, own[-1].stop)
        group_runs = runs.setdefault(group, [])
        if exchange is not None:
            during = tasks.setdefault(exchange.group, {})
            during[exchange.number] = (*during.get(exchange.number, ()), OverlapTask(group, len(group_runs)))
        prepared = prepare_documents(kernel, [document.span for document in own], mask, heads)
        group_runs.append(PreparedTile(prepared, rows, rows))
    return runs, tasks
