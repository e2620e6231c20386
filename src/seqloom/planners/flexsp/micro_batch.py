"""One micro-batch: its virtual groups, its buckets, its programme; the answer as seats."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from seqloom.cost import CostTables
from seqloom.planners.flexsp.buckets import Buckets, bucket
from seqloom.planners.flexsp.milp import Budget, Programme
from seqloom.planners.flexsp.starts import best_start
from seqloom.planners.problem import Problem, Seat


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


def prepare(problem: Problem, menu: dict[int, int], documents: np.ndarray, least: int) -> MicroBatch:
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


def seats_of(problem: Problem, menu: dict[int, int], degree: np.ndarray, groups: list[list[int]]) -> list[Seat]:
    """Open groups, degrees falling, on consecutive ranks: each then begins at a multiple of its size."""
    seats, start = [], 0
    for size, documents in zip(degree.tolist(), groups, strict=True):
        if documents:
            seats.append(Seat(problem.tables.shapes[menu[size]], start, documents))
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
