"""Rows of a local token buffer: index arrays, made on the host with numpy and sent to the device without a wait.

A run of rows is a slice, which costs nothing; other rows are an index tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from seqloom.layout import Layout, Move, Span

RowIndex = slice | torch.Tensor
"""A run of rows, or an index int64[rows]."""


def on_device(values: np.ndarray, device: torch.device | str) -> torch.Tensor:
    """Return the array as a tensor on a device. The copy to a GPU is queued in the stream; the host goes on.

    A plain copy would wait until everything launched before is done: a pause in every round.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def expand_runs(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the runs `start .. start + length - 1` one after the other, int64[sum of lengths]."""
    ends = np.cumsum(lengths)
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(ends[-1] if len(ends) else 0)


def slice_or_index(starts: np.ndarray, lengths: np.ndarray) -> slice | np.ndarray:
    """Return runs of rows as a slice when they follow each other, else as an index."""
    if not len(starts):
        return slice(0, 0)
    ends = starts + lengths
    if np.array_equal(starts[1:], ends[:-1]):
        return slice(int(starts[0]), int(ends[-1]))
    return expand_runs(starts, lengths)


def span_columns(spans: Sequence[Span]) -> np.ndarray:
    """Return documents, starts and stops, int64[3, n]."""
    return np.array(spans, dtype=np.int64).reshape(-1, 3).T


def first_rows(spans: np.ndarray, pieces: np.ndarray) -> np.ndarray:
    """Return the first row of every piece in a buffer whose rows are the tokens of sorted spans, int64[pieces].

    Args:
        spans: int64[3, n], sorted by document and start.
        pieces: int64[3, m]; each lies in a span, or in several that touch.
    """
    document, start, stop = spans
    first = np.cumsum(stop - start) - (stop - start)
    wanted, begin, _ = pieces
    width = 1 + int(stop.max(initial=0))
    at = np.searchsorted(document * width + start, wanted * width + begin, side="right") - 1
    return first[at] + begin - start[at]


def rows_of_move(move: Move, layout: Layout, rank: int, *, sends: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return peer, first row and length, int64[n] each, of the boxes of one rank's end of a move, peer by peer.

    Args:
        move: of token rows; both ranks of a pair find their boxes in the same order.
        layout: source or target of the move, whose rows the rank holds.
        sends: whether its end is the sender's.
    """
    own, peer = (move.sender, move.receiver) if sends else (move.receiver, move.sender)
    here = np.flatnonzero(own == rank)
    here = here[np.argsort(peer[here], kind="stable")]
    pieces = np.stack((move.item[here], move.start[here], move.stop[here]))
    return peer[here], first_rows(span_columns(layout.spans(rank)), pieces), pieces[2] - pieces[1]


def sort_order(
    pieces: Sequence[Span], spans: Sequence[Span], device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the permutation from rows in the order of `pieces` to rows in the order of the sorted `spans`.

    Args:
        pieces: each lies in a span, or in two that touch.

    Returns:
        int64[tokens] that sorts the rows, and its inverse; None and None where the rows are sorted already.
    """
    held = span_columns(pieces)
    rows, lengths = first_rows(span_columns(spans), held), held[2] - held[1]
    if np.array_equal(rows, np.cumsum(lengths) - lengths):
        return None, None
    inverse_order = on_device(expand_runs(rows, lengths), device)
    return inverse_permutation(inverse_order), inverse_order


def inverse_permutation(order: torch.Tensor) -> torch.Tensor:
    """Return the permutation that undoes `order`, int64[n]."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def take(tensor: torch.Tensor, rows: RowIndex) -> torch.Tensor:
    """Return rows of a tensor: a view of a run, a copy of others."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def put(tensor: torch.Tensor, rows: RowIndex, part: torch.Tensor) -> None:
    """Write `part` [len(rows), ...] into rows of a tensor."""
    if isinstance(rows, slice):
        tensor[rows] = part
    else:
        tensor.index_copy_(0, rows, part)


def add(tensor: torch.Tensor, rows: RowIndex, part: torch.Tensor) -> None:
    """Add `part` [len(rows), ...] to rows of a tensor; no row comes twice."""
    if isinstance(rows, slice):
        tensor[rows] += part
    else:
        tensor.index_add_(0, rows, part)


def count(rows: RowIndex) -> int:
    """Return how many rows these are."""
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)
