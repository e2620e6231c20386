"""A rank's rows of a round: ids and labels of its spans, and of nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from seqloom.data.sampler import Batch
from seqloom.data.source import Source
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    import torch

    from seqloom.comm import Context


def rank_rows(source: Source, context: Context, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Read what a rank holds in a round.

    Args:
        source: where the documents are.
        context: of this rank; document k of it is `batch.documents[k]` of the source.
        batch: the step's.

    Returns:
        ids and labels, int64[tokens] each, on the context's device, in the order of the local buffer.
    """
    from seqloom.comm.upload import on_device  # torch: preparing and sampling data do without it

    ids, labels = (np.empty(context.tokens, dtype=np.int64) for _ in range(2))
    row = 0
    for span in context.spans:
        _check(source, batch, span.document, span.stop)
        document, end = int(batch.documents[span.document]), row + span.tokens
        ids[row:end] = source.tokens(document, span.start, span.stop)
        labels[row:end] = source.labels(document, span.start, span.stop)
        row = end
    return on_device(ids, context.device), on_device(labels, context.device)


def _check(source: Source, batch: Batch, number: int, stop: int) -> None:
    """Refuse a plan made for another batch, and a batch drawn from another source."""
    if number >= len(batch) or stop > batch.lengths[number]:
        has = (
            f"document {number} has {batch.lengths[number]} tokens"
            if number < len(batch)
            else f"{len(batch)} documents"
        )
        raise SeqloomError(
            f"the plan reads document {number} up to token {stop}, but in this batch {has}; "
            "bind the plan that was made for this batch"
        )
    document = int(batch.documents[number])
    if document >= len(source.lengths) or source.lengths[document] != batch.lengths[number]:
        raise SeqloomError(
            f"document {document} of the batch has {batch.lengths[number]} tokens, and not so in the source; "
            "read from the source that the sampler was made for"
        )
