"""Buckets: documents of similar length are counted as equals, at the length of the longest of them.

The bounds are chosen by dynamic programming to add as few tokens as possible:

    error[q][k] = min over j < k of error[q - 1][j] + sum over i in j .. k of (length[k] - length[i])

over distinct lengths in rising order (documents of one length always share a bucket without error).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ROWS = 512
"""Ends of buckets whose starts are compared at once: bounds the memory of the dynamic programme."""


class Buckets(NamedTuple):
    """Documents by bucket, in rising length."""

    bound: np.ndarray
    """int64[Q] tokens of the longest member."""
    members: list[np.ndarray]
    """positions of the documents in each bucket."""

    @property
    def population(self) -> np.ndarray:
        """int64[Q] documents in each bucket."""
        return np.array([len(members) for members in self.members], np.int64)

    @property
    def tokens(self) -> int:
        """Tokens of all documents at their bucket's bound."""
        return int((self.bound * self.population).sum())


def bucket(tokens: np.ndarray, least: int, capacity: int) -> Buckets:
    """Bucket documents with the least added tokens.

    Args:
        tokens: int64[n] of one micro-batch.
        least: buckets to begin with; more are made, one by one, until the bucketed tokens are at most
            half-way between the true ones and ``capacity``, so that rounding up never makes a micro-batch
            look too large.
        capacity: tokens the cluster holds in a round.
    """
    values, kind, copies = np.unique(tokens, return_inverse=True, return_counts=True)
    total = int(tokens.sum())
    weight = np.concatenate([[0], np.cumsum(copies)])
    sums = np.concatenate([[0], np.cumsum(copies * values)])
    error = values * weight[1:] - sums[1:]  # one bucket
    starts = [np.zeros(len(values), np.int64)]
    while len(starts) < len(values):
        if len(starts) >= least and 2 * (total + int(error[-1])) <= total + capacity:
            break
        error, start = _one_more(error, values, weight, sums)
        starts.append(start)
    edges = [len(values)]
    for start in reversed(starts):
        edges.append(int(start[edges[-1] - 1]))
    edges.reverse()
    owner = np.searchsorted(np.array(edges[1:]), kind, side="right")
    members = [np.flatnonzero(owner == q) for q in range(len(starts))]
    return Buckets(values[np.array(edges[1:]) - 1], members)


def _one_more(
    error: np.ndarray, values: np.ndarray, weight: np.ndarray, sums: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Errors and last bucket starts with one bucket more; ``error[k]`` covers values ``0 .. k``."""
    n = len(values)
    begun = np.concatenate([error[:1], error[:-1]])  # error of everything before value j, for j >= 1
    best, start = error.copy(), np.zeros(n, np.int64)
    for low in range(1, n, ROWS):
        ends = np.arange(low, min(low + ROWS, n))
        starts = np.arange(1, ends[-1] + 1)
        added = values[ends, None] * (weight[ends + 1, None] - weight[starts])
        added -= sums[ends + 1, None] - sums[starts]
        added += begun[starts]
        added[starts > ends[:, None]] = np.iinfo(np.int64).max
        choice = added.argmin(axis=1)
        best[ends], start[ends] = added[np.arange(len(ends)), choice], starts[choice]
    return best, start
