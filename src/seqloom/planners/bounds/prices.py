"""What every document costs at every degree, in the best shape and place: the ground that the bound stands on.

A plan may put a group on any ranks, in rings of sizes that no planner tries. So the bound prices shapes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqloom.cost import CostModel, Shape, Variant
from seqloom.cost.profile import AdditiveProfile
from seqloom.plan import Group, Span
from seqloom.planners.bounds.remap import movable_share
from seqloom.planners.fill import NEVER

EVERY_SIZE = 64
"""Clusters of up to so many ranks are looked at in every size of ring."""
PROBE = 1 << 20
"""Tokens of the document from which the linear time of a token is read."""


@dataclass(frozen=True, eq=False)
class Prices:
    """One variant: ``D`` degrees, ``n`` documents, ``L = 3`` lanes. ns.

    Lane 0 is computing. Lane 1 is computing with ring messages in place of the attention that may hide them: that of
    the ring itself and that of documents on one rank. Lane 2 is the network.
    """

    variant: Variant
    degree: np.ndarray
    """float64[D]"""
    cost: np.ndarray
    """float64[L, D, n]: what the document adds to each of its ranks."""
    extra: np.ndarray
    """float64[L, D]: what its group adds to each of its ranks before any document."""
    once: np.ndarray
    """float64[L]: what a round costs a rank before any group."""
    pool: np.ndarray
    """float64[D, n]: of lanes 0 and 1, what other ranks of the island may take over."""
    alone: np.ndarray
    """float64[D, n]: least time of a round with this document; NEVER where memory does not hold it."""
    linear: float
    """Least time of a token outside attention, on the rank that has it in the linear layout."""
    tokens: np.ndarray
    """float64[n]"""
    capacity: float
    rings: bool
    """Whether there are rings, and so something to hide."""


def every_shape(cost: CostModel) -> tuple[Shape, ...]:
    """Shapes that a group may have: rings of any size, with any Ulysses inside.

    Above ``EVERY_SIZE`` ranks, rings over whole nodes, four sizes per doubling. Published constants know their own
    shapes only.
    """
    if isinstance(cost.profile, AdditiveProfile):
        return cost.shapes
    node, sizes = cost.node_size, cost.family.sizes
    every = max(2 * node, EVERY_SIZE) if cost.ranks <= EVERY_SIZE else 2 * node
    degrees = {d for d in range(1, every + 1) if d <= cost.ranks} | {node * k for k in _grid(cost.ranks // node)}
    found = set(cost.shapes)
    for degree in degrees | set(sizes):
        for ulysses in sizes:
            inside = degree <= node or node % ulysses == 0 or ulysses % node == 0
            if ulysses <= cost.model.heads and degree % ulysses == 0 and inside:
                found.add(Shape(ulysses, degree // ulysses))
    return tuple(sorted(found))


def _grid(most: int) -> list[int]:
    """1 to 8, then 10, 12, 14, 16, 20, ...: four per doubling, none above ``most``."""
    found = list(range(1, 9))
    while found[-1] < most:
        found.append(found[-1] + (1 << (found[-1].bit_length() - 3)))
    return [k for k in found if k <= most]


def price(lengths: np.ndarray, cost: CostModel, variant: Variant) -> Prices:
    """Price the documents in every shape, and keep the best of every degree."""
    tables = cost.tables(lengths, variant, every_shape(cost))
    tokens, degree, capacity = tables.tokens.astype(float), tables.degree.astype(float), float(tables.capacity)
    linear = _linear_ns(cost, variant)
    rings = np.array([shape.ring > 1 for shape in tables.shapes])
    lanes, fixed = tables.cost.astype(float), tables.fixed.astype(float)
    lanes[1, ~rings], fixed[1, ~rings] = lanes[0, ~rings], fixed[0, ~rings]
    lanes[1, degree == 1] = np.maximum(linear * tokens - 1, 0.0)  # its attention may be what a ring hides behind
    once = fixed[0].min(), fixed[0].min(), fixed[2].min()
    extra = fixed - np.array(once)[:, None]
    share = movable_share(cost, variant, linear)
    pool = share * linear * tokens / degree[:, None]
    if share:
        lanes -= 1.0  # tokens that move are rounded to whole ns elsewhere
        np.maximum(lanes, 0.0, out=lanes)
        pool = np.minimum(pool, lanes[:2].min(axis=0))
    alone = _alone(lanes, extra, np.array(once), pool, degree, cost)
    alone[tokens > degree[:, None] * capacity] = float(NEVER)
    degrees = np.unique(degree)
    return Prices(
        variant=variant,
        degree=degrees,
        cost=_cheapest(lanes, degree, degrees, axis=1),
        extra=_cheapest(extra, degree, degrees, axis=1),
        once=np.array(once),
        pool=share * linear * tokens / degrees[:, None],
        alone=_cheapest(alone, degree, degrees, axis=0),
        linear=linear,
        tokens=tokens,
        capacity=capacity,
        rings=bool(rings.any()),
    )


def price_all(lengths: np.ndarray, cost: CostModel, variants: Sequence[Variant]) -> list[Prices]:
    """The documents under each of the variants."""
    return [price(lengths, cost, variant) for variant in variants]


def _alone(
    lanes: np.ndarray, extra: np.ndarray, once: np.ndarray, pool: np.ndarray, degree: np.ndarray, cost: CostModel
) -> np.ndarray:
    """float64[S, n]: least time of a round with each document, in each shape.

    What may leave its ranks can only be spread over their islands.
    """
    own = lanes + extra[:, :, None]
    stays = np.stack([own[0] - pool, own[1] - pool, own[2]]) + once[:, None, None]
    reached = np.minimum(degree * cost.island_size, cost.ranks)[:, None]
    spread = once[0] + own[0] * degree[:, None] / reached
    return np.maximum(stays.max(axis=0), spread)


def _cheapest(values: np.ndarray, degree: np.ndarray, degrees: np.ndarray, axis: int) -> np.ndarray:
    """The least of the shapes of every degree: one row for what was one per shape."""
    rows = [values.compress(degree == d, axis=axis).min(axis=axis) for d in degrees]
    return np.stack(rows, axis=axis)


def _linear_ns(cost: CostModel, variant: Variant) -> float:
    """ns of a token outside attention: matrix products, elementwise work, vocabulary."""
    parts = cost.group_parts(Group((0,), 1, 1, (Span(0, 0, PROBE),)), variant)
    return (parts.linear + parts.head) / PROBE
