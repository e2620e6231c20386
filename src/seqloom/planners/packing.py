"""Packing documents into bins of equal capacity: the classic heuristics, one implementation each.

next_fit               in order of arrival; a new bin where the next document does not fit
first_fit              in the order given; the first bin with room
best_fit_decreasing    longest first; the fullest bin with room
least_loaded           in the order given; the bin with the least work (longest processing time first, LPT)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from seqloom.planners.compiled import kernels


def next_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Put documents, in order of arrival, into the last bin, or into a new one where they do not fit."""
    bins: list[list[int]] = []
    left = 0
    for document, size in enumerate(sizes.tolist()):
        if size > left:
            bins.append([])
            left = capacity
        bins[-1].append(document)
        left -= size
    return bins


def first_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """int64[n]: the bin of every document, each in the first bin that it fits into; bins are numbered from 0."""
    bins = np.empty(len(sizes), dtype=np.int64)
    kernels().first_fit(sizes, capacity, bins)
    return bins


def best_fit_decreasing(sizes: np.ndarray, capacity: int | Sequence[int]) -> list[list[int]]:
    """Put documents, longest first, into the fullest bin that they fit into; no document is larger than a bin.

    Of several capacities, bins have one after another.
    """
    capacities = capacity if isinstance(capacity, Sequence) else [capacity]
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, bin), ascending
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        place = bisect_left(free, (size, -1))
        if place < len(free):
            left, number = free.pop(place)
        else:
            left, number = capacities[len(bins) % len(capacities)], len(bins)
            bins.append([])
        bins[number].append(document)
        insort(free, (left - size, number))
    return bins


def least_loaded(
    sizes: np.ndarray, work: np.ndarray, bins: int, capacity: int, *, overflow: bool = False
) -> np.ndarray | None:
    """int64[n]: the bin of every document, in this order that with the least work of those it fits into.

    A document that fits nowhere goes, with ``overflow``, to the bin with the most capacity left; else returns None.
    """
    chosen = np.empty(len(sizes), dtype=np.int64)
    return None if kernels().least_loaded(sizes, work, capacity, bins, overflow, chosen) < 0 else chosen
