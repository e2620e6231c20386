"""The analytic model: kernels and links of a profile, composed for any model and cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.communication import (
    Communication,
    Flow,
    RemapTimes,
    cp_model,
    cp_shape,
    group_traffic,
    nic_proxies,
    tp_flow,
    tp_latency,
    tp_reduce_ns,
)
from seqloom.cost.compute import Compute
from seqloom.cost.memory import GRADIENT_BYTES, PARAMETER_BYTES, Memory
from seqloom.cost.shapes import GroupShape, MemoryPolicy, candidate_shapes, with_methods
from seqloom.layout import Route
from seqloom.plan import Checkpoint, Method, Reduce, Remap

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.communication import GroupTraffic
    from seqloom.cost.profile import AnalyticProfile
    from seqloom.describe import Cluster, ModelSpec
    from seqloom.layout import Layout
    from seqloom.plan import GroupFamily, StageMicroBatch

GIB = 1024**3
DEFAULT_CONTEXT = 384 * 1024  # sizes a learned position table when no longest sequence is given
DEVICE_SHARE = 0.9  # of the device's memory, when no budget is given


@dataclass(frozen=True, slots=True)
class AnalyticEngine:
    """Time and memory under an analytic profile."""

    profile: AnalyticProfile
    model: ModelSpec
    compute: Compute
    links: Communication
    memory: Memory
    shard_ranks: int
    budget_bytes: int
    shapes: tuple[GroupShape, ...]
    tensor: int = 1
    pad_multiple: int = 1

    @classmethod
    def build(
        cls,
        profile: AnalyticProfile,
        cluster: Cluster,
        model: ModelSpec,
        shard_ranks: int,
        family: GroupFamily,
        budget_gib: float | None,
        max_length: int | None,
        tensor: int = 1,
        owners: int = 0,
        within: GroupFamily | None = None,
    ) -> AnalyticEngine:
        """Compose the pieces and list all candidate shapes.

        Args:
            profile: kernels and links.
            cluster: the ranks.
            model: the model.
            shard_ranks: ranks that share parameter shards.
            family: of these ranks.
            budget_gib: memory per device.
            max_length: longest sequence.
            tensor: ranks of a team.
            owners: ranks over which free sharding spreads masters; 0: sharding is not free.
            within: family of the cluster that these ranks are a part of, if they are one.
        """
        shards = max(1, shard_ranks // tensor)
        parameters = model.parameters(max_length or DEFAULT_CONTEXT)
        budget = DEVICE_SHARE * cluster.device.memory_gib if budget_gib is None else budget_gib
        return cls(
            profile,
            model,
            Compute.build(profile, cluster, model),
            Communication(profile, cluster, cp_model(model, tensor)),
            Memory(profile, model, parameters, shards, tensor, owners),
            shards,
            budget_bytes=math.floor(budget * GIB),
            shapes=with_methods(
                candidate_shapes(family, model.heads, model.kv_heads, tensor, within),
                cluster.gpus_per_node,
                len(set(cluster.nic_of_gpu)) if tensor == 1 else 1,  # a stage that splits weights has no routes
            ),
            tensor=tensor,
        )

    @property
    def policies(self) -> tuple[MemoryPolicy, ...]:
        """Every checkpointing choice; gradients per round or per step where there is a shard group."""
        reduces = (Reduce.ROUND, Reduce.STEP) if self.shard_ranks > 1 else (Reduce.STEP,)
        kept = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)
        return tuple(MemoryPolicy(checkpoint, reduce) for reduce in reduces for checkpoint in kept)

    def fixed_bytes(self, policy: MemoryPolicy) -> int:
        """Bytes of a rank before any token."""
        return self.memory.fixed_bytes(policy)

    def token_bytes(self, policy: MemoryPolicy) -> float:
        """Bytes per token on a rank."""
        return self.memory.token_bytes(policy)

    def token_ns(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> dict[str, float]:
        """ns per token of the group, part by part, attention apart."""
        checkpoint = policy.checkpoint
        ulysses, sharing, team = self.flows(shape, policy, reach)
        ring = sharing.time if shape.overlaps_kv else 0.0
        adding = tp_reduce_ns(self.model, self.tensor, checkpoint, self.compute.memory_gb_s)
        return {
            "linear": (self.compute.linear(checkpoint) + adding) / shape.degree,
            "head": self.compute.head() / shape.degree,
            "steps": self._exposed * ring,
            "ulysses": ulysses.time,
            "ring": ring,
            "network": ulysses.network + sharing.network + team.network,
            "kv_gather": 0.0 if shape.overlaps_kv else sharing.time + self.links.gathered(cp_shape(shape, self.tensor)),
            "link": ulysses.link + sharing.link + team.link,
            "tensor": team.time,
        }

    def prefix_token_ns(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> dict[str, float]:
        """ns per token in front of a piece: its keys and values are shared again, and its gradients sent back."""
        _, sharing, _ = self.flows(shape, policy, reach)
        ring = sharing.time if shape.overlaps_kv else 0.0
        return {
            "steps": self._exposed * ring,
            "ring": ring,
            "network": sharing.network,
            "kv_gather": 0.0 if shape.overlaps_kv else sharing.time,
            "link": sharing.link,
        }

    def flows(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> tuple[Flow, Flow, Flow]:
        """Traffic per token of the group: the head exchange, keys and values by the shape's method, the teams'.

        A column's rank has tensor times as many tokens of 1 / tensor of the heads: as many values as if it had its own
        tokens of all heads.
        """
        kept, column = policy.checkpoint, cp_shape(shape, self.tensor)
        share = self.links.kv_gather if shape.method == Method.GATHER else self.links.ring
        heads, keys = self.links.ulysses(column, reach, kept), share(column, reach, kept)
        return heads, keys, tp_flow(self.links, shape, reach, kept)

    def layout_token_ns(self, policy: MemoryPolicy, remap: Remap) -> dict[str, tuple[float, float]]:
        """ns per token of a rank, by part: (in the linear layout, in the attention layout)."""
        linear, head = self.compute.linear(policy.checkpoint), self.compute.head()
        if remap == Remap.ATTENTION:
            return {"linear": (linear, 0.0), "head": (head, 0.0)}
        moved = self.compute.feed_forward(policy.checkpoint)
        return {"linear": (moved, linear - moved), "head": (0.0, head)}

    @property
    def matmul_share(self) -> float:
        """Share of ``linear`` that is matrix products."""
        return self.compute.matmul_share

    def remap_times(self, work: StageMicroBatch, attention: Layout, linear: Layout) -> RemapTimes:
        """Price the change between the two layouts of a round."""
        return RemapTimes.of(work, attention, linear, self.links)

    def route(self, shape: GroupShape, ranks: Sequence[int], tokens: int) -> Route | None:
        """How the keys and values of a routed shape cross nodes; None where there is nothing to spread.

        Args:
            shape: of the group.
            ranks: of the group, in order.
            tokens: on each rank, for which the number of slices shall be best.
        """
        card_of = self.links.cluster.nic_of_gpu
        proxies = nic_proxies(ranks, card_of)
        reach = group_traffic(tuple(ranks), shape, card_of, Route(proxies))
        if not shape.routed or reach.proxies < 2:
            return None
        return Route(proxies, self.links.slices(shape, reach, tokens * shape.degree))

    def fixed_ns(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> dict[str, float]:
        """ns of a group before any document, part by part.

        A round gathers the parameters for forward and for backward, and reduces the gradients unless that
        waits for the end of the step. What does not hide behind computing counts there as well.
        """
        profile, checkpoint, layers = self.profile, policy.checkpoint, self.model.layers
        passes = 3 if checkpoint == Checkpoint.FULL else 2
        column = cp_shape(shape, self.tensor)
        steps = passes * (shape.ring - 1) * profile.ring_step_us if shape.overlaps_kv else 0.0
        ring = self.links.ring_latency(column, reach, checkpoint) if shape.overlaps_kv else 0.0
        gathered = 0.0 if shape.overlaps_kv else self.links.kv_gather_latency(column, reach, checkpoint)
        gather = 0.0 if policy.resident else 2 * self._collective(PARAMETER_BYTES)
        waits = policy.resident or policy.reduce == Reduce.STEP
        reduce = 0.0 if waits else self._collective(GRADIENT_BYTES)
        return {
            "fixed": (profile.round_us + layers * profile.layer_us) * 1e3 + self._exposed * (gather + reduce),
            "steps": layers * steps * 1e3 + self._exposed * ring,
            "ulysses": self.links.ulysses_latency(column, reach, checkpoint),
            "ring": ring,
            "gather": gather,
            "reduce": reduce,
            "kv_gather": gathered,
            "tensor": tp_latency(self.links, self.tensor, reach, checkpoint),
        }

    def attention_ns(self, lengths: np.ndarray, ring: int, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns of all heads of each document on one of ``ring`` ranks."""
        return self.compute.attention(lengths, ring, policy.checkpoint)

    def kernel_call_ns(self, lengths: np.ndarray, ring: int, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns of calling the kernels for each document on one of ``ring`` ranks, however many heads."""
        passes = 4 / 3 if policy.checkpoint == Checkpoint.FULL else 1.0
        each = self.model.layers * ring * passes * self.profile.document_us * 1e3
        return np.where(lengths > 0, each, 0.0)

    def prefix_ns(self, prefix: np.ndarray, shape: GroupShape, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns of what a piece costs because tokens are in front of it, beyond the pairs that it reads.

        The kernels are called once more and their results merged; gradients of the prefix are added to what later
        pieces left for it. A rank meets all tokens of the prefix that a layer's window shows, of its own heads.
        """
        calls = self.kernel_call_ns(prefix, shape.kernel_calls, policy)
        passes = 3 / 2 if policy.checkpoint == Checkpoint.FULL else 1.0
        merging = self.model.layers * passes * self.profile.piece_us * 1e3
        met = sum(layers * np.minimum(prefix, window or np.inf) for window, layers in self.compute.windows)
        return calls + np.where(prefix > 0, merging, 0.0) + self.links.prefix(cp_shape(shape, self.tensor)) * met

    @property
    def solo_time_ratio(self) -> float:
        """A rank's time while all others wait, of that while all are busy."""
        return self.profile.alone

    def split_overhead_ns(self, layers: int) -> int:
        """ns that a unit's backward through so many layers takes more in two halves than whole."""
        return round(layers * self.profile.split_us * 1e3)

    def attention_share(self, shape: GroupShape) -> float:
        """Share of the heads on the fullest Ulysses rank."""
        return -(-self.links.model.heads // (shape.ulysses // self.tensor)) / self.model.heads

    def step_communication(self, policy: MemoryPolicy) -> float:
        """ns once per step on the links: reduction that waited, sum over replicas.

        Under free sharding what moves depends on the plan, see `relaying`.
        """
        if self.memory.owners:
            return 0.0
        waited = self._collective(GRADIENT_BYTES) if policy.reduce == Reduce.STEP else 0.0
        gradients, teams = GRADIENT_BYTES * self.memory.held, self.links.cluster.ranks // self.tensor
        return waited + self.links.replica_sum(gradients, self.shard_ranks, self.model.layers, teams)

    def step_overhead(self, policy: MemoryPolicy) -> float:
        """ns once per step: its communication, the optimiser on this rank's shard, the host."""
        memory = self.memory
        owned = memory.parameters / memory.owners if memory.owners else memory.held / self.shard_ranks
        optimiser = self.compute.optimiser(owned)
        return self.step_communication(policy) + optimiser + self.profile.step_us * 1e3

    @property
    def _exposed(self) -> float:
        """Share of the traffic beside computing that takes time of its own."""
        return 1.0 - self.profile.overlap

    def _collective(self, bytes_per_parameter: int) -> float:
        size = bytes_per_parameter * self.memory.held
        return self.links.collective(size, self.shard_ranks, self.model.layers)
