"""What the partitioner compares: the time of every document whole, and of the long ones in every shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from seqloom.cost import CostModel, CostTables, GroupShape, MemoryPolicy
from seqloom.layout import Span
from seqloom.plan import Group
from seqloom.planners.loops import NEVER

WHOLE = GroupShape(1, 1)
PROBE = 1 << 16
"""Tokens at which the time of linear layers, which is proportional, is read off."""
CUTTABLE_SHARE = 8
"""Documents that take less than one part in this many of a rank's round are never cut: whole ones level the ranks."""


@dataclass(frozen=True, eq=False)
class Alone:
    """One batch under one policy, every document whole on one rank: enough to see whether the policy can win."""

    lengths: np.ndarray
    cost: CostModel
    policy: MemoryPolicy
    tables: CostTables

    @classmethod
    def of(cls, lengths: np.ndarray, cost: CostModel, policy: MemoryPolicy) -> Alone:
        """Price the documents on one rank, whether it holds them or not."""
        return cls(lengths, cost, policy, cost.tables(lengths, policy, (WHOLE,)))

    @property
    def rounds(self) -> int:
        """Rounds without which memory does not hold the batch."""
        return max(1, -(-int(self.tables.tokens.sum()) // (self.tables.capacity * self.cost.ranks)))

    def least_ns(self, rounds: int) -> int:
        """Step in ns if every rank were busy all the time, in so many rounds."""
        fixed, _, floor = self.tables.fixed[:, 0].tolist()
        work = int(self.tables.cost[0, 0].sum()) // self.cost.ranks + rounds * fixed
        return max(work, rounds * floor) + self.cost.step_overhead_ns(self.policy)


@dataclass(frozen=True, eq=False)
class Prices:
    """One batch under one policy. Times in ns per rank; ``n`` documents, ``m`` long ones, ``S`` shapes."""

    cost: CostModel
    policy: MemoryPolicy
    capacity: int
    """Tokens a rank holds in one round."""
    tokens: np.ndarray
    """int64[n]: tokens a document occupies."""
    whole: np.ndarray
    """int64[n]: time of a document on one rank."""
    attention: np.ndarray
    """int64[n]: of that, its attention: what a rank computes while messages of other documents are under way."""
    order: np.ndarray
    """int64[n]: documents by falling time, ties by number."""
    fixed: int
    """What a rank's round costs before its first document."""
    floor: int
    """Parameter gathers and gradient reduction of a round: it is never shorter."""
    column: dict[int, int]
    """Long document -> its column in what follows."""
    shapes: tuple[GroupShape, ...]
    lane0: np.ndarray
    """int64[S, m]: computing and exposed exchanges of a document in each shape; NEVER where memory does not hold it."""
    ring: np.ndarray
    """int64[S, m]: the same with the ring's messages in place of attention; 0 without a ring."""
    network: np.ndarray
    """int64[S, m]: occupancy of the network card."""
    extra: np.ndarray
    """int64[2, S]: what a group adds to the first two lanes before its first document."""

    @classmethod
    def of(cls, alone: Alone) -> Prices:
        """Price a batch; only documents that may be worth cutting are priced in every shape."""
        cost, policy, tables = alone.cost, alone.policy, alone.tables
        whole, capacity = tables.cost[0, 0], tables.capacity
        order = np.argsort(-whole, kind="stable")
        least = int(whole.sum()) // (cost.ranks * alone.rounds * CUTTABLE_SHARE)
        long = order[(whole[order] > least) | (tables.tokens[order] > capacity)]
        cut = cost.tables(alone.lengths[long], policy)
        fits = cut.tokens[None, :] <= cut.degree[:, None] * capacity
        fixed = int(tables.fixed[0, 0])
        probe = cost.group_cost(Group((0,), 1, 1, (Span(0, 0, PROBE),)), policy)
        linear = tables.tokens * (probe.linear + probe.head) // PROBE
        return cls(
            cost=cost,
            policy=policy,
            capacity=capacity,
            tokens=tables.tokens,
            whole=whole,
            attention=np.maximum(0, whole - linear),
            order=order,
            fixed=fixed,
            floor=int(tables.fixed[2, 0]),
            column={k: i for i, k in enumerate(long.tolist())},
            shapes=cut.shapes,
            lane0=np.where(fits, cut.cost[0], NEVER),
            ring=cut.cost[1],
            network=cut.cost[2],
            extra=np.stack([cut.fixed[0] - fixed, np.where(cut.fixed[1] > 0, cut.fixed[1] - fixed, 0)]),
        )

    def charges(self, hidden: bool) -> np.ndarray:
        """int64[S, m]: what a document in its own group costs each of its ranks; NEVER where it does not fit.

        Args:
            hidden: whether the ring's messages are taken to hide behind other work of the rank.
        """
        return self._charged[hidden][0]

    def spent(self, hidden: bool) -> np.ndarray:
        """int64[S, m]: rank-ns of that, all ranks together."""
        return self._charged[hidden][1]

    def by_price(self, hidden: bool) -> np.ndarray:
        """int64[S, m]: shapes of every document, the cheapest first."""
        return self._charged[hidden][2]

    def cheapest(self, hidden: bool) -> list[int]:
        """Rank-ns of the cheapest cut of every long document."""
        return self._charged[hidden][3]

    @cached_property
    def _charged(self) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray, list[int]], ...]:
        """The four above, with messages exposed and hidden."""
        exposed = np.maximum(self.lane0 + self.extra[0][:, None], self.ring + self.extra[1][:, None])
        return self._compared(exposed), self._compared(self.lane0 + self.extra[0][:, None])

    def _compared(self, charges: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        degree = np.array([shape.degree for shape in self.shapes], np.int64)[:, None]
        spent = np.where(charges < NEVER, charges * degree, NEVER)
        cut = np.where(degree > 1, spent, NEVER)
        least = cut.min(axis=0).tolist() if len(cut) else []
        return charges, spent, np.argsort(spent, axis=0, kind="stable"), least

    @cached_property
    def listed(self) -> tuple[list[int], list[int]]:
        """Tokens and times of whole documents as plain lists, for loops over single documents."""
        return self.tokens.tolist(), self.whole.tolist()
