"""Packing documents into bins of equal capacity: the classic heuristics, one implementation each.

next_fit               in order of arrival; a new bin where the next document does not fit
first_fit              in the order given; the first bin with room
best_fit_decreasing    longest first; the fullest bin with room
least_loaded           in the order given; the bin with the least work (longest processing time first, LPT)
largest_differencing   no capacity; joins partial solutions that differ most (Karmarkar and Karp)
"""

from __future__ import annotations

import heapq
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


def largest_differencing(weights: Sequence[int], parts: int, *, equal_size: bool = False) -> list[list[int]]:
    """Return parts by the largest differencing method of Karmarkar and Karp, heaviest first.

    The two partial solutions whose parts differ most are joined, the heaviest of one with the lightest of the other,
    until one is left. For parts of equal size the first solutions have a sequence in every part.
    """
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    size = parts if equal_size else 1
    heap = []
    for number, first in enumerate(range(0, len(order), size)):
        members = order[first : first + size]
        sums = sorted(((weights[i], [i]) for i in members), reverse=True)
        solution = sums + [(0, [])] * (parts - len(sums))
        heap.append((solution[-1][0] - solution[0][0], number, solution))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        joined = [(a + b, first + second) for (a, first), (b, second) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], number, joined))
        number += 1
    return [members for _, members in heap[0][2]]
