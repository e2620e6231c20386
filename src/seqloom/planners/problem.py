"""What a planner is asked, and how its answer becomes a plan.

A ``Problem`` is one batch under one policy of one cost model, as integer arrays. Every planner answers with rounds of
``Seat``s: which documents, in which shape, from which rank on. ``to_plan`` turns them into the value everybody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, CostTables, GroupShape, MemoryPolicy
from seqloom.cost.plan_cost import finish_times, join_shard_groups
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Pipeline, Plan, Round, StageMicroBatch, in_order
from seqloom.planners.loops import NEVER, BatchTables

CHECKPOINTS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.PROFILE)
"""From the fastest, which keeps the most, to the slowest."""


class GroupPlacement(NamedTuple):
    """A group to be: its shape, its first rank and the documents it works on."""

    shape: GroupShape
    start: int
    documents: Sequence[int]


@dataclass(frozen=True, eq=False)
class Problem:
    """One batch under one policy of a cost model. Times in ns."""

    lengths: np.ndarray
    """int64[n]: true lengths; a document's id is its index."""
    cost: CostModel
    policy: MemoryPolicy
    tables: CostTables

    @classmethod
    def of(cls, lengths: Sequence[int] | np.ndarray, cost: CostModel, policy: MemoryPolicy) -> Problem:
        """Price the documents; SeqloomError if one of them fits on no group."""
        array = Batch.of(lengths).lengths
        problem = cls(array, cost, policy, cost.tables(array, policy))
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
        room = most * self.tables.capacity // self.cost.pad_multiple * self.cost.pad_multiple
        return SeqloomError(
            f"sequence {longest} has {self.lengths[longest]} tokens, but the largest group ({most} GPUs x "
            f"{self.tables.capacity} tokens) holds {room}; drop longer sequences (--max-length {room}), "
            f"raise the memory budget or use more GPUs"
        )

    @cached_property
    def capacities(self) -> dict[Checkpoint, int]:
        """Tokens a rank holds in a round, under each checkpointing choice that goes with this way to reduce."""
        return {v.checkpoint: self.cost.capacity(v) for v in self.cost.policies if v.reduce == self.policy.reduce}

    def checkpoint(self, seats: Sequence[GroupPlacement]) -> Checkpoint:
        """What a round of these seats keeps: the fastest choice whose memory holds it."""
        tokens = self.tables.tokens
        fullest = max(-(-int(tokens[list(seat.documents)].sum()) // seat.shape.degree) for seat in seats)
        return next(c for c in CHECKPOINTS if self.capacities.get(c, -1) >= fullest)

    @cached_property
    def search(self) -> BatchTables:
        """The same problem as plain arrays for the hot loops; lanes that are never used are left out."""
        tables = self.tables
        lanes = [0] + [lane for lane in (1, 2) if tables.cost[lane].any() or tables.fixed[lane].any()]
        cost = np.ascontiguousarray(tables.cost[lanes])
        fixed = np.ascontiguousarray(tables.fixed[lanes])
        degrees = np.unique(tables.degree)
        fits = tables.tokens[None, :] <= tables.degree[:, None] * tables.capacity
        time = np.where(fits, (cost + fixed[:, :, None]).max(axis=0), NEVER)
        solo_ns = np.empty((len(degrees), len(self.lengths)), np.int64)
        solo_shape = np.empty_like(solo_ns)
        for index, degree in enumerate(degrees):
            shapes = np.flatnonzero(tables.degree == degree)
            best = time[shapes].argmin(axis=0)
            solo_shape[index] = shapes[best]
            solo_ns[index] = time[shapes[best], np.arange(len(best))]
        return BatchTables(
            tokens=tables.tokens,
            cost=cost,
            fixed=fixed,
            shape_degree=tables.degree,
            degrees=degrees,
            solo_ns=solo_ns,
            solo_shape=solo_shape,
            value=self._value(cost, fixed, fits),
            capacity=tables.capacity,
            ranks=self.cost.ranks,
            shard_group=self.cost.shard_group_size,
            node=self.cost.node_size,
        )

    def _value(self, cost: np.ndarray, fixed: np.ndarray, fits: np.ndarray) -> np.ndarray:
        """int64[n] rank-ns: a document's cheapest work, plus its part of what a full round costs before its first."""
        work = np.where(fits, cost.max(axis=0) * self.tables.degree[:, None], NEVER).min(axis=0)
        share = int(fixed.max(axis=0).min()) * self.tables.tokens // self.tables.capacity
        return np.maximum(work + share, 1)


def fitting_problems(lengths: Sequence[int] | np.ndarray, cost: CostModel) -> list[Problem]:
    """The batch under every policy whose memory holds it; SeqloomError if there is none."""
    array = Batch.of(lengths).lengths
    problems = [Problem(array, cost, policy, cost.tables(array, policy)) for policy in cost.policies]
    fitting = [problem for problem in problems if problem.fits]
    if not fitting:
        raise max(problems, key=lambda problem: problem.tables.capacity).too_long()
    return fitting


def to_plan(problem: Problem, rounds: Sequence[Sequence[GroupPlacement]], planner: str) -> Plan:
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
        built.append(Round((StageMicroBatch(in_order(groups, cost.node_size), problem.checkpoint(seats)),)))
    pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, built, problem.policy.reduce, cost.tensor)
    return Plan(
        limits=cost.limits(problem.policy.reduce),
        sharding=cost.sharding,
        reduce=problem.policy.reduce,
        documents=tuple(lengths),
        pipelines=(pipeline,),
        planner=planner,
    )


# ---- merged: planners.pricing
# The time of rounds of seats, from the integers that planners compare, before any plan is built.
#
# It equals ``cost.plan_ns`` of the plan that ``to_plan`` builds from the same rounds, but for what free sharding
# moves
# and does not hide: each round keeps as much of its activations as its memory allows, takes as long as its slowest
# group,
# and holds only the shard groups that its groups touch.
#
# Network cards and NVLink ports need no look here. Seats are disjoint blocks of the family; a block that crosses
# nodes
# consists of whole nodes, so no two groups of a round share a card, and what one group puts on a card or port never
# takes longer than the group.


Rounds = Sequence[Sequence[GroupPlacement]]
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
        self._tables = {problem.policy.checkpoint: problem.tables}

    def step_ns(self, rounds: Rounds) -> int:
        """Step time in ns, with what a step costs once."""
        if not rounds:
            return 0
        cost, reduce = self.problem.cost, self.problem.policy.reduce
        checkpoints = [self.problem.checkpoint(seats) for seats in rounds]
        size, times = cost.shard_group_size, iter(self._group_times(rounds, checkpoints))
        slowest, joined = np.zeros((len(rounds), cost.ranks // size), dtype=np.int64), []
        for row, seats in zip(slowest, rounds, strict=True):
            touched = [range(seat.start // size, (seat.start + seat.shape.degree - 1) // size + 1) for seat in seats]
            for shard_groups, time in zip(touched, times, strict=False):
                row[shard_groups.start] = max(row[shard_groups.start], time)  # the others of a group wait for this one
            joined.append(join_shard_groups(shard_groups for shard_groups in touched if len(shard_groups) > 1))
        overhead = max(cost.step_overhead_ns(MemoryPolicy(checkpoint, reduce)) for checkpoint in set(checkpoints))
        return int(finish_times(slowest, joined).max()) + overhead

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
            policy = MemoryPolicy(checkpoint, self.problem.policy.reduce)
            self._tables[checkpoint] = self.problem.cost.tables(self.problem.lengths, policy)
        return self._tables[checkpoint]
