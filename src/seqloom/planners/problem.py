"""A batch to plan, and how a planner's answer becomes a plan.

A `BatchProblem` is one batch under one memory policy of one cost model, as integer arrays. Planners whose groups lie on
disjoint aligned blocks answer with rounds of `GroupPlacement`: which documents, in which shape, from which rank on.
`BatchProblem.step_ns` prices such rounds, `BatchProblem.plan` turns them into the plan. `build_plan` assembles any plan
of one stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, CostTables, GroupShape, MemoryPolicy
from seqloom.cost.plan_cost import finish_times, join_shard_groups
from seqloom.describe import Batch
from seqloom.errors import MemoryBudgetError, how_to_drop
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, StageMicroBatch, sort_groups
from seqloom.planners.loops import NEVER, BatchTables
from seqloom.planners.recompute import checkpoint_capacities, fastest_checkpoint


class GroupPlacement(NamedTuple):
    """A planned group: its shape, its first rank and the documents it works on."""

    shape: GroupShape
    start: int
    documents: Sequence[int]


PlacedRounds = Sequence[Sequence[GroupPlacement]]
"""A planner's answer: the groups of every round, in running order."""


@dataclass(frozen=True, eq=False)
class BatchProblem:
    """One batch under one memory policy of a cost model. Times in ns."""

    lengths: np.ndarray  # int64[n]: true lengths; a document's id is its index
    cost: CostModel
    policy: MemoryPolicy

    @cached_property
    def tables(self) -> CostTables:
        """The documents priced in every shape."""
        return self.cost.tables(self.lengths, self.policy)

    @property
    def fits(self) -> bool:
        """Whether the largest group holds the longest document."""
        longest, widest = self.lengths.max(), max(shape.degree for shape in self.cost.shapes)
        return bool(self.cost.padded_lengths(longest) <= widest * self.cost.capacity(self.policy))

    def too_long(self) -> MemoryBudgetError:
        """The error that names the document beyond the largest group's memory, and the way out."""
        longest = int(self.tables.tokens.argmax())
        most = int(self.tables.degree.max())
        held = most * self.tables.capacity // self.cost.pad_multiple * self.cost.pad_multiple
        return MemoryBudgetError(
            f"sequence {longest} has {self.lengths[longest]} tokens, but the largest group ({most} GPUs x "
            f"{self.tables.capacity} tokens) holds {held}; {how_to_drop(held)}, {self.cost.ways_out}"
        )

    def checkpoint(self, groups: Sequence[GroupPlacement]) -> Checkpoint:
        """The fastest checkpoint whose memory holds a round of these groups."""
        tokens = self.tables.tokens
        fullest = max(-(-int(tokens[list(group.documents)].sum()) // group.shape.degree) for group in groups)
        checkpoint = fastest_checkpoint(self.capacities, fullest)
        assert checkpoint is not None
        return checkpoint

    @cached_property
    def capacities(self) -> dict[Checkpoint, int]:
        """Tokens a rank holds in a round, under each checkpoint that goes with this way to reduce gradients."""
        return checkpoint_capacities(self.cost, self.policy.reduce)

    @cached_property
    def batch_tables(self) -> BatchTables:
        """The same problem for the loops, without the streams that no shape uses."""
        tables, classes = self.tables, self.cost.speeds.classes
        streams = [0] + [stream for stream in (1, 2) if tables.cost[stream].any() or tables.fixed[stream].any()]
        by_class = [self.tables_at(self.policy.checkpoint, slowness).cost[streams] for slowness in classes]
        rows = len(tables.shapes) * len(classes)  # every shape on every class of blocks, the fastest first
        cost = np.ascontiguousarray(np.stack(by_class, axis=2).reshape(len(streams), rows, -1))
        fixed = np.repeat(tables.fixed[streams], len(classes), axis=1)
        shape_degree, shape_class = np.repeat(tables.degree, len(classes)), np.arange(rows) % len(classes)
        degrees = np.repeat(np.unique(tables.degree), len(classes))
        block_class = np.arange(len(degrees)) % len(classes)
        fits = tables.tokens[None, :] <= shape_degree[:, None] * tables.capacity
        time = np.where(fits, (cost + fixed[:, :, None]).max(axis=0), NEVER)
        solo_ns = np.empty((len(degrees), len(self.lengths)), np.int64)
        solo_shape = np.empty_like(solo_ns)
        for index, (degree, own) in enumerate(zip(degrees, block_class, strict=True)):
            shapes = np.flatnonzero((shape_degree == degree) & (shape_class == own))
            best = time[shapes].argmin(axis=0)
            solo_shape[index] = shapes[best]
            solo_ns[index] = time[shapes[best], np.arange(len(best))]
        work = np.where(fits, cost.max(axis=0) * shape_degree[:, None], NEVER).min(axis=0)
        share = int(fixed.max(axis=0).min()) * tables.tokens // tables.capacity
        return BatchTables(
            tokens=tables.tokens,
            cost=cost,
            fixed=fixed,
            shape_degree=shape_degree,
            degrees=degrees,
            solo_ns=solo_ns,
            solo_shape=solo_shape,
            value=np.maximum(work + share, 1),
            capacity=tables.capacity,
            ranks=self.cost.ranks,
            shard_group=self.cost.shard_group_size,
            node=self.cost.node_size,
            block_class=block_class,
            rank_class=self.cost.speeds.class_of_rank if len(classes) > 1 else np.zeros(self.cost.ranks, np.int64),
        )

    def shape_of_row(self, row: int) -> GroupShape:
        """The shape that a row of `batch_tables` prices, on whichever blocks."""
        return self.tables.shapes[row // len(self.cost.speeds.classes)]

    def step_ns(self, rounds: PlacedRounds) -> int:
        """Step time in ns, with the step's overhead, from the integers that planners compare.

        It equals ``cost.plan_ns`` of the plan that `plan` builds, but for the exposed resharding time under free
        sharding. NICs and NVLink ports never decide: groups lie on disjoint blocks of the family, and a block that
        crosses nodes consists of whole nodes. So no two groups of a round share a NIC, and one group's traffic on a NIC
        or port never takes longer than the group. Experts get the tokens of all ranks of an EP group, which tables of
        documents do not know, so a model with experts is priced by its plan.
        """
        if not rounds:
            return 0
        if self.cost.model.moe_layers:
            return self.cost.plan_ns(self.plan(rounds, ""))
        cost, reduce = self.cost, self.policy.reduce
        checkpoints = [self.checkpoint(groups) for groups in rounds]
        size, times = cost.shard_group_size, iter(self._group_times(rounds, checkpoints))
        slowest, joined = np.zeros((len(rounds), cost.ranks // size), dtype=np.int64), []
        for row, groups in zip(slowest, rounds, strict=True):
            touched = [range(start // size, (start + shape.degree - 1) // size + 1) for shape, start, _ in groups]
            for shard_groups, time in zip(touched, times, strict=False):
                row[shard_groups.start] = max(row[shard_groups.start], time)  # the others of a group wait for this one
            joined.append(join_shard_groups(shard_groups for shard_groups in touched if len(shard_groups) > 1))
        overhead = max(cost.step_overhead_ns(MemoryPolicy(checkpoint, reduce)) for checkpoint in set(checkpoints))
        return int(finish_times(slowest, joined).max()) + overhead

    def _group_times(self, rounds: PlacedRounds, checkpoints: Sequence[Checkpoint]) -> list[int]:
        """ns of every group, round after round; groups of one shape and checkpoint are priced together."""
        groups = list(chain.from_iterable(rounds))
        owners = chain.from_iterable([c] * len(placed) for c, placed in zip(checkpoints, rounds, strict=True))
        index_of = {shape: index for index, shape in enumerate(self.tables.shapes)}
        classes: dict[tuple[Checkpoint, int, float], list[int]] = {}
        for index, (group, checkpoint) in enumerate(zip(groups, owners, strict=True)):
            slowness = self.slowness(group.shape, group.start)
            classes.setdefault((checkpoint, index_of[group.shape], slowness), []).append(index)
        times = [0] * len(groups)
        for (checkpoint, shape, slowness), members in classes.items():
            tables = self.tables_at(checkpoint, slowness)
            documents = np.array(list(chain.from_iterable(groups[i].documents for i in members)))
            first = np.cumsum([0] + [len(groups[i].documents) for i in members[:-1]])
            sums = np.add.reduceat(tables.cost[:, shape, documents], first, axis=1)
            for i, time in zip(members, (sums + tables.fixed[:, shape, None]).max(axis=0), strict=True):
                times[i] = int(time)
        return times

    def slowness(self, shape: GroupShape, start: int) -> float:
        """Times as long as by the profile that a group of this shape computes which begins at this rank."""
        speeds = self.cost.speeds
        return speeds.of_group(range(start, start + shape.degree)) if speeds else 1.0

    def tables_at(self, checkpoint: Checkpoint, slowness: float = 1.0) -> CostTables:
        """The documents priced under another checkpoint, on groups so slow, made on first use."""
        key = checkpoint, slowness
        if key not in self._tables_at:
            policy = MemoryPolicy(checkpoint, self.policy.reduce)
            self._tables_at[key] = self.cost.tables(self.lengths, policy, slowness=slowness)
        return self._tables_at[key]

    @cached_property
    def _tables_at(self) -> dict[tuple[Checkpoint, float], CostTables]:
        return {(self.policy.checkpoint, 1.0): self.tables}

    def plan(self, rounds: PlacedRounds, planner: str) -> Plan:
        """Build the plan of these rounds, each with the fastest checkpoint that its memory allows."""
        cost, lengths = self.cost, self.lengths.tolist()
        built = []
        for placed in rounds:
            groups = [
                whole_documents(cost, shape, range(start, start + shape.degree), documents, lengths)
                for shape, start, documents in sorted(placed, key=lambda group: group.start)
            ]
            built.append(StageMicroBatch(sort_groups(groups, cost.node_size), self.checkpoint(placed)))
        return build_plan(cost, lengths, built, self.policy.reduce, planner)


def fitting_problems(
    lengths: Sequence[int] | np.ndarray, cost: CostModel, only: MemoryPolicy | None = None
) -> list[BatchProblem]:
    """The batch under every policy, or ``only`` one, whose memory holds it; SeqloomError if there is none."""
    array = Batch.of(lengths).lengths
    problems = [BatchProblem(array, cost, policy) for policy in cost.policies if only in (None, policy)]
    fitting = [problem for problem in problems if problem.fits]
    if not fitting:
        raise max(problems, key=lambda problem: problem.tables.capacity).too_long()
    return fitting


def whole_documents(
    cost: CostModel, shape: GroupShape, ranks: Sequence[int], documents: Iterable[int], lengths: Sequence[int]
) -> Group:
    """A group of this shape that works on whole documents, in ascending order; ``lengths`` are those of the batch."""
    ordered = sorted(documents)
    spans = map(Span._make, zip(ordered, repeat(0), map(lengths.__getitem__, ordered), strict=False))
    return cost.group(shape, ranks, tuple(spans))


def build_plan(
    cost: CostModel, lengths: Sequence[int], rounds: Iterable[StageMicroBatch], reduce: Reduce, planner: str
) -> Plan:
    """Assemble the plan of one stage over all ranks from its rounds, in this order."""
    built = [Round((work,)) for work in rounds]
    return Plan(
        limits=cost.limits(reduce),
        sharding=cost.sharding,
        reduce=reduce,
        documents=tuple(lengths),
        pipelines=(Pipeline.single(range(cost.ranks), cost.model.layers, built, reduce, cost.tensor, cost.expert),),
        planner=planner,
    )
