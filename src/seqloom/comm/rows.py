"""Rows of a local buffer, as index arrays: runs of them, where spans lie in them, and permutations undone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from seqloom.comm.upload import on_device
from seqloom.plan import Span


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


def columns(spans: Sequence[Span]) -> np.ndarray:
    """Return documents, starts and stops, int64[3, n]."""
    return np.array(spans, dtype=np.int64).reshape(-1, 3).T


def first_rows(spans: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Return the first row of every piece in a buffer whose rows are those of sorted spans, int64[pieces].

    Args:
        spans: int64[3, n], sorted by document and start.
        pieces: int64[3, m]; each is a part of a span, or of several that touch.
    """
    document, start, stop = spans
    first = np.cumsum(stop - start) - (stop - start)
    wanted, begin, _ = pieces
    width = 1 + int(stop.max(initial=0))
    at = np.searchsorted(document * width + start, wanted * width + begin, side="right") - 1
    return first[at] + begin - start[at]


def sorting(
    pieces: Sequence[Span], spans: Sequence[Span], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `order` and `places` of tokens that lie as `pieces` say and shall lie as the sorted `spans` say.

    Args:
        pieces: parts of the spans, or of two that touch.
        spans: sorted by document and start.
        device: where the indices are wanted.

    Returns:
        int64[tokens] that sorts the rows, and its inverse; None and None where they are sorted already.
    """
    held = columns(pieces)
    rows, lengths = first_rows(columns(spans), held), held[2] - held[1]
    if np.array_equal(rows, np.cumsum(lengths) - lengths):
        return None, None
    places = on_device(expand(rows, lengths), device)
    return inverse(places), places


def inverse(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes `order`, int64[n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
