"""How evenly a step's work lies on its ranks, and how much of it communicates: four shares and a time.

    token imbalance       DBR   of what ranks could do while the fullest one works, the part they have no tokens for
    padding               PR    tokens that are computed beyond those of the documents
    attention imbalance   ABR   as DBR, of attention work: squares of lengths
    communication         CR    tokens of documents that are spread over several ranks

An imbalance is 1 - mean / max over all ranks. Of rounds that follow each other the maxima add up, since ranks wait in
every round for the one that has most; of pipelines side by side the largest sum counts, and in it that of the slowest
stage, whose work is in proportion to its layers. Of several steps, the mean. Padding and communication are shares of
all tokens of all steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.plan_cost import finish_times, join_shard_groups
from seqloom.cost.resharding import exposed_reshard_ns
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.packing.levels import Level
from seqloom.plan import Pipeline, Plan, Round, Sharding, StageMicroBatch, in_order
from seqloom.simulate import predicted_ns


@dataclass(frozen=True, slots=True)
class Balance:
    """Shares between 0 and 1, the number of steps and their mean predicted time in ns."""

    tokens: float
    padding: float
    attention: float
    communication: float
    steps: int
    step_ns: float

    def as_dict(self) -> dict[str, float]:
        """By the names that the field uses, the time in milliseconds."""
        return {
            "dbr": self.tokens,
            "pr": self.padding,
            "abr": self.attention,
            "cr": self.communication,
            "steps": self.steps,
            "mean_step_ms": self.step_ns / 1e6,
        }


def plans_balance(plans: Sequence[Plan], cost: CostModel, step_ns: Sequence[int] | None = None) -> Balance:
    """The figures of several steps.

    Args:
        plans: of the steps, at least one.
        cost: prices them, and knows the granule to which documents are padded.
        step_ns: their predicted times, if they are known.
    """
    times = [predicted_ns(plan, cost) for plan in plans] if step_ns is None else step_ns
    tokens = sum(plan.tokens for plan in plans)
    occupied = sum(int(cost.padded_lengths(np.array(plan.documents)).sum()) for plan in plans)
    held, squares = np.mean([imbalances(plan, cost) for plan in plans], axis=0).tolist()
    return Balance(
        tokens=held,
        padding=1 - tokens / occupied,
        attention=squares,
        communication=sum(map(_communicating, plans)) / tokens,
        steps=len(plans),
        step_ns=sum(times) / len(plans),
    )


def imbalances(plan: Plan, cost: CostModel) -> np.ndarray:
    """float64[2]: imbalance of tokens and of attention work in one step."""
    total, most = np.zeros((2, cost.ranks)), np.zeros(2)
    for pipeline in plan.pipelines:
        paced = np.zeros((len(pipeline.ranks_by_pp_rank), 2))
        hosts = [pipeline.pp_rank_of(stage) for stage in range(len(pipeline.stages))]
        shares = [(part.stop - part.first) / part.of for part in pipeline.parts]
        for current in pipeline.rounds:
            for host, share, work in zip(hosts, shares, current.work, strict=True):
                loads = share * _on_ranks(work, cost)
                total += loads
                paced[host] += loads.max(axis=1)
        most = np.maximum(most, paced.max(axis=0))
    return 1 - total.mean(axis=1) / most


def _communicating(plan: Plan) -> int:
    """Tokens of documents in groups of several ranks."""
    rounds = (current for pipeline in plan.pipelines for current in pipeline.rounds)
    return sum(group.tokens for current in rounds for group in current.work[0].groups if group.degree > 1)


def _on_ranks(work: StageMicroBatch, cost: CostModel) -> np.ndarray:
    """float64[2, ranks]: tokens in linear layers and attention work of one stage's share of a round.

    A group's ranks share both evenly: Ulysses by heads, rings in zigzag.
    """
    loads = np.zeros((2, cost.ranks))
    for group in work.groups:
        occupied = sum(-(-stop // cost.pad_multiple) - -(-start // cost.pad_multiple) for _, start, stop in group.spans)
        squares = sum(stop**2 - start**2 for _, start, stop in group.spans)
        loads[:, list(group.ranks)] += np.array([[occupied * cost.pad_multiple], [squares]]) / group.degree
    if work.linear is not None:
        loads[0] = np.bincount(work.linear.rank, work.linear.sizes, cost.ranks)
    return loads


# ---- merged: planners.hbp.packing
# A packed data set: which documents make a pack, which packs make a step, and what every step costs.


@dataclass(frozen=True, eq=False)
class Packing:
    """Documents in packs, packs in steps, in running order. One level per step.

    Attributes:
        name: of the planner.
        lengths: int64[n] tokens of every document of the data set.
        cost: what it was packed for.
        levels: shortest packs first.
        documents: int64[n], numbers of documents, pack after pack.
        pack_starts: int64[P + 1], where in ``documents`` each pack begins; the last one is n.
        step_starts: int64[S + 1], the first pack of each step; the last one is P.
        step_levels: int64[S], index of each step's level.
    """

    name: str
    lengths: np.ndarray
    cost: CostModel
    levels: tuple[Level, ...]
    documents: np.ndarray
    pack_starts: np.ndarray
    step_starts: np.ndarray
    step_levels: np.ndarray

    @property
    def steps(self) -> int:
        """Number of steps."""
        return len(self.step_levels)

    def packs(self, step: int) -> list[np.ndarray]:
        """The packs of a step: int64 numbers of documents each."""
        first, stop = self._packs_of(step)
        edges = self.pack_starts[first : stop + 1]
        return [self.documents[low:high] for low, high in pairwise(edges.tolist())]

    def batch(self, step: int) -> np.ndarray:
        """int64[k]: numbers of the step's documents, ascending. Document i of its plan is the i-th of them."""
        first, stop = self._packs_of(step)
        return np.sort(self.documents[self.pack_starts[first] : self.pack_starts[stop]])

    def plan(self, step: int) -> Plan:
        """The plan of one step: its packs side by side, as many rounds as it takes, in its level's shape."""
        batch = self.batch(step)
        cost, level = self.cost, self.levels[self.step_levels[step]]
        lengths = self.lengths[batch].tolist()
        packs = [np.searchsorted(batch, np.sort(pack)).tolist() for pack in self.packs(step)]
        blocks = cost.family.blocks(level.shape.degree)
        rounds = []
        for first in range(0, len(packs), len(blocks)):
            groups = [
                cost.group(level.shape, block, [Span(k, 0, lengths[k]) for k in pack])
                for block, pack in zip(blocks, packs[first:], strict=False)
            ]
            rounds.append(Round((StageMicroBatch(in_order(groups, cost.node_size), level.policy.checkpoint),)))
        reduce = level.policy.reduce
        pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, rounds, reduce)
        return Plan(cost.limits(reduce), cost.sharding, reduce, tuple(lengths), (pipeline,), self.name)

    @cached_property
    def pack_tokens(self) -> np.ndarray:
        """int64[P]: tokens that every pack occupies."""
        return np.add.reduceat(self.cost.padded_lengths(self.lengths)[self.documents], self.pack_starts[:-1])

    @cached_property
    def pack_squares(self) -> np.ndarray:
        """int64[P]: attention work of every pack, the sum of its documents' squared lengths."""
        return np.add.reduceat(np.square(self.lengths[self.documents]), self.pack_starts[:-1])

    @cached_property
    def pack_ns(self) -> np.ndarray:
        """int64[P]: time of every pack's group."""
        times = np.zeros(len(self.pack_starts) - 1, dtype=np.int64)
        owner = np.repeat(self.step_levels, np.diff(self.step_starts))
        for index, level in enumerate(self.levels):
            chosen = np.flatnonzero(owner == index)
            if not len(chosen):
                continue
            counts = np.diff(self.pack_starts)
            members = self.documents[np.repeat(owner == index, counts)]
            tables = self.cost.tables(self.lengths[members], level.policy, [level.shape])
            edges = np.cumsum(counts[chosen]) - counts[chosen]
            lanes = np.add.reduceat(tables.cost[:, 0], edges, axis=1) + tables.fixed
            times[chosen] = lanes.max(axis=0)
        return times

    @cached_property
    def step_ns(self) -> np.ndarray:
        """int64[S]: predicted time of every step, that of its plan.

        In a round, ranks that share parameter shards wait for the slowest of their packs; others go on.
        """
        times = np.zeros(self.steps, dtype=np.int64)
        for index, level in enumerate(self.levels):
            size, grid = self.cost.shard_group_size, self._grid(self.pack_ns, index)
            blocks = self.cost.family.blocks(level.shape.degree)
            touched = [range(block.start // size, (block.stop - 1) // size + 1) for block in blocks]
            slowest = np.zeros((grid.shape[1], self.cost.ranks // size, len(grid)), dtype=np.int64)
            for block, shard_groups in enumerate(touched):
                row = slowest[:, shard_groups.start]
                np.maximum(row, grid[:, :, block].T, out=row)
            done = finish_times(slowest, [join_shard_groups(touched)] * len(slowest)).max(axis=0)
            overhead = self.cost.step_overhead_ns(level.policy) + self._moved_ns(grid, level)
            times[self.step_levels == index] = done + overhead
        return times

    def _moved_ns(self, grid: np.ndarray, level: Level) -> np.ndarray:
        """int64[steps of the level]: what they do not hide of moving parameters and gradients under free sharding.

        Args:
            grid: int64[steps, rounds, blocks] time of every pack; 0 where there is none.
            level: of the steps.
        """
        if self.cost.sharding != Sharding.FREE:
            return np.zeros(len(grid), dtype=np.int64)
        line = (Pipeline.single(range(self.cost.ranks), self.cost.model.layers, (), level.policy.reduce),)
        shortest = np.where(grid > 0, grid, np.iinfo(np.int64).max).min(axis=2)
        last = (grid.max(axis=2) > 0).sum(axis=1) - 1
        shades = zip(shortest[:, 0].tolist(), shortest[np.arange(len(grid)), last].tolist(), strict=True)
        return np.array([exposed_reshard_ns(self.cost, line, [shade]) for shade in shades], dtype=np.int64)

    @cached_property
    def balance(self) -> Balance:
        """Its figures, those of `plans_balance` of all its plans."""
        spread = np.array([level.shape.degree > 1 for level in self.levels])[self.step_levels]
        tokens = np.add.reduceat(self.lengths[self.documents], self.pack_starts[self.step_starts[:-1]])
        return Balance(
            tokens=float(self._imbalance(self.pack_tokens).mean()),
            padding=float(1 - self.lengths.sum() / self.pack_tokens.sum()),
            attention=float(self._imbalance(self.pack_squares).mean()),
            communication=float(tokens[spread].sum() / tokens.sum()),
            steps=self.steps,
            step_ns=float(self.step_ns.mean()),
        )

    def _imbalance(self, work: np.ndarray) -> np.ndarray:
        """float64[S]: 1 - sum of means / sum of maxima over the rounds of every step; int64[P] work of packs."""
        shares = np.zeros(self.steps)
        for index, level in enumerate(self.levels):
            grid = self._grid(work, index)
            means = grid.sum(axis=(1, 2)) * (1 / self.cost.ranks)
            most = grid.max(axis=2, initial=0).sum(axis=1) / level.shape.degree
            shares[self.step_levels == index] = 1 - means / most
        return shares

    def _grid(self, values: np.ndarray, index: int) -> np.ndarray:
        """int64[steps of the level, rounds, blocks]: a value of every pack where it runs; 0 where none does."""
        level = self.levels[index]
        blocks = len(self.cost.family.blocks(level.shape.degree))
        steps = np.flatnonzero(self.step_levels == index)
        counts = np.diff(self.step_starts)[steps]
        rounds = -(-max(level.packs, int(counts.max(initial=0))) // blocks)
        grid = np.zeros((len(steps), rounds * blocks), dtype=np.int64)
        filled = np.arange(rounds * blocks) < counts[:, None]
        owner = np.repeat(self.step_levels, np.diff(self.step_starts))
        grid[filled] = values[owner == index]
        return grid.reshape(len(steps), rounds, blocks)

    def _packs_of(self, step: int) -> tuple[int, int]:
        if not 0 <= step < self.steps:
            raise SeqloomError(f"step {step}: the data set makes {self.steps} steps; choose 0 .. {self.steps - 1}")
        return int(self.step_starts[step]), int(self.step_starts[step + 1])
