"""The least that a document costs at every degree, in any shape and on any ranks.

A plan may put a ring on any ranks: inside a node, or over several nodes with any number of its ranks in each. Its
traffic depends on that. The bound takes every message count (out of a rank, out of a node, through a NIC) at its least
over all such placements, each for itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.communication import (
    ACTIVATION_BYTES,
    Communication,
    GroupTraffic,
    MessageCounts,
    group_traffic,
    remap_exchanges,
)
from seqloom.cost.shapes import BY_SPEED, STREAMS
from seqloom.cost.speeds import RankSpeeds
from seqloom.plan import Method, Reduce, Remap
from seqloom.planners.loops import NEVER

EVERY_SIZE = 64
"""Largest cluster on which the bound prices rings of every size."""
ENDLESS = 1 << 30
"""So many slices that filling and draining a route takes no time."""
ROUNDED = 4.0
"""ns by which the parts of a price, each rounded to whole ns, may be less than their sum."""


@dataclass(frozen=True, eq=False)
class DegreePrices:
    """One policy: ``D`` degrees, ``n`` documents, ``L = 3`` streams. ns.

    Stream 0 is computing. Stream 1 is computing with ring messages in place of the attention that may hide them: that
    of the ring itself and that of documents on one rank. Stream 2 is the network.
    """

    policy: MemoryPolicy
    degree: np.ndarray  # float64[D]
    cost: np.ndarray  # float64[L, D, n]: what the document adds to each of its ranks
    group_fixed: np.ndarray  # float64[L, D]: what its group adds to each of its ranks before any document
    round_fixed: np.ndarray  # float64[L]: what a round costs a rank before any group
    movable: np.ndarray  # float64[D, n]: of streams 0 and 1, what other ranks of the shard group may take over
    solo_ns: np.ndarray  # float64[D, n]: least time of a round with this document; NEVER where memory does not hold it
    linear: float  # Least time of a token outside attention that stays on the rank with it in the linear layout
    tokens: np.ndarray  # float64[n]
    capacity: float
    overlaps: bool  # Whether some shape hides ring messages behind attention


class SpeedScale(NamedTuple):
    """What times of the profile are multiplied with in the bound; see `of_fastest` and `weighted`."""

    tokens: float = 1.0  # linear layers, head and experts
    attention: tuple[float, ...] = ()  # attention of groups of 1, 2, ... ranks; none: 1
    rest: tuple[float, ...] = ()  # everything else, of groups of 1, 2, ... ranks; none: 1

    def at(self, degree: int) -> tuple[float, float]:
        """(attention, everything else but tokens) of groups of so many ranks."""
        attention, rest = (each[degree - 1] if each else 1.0 for each in (self.attention, self.rest))
        return attention, rest

    @classmethod
    def of_fastest(cls, speeds: RankSpeeds) -> SpeedScale:
        """Times as they are on the fastest ranks; of ``d`` ranks of a group, one is no faster than the d-th fastest."""
        return cls(speeds.classes[0], tuple(np.sort(speeds.slowness).tolist())) if speeds else cls()

    @classmethod
    def weighted(cls, speeds: RankSpeeds) -> SpeedScale:
        """Times of every rank weighted by its speed over that of the fastest one.

        Computing weighs the same on every rank. The rest weighs least on the slowest ranks: of ``d`` ranks, the mean
        of the ``d`` slowest.
        """
        weights = np.sort(speeds.values) * speeds.classes[0]
        means = np.cumsum(weights) / np.arange(1, len(weights) + 1)
        return cls(speeds.classes[0], (speeds.classes[0],) * len(weights), tuple(means.tolist()))


class ShapeRates(NamedTuple):
    """The best placement of a shape, float64[L] ns each: per token without attention, of a group before any, and of a
    document however short."""

    shape: GroupShape
    token_ns: np.ndarray
    fixed_ns: np.ndarray
    document_ns: np.ndarray


def price_documents(
    tokens: np.ndarray, cost: CostModel, policy: MemoryPolicy, scale: SpeedScale | None = None
) -> DegreePrices:
    """Price documents of so many tokens, float64[n], in every shape, and keep the best of every degree.

    Without a ``scale``, the times are those of the fastest ranks.
    """
    scale = SpeedScale.of_fastest(cost.speeds) if scale is None else scale
    rates = shape_rates(cost, policy, scale)
    single = cost.engine.token_ns(GroupShape(cost.tensor, 1), policy, GroupTraffic())  # one TP group, no exchanges
    own = scaled_parts(single, scale, cost.tensor)
    everywhere = sum(own.get(name, 0.0) for name in ("head", "routed", "expert"))
    linear = (own["linear"] - cost.engine.scan_token_ns(policy) * scale.tokens + everywhere) * cost.tensor
    round_fixed = _round_fixed(cost, policy)
    attention = cost.engine.attention_ns(tokens, [rate.shape for rate in rates], policy)
    capacity, token_movable = cost.capacity(policy), movable_ns(cost, policy, scale.tokens)
    degrees, rows = sorted({rate.shape.degree for rate in rates}), []
    for degree in degrees:
        movable = token_movable * tokens / degree
        best: list[np.ndarray] = []
        for (shape, token_ns, fixed_ns, document_ns), computing in zip(rates, attention, strict=True):
            if shape.degree != degree:
                continue
            streams = token_ns[:, None] * tokens + document_ns[:, None]
            streams[: 1 if shape.overlaps_kv else 2] += computing * scale.at(degree)[0]
            if degree == 1:
                streams[1] = linear * tokens  # its attention may be what a ring hides behind
            streams = np.maximum(streams - ROUNDED, 0.0)
            group_fixed = np.maximum(fixed_ns - round_fixed - ROUNDED, 0.0) * scale.at(degree)[1]
            solo_ns = _solo_ns(streams, group_fixed, round_fixed, movable, degree, cost)
            solo_ns[tokens > degree * capacity] = float(NEVER)
            found = [streams, group_fixed, solo_ns]
            best = [np.minimum(a, b) for a, b in zip(best, found, strict=True)] if best else found
        rows.append((*best, movable))
    streams, group_fixed, solo_ns, movable = (np.stack(values) for values in zip(*rows, strict=True))
    return DegreePrices(
        policy=policy,
        degree=np.array(degrees, float),
        cost=streams.transpose(1, 0, 2),
        group_fixed=group_fixed.T,
        round_fixed=round_fixed,
        movable=movable,
        solo_ns=solo_ns,
        linear=linear - shared_ns(cost, policy, scale.tokens),
        tokens=tokens,
        capacity=float(capacity),
        overlaps=any(rate.shape.overlaps_kv for rate in rates),
    )


def _solo_ns(
    streams: np.ndarray,
    group_fixed: np.ndarray,
    round_fixed: np.ndarray,
    movable: np.ndarray,
    degree: float,
    cost: CostModel,
) -> np.ndarray:
    """float64[n]: least time of a round with one document that adds these streams, float64[L, n], at this degree."""
    own = streams + (group_fixed + round_fixed)[:, None]
    stays = np.maximum(np.maximum(own[0], own[1]) - movable, own[2])
    reached = min(degree * cost.shard_group_size, cost.ranks)  # what moves can only go over these ranks
    return np.maximum(stays, round_fixed[0] + (streams[0] + group_fixed[0]) * degree / reached)


def price_mixes(prices: Sequence[DegreePrices], cost: CostModel, parts: int) -> list[DegreePrices]:
    """Price rounds some of whose layers recompute less, with the policies among these that differ by that.

    Of each pair, the shares of lighter layers are cut into so many parts. No share of a part is cheaper than the
    share at its lighter end, nor holds more than the one at its heavier end, so each part counts as a policy with the
    price of the one and the capacity of the other. All of them together leave no policy out.
    """
    by_checkpoint = {each.policy.checkpoint: each for each in prices}
    pairs = [(c.lighter, c) for c in by_checkpoint if c.lighter in by_checkpoint]
    mixes = [
        _mixed(by_checkpoint[light], by_checkpoint[heavy], part / parts, (part + 1) / parts, cost)
        for light, heavy in pairs
        for part in range(parts)
    ]
    mixed = {checkpoint for pair in pairs for checkpoint in pair}
    return mixes + [each for checkpoint, each in by_checkpoint.items() if checkpoint not in mixed]


def _mixed(light: DegreePrices, heavy: DegreePrices, low: float, high: float, cost: CostModel) -> DegreePrices:
    """Bound what rounds cost and hold whose share of lighter layers is between `low` and `high`.

    A document that fills much of its ranks' memory allows its round a smaller share than `high`.
    """
    per_token = heavy.degree[:, None] / heavy.tokens  # memory per token, in units in which a rank has 1
    spare, more = per_token - 1 / heavy.capacity, 1 / light.capacity - 1 / heavy.capacity
    most = np.clip(spare / more, low, high) if more > 0 else np.full_like(spare, high)

    def ends(name: str, high: float | np.ndarray = high) -> tuple[np.ndarray, np.ndarray]:
        a, b = getattr(heavy, name), getattr(light, name)
        return a + (b - a) * low, a + (b - a) * high

    streams, movable = np.minimum(*ends("cost", most)), np.maximum(*ends("movable", most))
    group_fixed, round_fixed = (np.minimum(*ends(name)) for name in ("group_fixed", "round_fixed"))
    capacity = 1 / (low / light.capacity + (1 - low) / heavy.capacity)
    degrees = enumerate(heavy.degree.tolist())
    solo_ns = np.stack(
        [_solo_ns(streams[:, d], group_fixed[:, d], round_fixed, movable[d], degree, cost) for d, degree in degrees]
    )
    solo_ns[heavy.tokens > heavy.degree[:, None] * capacity * (1 + 1e-12)] = float(NEVER)
    return replace(
        heavy,
        cost=streams,
        group_fixed=group_fixed,
        round_fixed=round_fixed,
        movable=movable,
        solo_ns=solo_ns,
        linear=float(min(ends("linear"))),
        capacity=capacity,
        overlaps=light.overlaps or heavy.overlaps,
    )


def scaled_parts(parts: dict[str, float], scale: SpeedScale, degree: int) -> dict[str, float]:
    """Times by part, without attention, on groups of so many ranks."""
    _, rest = scale.at(degree)
    return {name: ns * (scale.tokens if name in (*BY_SPEED, "routed") else rest) for name, ns in parts.items()}


@lru_cache(maxsize=32)
def shape_rates(cost: CostModel, policy: MemoryPolicy, scale: SpeedScale | None = None) -> tuple[ShapeRates, ...]:
    """The rates of every shape, stream by stream the least over its placements; without a scale, of the profile."""
    scale = SpeedScale() if scale is None else scale
    found = []
    for (shape, traffics), (token_ns, document_ns) in zip(
        candidate_shapes(cost), _document_rates(cost, policy._replace(reduce=Reduce.STEP), scale), strict=True
    ):
        fixed = [
            _streams(
                cost.engine.fixed_ns(shape._replace(routed=each.proxies > 0), policy, each._replace(slices=1)),
                shape.overlaps_kv,
            )
            for each in traffics
        ]
        found.append(ShapeRates(shape, token_ns, np.min(fixed, axis=0), document_ns))
    return tuple(found)


@lru_cache(maxsize=16)
def _document_rates(cost: CostModel, policy: MemoryPolicy, scale: SpeedScale) -> tuple[tuple[np.ndarray, ...], ...]:
    """Of every shape the ns per token and per document of `ShapeRates`; when gradients are reduced does not matter."""
    found = []
    for shape, traffics in candidate_shapes(cost):
        token, document = [], []
        for traffic in traffics:
            routed = shape._replace(routed=traffic.proxies > 0)
            each = scaled_parts(cost.engine.token_ns(routed, policy, traffic), scale, shape.degree)
            token.append(_streams(each, shape.overlaps_kv))
            each = scaled_parts(cost.engine.document_ns(routed, policy, traffic), scale, shape.degree)
            document.append(_streams(each, shape.overlaps_kv))
        found.append((np.min(token, axis=0), np.min(document, axis=0)))
    return tuple(found)


def _round_fixed(cost: CostModel, policy: MemoryPolicy) -> np.ndarray:
    """float64[L]: what a round costs a rank whatever its groups."""
    fixed = cost.engine.fixed_ns(GroupShape(cost.tensor, 1), policy, GroupTraffic())
    fixed.pop("tensor", None)
    return np.array(_streams(fixed, overlaps=False)) - 1


def _streams(parts: dict[str, float], overlaps: bool) -> list[float]:
    """Sum the parts of each stream; what has no ring hides nothing, so that its stream 1 is its stream 0.

    Tokens for experts of other nodes may go from another rank, whose NIC they occupy: the network stream is without.
    """
    network = tuple(name for name in STREAMS[2] if name != "expert_network")
    names = (STREAMS[0], STREAMS[1] if overlaps else STREAMS[0], network)
    return [sum(parts.get(name, 0.0) for name in stream) for stream in names]


@lru_cache(maxsize=8)
def candidate_shapes(cost: CostModel) -> list[tuple[GroupShape, tuple[GroupTraffic, ...]]]:
    """Rings and gathers of any size, with any Ulysses inside, each with traffics no worse than that of any placement.

    Above ``EVERY_SIZE`` ranks, of any size up to two nodes, then over whole nodes, four sizes per doubling. Without
    constants of links, the profile's own shapes. Where tensor-parallel groups split weights, of whole teams. Of a model
    with latents, all of them once more with these, and where scans can pass states, once more so.
    """
    if cost.engine.links is None:
        return [(shape, (cost.aligned_traffic(shape),)) for shape in cost.shapes]
    node, sizes = cost.node_size, [size for size in cost.family.sizes if size % cost.tensor == 0]
    every = cost.ranks if cost.ranks <= EVERY_SIZE else 2 * node
    degrees = set(range(1, every + 1)) | {node * k for k in _grid(cost.ranks // node)} | set(sizes)
    found = []
    for degree in sorted(degrees):
        for ulysses in sizes:
            if ulysses <= cost.model.heads and degree % ulysses == 0:
                for method in Method if degree > ulysses else (Method.RING,):
                    shape = GroupShape(ulysses, degree // ulysses, method)
                    traffics = _least_traffics(shape, cost)
                    found += [(shape, traffics)] * bool(traffics)
    found += [(shape._replace(latent=True), traffics) for shape, traffics in found if cost.model.latent]
    passing = [(shape, traffics) for shape, traffics in found if shape.degree > 1 and cost.model.mixer_state]
    return found + [(shape._replace(states=True), traffics) for shape, traffics in passing]


def _grid(most: int) -> list[int]:
    """1 to 8, then 10, 12, 14, 16, 20, ...: four per doubling, none above ``most``."""
    found = list(range(1, 9))
    while found[-1] < most:
        found.append(found[-1] + (1 << (found[-1].bit_length() - 3)))
    return [k for k in found if k <= most]


def _least_traffics(shape: GroupShape, cost: CostModel) -> tuple[GroupTraffic, ...]:
    """Inside a node; over nodes, each message through the NIC near its sender; over nodes, routed."""
    node, nic_of, tensor = cost.node_size, cost.cluster.nic_of_gpu, cost.tensor
    nics = len(set(nic_of))
    if shape.ulysses > node:  # blocks of whole nodes: wherever they lie, all their messages leave
        direct = group_traffic(range(shape.degree), shape, nic_of, None, tensor)
        return (direct, direct._replace(proxies=nics, slices=ENDLESS)) if shape.ring > 1 else (direct,)
    blocks = node // shape.ulysses
    found: tuple[GroupTraffic, ...] = ()
    if shape.ring <= blocks:
        found += (group_traffic(range(shape.degree), shape, nic_of, None, tensor),)
    if shape.ring > 1 and cost.ranks > node and shape.ring <= blocks * (cost.ranks // node):
        direct = _traffic_over_nodes(shape, blocks, cost.ranks // node, nics, tensor)
        found += (direct, direct._replace(proxies=nics, slices=ENDLESS))
    return found


def _traffic_over_nodes(shape: GroupShape, blocks: int, nodes: int, nics: int, tensor: int) -> GroupTraffic:
    """The fewest messages of a group over two or more nodes, each with 1 to ``blocks`` of its ``ring`` Ulysses blocks.

    With ``b`` blocks in its fullest node, ``b (ring - b)`` is least at one of the ends.
    """
    inner, ring = shape.ulysses, shape.ring
    fullest, least = min(blocks, ring - 1), -(-ring // nodes)
    left = inner * min(b * (ring - b) for b in (least, fullest))  # of each rank to those of its Ulysses index
    counts = range(max(2, -(-ring // blocks)), min(nodes, ring) + 1)  # of nodes
    once = inner * min(-(-ring // count) * (count - 1) for count in counts)

    def traffic(sent: int, left: int) -> MessageCounts:
        return MessageCounts(node_out=left, nic=max(sent, -(-left // nics)))

    return GroupTraffic(
        ulysses=MessageCounts(intra=inner // tensor - 1),
        ring=traffic(1, inner),
        gather=traffic(ring - fullest, left),
        gather_once=traffic(1, once),
        tensor=MessageCounts(intra=tensor - 1),
        everyone=traffic(inner * (ring - fullest), inner * left),
    )


def shared_ns(cost: CostModel, policy: MemoryPolicy, slowness: float = 1.0) -> float:
    """ns of a token's experts that its EP group takes off its rank at best.

    All ranks of the group compute its mean. A rank sends its own tokens in any case, but for those that it has fewer of
    than the mean, as many as it receives.
    """
    times = cost.engine.expert_times(policy)
    if times is None or cost.expert == 1:
        return 0.0
    exchange, _ = cost.engine.layout_token_ns(policy, Remap.ATTENTION)["expert"]
    return times.token_ns * slowness + exchange * (1 - 1 / times.imbalance)


def movable_ns(cost: CostModel, policy: MemoryPolicy, slowness: float = 1.0) -> float:
    """ns of a token's linear time that other ranks can take over at best: its EP group, or those of a second layout.

    With a second layout its transfer stays with its rank. 0 where nothing can move: shard groups of one rank, and
    profiles that have no price for it.
    """
    links = cost.engine.links
    if cost.shard_group_size == 1 or cost.tensor > 1 or links is None:
        return 0.0
    most = shared_ns(cost, policy, slowness)
    for remap in Remap:
        rates = cost.engine.layout_token_ns(policy, remap)
        computed = (*BY_SPEED, "routed")
        moved = sum(
            linear * (slowness if name in computed else 1.0)
            for name, (linear, _) in rates.items()
            if name in STREAMS[0]
        )
        most = max(most, moved - remap_transfer_ns(cost, links, policy, remap))
    return most


def remap_transfer_ns(cost: CostModel, links: Communication, policy: MemoryPolicy, remap: Remap) -> float:
    """Least ns of a remap's exchanges per token that leaves a rank, in all layers, forward and backward.

    Where a shard group has several nodes, part of a rank's tokens may use the network beside the rest on NVLink.
    """
    forms = (False, True) if cost.model.latent else (False,)
    values = min(remap_exchanges(cost.model, remap, policy.checkpoint, latent)[0] for latent in forms)
    near, far = links.message_ns(values * cost.model.layers * ACTIVATION_BYTES, "all_to_all")
    return near if cost.shard_group_size <= cost.node_size else near * far / (near + far)
