"""Shapes that a group may have, each with the fewest messages that any place of it has.

A plan may put a ring on any ranks: inside a node, or over several with any number of its ranks in each. What is sent
depends on that. Of every count (out of a rank, out of a node, through a card) the least is taken, each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.analytic import AnalyticEngine
from seqloom.cost.communication import (
    ACTIVATION_BYTES,
    Communication,
    GroupTraffic,
    MessageCounts,
    aligned_group_traffic,
    remap_exchanges,
)
from seqloom.cost.profile import AdditiveProfile
from seqloom.cost.shapes import STREAMS
from seqloom.plan import Method, Remap
from seqloom.planners.loops import NEVER

EVERY_SIZE = 64
"""Clusters of up to so many ranks are looked at in every size of ring."""
ENDLESS = 1 << 30
"""Slices of a route whose filling and emptying takes no time."""


class Place(NamedTuple):
    """A shape, and reaches that are no worse than that of any group of this shape."""

    shape: GroupShape
    reaches: tuple[GroupTraffic, ...]


def every_place(cost: CostModel) -> list[Place]:
    """Rings and gathers of any size, with any Ulysses inside.

    Above ``EVERY_SIZE`` ranks, of any size up to two nodes, then over whole nodes, four sizes per doubling. Published
    constants know their own shapes only. Where teams split weights, of whole teams.
    """
    card_of = cost.cluster.nic_of_gpu
    if isinstance(cost.profile, AdditiveProfile):
        return [Place(shape, (aligned_group_traffic(shape, card_of),)) for shape in cost.shapes]
    node, sizes = cost.node_size, [size for size in cost.family.sizes if size % cost.tensor == 0]
    every = cost.ranks if cost.ranks <= EVERY_SIZE else 2 * node
    degrees = set(range(1, every + 1)) | {node * k for k in _grid(cost.ranks // node)} | set(sizes)
    found = []
    for degree in sorted(degrees):
        for ulysses in sizes:
            if ulysses <= cost.model.heads and degree % ulysses == 0:
                for method in Method if degree > ulysses else (Method.RING,):
                    shape = GroupShape(ulysses, degree // ulysses, method)
                    reaches = _reaches(shape, cost)
                    found += [Place(shape, reaches)] * bool(reaches)
    return found


def _grid(most: int) -> list[int]:
    """1 to 8, then 10, 12, 14, 16, 20, ...: four per doubling, none above ``most``."""
    found = list(range(1, 9))
    while found[-1] < most:
        found.append(found[-1] + (1 << (found[-1].bit_length() - 3)))
    return [k for k in found if k <= most]


def _reaches(shape: GroupShape, cost: CostModel) -> tuple[GroupTraffic, ...]:
    """Inside a node; over nodes, each message through the card near its sender; over nodes, routed."""
    node, card_of, tensor = cost.node_size, cost.cluster.nic_of_gpu, cost.tensor
    if shape.ulysses > node:  # blocks of whole nodes: wherever they lie, all their messages leave
        direct = aligned_group_traffic(shape, card_of, tensor)
        return (direct, direct._replace(proxies=len(set(card_of)), slices=ENDLESS)) if shape.ring > 1 else (direct,)
    blocks = node // shape.ulysses
    found = (aligned_group_traffic(shape, card_of, tensor),) if shape.ring <= blocks else ()
    if shape.ring > 1 and cost.ranks > node and shape.ring <= blocks * (cost.ranks // node):
        direct = _spread(shape, blocks, cost.ranks // node, len(set(card_of)), tensor)
        found += (direct, direct._replace(proxies=len(set(card_of)), slices=ENDLESS))
    return found


def _spread(shape: GroupShape, blocks: int, nodes: int, cards: int, tensor: int) -> GroupTraffic:
    """The fewest messages of a group over two or more nodes, each with 1 to ``blocks`` of its ``ring`` Ulysses blocks.

    With ``b`` blocks in its fullest node, ``b (ring - b)`` is least at one of the ends.
    """
    inner, ring = shape.ulysses, shape.ring
    fullest, least = min(blocks, ring - 1), -(-ring // nodes)
    left = inner * min(b * (ring - b) for b in (least, fullest))
    counts = range(max(2, -(-ring // blocks)), min(nodes, ring) + 1)  # of nodes
    once = inner * min(-(-ring // count) * (count - 1) for count in counts)

    def traffic(sent: int, left: int) -> MessageCounts:
        return MessageCounts(near=0, sent=0, left=left, card=max(sent, -(-left // cards)))

    return GroupTraffic(
        ulysses=MessageCounts(near=inner // tensor - 1),
        ring=traffic(1, inner),
        gather=traffic(ring - fullest, left),
        once=traffic(1, once),
        team=MessageCounts(near=tensor - 1),
    )


# ---- merged: planners.bounds.remap
# How much of a token's linear time a second layout can take off the rank that has it in attention.


def movable_ns(cost: CostModel, policy: MemoryPolicy) -> float:
    """ns per token that leave a rank at best: what a token's own journey costs stays with it.

    0 where nothing can move: shard groups of one rank, and profiles that have no price for it.
    """
    if cost.shard_group_size == 1 or cost.tensor > 1 or not isinstance(cost.engine, AnalyticEngine):
        return 0.0
    most = 0.0
    for remap in Remap:
        moved = sum(linear for linear, _ in cost.engine.layout_token_ns(policy, remap).values())
        most = max(most, moved - journey_ns(cost, cost.engine.links, policy, remap))
    return most


def journey_ns(cost: CostModel, links: Communication, policy: MemoryPolicy, remap: Remap) -> float:
    """Least ns of a remap's exchanges per token that leaves a rank, in all layers, forward and backward.

    Where a shard group has several nodes, part of a rank's tokens may use the network beside the rest on NVLink.
    """
    values, _ = remap_exchanges(cost.model, remap, policy.checkpoint)
    near, far = links.message_ns(values * cost.model.layers * ACTIVATION_BYTES, "all_to_all")
    return near if cost.shard_group_size <= cost.node_size else near * far / (near + far)


# ---- merged: planners.bounds.prices
# What every document costs at every degree, in the best shape and place: the ground that the bound stands on.
#
# A plan may put a group on any ranks, in rings of sizes that no planner tries. So the bound prices shapes of its
# own.


ROUNDED = 4.0
"""ns by which the parts of a price, each rounded to whole ns, may be less than their sum."""


@dataclass(frozen=True, eq=False)
class Prices:
    """One policy: ``D`` degrees, ``n`` documents, ``L = 3`` lanes. ns.

    Lane 0 is computing. Lane 1 is computing with ring messages in place of the attention that may hide them: that of
    the ring itself and that of documents on one rank. Lane 2 is the network.
    """

    policy: MemoryPolicy
    degree: np.ndarray
    """float64[D]"""
    cost: np.ndarray
    """float64[L, D, n]: what the document adds to each of its ranks."""
    extra: np.ndarray
    """float64[L, D]: what its group adds to each of its ranks before any document."""
    once: np.ndarray
    """float64[L]: what a round costs a rank before any group."""
    pool: np.ndarray
    """float64[D, n]: of lanes 0 and 1, what other ranks of the shard group may take over."""
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

    shape: GroupShape
    token: np.ndarray
    fixed: np.ndarray


def price_all(lengths: np.ndarray, cost: CostModel, policies: Sequence[MemoryPolicy]) -> list[Prices]:
    """The documents under each of the policies."""
    return [price(cost.padded_lengths(lengths).astype(float), cost, policy) for policy in policies]


def price(tokens: np.ndarray, cost: CostModel, policy: MemoryPolicy) -> Prices:
    """Price documents of so many tokens in every place, and keep the best of every degree."""
    places = every_rate(cost, policy)
    least = GroupShape(cost.tensor, 1), policy, GroupTraffic()  # one team, its exchanges left out
    whole = cost.engine.token_ns(*least)
    linear = (whole["linear"] + whole.get("head", 0.0)) * cost.tensor
    once = _once(cost, policy)
    attention = {ring: cost.engine.attention_ns(tokens, ring, policy) for ring in {p.shape.ring for p in places}}
    capacity, movable = cost.capacity(policy), movable_ns(cost, policy)
    degrees, rows = sorted({place.shape.degree for place in places}), []
    for degree in degrees:
        pool = movable * tokens / degree
        best: list[np.ndarray] = []
        for place in places:
            if place.shape.degree != degree:
                continue
            lanes = place.token[:, None] * tokens
            computing = attention[place.shape.ring] * cost.engine.attention_share(place.shape)
            computing = computing + cost.engine.kernel_call_ns(tokens, place.shape.kernel_calls, policy)
            lanes[: 1 if place.shape.overlaps_kv else 2] += computing
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
        policy=policy,
        degree=np.array(degrees, float),
        cost=lanes.transpose(1, 0, 2),
        extra=extra.T,
        once=once,
        pool=pools,
        alone=alone,
        linear=linear,
        tokens=tokens,
        capacity=float(capacity),
        rings=any(place.shape.overlaps_kv for place in places),
    )


@lru_cache(maxsize=32)
def every_rate(cost: CostModel, policy: MemoryPolicy) -> tuple[Rates, ...]:
    """The rates of every shape, lane by lane the least of its reaches."""
    found = []
    for shape, reaches in every_place(cost):
        token, fixed = [], []
        for reach in reaches:
            routed = shape._replace(routed=reach.proxies > 0)
            token.append(_lanes(cost.engine.token_ns(routed, policy, reach), shape.overlaps_kv))
            fixed.append(_lanes(cost.engine.fixed_ns(routed, policy, reach._replace(slices=1)), shape.overlaps_kv))
        found.append(Rates(shape, np.min(token, axis=0), np.min(fixed, axis=0)))
    return tuple(found)


def _once(cost: CostModel, policy: MemoryPolicy) -> np.ndarray:
    """float64[L]: what a round costs a rank whatever its groups."""
    fixed = cost.engine.fixed_ns(GroupShape(cost.tensor, 1), policy, GroupTraffic())
    fixed.pop("tensor", None)
    return np.array(_lanes(fixed, hides=False)) - 1


def _lanes(parts: dict[str, float], hides: bool) -> list[float]:
    """The parts of each lane; what has no ring hides nothing, so that its lane 1 is its lane 0."""
    names = (STREAMS[0], STREAMS[1] if hides else STREAMS[0], STREAMS[2])
    return [sum(parts.get(name, 0.0) for name in lane) for lane in names]


def _alone(
    lanes: np.ndarray, extra: np.ndarray, once: np.ndarray, pool: np.ndarray, degree: int, cost: CostModel
) -> np.ndarray:
    """float64[n]: least time of a round with each document, at this degree.

    What may leave its ranks can only be spread over their shard groups.
    """
    own = lanes + (extra + once)[:, None]
    stays = np.maximum(np.maximum(own[0], own[1]) - pool, own[2])
    reached = min(degree * cost.shard_group_size, cost.ranks)
    return np.maximum(stays, once[0] + (lanes[0] + extra[0]) * degree / reached)
