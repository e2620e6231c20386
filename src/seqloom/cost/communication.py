"""Time on the links: where the messages of a group go, and what they take (alpha-beta per class of link).

First the messages are counted: how many stay in a node (NVLink), leave it, and through which NICs (`group_traffic`).
Then a `Flow` says how long they take, sent directly (`direct_flow`) or spread over all NICs of a node as in Zeppelin
(`routed_flow`). `Communication` has the volumes: Ulysses' all-to-all, the ring, the all-gather of keys and values,
tensor parallelism, collectives over parameters, and messages between pipeline stages; `remap_times` the change between
the attention and the linear layout.

Volumes are bytes sent per GPU and per token of the group, all layers, forward and backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.compute import attention_widths, kv_heads_per_rank
from seqloom.cost.shapes import GroupShape
from seqloom.layout import Route, move_between
from seqloom.plan import Checkpoint, Method, Remap

if TYPE_CHECKING:
    from collections.abc import Callable

    from seqloom.cost.profile import AnalyticProfile, LinkRate
    from seqloom.describe import Cluster, Link, ModelSpec
    from seqloom.layout import Layout
    from seqloom.plan import Stage, StageMicroBatch

ACTIVATION_BYTES = 2  # bf16 on the wire
KV_GRADIENT_BYTES = 4  # dK and dV are float32, on the wire and in memory: they are sums of many steps or pieces
STATE_BYTES = 4  # states of scans are float32 too
MIB = 1024**2


# -- counting messages ----------------------------------------------------------


class MessageCounts(NamedTuple):
    """Messages of one kind, all of the same size, counted at the busiest place."""

    intra: int = 0  # most that a rank sends inside its node
    inter: int = 0  # most that a rank sends out of its node
    node_out: int = 0  # most that leave one node
    nic: int = 0  # most that leave through one NIC, every rank using the one near it


class GroupTraffic(NamedTuple):
    """Messages of a group by kind: which use NVLink and which the network.

    With Ulysses, in a gather and in a tensor parallel group a rank sends one message to each of its peers, in a ring
    one to its successor. ``everyone`` counts one to each other rank of the group.
    """

    ulysses: MessageCounts = MessageCounts()
    ring: MessageCounts = MessageCounts()
    gather: MessageCounts = MessageCounts()
    gather_once: MessageCounts = MessageCounts()  # a gather that crosses to every node once, however many want it
    proxies: int = 0  # per node, of the route that the ring or gather takes; 0: every rank uses its own NIC
    slices: int = 1  # of that route
    tensor: MessageCounts = MessageCounts()
    everyone: MessageCounts = MessageCounts()


@lru_cache(maxsize=8192)
def group_traffic(
    ranks: Sequence[int], shape: GroupShape, nic_of: tuple[int, ...], route: Route | None = None, tensor: int = 1
) -> GroupTraffic:
    """Count the messages of the group on these ranks, wherever they lie; ``nic_of`` names the NIC near a node's ranks.

    Ulysses is the inner axis: rank ``i`` of the group has Ulysses index ``i % ulysses`` and ring index
    ``i // ulysses``. Tensor is the innermost: heads are exchanged among ranks of one tensor index. Messages of the ring
    or gather cross by the route, without one each through its own NIC.
    """
    if len(ranks) == 1:
        return GroupTraffic()
    node, nic = nodes_and_nics(ranks, nic_of)

    def counts(intra: np.ndarray, inter: np.ndarray) -> MessageCounts:
        node_out, nic_out = (int(np.bincount(place, weights=inter).max()) for place in (node, nic))
        return MessageCounts(int(intra.max()), int(inter.max()), node_out, nic_out)

    messages = _messages(node.reshape(shape.ring, -1, tensor))
    ulysses, ring, gather, gather_once, peers = (counts(*pair) for pair in messages)
    far = (node[:, None] != node[None, :]).sum(axis=1)
    proxies, slices = 0, 1
    if route is not None and gather.node_out:
        proxies, slices = len(route.proxies) // len(np.unique(node)), route.slices
    return GroupTraffic(ulysses, ring, gather, gather_once, proxies, slices, peers, counts(len(ranks) - 1 - far, far))


def nodes_and_nics(ranks: Sequence[int], nic_of: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """int64[ranks] each: node of every rank, and the number of its NIC in the cluster."""
    where = np.asarray(ranks, dtype=np.int64)
    node = where // len(nic_of)
    return node, node * (max(nic_of) + 1) + np.asarray(nic_of)[where % len(nic_of)]


def _messages(node: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(intra, inter) int64[ranks] messages of every rank, by kind in the order of `GroupTraffic`, tensor last.

    ``node`` is int64[ring, ulysses beyond tensor, tensor], of every rank.
    """
    ring, inner, tensor = node.shape
    far_heads = (node[:, :, None] != node[:, None, :]).sum(axis=2)
    far_next = (node != np.roll(node, -1, axis=0)).astype(np.int64)
    far_keys = (node[:, None] != node[None, :]).sum(axis=1)
    nodes = np.array([len(np.unique(column)) for column in node.reshape(ring, -1).T]).reshape(inner, tensor)
    far_peers = (node[:, :, :, None] != node[:, :, None, :]).sum(axis=3)
    pairs = [
        (inner - 1 - far_heads, far_heads),
        ((ring > 1) - far_next, far_next),
        (ring - 1 - far_keys, far_keys),
        (ring - 1 - far_keys, np.broadcast_to(nodes - 1, node.shape)),
        (tensor - 1 - far_peers, far_peers),
    ]
    return [(intra.ravel(), inter.ravel()) for intra, inter in pairs]


@lru_cache(maxsize=8192)
def nic_load(
    ranks: Sequence[int], shape: GroupShape, nic_of: tuple[int, ...], route: Route | None = None, tensor: int = 1
) -> tuple[tuple[np.ndarray, np.ndarray], list[np.ndarray]]:
    """Find the (node, NIC in it) that a group uses, and how much of what the busiest one carries.

    The latter are float64[n] shares from 0 to 1 of Ulysses, keys and values, tensor, mixers. Arguments as
    `group_traffic`.
    """
    nics = max(nic_of) + 1
    node, nic = nodes_and_nics(ranks, nic_of)
    proxy_node, proxy_nic = (node, nic) if route is None else nodes_and_nics(route.proxies, nic_of)
    every = (max(int(node.max()), int(proxy_node.max())) + 1) * nics
    heads, ring, gather, _, peers = (inter for _, inter in _messages(node.reshape(shape.ring, -1, tensor)))
    keys = gather if shape.method == Method.GATHER else ring
    ulysses, kv, tensor_load = (np.bincount(nic, weights=inter, minlength=every) for inter in (heads, keys, peers))
    if route is not None:  # every proxy of a node carries the same
        node_out = np.bincount(node, weights=keys, minlength=every // nics)
        kv = np.bincount(proxy_nic, weights=node_out[proxy_node], minlength=every)
    everyone = np.bincount(nic, weights=(node[:, None] != node[None, :]).sum(axis=1), minlength=every)
    every_load = (ulysses, kv, tensor_load, everyone)
    used = np.flatnonzero(sum(every_load))
    return divmod(used, nics), [load[used] / max(load.max(), 1.0) for load in every_load]


def nic_proxies(ranks: Sequence[int], nic_of: tuple[int, ...]) -> tuple[int, ...]:
    """Choose one rank near each NIC in every node of a group, at the same places in all nodes, ascending.

    Members of the group come before other ranks of the node, then the lowest.
    """
    size, members = len(nic_of), Counter(rank % len(nic_of) for rank in ranks)
    best_last = sorted(range(size), key=lambda place: (members[place], -place))
    places = sorted({nic_of[place]: place for place in best_last}.values())
    return tuple(node * size + place for node in sorted({rank // size for rank in ranks}) for place in places)


# -- the time of messages -------------------------------------------------------


class Flow(NamedTuple):
    """ns of some traffic: how long it takes, and how long it occupies the busiest NIC and NVLink port."""

    time: float = 0.0
    network: float = 0.0
    link: float = 0.0

    def __add__(self, other: tuple[float, ...]) -> Flow:  # type: ignore[override]
        """One after the other."""
        return Flow(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def direct_flow(messages: MessageCounts, link: float, nic: float) -> Flow:
    """Every rank uses the NIC near it; messages inside and out of a node move side by side.

    One message takes ``link`` ns on NVLink, ``nic`` ns on a NIC.
    """
    inside, outside = messages.intra * link, messages.nic * nic
    return Flow(max(inside, outside), outside, inside)


def routed_flow(
    crossing: MessageCounts, wanted: MessageCounts, proxies: int, slices: int, link: float, nic: float
) -> Flow:
    """All NICs of a node share what leaves it: sender -> proxies of its node -> proxies of the other node -> receiver.

    Messages go in slices: in stage t slice t is dispatched, slice t-1 crosses and slice t-2 is combined. So all stages
    but the outer two use NVLink and the network at once, and m slices need m + 2 stages. What stays in a node goes in
    slices too, beside those that cross:

        slice 0    dispatch  cross     combine
        slice 1              dispatch  cross     combine
        slice 2                        dispatch  cross     combine

    A sender keeps 1/proxies of what it dispatches, a receiver has 1/proxies of what is combined already. A proxy
    handles its share of the node's messages both ways.

    ``crossing`` counts messages that cross, each once per node that wants it; ``wanted`` those that ranks want from
    other nodes, which are the same unless several ranks of a node want one.
    """
    sent, received = (messages.inter * ((proxies - 1) / proxies) for messages in (crossing, wanted))
    sent_by_proxy, received_by_proxy = (messages.node_out / proxies for messages in (crossing, wanted))
    dispatch, combine = max(sent, sent_by_proxy) * link, max(received, received_by_proxy) * link
    both = max(sent + received_by_proxy, sent_by_proxy + received) * link
    cross, near = sent_by_proxy * nic, crossing.intra * link
    if slices == 1:
        time = dispatch + max(cross, near) + combine
    else:
        full = (slices - 2) * max(both + near, cross)
        ends = max(dispatch + near, cross) + max(cross, combine + near)
        time = (dispatch + ends + full + combine) / slices
    return Flow(time, cross, near + both)


def best_slices(time: Callable[[int], float]) -> int:
    """The number of slices that takes least time: from 2 on, as long as one more lowers it by a thousandth."""
    slices = 2
    while time(slices + 1) < 0.999 * time(slices):
        slices += 1
    return slices if time(slices) < time(1) else 1


# -- volumes and latencies ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Communication:
    """Traffic times of one model on one cluster, in ns.

    Of a model split over tensor parallel groups, ``model`` is what one tensor index sees of its attention: 1 / tensor
    of the heads (`cp_model`). Ranks of one tensor index share these heads by Ulysses and ring exactly as ranks without
    tensor parallelism share all of them, so shapes of attention traffic have Ulysses beyond tensor (`cp_shape`).
    """

    profile: AnalyticProfile
    cluster: Cluster
    model: ModelSpec
    cut_tables: float = 0.0  # of embedding and head, how many are cut over TP groups

    def of_layers(self, model: ModelSpec) -> Communication:
        """With some of the layers, and their share of the tables: they are priced with the layers, stage by stage."""
        return replace(self, model=model, cut_tables=self.cut_tables * model.layers / self.model.layers)

    # Ulysses: an all-to-all of heads

    def ulysses_bytes(self, shape: GroupShape, checkpoint: Checkpoint) -> float:
        """Bytes per token and GPU that are redistributed, a rank's own share included.

        Forward moves q, k, v in and the output out; backward the same again. Recomputing repeats q, k, v, and in full
        checkpointing the output as well. Every Ulysses rank counts as many query heads as the fullest one has. Latents
        go to every rank.
        """
        dim, query = self.model.head_dim, -(-self.model.heads // shape.ulysses) * shape.ulysses
        keys = self.model.latent_values * shape.ulysses if shape.latent else 2 * self._kv_heads(shape) * dim
        values, _ = attention_exchanges(query * dim, keys, checkpoint)
        return self.model.attention_layers * values * ACTIVATION_BYTES / shape.degree

    def ulysses(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per token of the all-to-all of heads."""
        message = self.ulysses_bytes(shape, checkpoint) / shape.ulysses
        return direct_flow(traffic.ulysses, *self.message_ns(message, "all_to_all"))

    def ulysses_latency(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> float:
        """ns per round: two calls (q with k and v, output) per pass and layer."""
        if shape.ulysses == 1:
            return 0.0
        latency = self.latency("all_to_all", traffic.ulysses.node_out > 0, (shape.ulysses - 1).bit_length())
        return self.model.attention_layers * attention_exchanges(0, 0, checkpoint)[1] * latency

    # keys and values: they rotate in a ring behind attention, or an all-gather brings them all before it

    def ring_bytes(self, shape: GroupShape, checkpoint: Checkpoint) -> float:
        """Bytes per token and GPU of a ring: K and V go r-1 steps in every pass, dK and dV r steps in float32."""
        forward = passes(checkpoint) * (shape.ring - 1) / shape.ring * self._kv_values(shape) * ACTIVATION_BYTES
        return self.model.attention_layers * (forward + self._kv_values(shape) * KV_GRADIENT_BYTES)

    def kv(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per token of sharing keys and values. A ring moves at the pace of its slowest link.

        A gather sends K and V to all ring ranks at once, and dK and dV back to their owner. Sent directly, every rank
        of another node gets its own copy. A route carries K and V once to every node; gradients are all different and
        cannot share the way.
        """
        if shape.method == Method.RING:
            return self._kv_flow(self.ring_bytes(shape, checkpoint), "p2p", traffic, traffic.ring, traffic.ring)
        message = self.model.attention_layers * self._kv_values(shape) / shape.ring
        keys, gradients = passes(checkpoint) * ACTIVATION_BYTES * message, KV_GRADIENT_BYTES * message
        crossing = traffic.gather_once if traffic.proxies else traffic.gather
        forward = self._kv_flow(keys, "collective", traffic, crossing, traffic.gather)
        return forward + self._kv_flow(gradients, "collective", traffic, traffic.gather, traffic.gather)

    def kv_latency(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> float:
        """ns per round.

        A ring has r-1 exchanges per forward and layer and r+1 per backward (gradients set out one step after the keys),
        an all-gather one per pass, and one of gradients.
        """
        if shape.ring == 1:
            return 0.0
        if shape.method == Method.RING:
            steps = (passes(checkpoint) - 1) * (shape.ring - 1) + shape.ring + 1
            return self.model.attention_layers * steps * self._exchange_latency("p2p", traffic, traffic.ring, 0)
        calls = self.model.attention_layers * (passes(checkpoint) + 1)
        return calls * self._exchange_latency("collective", traffic, traffic.gather, shape.ring - 1)

    def gathered_kv(self, shape: GroupShape) -> float:
        """ns per token of a rank's own work on gathered keys: sorting them, adding up and sorting their gradients.

        Every rank does it for all tokens of the group, so it weighs most where a wide ring has many short documents.
        """
        if shape.method != Method.GATHER or shape.ring == 1:
            return 0.0
        size = self.model.attention_layers * self._kv_values(shape._replace(latent=False)) * KV_GRADIENT_BYTES
        return size / MIB * self.profile.gathered_us * 1e3

    def prefix(self, shape: GroupShape) -> float:
        """ns per token in front of a piece and layer of adding up the gradients of its keys and values."""
        return self._kv_values(shape) * KV_GRADIENT_BYTES / MIB * self.profile.prefix_us * 1e3

    def slices(self, shape: GroupShape, traffic: GroupTraffic, tokens: int) -> int:
        """Slices of a route with which ``tokens`` tokens of a group take least time."""

        def time(slices: int) -> float:
            cut = traffic._replace(slices=slices)
            return self.kv(shape, cut, Checkpoint.NONE).time * tokens + self.kv_latency(shape, cut, Checkpoint.NONE)

        return best_slices(time)

    def _kv_flow(
        self, size: float, kind: str, traffic: GroupTraffic, crossing: MessageCounts, wanted: MessageCounts
    ) -> Flow:
        """ns of messages of so many bytes, routed where the traffic has proxies."""
        link, nic = self.message_ns(size, kind)
        if not traffic.proxies:
            return direct_flow(crossing, link, nic)
        return routed_flow(crossing, wanted, traffic.proxies, traffic.slices, link, nic)

    def _exchange_latency(self, kind: str, traffic: GroupTraffic, messages: MessageCounts, hops: int) -> float:
        """ns of one exchange: a route has one stage on the network per slice, and two inside the nodes."""
        once = self.latency(kind, messages.node_out > 0, hops)
        if not traffic.proxies:
            return once
        return traffic.slices * once + 2 * self.latency(kind, False, min(hops, traffic.proxies - 1))

    def _kv_heads(self, shape: GroupShape) -> int:
        """Key/value heads sent when every Ulysses rank gets as many as the one whose query heads read most."""
        return shape.ulysses * kv_heads_per_rank(self.model.heads, self.model.kv_heads, shape.ulysses)

    def _kv_values(self, shape: GroupShape) -> float:
        """Values of K and V per token and layer that a Ulysses rank holds; with latents, of these."""
        if shape.latent:
            return float(self.model.latent_values)
        return 2 * self._kv_heads(shape) * self.model.head_dim / shape.ulysses

    # mixers: all ranks of a group exchange tokens for heads, whatever its Ulysses and ring; a convolution fetches a few
    # rows only, before each run of tokens that a rank holds

    def mixers(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per token of what goes into the scans of mixers and comes out, which a recomputed layer repeats."""
        if shape.states:
            return Flow()
        values = mixer_passes(checkpoint) * len(self.model.mixer_layers) * self.model.mixer_exchange
        message = values * ACTIVATION_BYTES / shape.degree**2
        return direct_flow(traffic.everyone, *self.message_ns(message, "all_to_all"))

    def halo(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per document of the rows before a rank's runs of tokens."""
        if shape.degree == 1:
            return Flow()
        values = shape.runs_per_rank * mixer_passes(checkpoint) * len(self.model.mixer_layers) * self.model.mixer_halo
        link, nic = self.message_ns(values * ACTIVATION_BYTES, "all_to_all")
        return Flow(nic, nic, 0.0) if traffic.everyone.node_out else Flow(link, 0.0, link)

    def states(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per document of states of scans: every rank sends those of its runs to all others."""
        if not shape.states:
            return Flow()
        values = shape.runs_per_rank * mixer_passes(checkpoint) * len(self.model.mixer_layers) * self.model.mixer_state
        return direct_flow(traffic.everyone, *self.message_ns(values * STATE_BYTES, "all_to_all"))

    def mixer_latency(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> float:
        """ns per round: in every pass a convolution's halo, and a scan's exchange in and one out, or one of states."""
        if shape.degree == 1:
            return 0.0
        each = 1 if not self.model.mixer_exchange else 2 if shape.states else 3
        calls = mixer_passes(checkpoint) * len(self.model.mixer_layers) * each
        return calls * self.latency("all_to_all", traffic.everyone.node_out > 0, (shape.degree - 1).bit_length())

    # tensor parallelism: each half of a layer, attention and the feed-forward, all-gathers its input (hidden states)
    # from the tensor parallel group and sends partial sums of its output to the ranks that own the rows (an
    # all-to-all), where they are added. Backward does the reverse of each. An embedding that is cut has a sum, and in
    # backward a gather; a head has a gather and a sum, which is that of gradients, both in forward.

    def tensor_exchanges(self, checkpoint: Checkpoint) -> float:
        """Tensor parallel all-gathers, all layers and tables, forward and backward; there are as many sums."""
        return tensor_gathers(checkpoint) * self.model.layers + self.cut_tables

    def tensor(self, shape: GroupShape, traffic: GroupTraffic, checkpoint: Checkpoint) -> Flow:
        """ns per token of a group of this shape, all layers, forward and backward."""
        values = self.tensor_exchanges(checkpoint) * self.model.hidden
        message = values * ACTIVATION_BYTES / shape.degree
        gathers = direct_flow(traffic.tensor, *self.message_ns(message, "collective"))
        return gathers + direct_flow(traffic.tensor, *self.message_ns(message, "all_to_all"))

    def tensor_latency(self, tensor: int, traffic: GroupTraffic, checkpoint: Checkpoint) -> float:
        """ns per round, all layers, forward and backward, of groups of ``tensor`` ranks."""
        if tensor == 1:
            return 0.0
        crosses = traffic.tensor.node_out > 0
        gather = self.latency("collective", crosses, tensor - 1)
        total = gather + self.latency("all_to_all", crosses, (tensor - 1).bit_length())
        return self.tensor_exchanges(checkpoint) * total

    # expert parallelism: a rank sends each token once to every other rank of its EP group with some of its experts (an
    # all-to-all), and gets the sum of what these return. Backward does the reverse of each.

    def expert(self, expert: int, checkpoint: Checkpoint) -> Flow:
        """ns per token of a rank, all layers, forward and backward, in EP groups of ``expert`` ranks.

        EP groups divide nodes or consist of whole ones, and all ranks of a node exchange at the same time. The rank
        whose experts are asked for most receives more than the mean, and all wait for it.
        """
        if expert == 1:
            return Flow()
        cluster, moved = self.cluster, expert_exchanges(checkpoint)[0] * len(self.model.moe_layers) * self.model.hidden
        reached = self.profile.expert_imbalance * share_of_tokens(self.model, expert)
        link, nic = self.message_ns(moved * ACTIVATION_BYTES * reached, "all_to_all")
        near, far = min(expert, cluster.gpus_per_node) - 1, max(0, expert - cluster.gpus_per_node)
        sharing = max(Counter(cluster.nic_of_gpu).values())
        return Flow(max(near * link, far * sharing * nic), far * nic, near * link)

    def expert_latency(self, expert: int, checkpoint: Checkpoint) -> float:
        """ns per round, all layers, forward and backward."""
        if expert == 1:
            return 0.0
        calls = expert_exchanges(checkpoint)[1] * len(self.model.moe_layers)
        crosses = expert > self.cluster.gpus_per_node
        return calls * self.latency("all_to_all", crosses, (expert - 1).bit_length())

    # collectives over parameters and gradients

    def collective(self, size: float, ranks: int, calls: int, stride: int = 1) -> float:
        """ns of all-gathering (or reduce-scattering) ``size`` bytes over ``ranks`` ranks in ``calls`` pieces.

        Every GPU passes on (ranks-1)/ranks of the bytes over NVLink; a node takes in (nodes-1)/nodes of them over all
        its NICs together. Both go on at once. Of ranks that are ``stride`` apart there are as many such groups side by
        side, each with bytes of its own, and those of a node share its NICs.
        """
        if ranks == 1:
            return 0.0
        node = self.cluster.gpus_per_node
        nodes, groups = (ranks, node) if stride >= node else (-(-ranks * stride // node), stride)
        time = size * (ranks - 1) / ranks / self._gb_s("collective", False)
        latency = self.latency("collective", False, ranks - nodes)
        if nodes > 1:
            time = max(time, groups * size * (nodes - 1) / nodes / self._node_gb_s())
            latency += self.latency("collective", True, nodes)
        return time + calls * latency

    def replica_sum(self, size: float, shard_ranks: int, calls: int, ranks: int, stride: int = 1) -> float:
        """ns of all-reducing gradients of ``size`` bytes over all replicas of the shards, on so many ranks.

        With a ``stride``, ranks that are that far apart have the same bytes, and their neighbours others.
        """
        replicas = ranks // (shard_ranks * stride)
        if replicas == 1:
            return 0.0
        if shard_ranks == 1:
            return 2 * self.collective(size, replicas, calls, stride)
        # every GPU sums its own shard with its peers in other nodes: all NICs together carry the whole size
        latency = calls * self.latency("collective", True, replicas)
        return 2 * (stride * size * (replicas - 1) / replicas / self._node_gb_s() + latency)

    # messages between pipeline stages

    def stage_message(self, tokens: int, here: Stage, there: Stage) -> int:
        """ns of the hidden states (or their gradients) of so many tokens per rank from one stage to the next.

        Stages in different nodes use the NICs, of which every sending rank has at most those near it.
        """
        cluster, size = self.cluster, tokens * self.model.hidden * ACTIVATION_BYTES
        nodes, others = (Counter(rank // cluster.gpus_per_node for rank in stage.ranks) for stage in (here, there))
        crosses, nics = len(nodes.keys() | others.keys()) > 1, cluster.nics_per_node
        share = min(max(1.0, nics / cluster.gpus_per_node), nics / max(nodes.values())) if crosses else 1.0
        link, rate = self._link("p2p", crosses)
        time = size / (link.gb_s * rate.efficiency * share)  # bytes / (1e9 bytes/s) = ns
        return math.ceil(time + (link.latency_us + rate.call_us + self.profile.handover_us) * 1e3)

    # latency and bandwidth

    def latency(self, kind: str, crosses: bool, hops: int) -> float:
        """ns of one call: the link's own latency, the library's, and a share per hop."""
        link, rate = self._link(kind, crosses)
        return (link.latency_us + rate.call_us + hops * rate.hop_us) * 1e3

    def message_ns(self, size: float, kind: str) -> tuple[float, float]:
        """ns of a message of so many bytes on NVLink, and on a NIC that carries nothing else."""
        return size / self._gb_s(kind, False), size / self._gb_s(kind, True)

    def _link(self, kind: str, crosses: bool) -> tuple[Link, LinkRate]:
        if crosses:
            return self.cluster.nic, getattr(self.profile.network, kind)
        return self.cluster.intra, getattr(self.profile.intra, kind)

    def _gb_s(self, kind: str, crosses: bool) -> float:
        link, rate = self._link(kind, crosses)
        return link.gb_s * rate.efficiency

    def _node_gb_s(self) -> float:
        """Network bandwidth of a whole node in collectives."""
        return self._gb_s("collective", True) * self.cluster.nics_per_node


def cp_model(model: ModelSpec, tensor: int) -> ModelSpec:
    """The model as the ranks of one tensor index see its attention."""
    return replace(model, heads=model.heads // tensor, kv_heads=model.kv_heads // tensor) if tensor > 1 else model


def cp_shape(shape: GroupShape, tensor: int) -> GroupShape:
    """The shape in which the ranks of one tensor index share attention: Ulysses beyond tensor."""
    return shape._replace(ulysses=shape.ulysses // tensor) if tensor > 1 else shape


def passes(checkpoint: Checkpoint) -> int:
    """Passes through attention: forward, backward, and once more where all is recomputed."""
    return 3 if checkpoint == Checkpoint.FULL else 2


def mixer_passes(checkpoint: Checkpoint) -> int:
    """Passes through a mixer: forward, backward, and once more where a layer is recomputed, attention or not."""
    return 3 if checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL) else 2


def attention_exchanges(query: int, keys: int, checkpoint: Checkpoint) -> tuple[int, int]:
    """(values per token, calls) per layer in and out of attention, forward and backward, with repetitions.

    So many are of queries, and of keys and values, or of what stands in their place.
    """
    into, out = query + keys, query
    repeated = {Checkpoint.SELECTIVE: (into, 1), Checkpoint.FULL: (into + out, 2)}
    values, calls = repeated.get(checkpoint, (0, 0))
    return 2 * (into + out) + values, 4 + calls


def tensor_gathers(checkpoint: Checkpoint) -> int:
    """Tensor parallel all-gathers per layer, forward, backward and recomputed; there are as many sums."""
    return 4 if checkpoint in (Checkpoint.NONE, Checkpoint.PROFILE) else 6


def expert_exchanges(checkpoint: Checkpoint) -> tuple[int, int]:
    """(transfers of hidden states, calls) per layer with experts, forward and backward, with repetitions.

    Tokens go to experts and results come back; before it, ranks tell each other how many. Backward knows.
    """
    return (4, 5) if checkpoint in (Checkpoint.NONE, Checkpoint.PROFILE) else (6, 8)


@lru_cache(maxsize=256)
def share_of_tokens(model: ModelSpec, expert: int) -> float:
    """Share of tokens for which a rank of an EP group has an expert, if every choice of experts is as likely."""
    elsewhere, none = model.experts - model.experts // expert, 1.0
    for taken in range(model.active_experts):  # the next choice is none of the rank's either
        none *= max(0, elsewhere - taken) / (model.experts - taken)
        if none < 1e-12:
            return 1.0
    return 1.0 - none


# -- between the attention and the linear layout --------------------------------


def remap_times(
    work: StageMicroBatch, attention: Layout, linear: Layout, links: Communication
) -> tuple[int, np.ndarray, np.ndarray]:
    """ns of moving tokens from the attention to the linear layout of a round (Zeppelin), and back, in every layer.

    Half of the bytes go each way, so that a NIC is occupied for the mean of what it sends and receives, and an exchange
    lasts as long as the larger of both at the busiest place.

    Returns:
        Time of the exchanges, and how long they occupy each NIC, int64[nodes, nics], and NVLink port, int64[ranks].
    """
    cluster, layers = links.cluster, links.model.layers
    size, nics = cluster.gpus_per_node, cluster.nodes * cluster.nics_per_node
    move = move_between(attention, linear, node_size=size)
    ends, tokens = np.stack([move.sender, move.receiver]), move.sizes
    inside = move.remote & (move.sender // size == move.receiver // size)
    across = move.remote & ~inside
    nic_of = ends // size * cluster.nics_per_node + np.asarray(cluster.nic_of_gpu)[ends % size]
    near = np.stack([np.bincount(end[inside], tokens[inside], cluster.ranks) for end in ends])
    far = np.stack([np.bincount(end[across], tokens[across], nics) for end in nic_of])
    latent = any(group.latent for group in work.groups)
    values, calls = remap_exchanges(links.model, work.remap, work.checkpoint, latent)
    link, nic = links.message_ns(values * layers * ACTIVATION_BYTES, "all_to_all")
    time = 0.0
    if move.remote.any():
        doublings = (len(np.unique(ends)) - 1).bit_length()
        latency = layers * calls * links.latency("all_to_all", bool(across.any()), doublings)
        time = max(float(near.max()) * link, float(far.max()) * nic) + latency
    nic_ns, link_ns = (np.rint(each).astype(np.int64) for each in (far.mean(axis=0) * nic, near.mean(axis=0) * link))
    return round(time), nic_ns.reshape(cluster.nodes, -1), link_ns


def remap_exchanges(model: ModelSpec, remap: Remap, checkpoint: Checkpoint, latent: bool = False) -> tuple[int, int]:
    """(values per moved token, calls) of a layer, forward and backward.

    Around attention: q, k, v in and the output out, like a head exchange; where some group has latents, these in the
    place of k and v. Around the feed-forward: the hidden state in and out; recomputing repeats the way in.
    """
    again = checkpoint in (Checkpoint.SELECTIVE, Checkpoint.FULL)
    if remap == Remap.MLP:
        return (4 + again) * model.hidden, 4 + again
    query, kv = attention_widths(model)
    return attention_exchanges(query, model.latent_values if latent else 2 * kv, checkpoint)
