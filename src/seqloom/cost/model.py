"""The cost model: cluster + model + profile -> time and memory of any piece of a plan.

The profile's engine (`engines`) knows times in float64 ns; this class rounds them once, adds them up over documents and
groups, and makes the tables that planners search on. Whole rounds and plans are priced by `plan_cost`.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seqloom.cost import plan_cost
from seqloom.cost.communication import Communication, GroupTraffic, group_traffic, nic_proxies
from seqloom.cost.compute import Compute
from seqloom.cost.engines import DEVICE_SHARE, AdditiveEngine, AnalyticEngine, CostEngine
from seqloom.cost.memory import GIB
from seqloom.cost.profile import AdditiveProfile, AnalyticProfile, Profile
from seqloom.cost.shapes import (
    BY_SPEED,
    COST_COLUMNS,
    PROBE_CAPACITY,
    PROBE_LENGTHS,
    STREAMS,
    CostBreakdown,
    CostTables,
    GroupShape,
    MemoryPolicy,
    ordered,
    useful_shapes,
)
from seqloom.cost.speeds import RankSpeeds
from seqloom.errors import MemoryBudgetError, SeqloomError, unknown_name
from seqloom.layout import Route
from seqloom.plan import Checkpoint, Group, GroupFamily, LayerRange, Limits, Reduce, Sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.describe import Cluster, ModelSpec
    from seqloom.describe.model import LayerKind
    from seqloom.layout import Span
    from seqloom.plan import Plan, Stage

DEFAULT_CONTEXT = 384 * 1024
"""Tokens of a learned position table when no longest sequence is given: the largest published context."""

MOST_GIB, MOST_TOKENS = 1e9, 1 << 36
"""GiB of host memory, and tokens of a rank in a round, that count at most."""

CHECKED_TOKENS, MOST_NS = 1 << 17, float(1 << 50)
"""Tokens of a document, and ns that it may take, 13 days: sums of thousands fit 64-bit integers."""

TYPICAL_TOKENS, DEVICE_DECIMALS = 8192, 2
"""Tokens of the document by which devices of unequal nodes are compared, and decimals of their speeds."""

OFFLOADED = (Checkpoint.SELECTIVE, Checkpoint.FULL)
"""Checkpoints under which layers of plans of one stage may be offloaded."""

PricedShape = tuple[GroupShape, GroupTraffic]
"""A shape, and where the messages of a group of it go."""


class CostModel:
    """Prices groups, rounds and plans. Every number it hands out for comparison is an integer.

    Args:
        cluster: nodes, devices and links.
        model: the model to train.
        profile: a profile, its name or the path of its file; None picks the one of the cluster's device.
        sharding: over which ranks parameters are sharded.
        budget_gib: memory per device; None takes the profile's own, or 0.9 of the device's.
        max_length: longest sequence the run may see; sizes learned position embeddings.
        capacity: tokens a rank may hold in one round; None: as many as fit in memory, which is the limit anyway.
        stages: with more than one (or free sharding), a model that only pipelines can hold is not refused here.
        tensor: tensor parallel degree of every stage, neighbours in a node; shapes have multiples of it as Ulysses.
        expert: ranks that divide the experts of every layer among them (an EP group); 1: every rank computes all.
        cluster_cost: the model of the whole cluster, if ``cluster`` is a submesh of it; see `for_submesh`.
        float8: linear layers multiply in float8, but for the gradients of weights.
        offload: whether plans may keep activations in host memory: True, False, or "auto", which does it for batches
            that fit in no other way.
        offload_optimiser: whether the optimiser's master weights and moments are in host memory.
        host_gib: host memory of a device that plans may use; None: its share of what the cluster says of a node, if it
            says that.
        counts_offload: whether capacities count on activations in host memory; see `with_offload`.
        speeds: relative speed of every rank, beside what the cluster says of it; None: all alike. See `speeds`.
        memory_imbalance: `expert_imbalance` that memory counts on; None: that of the profile, as times do.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: ModelSpec,
        profile: AdditiveProfile | AnalyticProfile | str | Path | None = None,
        sharding: Sharding | str = Sharding.FULL,
        budget_gib: float | None = None,
        max_length: int | None = None,
        capacity: int | None = None,
        stages: int = 1,
        tensor: int = 1,
        cluster_cost: CostModel | None = None,
        float8: bool = False,
        offload: bool | str = "auto",
        offload_optimiser: bool = False,
        host_gib: float | None = None,
        counts_offload: bool = False,
        expert: int = 1,
        speeds: Sequence[float] | None = None,
        memory_imbalance: float | None = None,
    ) -> None:
        """Choose the engine of the profile's kind, and drop memory policies that cannot hold a single token."""
        if budget_gib is not None and not 0 < budget_gib < math.inf:
            raise SeqloomError(f"a memory budget of {budget_gib} GiB holds nothing; give a number above 0")
        if max_length is not None and max_length < 1:
            raise SeqloomError(f"a longest sequence of {max_length} tokens; give 1 or more, or leave it out")
        if host_gib is not None and not 0 < host_gib < math.inf:
            raise SeqloomError(f"{host_gib} GiB of host memory hold nothing; give a number above 0, or leave it out")
        if offload not in (True, False, "auto"):
            raise SeqloomError(f"offload is {offload!r}; give true, false or 'auto'")
        if sharding not in list(Sharding):
            raise unknown_name("sharding", str(sharding), list(Sharding))
        self.cluster, self.model, self.max_length = cluster, model, max_length
        self.context = max_length or DEFAULT_CONTEXT
        self.sharding, self.float8 = Sharding(sharding), float8
        self.profile = Profile.resolve(profile, cluster.device.name)
        self.ranks, self.node_size, self.tensor, self.expert = cluster.ranks, cluster.gpus_per_node, tensor, expert
        self.family = GroupFamily(self.ranks, self.node_size)
        self.cluster_cost = self if cluster_cost is None else cluster_cost
        _require_tensor(self)
        _require_expert(self)
        _require_float8(self)
        self._settings = (self.profile, self.sharding, budget_gib, max_length, capacity, stages)
        self._options: dict[str, Any] = {"float8": float8, "offload": offload, "offload_optimiser": offload_optimiser}
        self._options |= {"host_gib": host_gib, "counts_offload": counts_offload, "speeds": speeds}
        self._options["memory_imbalance"] = memory_imbalance
        self.speeds = RankSpeeds.of(self.ranks, self._device_speeds(), cluster.speeds, speeds)
        self.offload, self.offload_optimiser, self.counts_offload = offload, offload_optimiser, counts_offload
        self.host_bytes, self.memory_imbalance = self._host_bytes(host_gib), memory_imbalance
        self._submeshes: dict[tuple[int, int, int], CostModel] = {(self.ranks, tensor, expert): self}
        self._offloading: CostModel | None = self if counts_offload else None
        sharded = {Sharding.FULL: self.ranks, Sharding.HYBRID: self.node_size}.get(self.sharding, 1)
        self.shard_group_size = max(sharded, tensor, expert)  # ranks that take part in the same rounds
        self.engine: CostEngine
        if isinstance(self.profile, AdditiveProfile) and offload_optimiser:
            raise SeqloomError(
                f"the optimiser in host memory with profile {self.profile.name}, whose published constants say nothing "
                "of it; leave the profile out, or the optimiser where it is"
            )
        if isinstance(self.profile, AdditiveProfile):
            self.engine = AdditiveEngine.build(self.profile, self, sharded, budget_gib)
        else:
            self.engine = AnalyticEngine.build(self.profile, self, sharded, budget_gib)
        self.memory, self.budget_bytes = self.engine.memory, self.engine.budget_bytes
        self.pad_multiple = self.engine.pad_multiple
        if capacity is not None and capacity < self.pad_multiple:
            raise SeqloomError(f"a capacity of {capacity} tokens; give {self.pad_multiple} or more, or leave it out")
        self._token_limit = MOST_TOKENS if capacity is None else capacity - capacity % self.pad_multiple
        self._plain_capacity = {policy: self._tokens_that_fit(policy) for policy in self.engine.policies}
        self._capacity = dict(self._plain_capacity)
        for policy in self._offloadable if counts_offload else ():
            if self._plain_capacity[policy] > 0:
                self._capacity[policy] = max(self._plain_capacity[policy], self._offloaded_tokens(policy))
        self._fitting = tuple(policy for policy, tokens in self._capacity.items() if tokens > 0)
        if not self._fitting and stages == 1 and self.sharding != Sharding.FREE:
            raise _too_small(self)
        if stages == 1:
            self._require_host_memory()
        self._routes: dict[tuple[GroupShape, tuple[int, ...]], Route | None] = {}
        self._prices: dict[tuple[GroupShape, MemoryPolicy, GroupTraffic], tuple[CostBreakdown, dict[str, float]]] = {}
        self._by_layers: dict[tuple[LayerRange, ...], CostModel] = {}
        self._by_kinds: dict[frozenset[tuple[LayerKind, int]], CostModel] = {}
        self.shapes: tuple[GroupShape, ...] = self.engine.shapes
        self._check_prices()
        resident = tuple(policy._replace(resident=True) for policy in self.engine.policies)
        by_checkpoint = {policy.checkpoint: policy for policy in reversed(self._fitting or resident)}
        plain = tuple(shape for shape in self.shapes if not shape.latent and not shape.states)
        useful = [
            useful_shapes(partial(self.tables, policy=policy, shapes=shapes))
            for policy in by_checkpoint.values()
            for shapes in dict.fromkeys(
                (plain, self.shapes)
            )  # latents and states are further choices, and replace none
        ]
        self.shapes = ordered(shape for shapes in useful for shape in shapes)

    def _device_speeds(self) -> list[float] | None:
        """Speed of every node whose device is another than the cluster's: by the profiles of both, for this model."""
        if not self.cluster.node_devices:
            return None
        if isinstance(self.profile, AdditiveProfile):
            raise SeqloomError(
                f"cluster {self.cluster.name} has several devices, profile {self.profile.name} published constants of "
                f"{self.profile.device}; leave the profile out"
            )
        times: dict[str, float] = {}
        for device in (self.cluster.device, *self.cluster.node_devices):
            own = replace(self.cluster, device=device, node_devices=())
            compute = Compute.build(Profile.for_device(device.name), own, self.model, float8=False)
            attention = compute.attention(np.array([float(TYPICAL_TOKENS)]), 1, Checkpoint.NONE)[0] / TYPICAL_TOKENS
            times[device.name] = compute.linear(Checkpoint.NONE) + compute.head() + float(attention)
        base = times[self.cluster.device.name]
        return [round(base / times[device.name], DEVICE_DECIMALS) for device in self.cluster.node_devices]

    def _check_prices(self) -> None:
        """Refuse constants and sizes by which a step takes longer than integers of nanoseconds add up."""
        policy, longest = self.engine.policies[-1], float(max(CHECKED_TOKENS, self.pad_multiple))
        lengths = np.maximum(np.array(PROBE_LENGTHS, dtype=np.float64), self.pad_multiple)  # as documents are padded
        with np.errstate(all="ignore"):
            attention = self.engine.attention_ns(lengths, self.shapes, policy) * np.minimum(1, longest / lengths) ** 2
            for shape, most in zip(self.shapes, attention.max(axis=1).tolist(), strict=True):
                place = shape, policy, self.aligned_traffic(shape)
                fixed, tokens = (sum(each(*place).values()) for each in (self.engine.fixed_ns, self.engine.token_ns))
                if not most + fixed + longest * tokens < MOST_NS:
                    raise SeqloomError(
                        f"by profile {self.profile.name} a document of {longest:,.0f} tokens of {self.model.name} "
                        f"takes more than {MOST_NS / 1e9:,.0f} s on {shape.degree} ranks of {self.cluster.name}; "
                        "correct the constants of the profile, the links of the cluster or the sizes of the model"
                    )

    def __repr__(self) -> str:
        names = (self.cluster.name, self.model.name, self.profile.name, self.sharding.value)
        degrees = {"tensor": self.tensor, "expert": self.expert}
        return f"CostModel({', '.join((*names, *(f'{name} {size}' for name, size in degrees.items() if size > 1)))})"

    def with_tensor(self, tensor: int) -> CostModel:
        """The same ranks with another tensor parallel degree: prices of such a stage. Built once."""
        return self.for_submesh(self.ranks, tensor)

    def with_expert(self, expert: int) -> CostModel:
        """The same ranks with another expert degree. Built once."""
        return self.for_submesh(self.ranks, self.tensor, expert)

    def for_stage(self, stage: Stage) -> CostModel:
        """The same ranks with the degrees of a stage: its prices. Built once."""
        return self.for_submesh(self.ranks, stage.tensor, stage.expert)

    def for_layers(self, *ranges: LayerRange) -> CostModel:
        """The prices of these layers alone, where layers of the model differ; itself where all take as long.

        Built once for as many layers of each kind. Of a round, `plan_cost.scale_to_layers` takes what is theirs from
        both. Memory stays that of the model, and knows its layers one by one.
        """
        if ranges not in self._by_layers:
            layers = [layer for part in ranges for layer in range(part.first, part.stop)]
            kinds = self.model.layer_kinds
            counts = frozenset(Counter(kinds[layer] for layer in layers).items())
            known = self if not layers or len(set(kinds)) == 1 else self._by_kinds.get(counts)
            self._by_layers[ranges] = self._by_kinds[counts] = known or self._with_layers(layers)
        return self._by_layers[ranges]

    def _with_layers(self, layers: Sequence[int]) -> CostModel:
        part = copy.copy(self)
        part.model = self.model.with_layers(layers)
        part.engine = self.engine.of_layers(part.model)
        part._prices, part._by_layers, part._by_kinds = {}, {}, {}
        return self if part.engine is self.engine else part

    @property
    def degrees(self) -> tuple[int, int]:
        """Tensor and expert degree."""
        return self.tensor, self.expert

    @property
    def rank_word(self) -> str:
        """What people call a rank: "GPU", or "rank" where ranks are processes on CPUs."""
        return "rank" if self.cluster.device.name == "CPU" else "GPU"

    @property
    def expert_degrees(self) -> tuple[int, ...]:
        """Legal expert degrees, ascending; see `expert_degrees`."""
        return (1,) if self.tensor > 1 else expert_degrees(self.cluster, self.model, self.profile, self.sharding)

    def for_submesh(self, ranks: int, tensor: int = 1, expert: int = 1) -> CostModel:
        """So many neighbouring ranks, in a node or whole nodes, all else equal: to plan one of several pipelines.

        Built once. A plan for them may be moved to any multiple of their number.
        """
        whole, key = self.cluster_cost, (ranks, tensor, expert)
        if key not in whole._submeshes:
            self.model.check_tensor(tensor)
            if ranks % tensor:
                sizes = [size for size in whole.family.sizes if ranks % size == 0]
                raise _no_tensor_groups(whole, ranks, tensor, sizes, "tensor parallel groups divide the ranks")
            if self.speeds and ranks != whole.ranks:
                raise SeqloomError(
                    f"pipelines side by side on ranks of unequal speed ({whole.cluster.name}): they may change places, "
                    "which takes equal ranks; use one pipeline over all ranks, planner flex, zones or static"
                )
            part = whole.cluster.subcluster(ranks)
            own: dict[str, Any] = {"tensor": tensor, "expert": expert, "cluster_cost": whole, **self._options}
            whole._submeshes[key] = CostModel(part, self.model, *self._settings, **own)
        return whole._submeshes[key]

    def with_profile(
        self, profile: AnalyticProfile, sharding: Sharding | None = None, memory_imbalance: float | None = None
    ) -> CostModel:
        """The whole cluster with another profile, and with another sharding if one is given, all else equal.

        Memory counts on `memory_imbalance`; None: on that of the profile, as times do.
        """
        whole = self.cluster_cost
        degrees = {"tensor": whole.tensor, "expert": whole.expert}
        options: dict[str, Any] = {**degrees, **whole._options, "memory_imbalance": memory_imbalance}
        settings = (profile, sharding or whole.sharding, *whole._settings[2:])
        return CostModel(whole.cluster, whole.model, *settings, **options)

    def with_speeds(self, speeds: Sequence[float] | None) -> CostModel:
        """The whole cluster with these speeds of its ranks, beside what the cluster says of them, all else equal."""
        whole = self.cluster_cost
        if RankSpeeds.of(whole.ranks, whole.cluster.speeds, speeds) == whole.speeds:
            return whole
        degrees = {"tensor": whole.tensor, "expert": whole.expert}
        options: dict[str, Any] = {**degrees, **whole._options, "speeds": speeds}
        return CostModel(whole.cluster, whole.model, *whole._settings, **options)

    def with_offload(self) -> CostModel:
        """The same with capacities that count on activations in host memory. Built once.

        Its prices are the same: copies count only where a round of a plan is offloaded.
        """
        whole = self.cluster_cost
        if whole is not self:
            return whole.with_offload().for_submesh(self.ranks, self.tensor, self.expert)
        if self._offloading is None:
            degrees = {"tensor": self.tensor, "expert": self.expert}
            own: dict[str, Any] = {**degrees, **self._options, "counts_offload": True}
            self._offloading = CostModel(self.cluster, self.model, *self._settings, **own)
        return self._offloading

    @property
    def may_offload(self) -> bool:
        """Whether `with_offload` may hold more: activations may go to host memory, and do not count yet.

        A CPU's memory is host memory: nothing is gained there, but it may be tried.
        """
        wanted = self.offload is True or (self.offload == "auto" and self.cluster.device.name != "CPU")
        return wanted and bool(self._offloadable) and not self.counts_offload

    def holding(self, lengths: Sequence[int] | np.ndarray) -> CostModel:
        """The model whose capacities hold documents of these lengths in one stage: this one, or `with_offload`."""
        return self.with_offload() if self.may_offload and not self.holds(lengths) else self

    def holds(self, lengths: Sequence[int] | np.ndarray) -> bool:
        """Whether the largest group holds the longest of these documents, in plans of one stage."""
        longest = int(self.padded_lengths(np.asarray(lengths)).max(initial=0))
        most = max((self._capacity[policy] for policy in self._fitting), default=0)
        return longest <= most * max(shape.degree for shape in self.shapes)

    @property
    def links(self) -> Communication:
        """Times on the links; SeqloomError where the profile has no constants for them."""
        if self.engine.links is None:
            raise SeqloomError(f"profile {self.profile.name} has no constants for links; leave the profile out")
        return self.engine.links

    # -- memory -----------------------------------------------------------------

    @property
    def policies(self) -> tuple[MemoryPolicy, ...]:
        """Memory policies that hold at least a token, of plans with one stage; SeqloomError if there is none."""
        if self._fitting:
            return self._fitting
        raise _too_small(self)

    def capacity(self, policy: MemoryPolicy) -> int:
        """Tokens a rank can hold in one round."""
        self._check(policy)
        return self._capacity[policy]

    @property
    def ways_out(self) -> str:
        """What would hold longer documents, for messages."""
        ways = ["raise the memory budget", "use more GPUs"]
        if self.counts_offload and self.host_bytes is not None:
            ways.insert(0, "give it more host memory (host_gib)")
        if self.offload is False and self._offloadable:
            ways.insert(0, "let activations go to host memory (offload)")
        return f"{self.optimiser_way_out}{', '.join(ways[:-1])} or {ways[-1]}"

    @property
    def optimiser_way_out(self) -> str:
        """Begin of a list of ways to more memory: the optimiser in host memory, where it is not."""
        if self.offload_optimiser or isinstance(self.profile, AdditiveProfile) or self.cluster.device.name == "CPU":
            return ""
        return "keep the optimiser in host memory (optimiser.offload, --offload-optimiser), "

    @property
    def updates_on_host(self) -> bool:
        """Whether an optimiser in host memory is updated by the CPUs: where that takes less time than on the device."""
        ns = self.engine.offloaded_update_ns(1.0) if isinstance(self.engine, AnalyticEngine) else {}
        return bool(ns) and ns["host"] < ns["device"]

    def limits(self, reduce: Reduce | None = None) -> Limits:
        """Limits of a plan, for one way of reducing gradients (the first policy's by default)."""
        chosen = self.policies[0].reduce if reduce is None else reduce
        policies = [policy for policy in self.policies if policy.reduce == chosen]
        capacity = tuple((p.checkpoint, self._plain_capacity[p]) for p in policies)
        own = Limits(self.ranks, self.node_size, self.model.heads, capacity, self.pad_multiple)
        if not self.counts_offload:
            return own
        layers = self.model.layers
        most = ((p.checkpoint, self._tokens_that_fit(p, layers)) for p in policies if p in self._offloadable)
        return replace(own, offload_capacity=tuple(most))

    def microbatch_capacity(self, tokens: int) -> int:
        """So many tokens of a micro-batch, or the run's own limit, rounded down to the padding."""
        tokens = int(min(tokens, self._token_limit))
        return tokens - tokens % self.pad_multiple

    def _tokens_that_fit(self, policy: MemoryPolicy, offloaded_layers: int = 0) -> int:
        free = self.budget_bytes - self.memory.fixed_bytes(policy)
        return int(min(max(0, free // self.memory.token_bytes(policy, offloaded_layers)), self._token_limit))

    @property
    def _offloadable(self) -> tuple[MemoryPolicy, ...]:
        """Policies under which layers may be offloaded. All that a layer saves is more than copies can hide."""
        if isinstance(self.profile, AdditiveProfile):
            return ()
        return tuple(policy for policy in self.engine.policies if policy.checkpoint in OFFLOADED)

    def _offloaded_tokens(self, policy: MemoryPolicy) -> int:
        """Tokens a rank can hold in one round with as many layers offloaded as is best for that."""
        every, layers = LayerRange(0, self.model.layers, self.model.layers), self.model.layers
        if self.host_bytes is None:
            return self._tokens_that_fit(policy, layers)
        free = max(0, self.host_bytes - self.memory.host_state_bytes((every,), self.shard_group_size))
        sizes = [self.memory.host_bytes(every, policy.checkpoint, count) for count in range(1, layers + 1)]
        return max(min(self._tokens_that_fit(policy, n), int(free // size)) for n, size in enumerate(sizes, 1))

    def _require_host_memory(self) -> None:
        """Refuse an optimiser that host memory does not hold, in plans of one stage."""
        every = LayerRange(0, self.model.layers, self.model.layers)
        need = self.memory.host_state_bytes((every,), self.shard_group_size)
        if self.host_bytes is not None and need > self.host_bytes:
            raise MemoryBudgetError(
                f"the optimiser of {self.model.name} needs {need / GIB:.1f} GiB of host memory per GPU (sharded over "
                f"{self.shard_group_size} ranks), there are {self.host_bytes / GIB:.1f}; raise host_gib, keep the "
                "optimiser on the device or use more nodes"
            )

    def _host_bytes(self, host_gib: float | None) -> int | None:
        """Host memory of a rank that plans may use; None: not known."""
        node = self.cluster.host_gib
        share = None if node is None else DEVICE_SHARE * node / self.cluster.gpus_per_node
        gib = share if host_gib is None else host_gib
        return None if gib is None else math.floor(min(gib, MOST_GIB) * GIB)

    # -- documents and groups ---------------------------------------------------

    def padded_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """int64[n] tokens that documents occupy."""
        exact = np.asarray(lengths, dtype=np.int64)
        return -(-exact // self.pad_multiple) * self.pad_multiple

    def tables(
        self,
        lengths: Sequence[int] | np.ndarray,
        policy: MemoryPolicy,
        shapes: Sequence[GroupShape] | None = None,
        slowness: float = 1.0,
        *,
        head: bool = True,
    ) -> CostTables:
        """Everything planners compare, for documents of these lengths; of all shapes or these, on aligned blocks.

        The ranks of the groups compute `slowness` times as long as by the profile, and the `head` or not.
        """
        policy, shapes = self.priced_policy(policy), self.shapes if shapes is None else tuple(shapes)
        tokens = self.padded_lengths(np.asarray(lengths))
        distinct, of_length = np.unique(tokens, return_inverse=True)
        places = [(shape, self.aligned_traffic(shape)) for shape in shapes]
        cost = np.zeros((len(STREAMS), len(places), len(distinct)), dtype=np.int64)
        for name, values in self.document_ns(distinct, places, policy, slowness).items():
            if name == "routed" and slowness != 1:  # in a round, experts are as fast as the rank that has them
                values = np.rint(values * slowness).astype(np.int64)
            for stream, parts in enumerate(STREAMS):
                if name in parts and (head or name != "head"):
                    cost[stream] += values
        cost[1, [not shape.overlaps_kv for shape in shapes]] = 0  # without a ring that stream is never the longest
        fixed = [self._group_prices(place, policy)[0].stream_ns for place in places]
        return CostTables(
            shapes=shapes,
            degree=np.array([shape.degree for shape in shapes], dtype=np.int64),
            cost=np.take(cost, of_length, axis=2),
            fixed=np.array(fixed, dtype=np.int64).T.copy(),
            tokens=tokens,
            capacity=0 if policy.resident else self.capacity(policy),  # pipeline stages have a limit of their own
        )

    def document_ns(
        self, tokens: np.ndarray, places: Sequence[PricedShape], policy: MemoryPolicy, slowness: float = 1.0
    ) -> dict[str, np.ndarray]:
        """int64[S, n] by part: ns that each document adds to a group of each shape, whose ranks are so slow.

        Plain elementwise float64 operations only, each rounded on its own, so that the integers are the same on every
        machine and whether documents are priced together or one by one.
        """
        lengths, rates = tokens.astype(np.float64), [self._group_prices(place, policy)[1] for place in places]
        parts = {}
        for name in rates[0]:
            column = np.array([rate[name] for rate in rates])[:, None] * (slowness if name in BY_SPEED else 1.0)
            shape = len(places), len(lengths)
            parts[name] = np.rint(column * lengths).astype(np.int64) if column.any() else np.zeros(shape, np.int64)
        for row, (shape, traffic) in enumerate(places):
            for name, each in self.engine.document_ns(shape, policy, traffic).items():
                scaled = each * (slowness if name in BY_SPEED else 1.0)
                parts[name][row] += np.where(tokens > 0, round(scaled), 0)
        attention = self.engine.attention_ns(lengths, [shape for shape, _ in places], policy) * slowness
        return parts | {"attention": np.rint(attention).astype(np.int64)}

    def group_cost(self, group: Group, policy: MemoryPolicy) -> CostBreakdown:
        """Forward and backward of one group by part, by where its ranks really lie."""
        return CostBreakdown(*self.group_costs([group], policy)[0].tolist())

    def group_costs(self, groups: Sequence[Group], policy: MemoryPolicy) -> np.ndarray:
        """int64[groups, len(COST_COLUMNS)] ns: `group_cost` of many groups, priced together."""
        policy = self.priced_policy(policy)
        same_place: dict[tuple[PricedShape, float], list[int]] = {}
        for i, group in enumerate(groups):
            same_place.setdefault((self.shape_and_traffic(group), self.speeds.of_group(group.ranks)), []).append(i)
        table = np.zeros((len(groups), len(COST_COLUMNS)), dtype=np.int64)
        for (place, slowness), members in same_place.items():
            table[members] = self._group_prices(place, policy)[0]
            for name, values in self._span_ns([groups[i] for i in members], place, policy, slowness).items():
                table[members, COST_COLUMNS.index(name)] += values
        return table

    def _span_ns(
        self, groups: Sequence[Group], place: PricedShape, policy: MemoryPolicy, slowness: float
    ) -> dict[str, np.ndarray]:
        """int64[G] by part: ns that the spans of each of these groups of one shape and traffic add up to.

        A piece ``[a, b)`` adds what ``[0, b)`` costs beyond ``[0, a)``, so pieces add up to their document, and what
        every further piece has of its own: the kernels are called once more, gradients of the prefix are added up, its
        convolutions read the tokens before, and in a ring its keys and values are shared once more.
        """
        shape, traffic = place
        edges = np.array([(s.start, s.stop) for g in groups for s in g.spans], dtype=np.int64).reshape(-1, 2)
        edges = self.padded_lengths(edges)
        tokens, inverse = np.unique(edges, return_inverse=True)
        start, stop = inverse.reshape(-1, 2).T
        owner = np.repeat(np.arange(len(groups)), [len(group.spans) for group in groups])
        sums = {}
        for name, values in self.document_ns(tokens, [place], policy, slowness).items():
            sums[name] = np.zeros(len(groups), dtype=np.int64)
            np.add.at(sums[name], owner, values[0, stop] - values[0, start])
        prefix = edges[:, 0].astype(np.float64)
        if prefix.any():
            rates = self.engine.prefix_token_ns(shape, policy, traffic) if shape.ring > 1 else {}
            further = {name: rate * prefix for name, rate in rates.items()}
            further["attention"] = self.engine.prefix_ns(prefix, shape, policy)
            for name, each in self.engine.document_ns(shape, policy, traffic).items():
                further[name] = further.get(name, 0.0) + np.where(prefix > 0, each, 0.0)
            for name, values in further.items():
                values = values * (slowness if name in BY_SPEED else 1.0)
                np.add.at(sums[name], owner, np.rint(values).astype(np.int64))
        return sums

    def _group_prices(self, place: PricedShape, policy: MemoryPolicy) -> tuple[CostBreakdown, dict[str, float]]:
        """(ns of a group before any document, ns per token by part)."""
        key = (place[0], policy, place[1])
        if key not in self._prices:
            fixed = CostBreakdown(**{name: round(ns) for name, ns in self.engine.fixed_ns(*key).items()})
            self._prices[key] = fixed, self.engine.token_ns(*key)
        return self._prices[key]

    # -- shapes on ranks --------------------------------------------------------

    def shape_and_traffic(self, group: Group) -> PricedShape:
        """The row of the tables that prices a group, and where its messages go."""
        shape = GroupShape(group.ulysses, group.ring, group.method)
        traffic = group_traffic(group.ranks, shape, self.cluster.nic_of_gpu, group.route, self.tensor)
        return shape._replace(routed=traffic.proxies > 0, latent=group.latent, states=group.states), traffic

    def aligned_traffic(self, shape: GroupShape) -> GroupTraffic:
        """Traffic of the shape on any aligned block of the group family."""
        ranks = tuple(range(shape.degree))
        return group_traffic(ranks, shape, self.cluster.nic_of_gpu, self.route(shape, ranks), self.tensor)

    def route(self, shape: GroupShape, ranks: Sequence[int]) -> Route | None:
        """How a group's keys and values cross nodes: a proxy near each NIC, and slices for ranks that are rather full.

        None where the shape is not routed, the group stays in a node or a node has one NIC.
        """
        if not shape.routed:
            return None
        key, nic_of = (shape, tuple(ranks)), self.cluster.nic_of_gpu
        if key not in self._routes:
            tokens = min((self._capacity[policy] for policy in self._fitting), default=PROBE_CAPACITY) * shape.degree
            proxies = nic_proxies(ranks, nic_of)
            traffic = group_traffic(key[1], shape, nic_of, Route(proxies))
            spread = traffic.proxies > 1
            self._routes[key] = Route(proxies, self.links.slices(shape, traffic, tokens)) if spread else None
        return self._routes[key]

    def group(self, shape: GroupShape, ranks: Sequence[int], spans: Sequence[Span]) -> Group:
        """A group of this shape on these ranks, as planners put it into a plan."""
        own = tuple(ranks)
        route = self.route(shape, own)
        return Group(own, shape.ulysses, shape.ring, tuple(spans), shape.method, route, shape.latent, shape.states)

    # -- rounds, steps and plans ------------------------------------------------

    def step_overhead_ns(self, policy: MemoryPolicy) -> int:
        """ns once per step: optimiser, reduction once per step, sum over replicas."""
        self._check(policy)
        return round(self.engine.step_overhead(policy)[0])

    def stage_overhead_ns(self, stages: Sequence[LayerRange], ranks: int, shard_group: int) -> tuple[int, int]:
        """(ns, of that communication) once per step, on `ranks` ranks that run these pipeline stages."""
        total, communication = self.engine.stage_overhead(stages, ranks, shard_group)
        return round(total), round(communication)

    def stage_message_ns(self, tokens: int, here: Stage, there: Stage) -> int:
        """ns of a message of so many tokens per rank between two pipeline stages; 0 without constants of links."""
        return 0 if self.engine.links is None else self.engine.links.stage_message(tokens, here, there)

    def plan_ns(self, plan: Plan) -> int:
        """Step time of a plan of one-stage pipelines, in closed form."""
        return plan_cost.plan_ns(self, plan)

    def priced_policy(self, policy: MemoryPolicy) -> MemoryPolicy:
        """The policy by whose constants this one takes as long: running a stage again is running its layers again."""
        if policy.checkpoint == Checkpoint.STAGE:
            policy = policy._replace(checkpoint=Checkpoint.FULL)
        self._check(policy)
        return policy

    def _check(self, policy: MemoryPolicy) -> None:
        if policy.resident and any(policy.checkpoint == known.checkpoint for known in self.engine.policies):
            return  # the memory of a stage has other limits
        if self._capacity.get(policy, 0) < 1:
            legal = ", ".join(map(str, self.policies))
            raise SeqloomError(f"memory policy {policy} is not possible here; choose one of {legal}")


def _require_tensor(cost: CostModel) -> None:
    """Refuse a tensor parallel degree or a sharding that the model, the ranks or the profile do not allow."""
    if isinstance(cost.profile, AdditiveProfile) and (cost.tensor > 1 or cost.sharding == Sharding.FREE):
        what = f"tensor degree {cost.tensor}" if cost.tensor > 1 else "sharding free"
        raise SeqloomError(f"profile {cost.profile.name} has no constants for {what}; leave the profile out")
    cost.model.check_tensor(cost.tensor)
    sizes = [size for size in cost.family.sizes if size in cost.cluster_cost.family.sizes]
    rule = "tensor parallel groups are blocks of the group family"
    if cost.sharding != Sharding.FREE:
        sizes = [size for size in sizes if cost.node_size % size == 0]
        rule = "tensor parallel groups are equal parts of a node"
    if cost.tensor not in sizes:
        raise _no_tensor_groups(cost, cost.ranks, cost.tensor, sizes, rule)


def tensor_degrees(
    cluster: Cluster,
    model: ModelSpec,
    profile: AdditiveProfile | AnalyticProfile | str | Path | None = None,
    sharding: Sharding | str = Sharding.FULL,
) -> tuple[int, ...]:
    """Tensor degrees that plans of one sharding may have, ascending, whether or not memory holds the model.

    They divide heads, widths and experts, and a node. Under free sharding planners choose them stage by stage, and
    profiles of published constants know degree 1 only.
    """
    additive = isinstance(Profile.resolve(profile, cluster.device.name), AdditiveProfile)
    if sharding == Sharding.FREE or additive:
        return (1,)
    sizes = GroupFamily(cluster.ranks, cluster.gpus_per_node).sizes
    return tuple(size for size in model.tensor_degrees if size in sizes and cluster.gpus_per_node % size == 0)


def expert_degrees(
    cluster: Cluster,
    model: ModelSpec,
    profile: AdditiveProfile | AnalyticProfile | str | Path | None = None,
    sharding: Sharding | str = Sharding.FULL,
) -> tuple[int, ...]:
    """Legal expert degrees of plans without tensor parallelism, ascending, whether or not memory holds the model.

    They divide the experts and the ranks; an EP group divides a node or consists of whole nodes, under hybrid sharding
    the former. Under free sharding, and with a profile of published constants, there is none above 1.
    """
    additive = isinstance(Profile.resolve(profile, cluster.device.name), AdditiveProfile)
    if not model.experts or sharding == Sharding.FREE or additive:
        return (1,)
    most, node = cluster.gpus_per_node if sharding == Sharding.HYBRID else cluster.ranks, cluster.gpus_per_node
    every = [size for size in range(1, most + 1) if model.experts % size == 0 and cluster.ranks % size == 0]
    return tuple(size for size in every if node % size == 0 or size % node == 0)


def _require_expert(cost: CostModel) -> None:
    """Refuse an expert degree that the model, the ranks, the sharding or the profile do not allow."""
    legal, degree = cost.expert_degrees, cost.expert
    if degree in legal:
        return
    below, above = [each for each in legal if each < degree], [each for each in legal if each > degree]
    nearest = " or ".join(map(str, (*below[-1:], *above[:1])))
    why = "EP groups divide experts and ranks evenly, and are equal parts of a node"
    why += "" if cost.sharding == Sharding.HYBRID else " or whole nodes"
    if not cost.model.experts:
        why = "the model has no experts"
    elif cost.tensor > 1:
        why = f"the {cost.tensor} ranks of a TP group divide the experts already"
    elif cost.sharding == Sharding.FREE:
        why = "under free sharding planners choose stages by other degrees"
    elif isinstance(cost.profile, AdditiveProfile):
        why = f"profile {cost.profile.name} has no constants for it"
    place = f"{cost.model.experts} experts on {cost.ranks} ranks in nodes of {cost.node_size}, {cost.sharding} sharding"
    raise SeqloomError(f"expert degree {degree} for {place}: {why}; use {nearest}")


def _require_float8(cost: CostModel) -> None:
    """Refuse float8 where the profile has no constant for it, and where its scales would depend on the plan."""
    if cost.float8 and cost.tensor > 1:
        raise SeqloomError(
            f"float8 with tensor degree {cost.tensor}: a tensor rank scales a part of a token's values, so the result "
            "would depend on the plan; use tensor degree 1, or no float8"
        )
    speedup = cost.profile.float8_speedup if isinstance(cost.profile, AnalyticProfile) else 1.0
    if cost.float8 and speedup == 1.0 and cost.cluster.device.name != "CPU":
        raise SeqloomError(
            f"float8 with profile {cost.profile.name}, which has no float8_speedup above 1: {cost.cluster.device.name} "
            "has no such products, or nobody has said how fast they are; leave float8 out, or give a profile with it"
        )


def _no_tensor_groups(cost: CostModel, ranks: int, tensor: int, sizes: Sequence[int], rule: str) -> SeqloomError:
    legal = [size for size in cost.model.tensor_degrees if size in sizes]
    nearest = min(legal, key=lambda t: (abs(t - tensor), t))
    where = f"tensor degree {tensor} on {ranks} ranks in nodes of {cost.node_size}"
    return SeqloomError(f"{where}: {rule}; use {nearest}")


def _too_small(cost: CostModel) -> MemoryBudgetError:
    """The error that says how much memory the model's state needs in plans of one stage."""
    least = min(cost.memory.fixed_bytes(policy) for policy in cost.engine.policies) / GIB
    budget = f"the budget is {cost.budget_bytes / GIB:.1f} GiB"
    if cost.sharding == Sharding.FREE:
        part = "" if cost.offload_optimiser else "a part of the optimiser "
        return MemoryBudgetError(
            f"{cost.model.name} does not fit in one stage: its parameters and gradients, split over {cost.tensor} "
            f"tensor ranks, {part}and buffers need {least:.1f} GiB per GPU, {budget}; use more stages or a larger "
            f"tensor degree, {cost.optimiser_way_out}take a smaller model, or raise the budget above {least:.1f} GiB"
        )
    way = "use more GPUs" if cost.shard_group_size == cost.ranks else "shard wider (sharding full)"
    parts = "parameters, gradients" + ("" if cost.offload_optimiser else ", optimiser")
    return MemoryBudgetError(
        f"{cost.model.name} does not fit: {parts} and buffers need {least:.1f} GiB per GPU "
        f"(sharded over {cost.shard_group_size} ranks), {budget}; {way}, {cost.optimiser_way_out}take a smaller model, "
        f"or raise the budget above {least:.1f} GiB"
    )
