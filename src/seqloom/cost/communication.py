"""Time on the links, alpha-beta per class: Ulysses exchange, ring, key/value all-gather, collectives.

Volumes are bytes sent per GPU and per token of the group, all layers, forward and backward. With ``u`` for
Ulysses and ``r`` for ring, a Ulysses rank holds the kv heads that its query heads read: ``ceil(kv / u)`` where heads
divide, one more at most where they do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from seqloom.plan import Checkpoint
from seqloom.plan.group import even_ranges

if TYPE_CHECKING:
    from seqloom.cost.profile import AnalyticProfile
    from seqloom.cost.reach import Reach
    from seqloom.cost.values import Shape
    from seqloom.describe import Cluster, ModelSpec

ACTIVATION_BYTES = 2  # bf16 on the wire
KV_GRADIENT_BYTES = 4  # dK and dV travel around the ring in float32: they are sums of many steps


@dataclass(frozen=True, slots=True)
class Communication:
    """Traffic times of one model on one cluster, in ns."""

    profile: AnalyticProfile
    cluster: Cluster
    model: ModelSpec

    # -- exchanges per token ----------------------------------------------------

    def ulysses_bytes(self, shape: Shape, checkpoint: Checkpoint) -> float:
        """Bytes per token and GPU that are redistributed, what a rank keeps for itself included.

        Forward moves q, k, v in and the output out; backward the same again. Recomputing repeats q, k, v,
        and in full checkpointing the output as well.
        """
        query, kv = self._even(self.model.heads, shape), self._kv_heads(shape)
        values = 2 * (2 * query + 2 * kv)
        if checkpoint == Checkpoint.SELECTIVE:
            values += query + 2 * kv
        if checkpoint == Checkpoint.FULL:
            values += 2 * query + 2 * kv
        return self.model.layers * values * self.model.head_dim * ACTIVATION_BYTES / shape.degree

    def ulysses(self, shape: Shape, reach: Reach, checkpoint: Checkpoint) -> tuple[float, float]:
        """(ns per token, of that ns on the network): traffic inside and out of a node moves side by side."""
        if shape.ulysses == 1:
            return 0.0, 0.0
        volume = self.ulysses_bytes(shape, checkpoint)
        near = -(-shape.ulysses // reach.ulysses_nodes)  # ranks of the subgroup in one node
        inside = volume * (near - 1) / shape.ulysses / self._intra_gb_s("all_to_all")
        outside = 0.0
        if reach.ulysses_nodes > 1:
            sent = volume * (shape.ulysses - near) / shape.ulysses
            outside = sent / self._nic_gb_s("all_to_all", reach.node_ranks)
        return max(inside, outside), outside

    def ring_bytes(self, shape: Shape, checkpoint: Checkpoint) -> float:
        """Bytes per token and GPU: K and V go r-1 steps in every pass, dK and dV r steps in float32."""
        kv = 2 * self._kv_heads(shape) * self.model.head_dim / shape.ulysses
        passes = 3 if checkpoint == Checkpoint.FULL else 2
        forward = passes * (shape.ring - 1) / shape.ring * kv * ACTIVATION_BYTES
        return self.model.layers * (forward + kv * KV_GRADIENT_BYTES)

    def ring(self, shape: Shape, reach: Reach, checkpoint: Checkpoint) -> tuple[float, float]:
        """(ns per token, of that ns on the network): a ring moves at the pace of its slowest link."""
        if shape.ring == 1:
            return 0.0, 0.0
        volume = self.ring_bytes(shape, checkpoint)
        if reach.ring_exits:
            time = volume / self._nic_gb_s("p2p", reach.ring_exits)
            return time, time
        return volume / self._intra_gb_s("p2p"), 0.0

    def kv_gather(self, shape: Shape, reach: Reach, checkpoint: Checkpoint) -> float:
        """ns per token of gathering all K and V instead of a ring, and reducing dK and dV back."""
        if shape.ring == 1:
            return 0.0
        kv = 2 * self._kv_heads(shape) * self.model.head_dim / shape.ulysses
        passes = 3 if checkpoint == Checkpoint.FULL else 2
        volume = kv * (passes * ACTIVATION_BYTES + KV_GRADIENT_BYTES) * (shape.ring - 1) / shape.ring
        nic = self._nic_gb_s("collective", reach.ring_exits) if reach.ring_exits else 0.0
        return self.model.layers * volume / (nic or self._intra_gb_s("collective"))

    # -- latencies per round ----------------------------------------------------

    def ulysses_latency(self, shape: Shape, reach: Reach, checkpoint: Checkpoint) -> float:
        """ns per round: two calls (q with k and v, output) per pass and layer."""
        if shape.ulysses == 1:
            return 0.0
        calls = {Checkpoint.SELECTIVE: 5, Checkpoint.FULL: 6}.get(checkpoint, 4)
        doublings = (shape.ulysses - 1).bit_length()
        return self.model.layers * calls * self._latency("all_to_all", reach.ulysses_nodes > 1, doublings)

    def ring_latency(self, shape: Shape, reach: Reach, checkpoint: Checkpoint) -> float:
        """ns per round: r-1 exchanges per forward, r+1 per backward (gradients set out one step after the keys)."""
        if shape.ring == 1:
            return 0.0
        steps = (2 if checkpoint == Checkpoint.FULL else 1) * (shape.ring - 1) + shape.ring + 1
        return self.model.layers * steps * self._latency("p2p", reach.ring_exits > 0, 0)

    def kv_gather_latency(self, shape: Shape, reach: Reach, checkpoint: Checkpoint) -> float:
        """ns per round: a gather per pass and a reduce-scatter, per layer."""
        if shape.ring == 1:
            return 0.0
        calls = 4 if checkpoint == Checkpoint.FULL else 3
        return self.model.layers * calls * self._latency("collective", reach.ring_exits > 0, shape.ring - 1)

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
        latency = self._latency("collective", False, ranks - nodes)
        if nodes > 1:
            time = max(time, size * (nodes - 1) / nodes / self._node_gb_s())
            latency += self._latency("collective", True, nodes)
        return time + calls * latency

    def replica_sum(self, size: float, shard_ranks: int, calls: int) -> float:
        """ns of summing gradients of ``size`` bytes (whole model) over all replicas of the shards."""
        replicas = self.cluster.ranks // shard_ranks
        if replicas == 1:
            return 0.0
        if shard_ranks == 1:
            return 2 * self.collective(size, self.cluster.ranks, calls)
        # every GPU sums its own shard with its peers in other nodes: all NICs together carry the whole size
        latency = calls * self._latency("collective", True, replicas)
        return 2 * (size * (replicas - 1) / replicas / self._node_gb_s() + latency)

    # -- bandwidths -------------------------------------------------------------

    def _even(self, heads: int, shape: Shape) -> int:
        """Heads sent when every Ulysses rank gets as many as the fullest: replicated or uneven ones count."""
        return -(-heads // shape.ulysses) * shape.ulysses

    def _kv_heads(self, shape: Shape) -> int:
        """Key/value heads sent when every Ulysses rank gets as many as the one whose query heads read most."""
        shared = self.model.heads // self.model.kv_heads
        ranges = even_ranges(self.model.heads, shape.ulysses)
        return shape.ulysses * max(-(-high // shared) - low // shared for low, high in ranges)

    def _latency(self, kind: str, crosses: bool, hops: int) -> float:
        """ns of one call: the link's own latency, the library's, and a share per hop."""
        link = self.cluster.nic if crosses else self.cluster.intra
        rate = getattr(self.profile.network if crosses else self.profile.intra, kind)
        return (link.latency_us + rate.call_us + hops * rate.hop_us) * 1e3

    def _intra_gb_s(self, kind: str) -> float:
        return self.cluster.intra.gb_s * getattr(self.profile.intra, kind).efficiency

    def _nic_gb_s(self, kind: str, senders: int) -> float:
        """Network bandwidth of one GPU when ``senders`` GPUs of its node send at once."""
        nics, gpus = self.cluster.nics_per_node, self.cluster.gpus_per_node
        share = min(max(1.0, nics / gpus), nics / max(1, senders))
        return self.cluster.nic.gb_s * getattr(self.profile.network, kind).efficiency * share

    def _node_gb_s(self) -> float:
        """Network bandwidth of a whole node in collectives."""
        return self.cluster.nic.gb_s * self.profile.network.collective.efficiency * self.cluster.nics_per_node
