"""Answers to begin with: groups of one degree, documents longest first on the least loaded group."""

from __future__ import annotations

import heapq

import numpy as np

from seqloom.planners.flexsp.milp import Programme


def best_start(programme: Programme) -> tuple[int, np.ndarray] | None:
    """The fastest homogeneous answer: ns and int64[Q, P] documents; None if none obeys every rule."""
    best: tuple[int, np.ndarray] | None = None
    for degree in np.unique(programme.degree).tolist():
        placed = homogeneous(programme, degree)
        value = None if placed is None else programme.value_ns(placed)
        if placed is not None and value is not None and (best is None or value < best[0]):
            best = (value, placed)
    return best


def homogeneous(programme: Programme, degree: int) -> np.ndarray | None:
    """Place documents, longest first, on the group with the fewest tokens; None if they do not fit."""
    groups = np.flatnonzero(programme.degree == degree).tolist()
    loads = [(0, group) for group in groups]
    placed = np.zeros((len(programme.bound), len(programme.degree)), np.int64)
    for q in np.argsort(-programme.bound, kind="stable").tolist():
        size = int(programme.bound[q])
        for _ in range(int(programme.count[q])):
            tokens, group = loads[0]
            if tokens + size > degree * programme.capacity:
                return None
            heapq.heapreplace(loads, (tokens + size, group))
            placed[q, group] += 1
    return placed
