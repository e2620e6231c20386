"""A packed data set: which documents make a pack, which packs make a step, and what every step costs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.relaying import relay_ns
from seqloom.errors import SeqloomError
from seqloom.plan import Pipeline, Plan, Round, Sharding, Span, Work, in_order
from seqloom.planners.hbp.balance import Balance
from seqloom.planners.hbp.levels import Level


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
            rounds.append(Round((Work(in_order(groups, cost.node_size), level.variant.checkpoint),)))
        reduce = level.variant.reduce
        pipeline = Pipeline.single(range(cost.ranks), cost.model.layers, rounds, reduce)
        return Plan(cost.limits(reduce), cost.sharding, reduce, tuple(lengths), (pipeline,), self.name)

    @cached_property
    def pack_tokens(self) -> np.ndarray:
        """int64[P]: tokens that every pack occupies."""
        return np.add.reduceat(self.cost.tokens(self.lengths)[self.documents], self.pack_starts[:-1])

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
            tables = self.cost.tables(self.lengths[members], level.variant, [level.shape])
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
            degree, island = level.shape.degree, self.cost.island_size
            starts = np.array([block.start for block in self.cost.family.blocks(degree)])
            together = np.unique(starts // max(degree, island), return_index=True)[1]
            grid = self._grid(self.pack_ns, index)
            waits = np.maximum.reduceat(grid, together, axis=2)
            overhead = self.cost.step_overhead_ns(level.variant) + self._moved_ns(grid, level)
            times[self.step_levels == index] = waits.sum(axis=1).max(axis=1, initial=0) + overhead
        return times

    def _moved_ns(self, grid: np.ndarray, level: Level) -> np.ndarray:
        """int64[steps of the level]: what they do not hide of moving parameters and gradients under free sharding.

        Args:
            grid: int64[steps, rounds, blocks] time of every pack; 0 where there is none.
            level: of the steps.
        """
        if self.cost.sharding != Sharding.FREE:
            return np.zeros(len(grid), dtype=np.int64)
        line = (Pipeline.single(range(self.cost.ranks), self.cost.model.layers, (), level.variant.reduce),)
        shortest = np.where(grid > 0, grid, np.iinfo(np.int64).max).min(axis=2)
        last = (grid.max(axis=2) > 0).sum(axis=1) - 1
        shades = zip(shortest[:, 0].tolist(), shortest[np.arange(len(grid)), last].tolist(), strict=True)
        return np.array([relay_ns(self.cost, line, [shade]) for shade in shades], dtype=np.int64)

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
