"""How far a group reaches: how many of its messages stay in a node, leave it, and through which network cards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.compute import kv_width, query_width
from seqloom.cost.shapes import GroupShape
from seqloom.layout import Route, move_between
from seqloom.plan import Checkpoint, Method, Remap
from seqloom.plan.group import even_ranges

if TYPE_CHECKING:
    from collections.abc import Callable

    from seqloom.cost.profile import AnalyticProfile
    from seqloom.describe import Cluster, ModelSpec
    from seqloom.layout import Layout
    from seqloom.plan import StageMicroBatch


class MessageCounts(NamedTuple):
    """Messages of one kind, all of the same size, counted at the busiest place."""

    near: int = 0  # most that a rank sends inside its node
    sent: int = 0  # most that a rank sends out of its node
    left: int = 0  # most that leave one node
    card: int = 0  # most that leave through one network card, every rank using the one near it


class GroupTraffic(NamedTuple):
    """What decides which of a group's messages use NVLink and which the network.

    The units differ: with Ulysses and in a gather a rank sends one message to each of its peers, in a ring one to its
    successor. `once` counts a gather in which what several ranks of a node want crosses only once.
    """

    ulysses: MessageCounts = MessageCounts()
    ring: MessageCounts = MessageCounts()
    gather: MessageCounts = MessageCounts()
    once: MessageCounts = MessageCounts()
    proxies: int = 0  # per node, of the route that the ring or gather takes; 0: every rank uses its own card
    slices: int = 1  # of that route
    team: MessageCounts = MessageCounts()  # to the other tensor ranks of a team, one message each


class NicLoad(NamedTuple):
    """How a group's traffic spreads over network cards, as shares of the busiest one's. Columns of equal length."""

    node: np.ndarray  # int64[n]
    card: np.ndarray  # int64[n] in its node
    ulysses: np.ndarray  # float64[n] 0 to 1
    sharing: np.ndarray  # float64[n] the same of keys and values
    team: np.ndarray  # float64[n] the same of tensor ranks


@lru_cache(maxsize=8192)
def group_traffic(
    ranks: Sequence[int], shape: GroupShape, card_of: tuple[int, ...], route: Route | None = None, tensor: int = 1
) -> GroupTraffic:
    """Reach of the group on these ranks, wherever they lie.

    Args:
        ranks: of the group, in order. Ulysses is the inner axis: rank ``i`` of the group has Ulysses index
            ``i % ulysses`` and ring index ``i // ulysses``.
        shape: of the group.
        card_of: the network card near each rank of a node.
        route: how the ring's or gather's messages cross; None: each through its own card.
        tensor: ranks of a team, the innermost axis: heads are exchanged among the teams' ranks of one index.
    """
    if len(ranks) == 1:
        return GroupTraffic()
    where = np.asarray(ranks, dtype=np.int64)
    node = where // len(card_of)
    card = node * len(card_of) + np.asarray(card_of)[where % len(card_of)]

    def traffic(near: np.ndarray, far: np.ndarray) -> MessageCounts:
        left, through = (int(np.bincount(place, weights=far).max()) for place in (node, card))
        return MessageCounts(int(near.max()), int(far.max()), left, through)

    counts = _messages(node.reshape(shape.ring, -1, tensor))
    ulysses, ring, gather, once, team = (traffic(*pair) for pair in counts)
    if route is None or not gather.left:
        return GroupTraffic(ulysses, ring, gather, once, team=team)
    return GroupTraffic(ulysses, ring, gather, once, len(route.proxies) // len(np.unique(node)), route.slices, team)


def aligned_group_traffic(shape: GroupShape, card_of: tuple[int, ...], tensor: int = 1) -> GroupTraffic:
    """Reach of a group on an aligned block of the group family, not routed: the same for every block of one size."""
    return group_traffic(range(shape.degree), shape, card_of, None, tensor)


def nic_proxies(ranks: Sequence[int], card_of: tuple[int, ...]) -> tuple[int, ...]:
    """One rank near each network card in every node of a group, at the same places in all nodes, ascending.

    Members of the group come before other ranks of the node, then the lowest.
    """
    size = len(card_of)
    nodes = sorted({rank // size for rank in ranks})
    members = Counter(rank % size for rank in ranks)
    near: dict[int, list[int]] = {}
    for place, card in enumerate(card_of):
        near.setdefault(card, []).append(place)
    places = sorted(max(some, key=lambda place: (members[place], -place)) for some in near.values())
    return tuple(node * size + place for node in nodes for place in places)


def _messages(node: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(near, far) int64[ranks] messages that every rank sends: of Ulysses, ring, gather, gather crossing once, team.

    Args:
        node: int64[ring, ulysses beyond tensor, tensor] of every rank.
    """
    ring, inner, tensor = node.shape
    far_heads = (node[:, :, None] != node[:, None, :]).sum(axis=2)
    far_next = (node != np.roll(node, -1, axis=0)).astype(np.int64)
    far_keys = (node[:, None] != node[None, :]).sum(axis=1)
    nodes = np.array([len(np.unique(column)) for column in node.reshape(ring, -1).T]).reshape(inner, tensor)
    far_team = (node[:, :, :, None] != node[:, :, None, :]).sum(axis=3)
    near_keys = ring - 1 - far_keys
    pairs = [
        (inner - 1 - far_heads, far_heads),
        ((ring > 1) - far_next, far_next),
        (near_keys, far_keys),
        (near_keys, np.broadcast_to(nodes - 1, node.shape)),
        (tensor - 1 - far_team, far_team),
    ]
    return [(near.ravel(), far.ravel()) for near, far in pairs]


@lru_cache(maxsize=8192)
def nic_load(
    ranks: Sequence[int], shape: GroupShape, card_of: tuple[int, ...], route: Route | None = None, tensor: int = 1
) -> NicLoad:
    """Which network cards a group uses, and how much of what its busiest one carries. Arguments as `reach_of`."""
    size, cards = len(card_of), max(card_of) + 1
    where = np.asarray(ranks, dtype=np.int64)
    node = where // size
    card = node * cards + np.asarray(card_of)[where % size]
    heads, ring, gather, _, mates = _messages(node.reshape(shape.ring, -1, tensor))
    last = int(node.max()) + 1
    ulysses, team = (np.bincount(card, weights=far, minlength=last * cards) for _, far in (heads, mates))
    keys = (gather if shape.method == Method.GATHER else ring)[1]
    if route is None:
        sharing = np.bincount(card, weights=keys, minlength=last * cards)
    else:  # every proxy of a node carries the same
        proxy = np.asarray(route.proxies, dtype=np.int64)
        through = proxy // size * cards + np.asarray(card_of)[proxy % size]
        sharing = np.zeros(max(last, int(proxy.max()) // size + 1) * cards)
        ulysses, team = (np.concatenate([own, np.zeros(len(sharing) - len(own))]) for own in (ulysses, team))
        left = np.bincount(node, weights=keys, minlength=len(sharing) // cards)
        np.add.at(sharing, through, left[proxy // size])
    used = np.flatnonzero(ulysses + sharing + team)
    parts = [values[used] / max(values.max(), 1.0) for values in (ulysses, sharing, team)]
    return NicLoad(used // cards, used % cards, *parts)


# ---- merged: cost.routing
# What a routed exchange takes: sender -> proxies of its node -> proxies of the other node -> receiver, in slices.
#
# Stages run one after the other; in stage t slice t is dispatched, slice t-1 crosses and slice t-2 is combined. So
# all
# stages but the outer two use NVLink and the network at once, and m slices need m + 2 stages. What stays in a node
# goes
# in slices too, beside those that cross:
#
#     slice 0    dispatch  cross     combine
#     slice 1              dispatch  cross     combine
#     slice 2                        dispatch  cross     combine


WORTHWHILE = 0.999
"""One slice more must lower the time to this share of it."""


class Flow(NamedTuple):
    """ns of some traffic: how long it takes, and how long the busiest card and NVLink port are taken."""

    time: float = 0.0
    network: float = 0.0
    link: float = 0.0

    def __add__(self, other: tuple[float, ...]) -> Flow:  # type: ignore[override]
        """One after the other."""
        return Flow(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def direct_flow(traffic: MessageCounts, link: float, card: float) -> Flow:
    """Every rank uses the card near it; messages inside and out of a node move side by side.

    Args:
        traffic: messages at the busiest places.
        link: ns of one message on NVLink.
        card: ns of one message on a network card.
    """
    inside, outside = traffic.near * link, traffic.card * card
    return Flow(max(inside, outside), outside, inside)


def routed_flow(
    crossing: MessageCounts, wanted: MessageCounts, proxies: int, slices: int, link: float, card: float
) -> Flow:
    """All cards of a node share what leaves it.

    A sender keeps 1/proxies of what it dispatches, a receiver has 1/proxies of what is combined already. A proxy
    handles its share of the node's messages both ways. Messages inside a node go beside those that cross.

    Args:
        crossing: messages that cross, each once per node that wants it.
        wanted: messages that ranks want from other nodes; the same unless several ranks of a node want one.
        proxies: per node.
        slices: pieces of a message under way one behind the other.
        link: ns of one message on NVLink.
        card: ns of one message on a network card.
    """
    kept_apart = (proxies - 1) / proxies
    dispatch = max(crossing.sent * kept_apart, crossing.left / proxies) * link
    combine = max(wanted.sent * kept_apart, wanted.left / proxies) * link
    cross = crossing.left / proxies * card
    out = crossing.sent * kept_apart + wanted.left / proxies
    back = crossing.left / proxies + wanted.sent * kept_apart
    both = max(out, back) * link
    near = crossing.near * link
    if slices == 1:
        time = dispatch + max(cross, near) + combine
    else:
        full = (slices - 2) * max(both + near, cross)
        ends = max(dispatch + near, cross) + max(cross, combine + near)
        time = (dispatch + ends + full + combine) / slices
    return Flow(time, cross, near + both)


def best_slices(time: Callable[[int], float]) -> int:
    """The number of slices that takes least time; falling fill and rising latencies have one minimum from 2 on."""
    slices = 2
    while time(slices + 1) < WORTHWHILE * time(slices):
        slices += 1
    return slices if time(slices) < time(1) else 1


# ---- merged: cost.communication
# Time on the links, alpha-beta per class: Ulysses exchange, ring, key/value gather, remapping, collectives.
#
# Volumes are bytes sent per GPU and per token of the group, all layers, forward and backward. With ``u`` for
# Ulysses and ``r`` for ring, a Ulysses rank holds the kv heads that its query heads read: ``ceil(kv / u)`` where
# heads
# divide, one more at most where they do not.


ACTIVATION_BYTES = 2  # bf16 on the wire
KV_GRADIENT_BYTES = 4  # dK and dV travel in float32: they are sums of many steps
MIB = 1024**2


@dataclass(frozen=True, slots=True)
class Communication:
    """Traffic times of one model on one cluster, in ns."""

    profile: AnalyticProfile
    cluster: Cluster
    model: ModelSpec

    # -- exchanges per token ----------------------------------------------------

    def ulysses_bytes(self, shape: GroupShape, checkpoint: Checkpoint) -> float:
        """Bytes per token and GPU that are redistributed, what a rank keeps for itself included.

        Forward moves q, k, v in and the output out; backward the same again. Recomputing repeats q, k, v,
        and in full checkpointing the output as well.
        """
        query, kv = self._even(self.model.heads, shape), self._kv_heads(shape)
        values = exchanged_values(query, kv, checkpoint)
        return self.model.layers * values * self.model.head_dim * ACTIVATION_BYTES / shape.degree

    def ulysses(self, shape: GroupShape, reach: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per token of the head exchange: traffic inside and out of a node moves side by side."""
        if shape.ulysses == 1:
            return Flow()
        message = self.ulysses_bytes(shape, checkpoint) / shape.ulysses
        return direct_flow(reach.ulysses, *self.message_ns(message, "all_to_all"))

    def ring_bytes(self, shape: GroupShape, checkpoint: Checkpoint) -> float:
        """Bytes per token and GPU: K and V go r-1 steps in every pass, dK and dV r steps in float32."""
        passes = 3 if checkpoint == Checkpoint.FULL else 2
        forward = passes * (shape.ring - 1) / shape.ring * self._kv_values(shape) * ACTIVATION_BYTES
        return self.model.layers * (forward + self._kv_values(shape) * KV_GRADIENT_BYTES)

    def ring(self, shape: GroupShape, reach: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per token: a ring moves at the pace of its slowest link."""
        if shape.ring == 1:
            return Flow()
        return self._sharing(self.ring_bytes(shape, checkpoint), "p2p", reach, reach.ring, reach.ring)

    def kv_gather(self, shape: GroupShape, reach: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per token of sending K and V to all ring indices at once, and dK and dV back to their owner.

        Sent directly, every index of another node gets its own copy. A route carries K and V once to every node;
        gradients are all different and cannot share the way.
        """
        if shape.ring == 1:
            return Flow()
        passes = 3 if checkpoint == Checkpoint.FULL else 2
        message = self.model.layers * self._kv_values(shape) / shape.ring
        keys, gradients = passes * ACTIVATION_BYTES * message, KV_GRADIENT_BYTES * message
        crossing = reach.once if reach.proxies else reach.gather
        forward = self._sharing(keys, "collective", reach, crossing, reach.gather)
        return forward + self._sharing(gradients, "collective", reach, reach.gather, reach.gather)

    def gathered(self, shape: GroupShape) -> float:
        """ns per token of a rank's own work on gathered keys: sorting them, adding up and sorting their gradients.

        Every rank does it for all tokens of the group, so it weighs most where a wide ring has many short documents.
        """
        if shape.method != Method.GATHER or shape.ring == 1:
            return 0.0
        size = self.model.layers * self._kv_values(shape) * KV_GRADIENT_BYTES
        return size / MIB * self.profile.gathered_us * 1e3

    def prefix(self, shape: GroupShape) -> float:
        """ns per token in front of a piece and layer of adding up the gradients of its keys and values."""
        return self._kv_values(shape) * KV_GRADIENT_BYTES / MIB * self.profile.prefix_us * 1e3

    def _sharing(
        self, message: float, kind: str, reach: GroupTraffic, crossing: MessageCounts, wanted: MessageCounts
    ) -> Flow:
        """ns of messages of so many bytes, routed where the reach says so."""
        link, card = self.message_ns(message, kind)
        if not reach.proxies:
            return direct_flow(crossing, link, card)
        return routed_flow(crossing, wanted, reach.proxies, reach.slices, link, card)

    def slices(self, shape: GroupShape, reach: GroupTraffic, tokens: int) -> int:
        """Slices of a route with which ``tokens`` tokens of a group take least time."""
        gather, kept = shape.method == Method.GATHER, Checkpoint.NONE
        flow, latency = (self.kv_gather, self.kv_gather_latency) if gather else (self.ring, self.ring_latency)

        def time(slices: int) -> float:
            cut = reach._replace(slices=slices)
            return flow(shape, cut, kept).time * tokens + latency(shape, cut, kept)

        return best_slices(time)

    # -- latencies per round ----------------------------------------------------

    def ulysses_latency(self, shape: GroupShape, reach: GroupTraffic, checkpoint: Checkpoint) -> float:
        """ns per round: two calls (q with k and v, output) per pass and layer."""
        if shape.ulysses == 1:
            return 0.0
        calls = {Checkpoint.SELECTIVE: 5, Checkpoint.FULL: 6}.get(checkpoint, 4)
        doublings = (shape.ulysses - 1).bit_length()
        return self.model.layers * calls * self.latency("all_to_all", reach.ulysses.left > 0, doublings)

    def ring_latency(self, shape: GroupShape, reach: GroupTraffic, checkpoint: Checkpoint) -> float:
        """ns per round: r-1 exchanges per forward, r+1 per backward (gradients set out one step after the keys)."""
        if shape.ring == 1:
            return 0.0
        steps = (2 if checkpoint == Checkpoint.FULL else 1) * (shape.ring - 1) + shape.ring + 1
        return self.model.layers * steps * self._sharing_latency("p2p", reach, reach.ring, 0)

    def kv_gather_latency(self, shape: GroupShape, reach: GroupTraffic, checkpoint: Checkpoint) -> float:
        """ns per round: a gather per pass and one exchange of gradients, per layer."""
        if shape.ring == 1:
            return 0.0
        calls = 4 if checkpoint == Checkpoint.FULL else 3
        return self.model.layers * calls * self._sharing_latency("collective", reach, reach.gather, shape.ring - 1)

    def _sharing_latency(self, kind: str, reach: GroupTraffic, traffic: MessageCounts, hops: int) -> float:
        """ns of one exchange: a route has one stage on the network per slice, and two inside the nodes."""
        once = self.latency(kind, traffic.left > 0, hops)
        if not reach.proxies:
            return once
        return reach.slices * once + 2 * self.latency(kind, False, min(hops, reach.proxies - 1))

    # -- collectives over parameters --------------------------------------------

    def collective(self, size: float, ranks: int, calls: int) -> float:
        """ns of all-gathering (or reduce-scattering) ``size`` bytes over ``ranks`` ranks in ``calls`` pieces.

        Every GPU passes on (ranks-1)/ranks of the bytes over NVLink; a node takes in (nodes-1)/nodes of
        them over all its NICs together. Both go on at once.
        """
        if ranks == 1:
            return 0.0
        nodes = -(-ranks // self.cluster.gpus_per_node)
        time = size * (ranks - 1) / ranks / self._intra_gb_s("collective")
        latency = self.latency("collective", False, ranks - nodes)
        if nodes > 1:
            time = max(time, size * (nodes - 1) / nodes / self._node_gb_s())
            latency += self.latency("collective", True, nodes)
        return time + calls * latency

    def replica_sum(self, size: float, shard_ranks: int, calls: int, ranks: int | None = None) -> float:
        """ns of summing gradients of ``size`` bytes over all replicas of the shards, on all ranks or so many."""
        ranks = self.cluster.ranks if ranks is None else ranks
        replicas = ranks // shard_ranks
        if replicas == 1:
            return 0.0
        if shard_ranks == 1:
            return 2 * self.collective(size, ranks, calls)
        # every GPU sums its own shard with its peers in other nodes: all NICs together carry the whole size
        latency = calls * self.latency("collective", True, replicas)
        return 2 * (size * (replicas - 1) / replicas / self._node_gb_s() + latency)

    # -- bandwidths -------------------------------------------------------------

    def _even(self, heads: int, shape: GroupShape) -> int:
        """Heads sent when every Ulysses rank gets as many as the fullest: replicated or uneven ones count."""
        return -(-heads // shape.ulysses) * shape.ulysses

    def _kv_heads(self, shape: GroupShape) -> int:
        """Key/value heads sent when every Ulysses rank gets as many as the one whose query heads read most."""
        shared = self.model.heads // self.model.kv_heads
        ranges = even_ranges(self.model.heads, shape.ulysses)
        return shape.ulysses * max(-(-high // shared) - low // shared for low, high in ranges)

    def _kv_values(self, shape: GroupShape) -> float:
        """Values of K and V per token and layer that a Ulysses rank holds."""
        return 2 * self._kv_heads(shape) * self.model.head_dim / shape.ulysses

    def latency(self, kind: str, crosses: bool, hops: int) -> float:
        """ns of one call: the link's own latency, the library's, and a share per hop."""
        link = self.cluster.nic if crosses else self.cluster.intra
        rate = getattr(self.profile.network if crosses else self.profile.intra, kind)
        return (link.latency_us + rate.call_us + hops * rate.hop_us) * 1e3

    def message_ns(self, size: float, kind: str) -> tuple[float, float]:
        """ns of a message of so many bytes on NVLink, and on a network card that carries nothing else."""
        return size / self._intra_gb_s(kind), size / self._card_gb_s(kind)

    def _intra_gb_s(self, kind: str) -> float:
        return self.cluster.intra.gb_s * getattr(self.profile.intra, kind).efficiency

    def _card_gb_s(self, kind: str) -> float:
        return self.cluster.nic.gb_s * getattr(self.profile.network, kind).efficiency

    def _node_gb_s(self) -> float:
        """Network bandwidth of a whole node in collectives."""
        return self.cluster.nic.gb_s * self.profile.network.collective.efficiency * self.cluster.nics_per_node


def exchanged_values(query: int, kv: int, checkpoint: Checkpoint) -> int:
    """Values per token and layer that go in and out of attention, forward and backward, with what is repeated."""
    values = 2 * (2 * query + 2 * kv)
    if checkpoint == Checkpoint.SELECTIVE:
        values += query + 2 * kv
    if checkpoint == Checkpoint.FULL:
        values += 2 * query + 2 * kv
    return values


# ---- merged: cost.teams
# Tensor parallelism on the links: what a team of ranks that split the weights exchanges.
#
# Between the products that are split, hidden states lie with the tokens. Each half of a layer, attention and the
# feed-forward, gathers its input from the team and sends partial sums of its output back, each rank getting those
# of its
# own tokens:
#
#     forward     2 gathers, 2 sums per layer
#     backward    of a gather a sum, of a sum a gather: 2 and 2
#     again       where the layer is run again: 2 and 2
#
# A gather is an all-gather; a sum is an all-to-all of the partial rows, added up by their owner. So a rank sends
# its own
# tokens' hidden states, or its peer's, to each of its peers: one message of as many bytes each time.
#
# What happens inside attention is that of the column: the ranks of one index in all teams of a group, which share
# 1 / tensor of the heads by Ulysses and ring exactly as ranks without teams share all of them.


HIDDEN_BYTES = 2  # bf16 on the wire
REPEATING = (Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE)


def cp_model(model: ModelSpec, tensor: int) -> ModelSpec:
    """The model as the ranks of a column see its attention."""
    return replace(model, heads=model.heads // tensor, kv_heads=model.kv_heads // tensor) if tensor > 1 else model


def cp_shape(shape: GroupShape, tensor: int) -> GroupShape:
    """The shape of a column of a group: Ulysses beyond tensor."""
    return shape._replace(ulysses=shape.ulysses // tensor) if tensor > 1 else shape


def tensor_parallel_exchanges(checkpoint: Checkpoint) -> int:
    """Gathers of a layer, forward and backward, with what is repeated; there are as many sums."""
    return 6 if checkpoint in REPEATING else 4


def tp_flow(links: Communication, shape: GroupShape, reach: GroupTraffic, checkpoint: Checkpoint) -> Flow:
    """ns per token of the group, all layers, forward and backward."""
    if not (reach.team.near or reach.team.sent):
        return Flow()
    message = (
        tensor_parallel_exchanges(checkpoint) * links.model.layers * links.model.hidden * HIDDEN_BYTES / shape.degree
    )
    gathers = direct_flow(reach.team, *links.message_ns(message, "collective"))
    return gathers + direct_flow(reach.team, *links.message_ns(message, "all_to_all"))


def tp_latency(links: Communication, tensor: int, reach: GroupTraffic, checkpoint: Checkpoint) -> float:
    """ns per round, all layers, forward and backward."""
    if tensor == 1:
        return 0.0
    crosses = reach.team.left > 0
    gather = links.latency("collective", crosses, tensor - 1)
    total = gather + links.latency("all_to_all", crosses, (tensor - 1).bit_length())
    return tensor_parallel_exchanges(checkpoint) * links.model.layers * total


def tp_reduce_ns(model: ModelSpec, tensor: int, checkpoint: Checkpoint, memory_gb_s: float) -> float:
    """ns per token of a rank, all layers: a sum reads a row of every team member and writes one."""
    if tensor == 1:
        return 0.0
    touched = tensor_parallel_exchanges(checkpoint) * model.layers * (tensor + 1) * model.hidden
    return touched * HIDDEN_BYTES / memory_gb_s


# ---- merged: cost.remapping
# What it costs to hold tokens in one layout for attention and in another for linear layers.


@dataclass(frozen=True, slots=True, eq=False)
class RemapTimes:
    """ns of one round's remapping, all layers, forward and backward."""

    time: int  # of its exchanges, at the pace of the busiest rank or card
    card: np.ndarray  # int64[nodes, cards] how long each card is taken
    link: np.ndarray  # int64[ranks] how long each NVLink port is taken

    @classmethod
    def of(cls, work: StageMicroBatch, attention: Layout, linear: Layout, links: Communication) -> RemapTimes:
        """Price the move from the attention layout of a round to its linear layout, and back, in every layer.

        Half of the bytes go each way, so that a card is taken for the mean of what it sends and receives, and an
        exchange lasts as long as the larger of both at the busiest place.
        """
        cluster = links.cluster
        ranks, size = cluster.ranks, cluster.gpus_per_node
        move = move_between(attention, linear, node_size=size)
        ends, tokens = np.stack([move.sender, move.receiver]), move.sizes
        inside = move.remote & (move.sender // size == move.receiver // size)
        across = move.remote & ~inside
        card_of = ends // size * cluster.nics_per_node + np.asarray(cluster.nic_of_gpu)[ends % size]
        near = np.stack([np.bincount(end[inside], tokens[inside], ranks) for end in ends])
        cards = cluster.nodes * cluster.nics_per_node
        far = np.stack([np.bincount(end[across], tokens[across], cards) for end in card_of])
        values, calls = remap_exchanges(links.model, work.remap, work.checkpoint)
        link, card = links.message_ns(values * links.model.layers * ACTIVATION_BYTES, "all_to_all")
        time = 0.0
        if move.remote.any():
            doublings = (len(np.unique(ends)) - 1).bit_length()
            latency = links.model.layers * calls * links.latency("all_to_all", bool(across.any()), doublings)
            time = max(float(near.max()) * link, float(far.max()) * card) + latency
        return cls(
            round(time),
            np.rint(far.mean(axis=0) * card).astype(np.int64).reshape(cluster.nodes, -1),
            np.rint(near.mean(axis=0) * link).astype(np.int64),
        )


def remap_exchanges(model: ModelSpec, remap: Remap, checkpoint: Checkpoint) -> tuple[int, int]:
    """(values per moved token, calls) of a layer, forward and backward.

    Around attention: q, k, v in and the output out, like a head exchange. Around the feed-forward: the hidden state
    in and out; recomputing repeats the way in.
    """
    again = checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL)
    if remap == Remap.MLP:
        return (4 + again) * model.hidden, 4 + again
    calls = {Checkpoint.SELECTIVE: 5, Checkpoint.FULL: 6}.get(checkpoint, 4)
    return exchanged_values(query_width(model), kv_width(model), checkpoint), calls
