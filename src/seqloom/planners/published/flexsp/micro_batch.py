"""Buckets: documents of similar length are counted as equals, at the length of the longest of them.

The bounds are chosen by dynamic programming to add as few tokens as possible:

    error[q][k] = min over j < k of error[q - 1][j] + sum over i in j .. k of (length[k] - length[i])

over distinct lengths in rising order (documents of one length always share a bucket without error).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostTables
from seqloom.planners.packing import least_loaded
from seqloom.planners.problem import BatchProblem, GroupPlacement
from seqloom.planners.published.flexsp.milp import Budget, Programme

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


# ---- merged: planners.flexsp.starts
# Answers to begin with: groups of one degree, documents longest first on the least loaded group.


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
    groups = np.flatnonzero(programme.degree == degree)
    order = np.argsort(-programme.bound, kind="stable")
    buckets = np.repeat(order, programme.count[order])
    sizes = programme.bound[buckets].tolist()
    members = least_loaded(range(len(sizes)), sizes, sizes, len(groups), degree * programme.capacity)
    if members is None:
        return None
    placed = np.zeros((len(programme.bound), len(programme.degree)), np.int64)
    for group, documents in zip(groups, members, strict=True):
        placed[:, group] = np.bincount(buckets[documents], minlength=len(placed))
    return placed


# ---- merged: planners.flexsp.micro_batch
# One micro-batch: its virtual groups, its buckets, its programme; the answer as seats.


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Documents that run side by side, and the programme that seats them."""

    documents: np.ndarray
    """int64[n] indices into the batch."""
    buckets: Buckets
    programme: Programme
    start: tuple[int, np.ndarray] | None
    """Best homogeneous answer: ns and documents of each bucket in each group."""

    def answer(self, budget: Budget) -> np.ndarray | None:
        """int64[Q, P] documents of each bucket in each group; the start if the solver finds nothing."""
        known = None if self.start is None else self.start[1]
        found = self.programme.solve(known, budget)
        return known if found is None else found

    def draw(self, placed: np.ndarray, random: Random) -> list[list[int]]:
        """Documents of each group: concrete ones, drawn at random from each bucket to fill the counts."""
        groups: list[list[int]] = [[] for _ in self.programme.degree]
        for members, counts in zip(self.buckets.members, placed.tolist(), strict=True):
            drawn = self.documents[members].tolist()
            random.shuffle(drawn)
            for group, count in enumerate(counts):
                groups[group] += drawn[:count]
                del drawn[:count]
        return groups


def prepare(problem: BatchProblem, menu: dict[int, int], documents: np.ndarray, least: int) -> MicroBatch:
    """Set up a micro-batch.

    Args:
        problem: the batch.
        menu: shape index by degree, ascending.
        documents: int64[n] indices into the batch.
        least: buckets to begin with.
    """
    tables, ranks = problem.tables, problem.cost.ranks
    tokens = tables.tokens[documents]
    grouped = bucket(tokens, least, ranks * tables.capacity)
    degree = virtual_groups(np.array(list(menu)), tokens, tables.capacity, ranks)
    shapes = np.array([menu[d] for d in degree.tolist()])
    longest = [documents[members[tokens[members].argmax()]] for members in grouped.members]
    cost = tables.cost[:, shapes][:, :, longest]
    fixed = tables.fixed[:, shapes]

    def programme(every_rank: bool) -> Programme:
        sizes = (tables.capacity, ranks, every_rank)
        return Programme(grouped.bound, grouped.population, degree, cost, fixed, *sizes)

    strict = programme(True)
    start = best_start(strict)
    if start is None and ranks not in menu:  # groups of the menu may be unable to use every rank: let some idle
        strict = programme(False)
        start = best_start(strict)
    return MicroBatch(documents, grouped, strict, start)


def virtual_groups(degrees: np.ndarray, tokens: np.ndarray, capacity: int, ranks: int) -> np.ndarray:
    """Degrees of the groups that may be opened, falling.

    Published pruning: beside the documents that need the largest degree, each thought to sit in a group of
    its own, only what is left of the cluster is offered to smaller degrees.

    Args:
        degrees: int64[D] ascending.
        tokens: int64[n] of the micro-batch.
        capacity: tokens a rank holds.
        ranks: of the cluster.
    """
    needed = degrees[np.searchsorted(degrees * capacity, tokens)]
    largest = int(needed.max())
    left = ranks - largest * int((needed == largest).sum())
    copies = [max(0, left if degree < largest else ranks) // degree for degree in degrees.tolist()]
    return np.repeat(degrees, copies)[::-1]


def seats_of(
    problem: BatchProblem, menu: dict[int, int], degree: np.ndarray, groups: list[list[int]]
) -> list[GroupPlacement]:
    """Open groups, degrees falling, on consecutive ranks: each then begins at a multiple of its size."""
    seats, start = [], 0
    for size, documents in zip(degree.tolist(), groups, strict=True):
        if documents:
            seats.append(GroupPlacement(problem.tables.shapes[menu[size]], start, documents))
            start += size
    return seats


def floor_ns(tables: CostTables, documents: np.ndarray, ranks: int) -> int:
    """ns that no micro-batch of these documents beats: the longest alone; all work on all ranks."""
    degree = tables.degree[:, None]
    fits = tables.tokens[documents] <= degree * tables.capacity
    cost = tables.cost[:, :, documents]
    never = np.int64(1) << np.int64(60)
    alone = np.where(fits, (cost + tables.fixed[:, :, None]).max(axis=0), never).min(axis=0).max()
    work = np.where(fits, cost * degree, never).min(axis=1).sum(axis=1) // ranks
    return max(int(alone), int((work + tables.fixed.min(axis=1)).max()))
