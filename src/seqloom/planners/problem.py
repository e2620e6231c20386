"""What a planner is asked, and how its answer becomes a plan.

A ``Problem`` is one batch under one variant of one cost model, as integer arrays. Every planner answers with rounds of
``Seat``s: which documents, in which shape, from which rank on. ``to_plan`` turns them into the value everybody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, CostTables, Shape, Variant
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Pipeline, Plan, Round, Span, Work, in_order
from seqloom.planners.fill import NEVER, Tables

CHECKPOINTS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.PROFILE)
"""From the fastest, which keeps the most, to the slowest."""


class Seat(NamedTuple):
    """A group to be: its shape, its first rank and the documents it works on."""

    shape: Shape
    start: int
    documents: Sequence[int]


@dataclass(frozen=True, eq=False)
class Problem:
    """One batch under one variant of a cost model. Times in ns."""

    lengths: np.ndarray
    """int64[n]: true lengths; a document's id is its index."""
    cost: CostModel
    variant: Variant
    tables: CostTables

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray, cost: CostModel, variant: Variant) -> Problem:
        """Price the documents; SeqloomError if one of them fits on no group."""
        array = Batch.of(lengths).lengths
        problem = cls(array, cost, variant, cost.tables(array, variant))
        if not problem.fits:
            raise problem.too_long()
        return problem

    @property
    def fits(self) -> bool:
        """Whether the largest group holds the longest document."""
        return bool(self.tables.tokens.max() <= self.tables.degree.max() * self.tables.capacity)

    def too_long(self) -> SeqloomError:
        """The error that says which document is beyond the largest group's memory, and the way out."""
        longest = int(self.tables.tokens.argmax())
        most = int(self.tables.degree.max())
        room = most * self.tables.capacity // self.cost.granule * self.cost.granule
        return SeqloomError(
            f"sequence {longest} has {self.lengths[longest]} tokens, but the largest group ({most} GPUs x "
            f"{self.tables.capacity} tokens) holds {room}; drop longer sequences (--max-length {room}), "
            f"raise the memory budget or use more GPUs"
        )

    @cached_property
    def capacities(self) -> dict[Checkpoint, int]:
        """Tokens a rank holds in a round, under each checkpointing choice that goes with this way to reduce."""
        return {v.checkpoint: self.cost.capacity(v) for v in self.cost.variants if v.reduce == self.variant.reduce}

    def checkpoint(self, seats: Sequence[Seat]) -> Checkpoint:
        """What a round of these seats keeps: the fastest choice whose memory holds it."""
        tokens = self.tables.tokens
        fullest = max(-(-int(tokens[list(seat.documents)].sum()) // seat.shape.degree) for seat in seats)
        return next(c for c in CHECKPOINTS if self.capacities.get(c, -1) >= fullest)

    @cached_property
    def search(self) -> Tables:
        """The same problem as plain arrays for the hot loops; lanes that are never used are left out."""
        tables = self.tables
        lanes = [0] + [lane for lane in (1, 2) if tables.cost[lane].any() or tables.fixed[lane].any()]
        cost = np.ascontiguousarray(tables.cost[lanes])
        fixed = np.ascontiguousarray(tables.fixed[lanes])
        degrees = np.unique(tables.degree)
        fits = tables.tokens[None, :] <= tables.degree[:, None] * tables.capacity
        time = np.where(fits, (cost + fixed[:, :, None]).max(axis=0), NEVER)
        alone = np.empty((len(degrees), len(self.lengths)), np.int64)
        alone_shape = np.empty_like(alone)
        for index, degree in enumerate(degrees):
            shapes = np.flatnonzero(tables.degree == degree)
            best = time[shapes].argmin(axis=0)
            alone_shape[index] = shapes[best]
            alone[index] = time[shapes[best], np.arange(len(best))]
        return Tables(
            tokens=tables.tokens,
            cost=cost,
            fixed=fixed,
            shape_degree=tables.degree,
            degrees=degrees,
            alone=alone,
            alone_shape=alone_shape,
            value=self._value(cost, fixed, fits),
            capacity=tables.capacity,
            ranks=self.cost.ranks,
            island=self.cost.island_size,
            node=self.cost.node_size,
        )

    def _value(self, cost: np.ndarray, fixed: np.ndarray, fits: np.ndarray) -> np.ndarray:
        """int64[n] rank-ns: a document's cheapest work, plus its part of what a full round costs before its first."""
        work = np.where(fits, cost.max(axis=0) * self.tables.degree[:, None], NEVER).min(axis=0)
        share = int(fixed.max(axis=0).min()) * self.tables.tokens // self.tables.capacity
        return np.maximum(work + share, 1)


def fitting_problems(lengths: Sequence[int] | np.ndarray, cost: CostModel) -> list[Problem]:
    """The batch under every variant whose memory holds it; SeqloomError if there is none."""
    array = Batch.of(lengths).lengths
    problems = [Problem(array, cost, variant, cost.tables(array, variant)) for variant in cost.variants]
    fitting = [problem for problem in problems if problem.fits]
    if not fitting:
        raise max(problems, key=lambda problem: problem.tables.capacity).too_long()
    return fitting


def to_plan(problem: Problem, rounds: Sequence[Sequence[Seat]], planner: str) -> Plan:
    """Build the plan of these rounds, in this order; each keeps as much of its activations as its memory allows."""
    cost, lengths = problem.cost, problem.lengths.tolist()
    built = []
    for seats in rounds:
        groups = tuple(
            cost.group(
                seat.shape,
                range(seat.start, seat.start + seat.shape.degree),
                [Span(k, 0, lengths[k]) for k in sorted(seat.documents)],
            )
            for seat in sorted(seats, key=lambda seat: seat.start)
        )
        built.append(Round((Work(in_order(groups, cost.node_size), problem.checkpoint(seats)),)))
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, built, problem.variant.reduce, cost.tensor)
    return Plan(
        limits=cost.limits(problem.variant.reduce),
        sharding=cost.sharding,
        reduce=problem.variant.reduce,
        documents=tuple(lengths),
        pipelines=(pipeline,),
        planner=planner,
    )
