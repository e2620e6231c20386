"""Packing documents into bins of equal room: the classic heuristics, one implementation each.

next_fit               in order of arrival; a new bin where the next document does not fit
first_fit              in the order given; the first bin with room
best_fit_decreasing    longest first; the fullest bin with room
least_loaded           in the order given; the bin with the least work (longest processing time first, LPT)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from heapq import heapify, heappush, heapreplace

import numpy as np

from seqloom.planners.compiled import kernels


def next_fit(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Put documents, in order of arrival, into the last bin, or into a new one where ``room`` is not enough."""
    bins: list[list[int]] = []
    left = 0
    for document, size in enumerate(sizes.tolist()):
        if size > left:
            bins.append([])
            left = room
        bins[-1].append(document)
        left -= size
    return bins


def first_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """int64[n]: the bin of every document, each in the first bin with room for it; bins are numbered from 0."""
    bins = np.empty(len(sizes), dtype=np.int64)
    kernels().first_fit(sizes, room, bins)
    return bins


def best_fit_decreasing(sizes: np.ndarray, room: int) -> list[list[int]]:
    """Put documents, longest first, into the fullest bin with room for them; no document is larger than a bin."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for document in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[document])
        place = bisect_left(free, (size, -1))
        if place < len(free):
            left, number = free.pop(place)
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(document)
        insort(free, (left - size, number))
    return bins


def least_loaded(
    order: Iterable[int],
    sizes: Sequence[int],
    work: Sequence[int],
    bins: int,
    room: int,
    *,
    overflow: bool = False,
) -> list[list[int]] | None:
    """Put documents, in this order, into the bin with the least work among those with room; the first of equals.

    Args:
        order: documents, usually by falling work.
        sizes: of every document.
        work: of every document.
        bins: how many there are.
        room: of a bin.
        overflow: whether a document that finds no room goes to the bin with most room left.

    Returns:
        the documents of every bin; None if one found no room.
    """
    left = [room] * bins
    loads = [(0, number) for number in range(bins)]
    members: list[list[int]] = [[] for _ in range(bins)]
    for document in order:
        size, chosen = sizes[document], loads[0]
        if left[chosen[1]] >= size:
            heapreplace(loads, (chosen[0] + work[document], chosen[1]))
        else:
            fitting = [load for load in loads if left[load[1]] >= size]
            if not fitting and not overflow:
                return None
            chosen = min(fitting) if fitting else max(loads, key=lambda load: left[load[1]])
            loads.remove(chosen)
            heapify(loads)
            heappush(loads, (chosen[0] + work[document], chosen[1]))
        left[chosen[1]] -= size
        members[chosen[1]].append(document)
    return members
