"""What every document costs at every degree, in the best shape and place: the ground that the bound stands on.

A plan may put a group on any ranks, in rings of sizes that no planner tries. So the bound prices shapes of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, Shape, Variant
from seqloom.cost.reach import Reach
from seqloom.cost.values import LANES
from seqloom.planners.bounds.places import every_place
from seqloom.planners.bounds.remap import movable_ns
from seqloom.planners.fill import NEVER

ROUNDED = 4.0
"""ns by which the parts of a price, each rounded to whole ns, may be less than their sum."""


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


class Rates(NamedTuple):
    """The best place of a shape: float64[L] ns per token without attention, and ns of a group before any document."""

    shape: Shape
    token: np.ndarray
    fixed: np.ndarray


def price_all(lengths: np.ndarray, cost: CostModel, variants: Sequence[Variant]) -> list[Prices]:
    """The documents under each of the variants."""
    return [price(cost.tokens(lengths).astype(float), cost, variant) for variant in variants]


def price(tokens: np.ndarray, cost: CostModel, variant: Variant) -> Prices:
    """Price documents of so many tokens in every place, and keep the best of every degree."""
    places = every_rate(cost, variant)
    least = Shape(cost.tensor, 1), variant, Reach()  # one team, its exchanges left out
    whole = cost.engine.rates(*least)
    linear = (whole["linear"] + whole.get("head", 0.0)) * cost.tensor
    once = _once(cost, variant)
    attention = {ring: cost.engine.attention(tokens, ring, variant) for ring in {p.shape.ring for p in places}}
    capacity, movable = cost.capacity(variant), movable_ns(cost, variant)
    degrees, rows = sorted({place.shape.degree for place in places}), []
    for degree in degrees:
        pool = movable * tokens / degree
        best: list[np.ndarray] = []
        for place in places:
            if place.shape.degree != degree:
                continue
            lanes = place.token[:, None] * tokens
            computing = attention[place.shape.ring] * cost.engine.attention_share(place.shape)
            computing = computing + cost.engine.document_calls(tokens, place.shape.kernels, variant)
            lanes[: 1 if place.shape.hides else 2] += computing
            if degree == 1:
                lanes[1] = linear * tokens  # its attention may be what a ring hides behind
            lanes, extra = np.maximum(lanes - ROUNDED, 0.0), np.maximum(place.fixed - once - ROUNDED, 0.0)
            alone = _alone(lanes, extra, once, pool, degree, cost)
            alone[tokens > degree * capacity] = float(NEVER)
            found = [lanes, extra, alone]
            best = [np.minimum(a, b) for a, b in zip(best, found, strict=True)] if best else found
        rows.append((*best, pool))
    lanes, extra, alone, pools = (np.stack(values) for values in zip(*rows, strict=True))
    return Prices(
        variant=variant,
        degree=np.array(degrees, float),
        cost=lanes.transpose(1, 0, 2),
        extra=extra.T,
        once=once,
        pool=pools,
        alone=alone,
        linear=linear,
        tokens=tokens,
        capacity=float(capacity),
        rings=any(place.shape.hides for place in places),
    )


@lru_cache(maxsize=32)
def every_rate(cost: CostModel, variant: Variant) -> tuple[Rates, ...]:
    """The rates of every shape, lane by lane the least of its reaches."""
    found = []
    for shape, reaches in every_place(cost):
        token, fixed = [], []
        for reach in reaches:
            routed = shape._replace(routed=reach.proxies > 0)
            token.append(_lanes(cost.engine.rates(routed, variant, reach), shape.hides))
            fixed.append(_lanes(cost.engine.fixed(routed, variant, reach._replace(slices=1)), shape.hides))
        found.append(Rates(shape, np.min(token, axis=0), np.min(fixed, axis=0)))
    return tuple(found)


def _once(cost: CostModel, variant: Variant) -> np.ndarray:
    """float64[L]: what a round costs a rank whatever its groups."""
    fixed = cost.engine.fixed(Shape(cost.tensor, 1), variant, Reach())
    fixed.pop("tensor", None)
    return np.array(_lanes(fixed, hides=False)) - 1


def _lanes(parts: dict[str, float], hides: bool) -> list[float]:
    """The parts of each lane; what has no ring hides nothing, so that its lane 1 is its lane 0."""
    names = (LANES[0], LANES[1] if hides else LANES[0], LANES[2])
    return [sum(parts.get(name, 0.0) for name in lane) for lane in names]


def _alone(
    lanes: np.ndarray, extra: np.ndarray, once: np.ndarray, pool: np.ndarray, degree: int, cost: CostModel
) -> np.ndarray:
    """float64[n]: least time of a round with each document, at this degree.

    What may leave its ranks can only be spread over their islands.
    """
    own = lanes + (extra + once)[:, None]
    stays = np.maximum(np.maximum(own[0], own[1]) - pool, own[2])
    reached = min(degree * cost.island_size, cost.ranks)
    return np.maximum(stays, once[0] + (lanes[0] + extra[0]) * degree / reached)
