"""The token rows that a rank reads: ids and labels of its spans, round by round, and ahead of the step that needs them.

`rank_rows` reads one round. `RowReader` reads the rounds of a step in a background thread, each once for all stages
that hold the same tokens of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from seqloom.data.sampler import Batch
from seqloom.data.source import Source
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import ActionKind

if TYPE_CHECKING:  # preparing and sampling data do without torch
    import torch

    from seqloom.dist import Context
    from seqloom.engine import RankPlan

Rows = tuple["torch.Tensor", "torch.Tensor"]
"""Ids and labels, int64[tokens] each."""
ROUNDS_AHEAD = 2
"""Rounds that a reader reads before the engine asks for them."""


def rank_rows(source: Source, context: Context, batch: Batch) -> Rows:
    """Read the ids and labels of the spans that a rank holds in a round, and nothing else.

    Document k of the context is `batch.documents[k]` of the source. Both results are int64[tokens] on the context's
    device, in the order of the local buffer.
    """
    return _to_device(_read(source, batch, context.spans, context.device), context.device)


class RowReader(AbstractContextManager):
    """Rows of one step, read in a background thread in the order in which the engine asks for them.

        with RowReader(rank_plan, source, batch) as rows:
            result = run_step(rank_plan, parameters, rows, batch.valid_tokens)

    Stages that hold the same tokens of a round on this rank, such as those with embedding and head, get the same
    tensors. On a GPU the thread reads into pinned memory, and the copy to the device is queued in the caller's stream.
    An error of the source is raised where the engine asks for the round. The thread ends with the block.
    """

    def __init__(self, rank_plan: RankPlan, source: Source, batch: Batch) -> None:
        """Start to read the first rounds of a plan for this batch."""
        self._source, self._batch, self._device = source, batch, rank_plan.device
        spans = [context.spans for context in _contexts_in_order(rank_plan)]
        self._uses = Counter(spans)
        self._unread = iter(self._uses)
        self._reads: dict[tuple[Span, ...], Future[Rows]] = {}
        self._rows: dict[tuple[Span, ...], Rows] = {}  # that another stage will ask for
        self._thread = ThreadPoolExecutor(1, "seqloom-rows", _take_gpu, (_gpu_of(self._device),))
        for _ in range(ROUNDS_AHEAD):
            self._read_next()

    def __call__(self, context: Context) -> Rows:
        """Return ids and labels of a round, int64[context.tokens] each, on the plan's device."""
        spans = context.spans
        if not self._uses[spans]:
            raise SeqloomError(
                f"rank {context.rank} has {context.tokens} tokens in a round that is not in the plan of this reader, "
                "or that a step has read already; make a RowReader of its own for every step"
            )
        while spans not in self._rows and spans not in self._reads:
            self._read_next()
        if spans in self._reads:
            read = self._reads.pop(spans)
            self._read_next()
            self._rows[spans] = _to_device(read.result(), self._device)
        self._uses[spans] -= 1
        return self._rows[spans] if self._uses[spans] else self._rows.pop(spans)

    def __exit__(self, *error: object) -> None:
        """End the thread; rounds that nobody asked for are not read."""
        self._thread.shutdown(cancel_futures=True)

    def _read_next(self) -> None:
        """Have the next round read, if there is one."""
        for spans in self._unread:
            self._reads[spans] = self._thread.submit(_read, self._source, self._batch, spans, self._device)
            return


def _contexts_in_order(rank_plan: RankPlan) -> list[Context]:
    """Return the contexts of the forwards that need ids or labels, in the order in which the rank runs them."""
    microbatches = [rank_plan.microbatch(each) for each in rank_plan.actions if each.kind == ActionKind.F]
    needed = [each for each in microbatches if each.layers.has_embedding or each.layers.has_head]
    return [each.context for each in needed if each.context is not None]


def _gpu_of(device: torch.device) -> int | None:
    """Return the number of a GPU, that of the current thread where the device has none; None on a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.current_device() if device.index is None else device.index


def _take_gpu(gpu: int | None) -> None:
    """Make a GPU that of this thread: a new thread has GPU 0, where pinned memory would create a context."""
    if gpu is not None:
        import torch

        torch.cuda.set_device(gpu)


def _read(source: Source, batch: Batch, spans: Sequence[Span], device: torch.device) -> Rows:
    """Read spans into host memory, pinned if they are for a GPU."""
    import torch

    tokens, pinned = sum(span.tokens for span in spans), device.type == "cuda"
    ids, labels = (torch.empty(tokens, dtype=torch.int64, pin_memory=pinned) for _ in range(2))
    ids_out, labels_out, row = ids.numpy(), labels.numpy(), 0
    for span in spans:
        _check_document(source, batch, span.document, span.stop)
        here = slice(row, row + span.tokens)
        ids_out[here], labels_out[here] = source.rows(int(batch.documents[span.document]), span.start, span.stop)
        row = here.stop
    return ids, labels


def _to_device(rows: Rows, device: torch.device) -> Rows:
    """Copy pinned rows to a GPU without waiting for the copy; a plain copy would wait for everything launched before.

    torch keeps pinned memory until the copies out of it are done.
    """
    ids, labels = (each.to(device, non_blocking=True) for each in rows)
    return ids, labels


def _check_document(source: Source, batch: Batch, number: int, stop: int) -> None:
    """Refuse a plan of another batch, and a batch of another source."""
    if number >= len(batch) or stop > batch.lengths[number]:
        there = f"it has {batch.lengths[number]} tokens" if number < len(batch) else f"there are {len(batch)} documents"
        raise SeqloomError(
            f"the plan reads document {number} up to token {stop}, but in this batch {there}; "
            "bind the plan that was made for this batch"
        )
    document = int(batch.documents[number])
    if document >= len(source.lengths) or source.lengths[document] != batch.lengths[number]:
        raise SeqloomError(
            f"document {document} of the batch has {batch.lengths[number]} tokens, and not so in the source; "
            "read from the source that the sampler was made for"
        )
