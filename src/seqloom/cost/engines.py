"""Cost engines: what a profile knows of times and memory, behind one protocol.

An **analytic** profile has kernels and links, from which the time of any model on any cluster is composed. An
**additive** profile has a published system's own constants (FlexSP's), exactly as they are, and no further terms:

    T(group) = (1/d) sum_k (a1 s_k^2 + a2 s_k) + b1 + [d > 1] c L h sum_k s_k / (d v_d)

with ``c`` = 16 bytes (4 all-to-alls, forward and backward, 2 bytes each), ``L`` layers, ``h`` hidden width and ``v_d``
the effective bandwidth of degree ``d``. Degree 1 communicates nothing; there is no ``(d-1)/d``, nothing overlaps.

Times are float64 ns by name of the part in `CostBreakdown`; `CostModel` rounds them once.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.communication import (
    MIB,
    Communication,
    Flow,
    cp_model,
    cp_shape,
    passes,
)
from seqloom.cost.compute import OPTIMISER_TRAFFIC, Compute, ExpertTimes
from seqloom.cost.forward_backward import FORWARD, forward_with
from seqloom.cost.memory import (
    GIB,
    GRADIENT_BYTES,
    OPTIMISER_BYTES,
    PARAMETER_BYTES,
    AdditiveMemory,
    AnalyticMemory,
    MemoryModel,
)
from seqloom.cost.profile import HOST_GB_S
from seqloom.cost.shapes import GroupShape, MemoryPolicy, candidate_shapes, with_methods
from seqloom.errors import SeqloomError, unknown_name
from seqloom.plan import Checkpoint, LayerRange, Reduce, Remap, Sharding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from seqloom.cost.communication import GroupTraffic
    from seqloom.cost.model import CostModel
    from seqloom.cost.profile import AdditiveModel, AdditiveProfile, AnalyticProfile
    from seqloom.describe import Cluster, ModelSpec

DEVICE_SHARE = 0.9  # of the device's memory, when no budget is given


@dataclass(frozen=True, slots=True, kw_only=True)
class CostEngine(ABC):
    """The protocol of engines. A method that is not abstract answers for engines without constants for the question."""

    profile: AdditiveProfile | AnalyticProfile
    memory: MemoryModel
    links: Communication | None  # None: messages between stages are free, and tokens have one layout
    budget_bytes: int  # memory per device that plans may use
    shapes: tuple[GroupShape, ...]  # all that it can price
    policies: tuple[MemoryPolicy, ...]  # all, whether they fit or not
    pad_multiple: int = 1  # lengths are rounded up to a multiple of this many tokens
    matmul_share: float = 1.0  # of the part ``linear``
    solo_time_ratio: float = 1.0  # a rank's time while all others wait, over its time while all are busy
    split_us: float = 0.0  # what a backward takes more in two halves (I, W) than in one, per layer
    host_gb_s: float = HOST_GB_S  # GB/s of a device to and from pinned host memory, in one direction

    def forward(self, checkpoint: Checkpoint) -> Sequence[int]:
        """Share of each column of costs that is forward, in the units of `FORWARD`."""
        return FORWARD[checkpoint]

    def of_layers(self, model: ModelSpec) -> CostEngine:
        """The engine that prices a part of the model's layers (`ModelSpec.with_layers`); itself: all take as long."""
        return self

    @abstractmethod
    def fixed_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """ns of a group before any document."""

    @abstractmethod
    def token_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """ns per token of the group, without attention."""

    @abstractmethod
    def attention_ns(self, lengths: np.ndarray, shapes: Sequence[GroupShape], policy: MemoryPolicy) -> np.ndarray:
        """float64[shapes, n] ns of each document on the rank of a group that has most heads."""

    def document_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """ns of a document, or a piece of one, however many tokens it has; parts are those of tokens."""
        return {}

    def scan_token_ns(self, policy: MemoryPolicy) -> float:
        """ns per token of a rank, of the part ``linear``, that stays where attention has the token: scans."""
        return 0.0

    def expert_times(self, policy: MemoryPolicy) -> ExpertTimes | None:
        """What routed experts take on a rank, of which the part ``routed`` is only the tokens; None: the same."""
        return None

    def prefix_ns(self, prefix: np.ndarray, shape: GroupShape, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns that so many tokens in front of a piece cost, beyond the query-key pairs that it reads."""
        return np.zeros(len(prefix))

    def prefix_token_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """ns per token in front of a piece that its keys and values take on the links."""
        return {}

    def flows(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> tuple[Flow, Flow, Flow, Flow]:
        """Traffic per token of the group: all-to-all of heads, keys and values by the shape's method, tensor, mixer."""
        return Flow(), Flow(), Flow(), Flow()

    def layout_token_ns(self, policy: MemoryPolicy, remap: Remap) -> dict[str, tuple[float, float]]:
        """ns per token of a rank, by part: (in the linear layout, in the attention layout)."""
        raise SeqloomError(
            f"profile {self.profile.name} has no constants for a second layout of tokens; "
            "plan without remapping, or leave the profile out"
        )

    def copy_ns(self, size: np.ndarray) -> np.ndarray:
        """int64 ns of copying so many bytes between a device and host memory, one way."""
        return np.ceil(size / self.host_gb_s).astype(np.int64)

    def split_overhead_ns(self, layers: int) -> int:
        """ns that a backward through so many layers takes more in two halves than in one."""
        return round(layers * self.split_us * 1e3)

    def step_overhead(self, policy: MemoryPolicy) -> tuple[float, float]:
        """(ns, of that communication) once per step, in plans of one stage."""
        return 0.0, 0.0

    def stage_overhead(self, stages: Sequence[LayerRange], ranks: int, shard_group: int) -> tuple[float, float]:
        """(ns, of that communication) once per step, on `ranks` ranks that run these pipeline stages."""
        return 0.0, 0.0


class ShardedParameters(NamedTuple):
    """Parameters that the same ranks shard, and the collectives over them."""

    parameters: int  # of a rank, whole
    trained: int  # of these, with gradients
    ranks: int  # that share them
    gathers: int  # calls of an all-gather of all of them
    reductions: int  # calls of a reduce-scatter of their gradients
    stride: int  # how far these ranks are apart


@dataclass(frozen=True, kw_only=True)
class AnalyticEngine(CostEngine):
    """Kernels and links of a profile, composed for any model and cluster."""

    profile: AnalyticProfile
    memory: AnalyticMemory
    links: Communication
    model: ModelSpec
    compute: Compute
    shard_ranks: int
    tensor: int
    expert: int

    @classmethod
    def build(
        cls, profile: AnalyticProfile, cost: CostModel, shard_ranks: int, budget_gib: float | None
    ) -> AnalyticEngine:
        """Compose the pieces for the cluster and model of a cost model, and list all candidate shapes."""
        cluster, model, tensor, whole = cost.cluster, cost.model, cost.tensor, cost.cluster_cost
        owners = whole.ranks if cost.sharding == Sharding.FREE else 0
        cluster_family = None if cost.ranks == whole.ranks else whole.family
        plain = candidate_shapes(cost.family, model.heads, model.kv_heads, tensor, cluster_family)
        nics = len(set(cluster.nic_of_gpu)) if tensor == 1 else 1  # tensor parallel stages have no routes
        budget = DEVICE_SHARE * cluster.device.memory_gib if budget_gib is None else budget_gib
        compute = Compute.build(profile, cluster, model, float8=cost.float8, parts=cost.expert * tensor)
        imbalance = profile.expert_imbalance if cost.memory_imbalance is None else cost.memory_imbalance
        held = replace(profile, expert_imbalance=imbalance)
        shared = held, model, cost.context, shard_ranks, tensor, owners, cost.offload_optimiser
        memory = AnalyticMemory(*shared, cost.expert)
        reduces = (Reduce.ROUND, Reduce.STEP) if shard_ranks > 1 else (Reduce.STEP,)
        checkpoints = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)
        return cls(
            profile=profile,
            model=model,
            compute=compute,
            links=Communication(profile, cluster, cp_model(model, tensor), 2 if memory.table_ranks > 1 else 0),
            memory=memory,
            shard_ranks=shard_ranks,
            budget_bytes=math.floor(budget * GIB),
            shapes=with_methods(plain, cluster.gpus_per_node, nics, model.latent > 0, model.mixer_state > 0),
            policies=tuple(MemoryPolicy(checkpoint, reduce) for reduce in reduces for checkpoint in checkpoints),
            matmul_share=compute.matmul_share,
            solo_time_ratio=profile.solo_time_ratio,
            split_us=profile.split_us,
            host_gb_s=profile.host_gb_s,
            tensor=tensor,
            expert=cost.expert,
        )

    def of_layers(self, model: ModelSpec) -> AnalyticEngine:
        """With the share of a round's constant that these layers are of all: a profile does not say what it is for."""
        profile = replace(self.profile, round_us=self.profile.round_us * model.layers / self.model.layers)
        links, compute = self.links.of_layers(cp_model(model, self.tensor)), self.compute.of_layers(model)
        own = {"profile": profile, "links": links, "compute": compute, "matmul_share": compute.matmul_share}
        return replace(self, model=model, **own)

    def fixed_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """ns of a group before any document.

        A round gathers the parameters for forward and for backward, and reduces the gradients unless that waits for
        the end of the step. The share of this and of a ring's latency that computing does not hide counts twice:
        on its own stream, and as exposed time.
        """
        profile, checkpoint, layers = self.profile, policy.checkpoint, self.model.layers
        cp, exposed = cp_shape(shape, self.tensor), 1.0 - profile.overlap
        steps = passes(checkpoint) * (shape.ring - 1) * profile.ring_step_us if shape.overlaps_kv else 0.0
        kv = self.links.kv_latency(cp, traffic, checkpoint)
        ring, kv_gather = (kv, 0.0) if shape.overlaps_kv else (0.0, kv)
        gather = 0.0 if policy.resident else 2 * sum(map(self._gather_ns, self._round_collectives))
        waits = policy.resident or policy.reduce == Reduce.STEP
        reduce = 0.0 if waits else sum(map(self._reduce_ns, self._round_collectives))
        matrices = self.model.attention_layers * self.compute.expansion_matrix(shape)
        return {
            "fixed": (profile.round_us + layers * profile.layer_us) * 1e3 + exposed * (gather + reduce),
            "steps": self.model.attention_layers * steps * 1e3 + exposed * ring + matrices,
            "ulysses": self.links.ulysses_latency(cp, traffic, checkpoint)
            + self.links.mixer_latency(shape, traffic, checkpoint),
            "ring": ring,
            "gather": gather,
            "reduce": reduce,
            "kv_gather": kv_gather,
            "tensor": self.links.tensor_latency(self.tensor, traffic, checkpoint),
            "expert_latency": self.links.expert_latency(self.expert, checkpoint),
        }

    def token_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """ns per token of the group, without attention."""
        ulysses, kv, tensor, mixers = self.flows(shape, policy, traffic)
        sums = self.compute.tensor_sums(self.tensor, self.links.tensor_exchanges(policy.checkpoint))
        rates = self.prefix_token_ns(shape, policy, traffic)
        rates["kv_gather"] += self.links.gathered_kv(cp_shape(shape, self.tensor))
        experts, routed = self.links.expert(self.expert, policy.checkpoint), self.expert_times(policy).token_ns
        return rates | {
            "linear": (self.compute.linear(policy.checkpoint) - routed + sums) / shape.degree
            + self.compute.scan(shape, policy.checkpoint),
            "routed": routed / shape.degree,
            "head": self.compute.head() / shape.degree,
            "ulysses": ulysses.time + mixers.time,
            "network": ulysses.network + kv.network + tensor.network + mixers.network,
            "link": ulysses.link + kv.link + tensor.link + mixers.link,
            "tensor": tensor.time,
            "expert": experts.time / shape.degree,
            "expert_network": experts.network / shape.degree,
        }

    def document_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """Halos of convolutions, and states of scans, which every rank joins."""
        if not self.model.mixer_layers:
            return {}
        seen = traffic, policy.checkpoint
        time, network, link = self.links.halo(shape, *seen) + self.links.states(shape, *seen)
        joined = self.compute.joined_states(shape, policy.checkpoint)
        return {"ulysses": time, "network": network, "link": link, "linear": joined}

    def forward(self, checkpoint: Checkpoint) -> Sequence[int]:
        """Of a model with frozen weights, by how much its products are of each column."""
        shares = self.compute.forward_shares(checkpoint)
        return forward_with(shares, checkpoint) if shares else FORWARD[checkpoint]

    def expert_times(self, policy: MemoryPolicy) -> ExpertTimes:
        """Of a rank with its part of the experts, or with its part of each."""
        return self.compute.experts(policy.checkpoint, self.expert * self.tensor)

    def scan_token_ns(self, policy: MemoryPolicy) -> float:
        """On one rank."""
        return self.compute.scan(GroupShape(1, 1), policy.checkpoint)

    def prefix_token_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """Keys and values in front of a piece are shared again, like those of the piece, and gradients sent back."""
        kv = self.flows(shape, policy, traffic)[1]
        ring = kv.time if shape.overlaps_kv else 0.0
        return {
            "steps": (1.0 - self.profile.overlap) * ring,
            "ring": ring,
            "network": kv.network,
            "kv_gather": 0.0 if shape.overlaps_kv else kv.time,
            "link": kv.link,
        }

    def flows(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> tuple[Flow, Flow, Flow, Flow]:
        """Traffic per token of the group: all-to-all of heads, keys and values by the shape's method, tensor, mixers.

        A tensor rank has tensor times as many tokens of 1 / tensor of the heads: as many values as if it had its own
        tokens of all heads.
        """
        links, cp = self.links, cp_shape(shape, self.tensor)
        seen = traffic, policy.checkpoint
        return links.ulysses(cp, *seen), links.kv(cp, *seen), links.tensor(shape, *seen), links.mixers(shape, *seen)

    def layout_token_ns(self, policy: MemoryPolicy, remap: Remap) -> dict[str, tuple[float, float]]:
        """Around attention all linear layers move, around the feed-forward only these; scans stay."""
        routed, head = self.expert_times(policy).token_ns, self.compute.head()
        linear = self.compute.linear(policy.checkpoint) - routed
        scan, experts = self.scan_token_ns(policy), self.links.expert(self.expert, policy.checkpoint)
        moves = {"routed": (routed, 0.0), "expert": (experts.time, 0.0), "expert_network": (experts.network, 0.0)}
        if remap == Remap.ATTENTION:
            return moves | {"linear": (linear, scan), "head": (head, 0.0)}
        moved = self.compute.feed_forward(policy.checkpoint) - routed
        return moves | {"linear": (moved, linear - moved + scan), "head": (0.0, head)}

    def attention_ns(self, lengths: np.ndarray, shapes: Sequence[GroupShape], policy: MemoryPolicy) -> np.ndarray:
        """The heads of the fullest Ulysses rank, kernel calls, and what making keys from latents takes more there."""
        rings = {shape.ring for shape in shapes}
        all_heads = {ring: self.compute.attention(lengths, ring, policy.checkpoint) for ring in rings}
        rows = []
        for shape in shapes:
            share = -(-self.links.model.heads // (shape.ulysses // self.tensor)) / self.model.heads
            calls = self._kernel_call_ns(lengths, shape.kernel_calls, policy)
            row = all_heads[shape.ring] * share + calls
            if shape.latent:
                more = self.compute.expansion(shape, policy.checkpoint) - self.compute.unexpanded(
                    shape, policy.checkpoint
                )
                row = row + self.model.attention_layers * more * lengths
            rows.append(row)
        return np.stack(rows)

    def _kernel_call_ns(self, lengths: np.ndarray, calls: int, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns of so many attention calls for each document, and a scan by each mixer, however many heads."""
        again = 4 / 3 if policy.checkpoint == Checkpoint.FULL else 1.0
        total = self.model.attention_layers * calls + len(self.model.mixer_layers)
        return np.where(lengths > 0, total * again * self.profile.document_us * 1e3, 0.0)

    def prefix_ns(self, prefix: np.ndarray, shape: GroupShape, policy: MemoryPolicy) -> np.ndarray:
        """float64[n] ns: kernels are called once more and their results merged; gradients of the prefix are added up.

        A rank meets all tokens of the prefix that a layer's mask shows, of its own heads, which it makes from latents
        once more where these are what the cache has.
        """
        calls = self._kernel_call_ns(prefix, shape.kernel_calls, policy)
        again = 3 / 2 if policy.checkpoint == Checkpoint.FULL else 1.0
        merging = self.model.attention_layers * again * self.profile.piece_us * 1e3
        met = sum(
            layers * np.minimum(prefix if chunk is None else prefix % chunk, window or np.inf)
            for (window, chunk), layers in self.compute.masks
        )
        each = self.links.prefix(cp_shape(shape, self.tensor)) + self.compute.expansion(shape, policy.checkpoint)
        return calls + np.where(prefix > 0, merging, 0.0) + each * met

    def step_overhead(self, policy: MemoryPolicy) -> tuple[float, float]:
        """Gradients that were not reduced every round, the sum over replicas, the optimiser, the host."""
        ranks, every = self.links.cluster.ranks, LayerRange(0, self.model.layers, self.model.layers)
        waited = policy.reduce == Reduce.STEP
        return self._overhead([every], ranks, self.shard_ranks, gathers=False, reduces=waited)

    def stage_overhead(self, stages: Sequence[LayerRange], ranks: int, shard_group: int) -> tuple[float, float]:
        """Parameters gathered before the first micro-batch, gradients scattered and summed after the last, optimiser.

        Tensor ranks share with their peers in other tensor parallel groups, ranks of an EP group what they have of the
        experts with those that have the same.
        """
        return self._overhead(stages, ranks, shard_group, gathers=True, reduces=True)

    def _overhead(
        self, stages: Sequence[LayerRange], ranks: int, shard_group: int, *, gathers: bool, reduces: bool
    ) -> tuple[float, float]:
        """(ns, of that communication). Under free sharding messages depend on the whole plan: see `resharding`."""
        memory, rest = self.memory, self.profile.step_us * 1e3
        if memory.owners:
            return rest + self._optimiser_ns(memory.trained / memory.owners), 0.0
        moved, updated = 0.0, 0.0
        for part in self._collectives(stages, shard_group):
            moved += (self._gather_ns(part) if gathers else 0.0) + (self._reduce_ns(part) if reduces else 0.0)
            if part.trained:
                size = GRADIENT_BYTES * part.trained
                moved += self.links.replica_sum(size, part.ranks, part.reductions, ranks, part.stride)
            updated += part.trained / part.ranks
        if self.tensor > 1:  # gradients of norms, each rank's of its own tokens
            size = GRADIENT_BYTES * sum(map(memory.replicated_of, stages)) / memory.shards(shard_group)[1]
            moved += 2 * self.links.collective(size, self.tensor, 1)
        if reduces:
            moved += self._head_sum_ns(stages, ranks, self.memory.shards(shard_group)[0])
        return moved + (rest + self._optimiser_ns(updated)), moved

    def _head_sum_ns(self, stages: Sequence[LayerRange], ranks: int, shards: int) -> float:
        """ns of summing the gradients of the head over all head stages, on ranks that are a stage apart."""
        heads = [layers for layers in stages if layers.first == layers.stop]
        size = GRADIENT_BYTES * sum(self.memory.trained_of(layers).common for layers in heads) / shards
        return 2 * self.links.collective(size, heads[0].head_stages, 1, ranks) if size else 0.0

    def _collectives(self, stages: Sequence[LayerRange], shard_group: int) -> Iterator[ShardedParameters]:
        """Yield what collectives over a rank's parameters move.

        Experts that an EP group divides have collectives of their own, and so have layers of a TP group.
        """
        held = [self.memory.parameters_of(layers) for layers in stages]
        trained = [self.memory.trained_of(layers) for layers in stages]
        shards, divided_shards = self.memory.shards(shard_group)
        layers = [layer for part in stages for layer in range(part.first, part.stop)]
        reductions = sum(self.model.trained_parameters(layer) > 0 for layer in layers)
        common = sum(each.common for each in held), sum(each.common for each in trained)
        divided = sum(each.divided for each in held), sum(each.divided for each in trained)
        if self.tensor > 1:  # embedding, final norm and head: one call
            outside, beside = int(common[0] > 0), 0
            if self.memory.table_ranks > 1:
                beside = int(any(part.has_embedding or part.has_head for part in stages))
            yield ShardedParameters(*common, shards, outside, outside, 1)
            yield ShardedParameters(*divided, divided_shards, len(layers) + beside, reductions + beside, self.tensor)
            return
        yield ShardedParameters(*common, shards, len(layers), reductions, 1)
        if self.expert > 1:
            sparse = len(set(layers) & set(self.model.moe_layers))
            yield ShardedParameters(*divided, divided_shards, sparse, sparse, self.expert)

    def _gather_ns(self, part: ShardedParameters) -> float:
        """ns of an all-gather of all parameters."""
        return self.links.collective(PARAMETER_BYTES * part.parameters, part.ranks, part.gathers, part.stride)

    def _reduce_ns(self, part: ShardedParameters) -> float:
        """ns of a reduce-scatter of the gradients of those that are trained."""
        if not part.trained:
            return 0.0
        return self.links.collective(GRADIENT_BYTES * part.trained, part.ranks, part.reductions, part.stride)

    @cached_property
    def _round_collectives(self) -> tuple[ShardedParameters, ...]:
        """Collectives over all parameters of a plan of one stage."""
        every = LayerRange(0, self.model.layers, self.model.layers)
        return tuple(self._collectives([every], self.shard_ranks))

    def _optimiser_ns(self, parameters: float) -> float:
        """ns of the optimiser's step on this many parameters of a rank."""
        if not self.memory.offload_optimiser:
            return self.compute.optimiser(parameters)
        return min(self.offloaded_update_ns(parameters).values())

    def offloaded_update_ns(self, parameters: float) -> dict[str, float]:
        """ns of updating parameters whose masters and moments are in host memory: on the GPU, and on the host's CPUs.

        On the GPU all state passes the link up and down, side by side, and the host's memory twice. On the host the
        gradients go down and the new parameters up, beside the update, which is as fast as memory. The GPUs of a node
        share that memory.
        """
        link, gpus = self.host_gb_s, self.links.cluster.gpus_per_node
        memory = self.profile.host_memory_gb_s / gpus
        return {
            "device": parameters * max(OPTIMISER_BYTES / link, 2 * OPTIMISER_BYTES / memory),
            "host": parameters * max(GRADIENT_BYTES / link, OPTIMISER_TRAFFIC / memory),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditiveEngine(CostEngine):
    """Published constants: linear, attention, ulysses and fixed, all on the compute stream."""

    profile: AdditiveProfile
    constants: AdditiveModel

    @classmethod
    def build(
        cls, profile: AdditiveProfile, cost: CostModel, shard_ranks: int, budget_gib: float | None
    ) -> AdditiveEngine:
        """Check that the constants hold for the cluster and model of a cost model, and size the state.

        Parameters are interpolated (and beyond the ends extrapolated) linearly between the published contexts.
        """
        constants = _published(profile, cost.cluster, cost.model)
        parameters = interpolate(constants.parameters_gi, cost.context)
        state = math.ceil(profile.state_bytes_per_parameter * parameters * GIB / shard_ranks)
        budget = profile.budget_gib if budget_gib is None else budget_gib
        listed = (1, *profile.bandwidth_mib_per_ms)
        degrees = [size for size in cost.family.sizes if size in listed and size <= constants.heads]
        return cls(
            profile=profile,
            constants=constants,
            memory=AdditiveMemory(state, shard_ranks, constants.mib_per_token * MIB, constants.layers),
            links=None,
            policies=(MemoryPolicy(Checkpoint.PROFILE, Reduce.ROUND),),  # as they were measured
            budget_bytes=math.floor(budget * GIB),
            shapes=tuple(GroupShape(degree, 1) for degree in degrees),
            pad_multiple=profile.pad_multiple,
        )

    def fixed_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """b1."""
        return {"fixed": self.constants.fixed_ms * 1e6}

    def token_ns(self, shape: GroupShape, policy: MemoryPolicy, traffic: GroupTraffic) -> dict[str, float]:
        """a2 and the all-to-all."""
        model, degree = self.constants, shape.degree
        exchange = 0.0
        if degree > 1:
            volume = self.profile.exchange_bytes * model.layers * model.hidden
            exchange = volume / MIB / (degree * self._bandwidth(shape, traffic)) * 1e6  # ms -> ns
        return {"linear": model.linear_ms * 1e6 / degree, "ulysses": exchange}

    def attention_ns(self, lengths: np.ndarray, shapes: Sequence[GroupShape], policy: MemoryPolicy) -> np.ndarray:
        """a1 / d."""
        whole = self.constants.quadratic_ms * 1e6 * (lengths * lengths)
        return np.stack([whole * (1.0 / shape.degree) for shape in shapes])

    def _bandwidth(self, shape: GroupShape, traffic: GroupTraffic) -> float:
        """MiB/ms of the degree; a small group astride two nodes gets that of the least degree that crosses."""
        table = self.profile.bandwidth_mib_per_ms
        if shape.ring > 1 or shape.degree not in table:
            legal = ", ".join(str(degree) for degree in (1, *table))
            raise SeqloomError(
                f"profile {self.profile.name} has no constants for a group of ulysses {shape.ulysses} x ring "
                f"{shape.ring}; use Ulysses of degree {legal}, or leave the profile out"
            )
        crossing = [degree for degree in table if degree > self.profile.node_size]
        astride = traffic.ulysses.node_out > 0 and shape.degree <= self.profile.node_size
        return table[min(crossing)] if astride and crossing else table[shape.degree]


def interpolate(points: tuple[tuple[int, float], ...], x: float) -> float:
    """Piecewise linear through ``points``; the end segments go on beyond the ends."""
    i = min(max(sum(x >= knot for knot, _ in points) - 1, 0), len(points) - 2)
    (x0, y0), (x1, y1) = points[i], points[i + 1]
    return y0 + (y1 - y0) * ((x - x0) / (x1 - x0))


def _published(profile: AdditiveProfile, cluster: Cluster, model: ModelSpec) -> AdditiveModel:
    """The profile's entry for this model, provided that it is the same model, on nodes like the authors'.

    Published bandwidths are by degree; a single smaller node will do.
    """
    if model.name not in profile.models:
        raise SeqloomError(
            f"{unknown_name(f'model for profile {profile.name}:', model.name, profile.models)} "
            f"(this profile holds published constants of {', '.join(profile.models)} only; "
            "leave the profile out to price another model)"
        )
    if model.adapters:
        raise SeqloomError(
            f"adapters of {model.name} with profile {profile.name}, whose published constants are of training all "
            "parameters; leave the profile out"
        )
    entry = profile.models[model.name]
    for field in ("layers", "hidden", "heads"):
        here, there = getattr(model, field), getattr(entry, field)
        if here != there:
            raise SeqloomError(
                f"profile {profile.name} holds constants of a {model.name} with {field} {there}, "
                f"this one has {here}; leave the profile out to price it"
            )
    size = profile.node_size
    if not cluster.device.name.lower().startswith(profile.device.lower()):
        raise SeqloomError(
            f"profile {profile.name} was measured on {profile.device}, not {cluster.device.name}; "
            f"take a cluster such as 8x{size}x{profile.device}-40G, or leave the profile out"
        )
    if cluster.gpus_per_node != size and not (cluster.nodes == 1 and cluster.gpus_per_node < size):
        raise SeqloomError(
            f"profile {profile.name} was measured on nodes of {size} GPUs, this cluster has nodes of "
            f"{cluster.gpus_per_node}; take any number of nodes of {size}, one node of at most {size}, "
            "or leave the profile out"
        )
    return entry
