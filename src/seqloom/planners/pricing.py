"""The time of rounds of seats, from the integers that planners compare, before any plan is built.

It equals ``cost.plan_ns`` of the plan that ``to_plan`` builds from the same rounds, but for what free sharding moves
and does not hide: each round keeps as much of its activations as its memory allows, takes as long as its slowest group,
and holds only the islands that its groups touch.

Network cards and NVLink ports need no look here. Seats are disjoint blocks of the family; a block that crosses nodes
consists of whole nodes, so no two groups of a round share a card, and what one group puts on a card or port never
takes longer than the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from seqloom.cost import CostTables, Variant
from seqloom.plan import Checkpoint
from seqloom.planners.problem import CHECKPOINTS, Problem, Seat

Rounds = Sequence[Sequence[Seat]]
"""What a planner answers: the seats of every round, in running order."""


def price_rounds(problem: Problem, rounds: Rounds) -> int:
    """Step time in ns of the plan that ``to_plan`` builds from these rounds."""
    return Pricer(problem).step_ns(rounds)


class Pricer:
    """Prices many answers to one problem."""

    def __init__(self, problem: Problem) -> None:
        """The tables of other checkpoints are made when one is first used."""
        self.problem = problem
        self._shape = {shape: index for index, shape in enumerate(problem.tables.shapes)}
        self._tables = {problem.variant.checkpoint: problem.tables}

    def step_ns(self, rounds: Rounds) -> int:
        """Step time in ns, with what a step costs once."""
        if not rounds:
            return 0
        cost, reduce = self.problem.cost, self.problem.variant.reduce
        island = cost.island_size
        checkpoints = [self.problem.checkpoint(seats) for seats in rounds]
        times = self._group_times(rounds, checkpoints)
        ready = [0] * (cost.ranks // island)
        at = 0
        for seats in rounds:
            spans = sorted(
                (seat.start // island, (seat.start + seat.shape.degree - 1) // island, times[at + i])
                for i, seat in enumerate(seats)
            )
            at += len(seats)
            for first, last, longest in _joined(spans):
                ready[first : last + 1] = [max(ready[first : last + 1]) + longest] * (last + 1 - first)
        overhead = max(cost.step_overhead_ns(Variant(checkpoint, reduce)) for checkpoint in set(checkpoints))
        return max(ready) + overhead

    def _group_times(self, rounds: Rounds, checkpoints: Sequence[Checkpoint]) -> list[int]:
        """ns of every group, round after round; groups of one shape and checkpoint are priced together."""
        alike: dict[tuple[Checkpoint, int], list[int]] = {}
        seats = list(chain.from_iterable(rounds))
        kept = chain.from_iterable([c] * len(r) for c, r in zip(checkpoints, rounds, strict=True))
        for index, (seat, checkpoint) in enumerate(zip(seats, kept, strict=True)):
            alike.setdefault((checkpoint, self._shape[seat.shape]), []).append(index)
        times = [0] * len(seats)
        for (checkpoint, shape), members in alike.items():
            tables = self._tables_of(checkpoint)
            documents = np.array(list(chain.from_iterable(seats[i].documents for i in members)))
            first = np.cumsum([0] + [len(seats[i].documents) for i in members[:-1]])
            sums = np.add.reduceat(tables.cost[:, shape, documents], first, axis=1)
            for i, time in zip(members, (sums + tables.fixed[:, shape, None]).max(axis=0), strict=True):
                times[i] = int(time)
        return times

    def fastest_tables(self) -> CostTables:
        """Tables of the checkpoint that keeps the most: no round is faster than under them."""
        return self._tables_of(next(c for c in CHECKPOINTS if c in self.problem.capacities))

    def _tables_of(self, checkpoint: Checkpoint) -> CostTables:
        if checkpoint not in self._tables:
            variant = Variant(checkpoint, self.problem.variant.reduce)
            self._tables[checkpoint] = self.problem.cost.tables(self.problem.lengths, variant)
        return self._tables[checkpoint]


def _joined(spans: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Merge (first island, last island, ns), sorted, where they share an island; the longest time counts."""
    merged: list[tuple[int, int, int]] = []
    for first, last, time in spans:
        if merged and first <= merged[-1][1]:
            start, stop, longest = merged.pop()
            merged.append((start, max(stop, last), max(longest, time)))
        else:
            merged.append((first, last, time))
    return merged
