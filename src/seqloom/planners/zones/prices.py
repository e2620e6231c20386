"""Prices that planner ``zones`` compares: every document on one rank, and the long ones in every group shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, CostTables, GroupShape, MemoryPolicy
from seqloom.layout import Span
from seqloom.plan import Group
from seqloom.planners.loops import NEVER

SINGLE_RANK = GroupShape(1, 1)
PROBE = 1 << 16
"""Tokens at which the time of linear layers, which is proportional, is read off."""
CUTTABLE_SHARE = 8
"""Documents that take less than one part in this many of a rank's round are never cut: they serve to even out ranks."""


@dataclass(frozen=True, eq=False)
class SingleRankPrices:
    """One batch under one policy, every document on one rank: enough to see whether the policy can win."""

    lengths: np.ndarray
    cost: CostModel
    policy: MemoryPolicy
    tables: CostTables

    @classmethod
    def of(cls, lengths: np.ndarray, cost: CostModel, policy: MemoryPolicy) -> SingleRankPrices:
        """Price the documents on one rank, whether it holds them or not."""
        return cls(lengths, cost, policy, cost.tables(lengths, policy, (SINGLE_RANK,)))

    @property
    def min_rounds(self) -> int:
        """Rounds without which memory does not hold the batch."""
        return max(1, -(-int(self.tables.tokens.sum()) // (self.tables.capacity * self.cost.ranks)))

    def least_ns(self, rounds: int) -> int:
        """Step in ns if every rank were busy all the time, in so many rounds."""
        fixed, _, floor = self.tables.fixed[:, 0].tolist()
        work = int(self.tables.cost[0, 0].sum()) // self.cost.ranks + rounds * fixed
        return max(work, rounds * floor) + self.cost.step_overhead_ns(self.policy)


class CutPrices(NamedTuple):
    """What it costs to cut long documents, each in a group of its own. ``m`` long documents, ``S`` shapes."""

    rank_ns: np.ndarray
    """int64[S, m]: time on each rank of the group; NEVER where memory does not hold it."""
    total_ns: np.ndarray
    """int64[S, m]: time of all its ranks together."""
    order: np.ndarray
    """int64[S, m]: shapes by rising total."""
    cheapest: list[int]
    """Least total of every document over shapes of several ranks."""


@dataclass(frozen=True, eq=False)
class ZonePrices:
    """One batch under one policy. Times in ns per rank; ``n`` documents, ``m`` long ones, ``S`` shapes."""

    cost: CostModel
    policy: MemoryPolicy
    capacity: int
    """Tokens a rank holds in one round."""
    tokens: np.ndarray
    """int64[n]: tokens a document occupies."""
    whole_ns: np.ndarray
    """int64[n]: time of a document on one rank."""
    attention_ns: np.ndarray
    """int64[n]: of that, its attention: what a rank computes while messages of other documents are under way."""
    order: np.ndarray
    """int64[n]: documents by falling time, ties by number."""
    fixed_ns: int
    """Time of a rank's round before its first document."""
    floor_ns: int
    """Parameter gathers and gradient reduction of a round: it is never shorter."""
    column: dict[int, int]
    """Long document -> its column in what follows."""
    shapes: tuple[GroupShape, ...]
    compute_ns: np.ndarray
    """int64[S, m]: computing and exposed exchanges of a document in each shape; NEVER where memory does not hold it."""
    ring_ns: np.ndarray
    """int64[S, m]: the same with the ring's messages in place of attention; 0 without a ring."""
    nic_ns: np.ndarray
    """int64[S, m]: occupancy of the NIC."""
    group_ns: np.ndarray
    """int64[2, S]: what a group adds to the first two before its first document."""

    @classmethod
    def of(cls, single: SingleRankPrices) -> ZonePrices:
        """Price a batch; only documents that may be worth cutting are priced in every shape."""
        cost, policy, tables = single.cost, single.policy, single.tables
        whole, capacity = tables.cost[0, 0], tables.capacity
        order = np.argsort(-whole, kind="stable")
        least = int(whole.sum()) // (cost.ranks * single.min_rounds * CUTTABLE_SHARE)
        long = order[(whole[order] > least) | (tables.tokens[order] > capacity)]
        cut = cost.tables(single.lengths[long], policy)
        fits = cut.tokens[None, :] <= cut.degree[:, None] * capacity
        fixed = int(tables.fixed[0, 0])
        probe = cost.group_cost(Group((0,), 1, 1, (Span(0, 0, PROBE),)), policy)
        linear = tables.tokens * (probe.linear + probe.head) // PROBE
        return cls(
            cost=cost,
            policy=policy,
            capacity=capacity,
            tokens=tables.tokens,
            whole_ns=whole,
            attention_ns=np.maximum(0, whole - linear),
            order=order,
            fixed_ns=fixed,
            floor_ns=int(tables.fixed[2, 0]),
            column={k: i for i, k in enumerate(long.tolist())},
            shapes=cut.shapes,
            compute_ns=np.where(fits, cut.cost[0], NEVER),
            ring_ns=cut.cost[1],
            nic_ns=cut.cost[2],
            group_ns=np.stack([cut.fixed[0] - fixed, np.where(cut.fixed[1] > 0, cut.fixed[1] - fixed, 0)]),
        )

    def cut_prices(self, hidden: bool) -> CutPrices:
        """Prices of cuts; ``hidden``: the rank's other work is taken to hide the ring's messages."""
        return self._cut_prices[hidden]

    @cached_property
    def _cut_prices(self) -> tuple[CutPrices, CutPrices]:
        computing = self.compute_ns + self.group_ns[0][:, None]
        exposed = np.maximum(computing, self.ring_ns + self.group_ns[1][:, None])
        degree = np.array([shape.degree for shape in self.shapes], np.int64)[:, None]
        found = []
        for rank_ns in (exposed, computing):
            total = np.where(rank_ns < NEVER, rank_ns * degree, NEVER)
            cheapest = np.where(degree > 1, total, NEVER).min(axis=0).tolist() if len(total) else []
            found.append(CutPrices(rank_ns, total, np.argsort(total, axis=0, kind="stable"), cheapest))
        return found[0], found[1]

    @cached_property
    def tokens_list(self) -> list[int]:
        """`tokens` as a plain list, for loops over single documents."""
        return self.tokens.tolist()

    @cached_property
    def whole_ns_list(self) -> list[int]:
        """`whole_ns` as a plain list."""
        return self.whole_ns.tolist()
