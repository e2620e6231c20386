"""What the partitioner compares: the time of every document whole, and of the long ones in every shape."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqloom.cost import CostModel, Shape, Variant
from seqloom.plan import Group, Span
from seqloom.planners.fill import NEVER

WHOLE = Shape(1, 1)
PROBE = 1 << 16
"""Tokens at which the time of linear layers, which is proportional, is read off."""
CUTTABLE_SHARE = 8
"""Documents that take less than one part in this many of a rank's round are never cut: whole ones level the ranks."""


@dataclass(frozen=True, eq=False)
class Prices:
    """One batch under one variant. Times in ns per rank; ``n`` documents, ``m`` long ones, ``S`` shapes."""

    cost: CostModel
    variant: Variant
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
    shapes: tuple[Shape, ...]
    lane0: np.ndarray
    """int64[S, m]: computing and exposed exchanges of a document in each shape; NEVER where memory does not hold it."""
    ring: np.ndarray
    """int64[S, m]: the same with the ring's messages in place of attention; 0 without a ring."""
    network: np.ndarray
    """int64[S, m]: occupancy of the network card."""
    extra: np.ndarray
    """int64[2, S]: what a group adds to the first two lanes before its first document."""

    @classmethod
    def of(cls, lengths: np.ndarray, cost: CostModel, variant: Variant) -> Prices:
        """Price a batch; only documents that may be worth cutting are priced in every shape."""
        alone = cost.tables(lengths, variant, (WHOLE,))
        whole, capacity = alone.cost[0, 0], alone.capacity
        order = np.argsort(-whole, kind="stable")
        rounds = max(1, -(-int(alone.tokens.sum()) // (capacity * cost.ranks)))
        level = int(whole.sum()) // (cost.ranks * rounds)
        falling = whole[order]
        long = order[(falling * CUTTABLE_SHARE > level) | (alone.tokens[order] > capacity)]
        long = order[: max(len(long), min(len(order), 2))]
        tables = cost.tables(lengths[long], variant)
        fits = tables.tokens[None, :] <= tables.degree[:, None] * capacity
        lane0, ring, network = tables.cost
        fixed = int(alone.fixed[0, 0])
        linear = cost.group_parts(Group((0,), 1, 1, (Span(0, 0, PROBE),)), variant)
        rings = tables.fixed[1] > 0
        extra = np.stack([tables.fixed[0] - fixed, np.where(rings, tables.fixed[1] - fixed, 0)])
        return cls(
            cost=cost,
            variant=variant,
            capacity=capacity,
            tokens=alone.tokens,
            whole=whole,
            attention=np.maximum(0, whole - alone.tokens * (linear.linear + linear.head) // PROBE),
            order=order,
            fixed=fixed,
            floor=int(alone.fixed[2, 0]),
            column={int(k): i for i, k in enumerate(long)},
            shapes=tables.shapes,
            lane0=np.where(fits, lane0, NEVER),
            ring=ring,
            network=network,
            extra=extra,
        )

    def charges(self, hidden: bool) -> np.ndarray:
        """int64[S, m]: what a document in its own group costs each of its ranks; NEVER where it does not fit.

        Args:
            hidden: whether the ring's messages are taken to hide behind other work of the rank.
        """
        lane0 = self.lane0 + self.extra[0][:, None]
        if hidden:
            return lane0
        return np.maximum(lane0, self.ring + self.extra[1][:, None])
