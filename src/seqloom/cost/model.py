"""Why a model cannot be trained here, or not in this way, and the way out."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost import plan_cost as closed_form
from seqloom.cost import plan_cost as rounds
from seqloom.cost.additive import AdditiveEngine
from seqloom.cost.analytic import AnalyticEngine
from seqloom.cost.communication import GroupTraffic, group_traffic
from seqloom.cost.profile import AdditiveProfile, AnalyticProfile, Profile
from seqloom.cost.shapes import (
    PROBED,
    STREAMS,
    CostBreakdown,
    CostTables,
    GroupShape,
    MemoryPolicy,
    ordered,
    useful_shapes,
)
from seqloom.errors import SeqloomError, unknown_name
from seqloom.layout import Route
from seqloom.plan import Checkpoint, Group, GroupFamily, LayerRange, Limits, Reduce, Sharding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.plan_cost import RoundTimes
    from seqloom.describe import Cluster, ModelSpec
    from seqloom.layout import Span
    from seqloom.plan import Plan, StageMicroBatch


GIB = 1024**3


def require_sizes(budget_gib: float | None, max_length: int | None) -> None:
    """Refuse a memory budget and a longest sequence that hold nothing."""
    if budget_gib is not None and not 0 < budget_gib < math.inf:
        raise SeqloomError(f"a memory budget of {budget_gib} GiB holds nothing; give a number above 0")
    if max_length is not None and max_length < 1:
        raise SeqloomError(f"a longest sequence of {max_length} tokens; give 1 or more, or leave it out")


def require_tensor(cost: CostModel) -> None:
    """Refuse a tensor degree that the model or the ranks do not allow, and what published constants know nothing of."""
    if isinstance(cost.profile, AdditiveProfile) and (cost.tensor > 1 or cost.sharding == Sharding.FREE):
        what = f"tensor degree {cost.tensor}" if cost.tensor > 1 else "sharding free"
        raise SeqloomError(f"profile {cost.profile.name} has no constants for {what}; leave the profile out")
    cost.model.check_tensor(cost.tensor)
    sizes = [size for size in cost.family.sizes if size in cost.cluster_cost.family.sizes]
    if cost.tensor not in sizes:
        raise _no_team(cost, cost.ranks, cost.tensor, sizes, "teams are blocks of the group family")


def require_teams(cost: CostModel, ranks: int, tensor: int) -> None:
    """Refuse to plan for ranks that are not whole teams."""
    cost.model.check_tensor(tensor)
    if ranks % tensor:
        sizes = [size for size in cost.family.sizes if ranks % size == 0]
        raise _no_team(cost, ranks, tensor, sizes, "teams divide the ranks")


def _no_team(cost: CostModel, ranks: int, tensor: int, sizes: Sequence[int], rule: str) -> SeqloomError:
    legal = [size for size in cost.model.tensor_degrees if size in sizes]
    nearest = min(legal, key=lambda t: (abs(t - tensor), t))
    where = f"tensor degree {tensor} on {ranks} ranks in nodes of {cost.node_size}"
    return SeqloomError(f"{where}: {rule}; use {nearest}")


def too_small(cost: CostModel) -> SeqloomError:
    """The error that says how much memory the model's state needs on plans of one stage."""
    least = min(cost.engine.fixed_bytes(v) for v in cost.engine.policies) / GIB
    if cost.sharding == Sharding.FREE:
        return SeqloomError(
            f"{cost.model.name} does not fit in one stage: its parameters and gradients, split over teams of "
            f"{cost.tensor}, a part of the optimiser and buffers need {least:.1f} GiB per GPU, the budget is "
            f"{cost.budget_bytes / GIB:.1f} GiB; use more stages or a larger tensor degree, take a smaller model, or "
            f"raise the budget above {least:.1f} GiB"
        )
    way = "use more GPUs" if cost.shard_group_size == cost.ranks else "shard wider (sharding full)"
    return SeqloomError(
        f"{cost.model.name} does not fit: parameters, gradients, optimiser and buffers need "
        f"{least:.1f} GiB per GPU (sharded over {cost.shard_group_size} ranks), "
        f"the budget is {cost.budget_bytes / GIB:.1f} GiB; {way}, take a smaller model, "
        f"or raise the budget above {least:.1f} GiB"
    )


# ---- merged: cost.tabling
# The tables that planners search on, for documents of given lengths.


def cost_tables(
    cost: CostModel, lengths: Sequence[int] | np.ndarray, policy: MemoryPolicy, shapes: tuple[GroupShape, ...]
) -> CostTables:
    """Everything planners compare, of these shapes on aligned blocks."""
    tokens = cost.padded_lengths(np.asarray(lengths))
    places = [(shape, cost.aligned_traffic(shape)) for shape in shapes]
    lanes = np.zeros((len(STREAMS), len(places), len(tokens)), dtype=np.int64)
    for name, values in cost.document_ns(tokens, places, policy).items():
        for lane, members in enumerate(STREAMS):
            if name in members:
                lanes[lane] += values
    whole = [not shape.overlaps_kv for shape in shapes]
    lanes[1, whole] = 0  # without a ring that lane is never the longest
    fixed = [CostBreakdown(**cost.fixed_cost(shape, policy, reach)).stream_ns for shape, reach in places]
    return CostTables(
        shapes=shapes,
        degree=np.array([shape.degree for shape in shapes], dtype=np.int64),
        cost=lanes,
        fixed=np.array(fixed, dtype=np.int64).T.copy(),
        tokens=tokens,
        capacity=0 if policy.resident else cost.capacity(policy),  # a stage of a pipeline has a limit of its own
    )


def document_ns(
    cost: CostModel, tokens: np.ndarray, places: Sequence[tuple[GroupShape, GroupTraffic]], policy: MemoryPolicy
) -> dict[str, np.ndarray]:
    """int64[S, n] per part: ns that each document adds to a group of each shape.

    Plain elementwise float64 operations only, each rounded on its own, so that the integers are the
    same on every machine and whether documents are priced together or one by one.
    """
    engine, lengths = cost.engine, tokens.astype(np.float64)
    rates = [cost.token_rates(shape, policy, reach) for shape, reach in places]
    parts = {}
    for name in rates[0]:
        column = np.array([rate[name] for rate in rates])[:, None]
        parts[name] = np.rint(column * lengths).astype(np.int64)
    whole = {ring: engine.attention_ns(lengths, ring, policy) for ring in {shape.ring for shape, _ in places}}
    calls = {shape: engine.kernel_call_ns(lengths, shape.kernel_calls, policy) for shape, _ in places}
    shares = [whole[shape.ring] * engine.attention_share(shape) + calls[shape] for shape, _ in places]
    parts["attention"] = np.rint(np.stack(shares)).astype(np.int64)
    return parts


# ---- merged: cost.pieces
# What the spans of a group add up to: whole documents, and pieces with a prefix.


def span_sums(
    cost: CostModel, groups: Sequence[Group], place: tuple[GroupShape, GroupTraffic], policy: MemoryPolicy
) -> dict[str, np.ndarray]:
    """int64[G] per part: ns that the spans of each of these alike groups add up to.

    A piece adds what the document up to its end costs beyond the document up to its start, so pieces add up to their
    document, and to what every further piece has of its own: the kernels are called once more, gradients of the prefix
    are added up, and in a ring its keys and values are shared once more.
    """
    shape, reach = place
    edges = np.array([(s.start, s.stop) for g in groups for s in g.spans], dtype=np.int64).reshape(-1, 2)
    edges = cost.padded_lengths(edges)
    tokens, inverse = np.unique(edges, return_inverse=True)
    start, stop = inverse.reshape(-1, 2).T
    owner = np.repeat(np.arange(len(groups)), [len(group.spans) for group in groups])
    sums = {}
    for name, values in cost.document_ns(tokens, [place], policy).items():
        sums[name] = np.zeros(len(groups), dtype=np.int64)
        np.add.at(sums[name], owner, values[0, stop] - values[0, start])
    prefix = edges[:, 0].astype(np.float64)
    if prefix.any():
        work = cost.engine.prefix_ns(prefix, shape, policy)
        np.add.at(sums["attention"], owner, np.rint(work).astype(np.int64))
    if prefix.any() and shape.ring > 1:
        for name, rate in cost.engine.prefix_token_ns(shape, policy, reach).items():
            np.add.at(sums[name], owner, np.rint(rate * prefix).astype(np.int64))
    return sums


# ---- merged: cost.model
# The cost model: cluster + model + profile -> time and memory of any piece of a plan.


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
        tensor: ranks of a team that splits the weights of every stage; shapes have multiples of it as Ulysses.
        cluster_cost: the model of the whole cluster, if ``cluster`` is a part of it; see `for_submesh`.
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
    ) -> None:
        """Choose the engine of the profile's kind and drop the policies that cannot hold a single token."""
        require_sizes(budget_gib, max_length)
        self.cluster, self.model, self.max_length = cluster, model, max_length
        if sharding not in list(Sharding):
            raise unknown_name("sharding", str(sharding), list(Sharding))
        self.sharding = Sharding(sharding)
        self.profile = Profile.resolve(profile, cluster.device.name)
        self.ranks, self.node_size, self.tensor = cluster.ranks, cluster.gpus_per_node, tensor
        self.family = GroupFamily(self.ranks, self.node_size)
        self.cluster_cost = self if cluster_cost is None else cluster_cost
        require_tensor(self)
        self._asked = (self.profile, self.sharding, budget_gib, max_length, capacity, stages)
        self._kin: dict[tuple[int, int], CostModel] = {(self.ranks, tensor): self}
        sharded = {Sharding.FULL: self.ranks, Sharding.HYBRID: self.node_size}.get(self.sharding, 1)
        self.shard_group_size = max(sharded, tensor)  # ranks in the same rounds: they share shards, or are a team
        sizes = (cluster, model, sharded, self.family, budget_gib, max_length)
        self.engine: AdditiveEngine | AnalyticEngine
        if isinstance(self.profile, AdditiveProfile):
            self.engine = AdditiveEngine.build(self.profile, *sizes)
        else:
            owners = self.cluster_cost.ranks if self.sharding == Sharding.FREE else 0
            within = None if self.ranks == self.cluster_cost.ranks else self.cluster_cost.family
            self.engine = AnalyticEngine.build(self.profile, *sizes, tensor, owners, within)
        self.pad_multiple: int = self.engine.pad_multiple
        if capacity is not None and capacity < self.pad_multiple:
            raise SeqloomError(f"a capacity of {capacity} tokens; give {self.pad_multiple} or more, or leave it out")
        self.token_limit = None if capacity is None else capacity - capacity % self.pad_multiple
        fits = {v: self._tokens_that_fit(v) for v in self.engine.policies}
        self._capacity = {
            v: tokens if self.token_limit is None else min(tokens, self.token_limit) for v, tokens in fits.items()
        }
        self._fitting = tuple(v for v, tokens in self._capacity.items() if tokens > 0)
        if not self._fitting and stages == 1 and self.sharding != Sharding.FREE:
            raise too_small(self)
        self._routes: dict[tuple[GroupShape, tuple[int, ...]], Route | None] = {}
        self._rates: dict[tuple[GroupShape, MemoryPolicy, GroupTraffic], dict[str, float]] = {}
        self._fixed: dict[tuple[GroupShape, MemoryPolicy, GroupTraffic], dict[str, int]] = {}
        self.shapes: tuple[GroupShape, ...] = self.engine.shapes
        if isinstance(self.engine, AnalyticEngine):
            staged = (policy._replace(resident=True) for policy in self.engine.policies)
            first = {policy.checkpoint: policy for policy in reversed(self._fitting or tuple(staged))}
            prices = [partial(self.tables, policy=policy) for policy in first.values()]
            self.shapes = ordered(shape for price in prices for shape in useful_shapes(price))

    def __repr__(self) -> str:
        names = (self.cluster.name, self.model.name, self.profile.name, self.sharding.value)
        return f"CostModel({', '.join(names)}{f', tensor {self.tensor}' if self.tensor > 1 else ''})"

    def with_tensor(self, tensor: int) -> CostModel:
        """The same ranks with weights split over teams of so many: prices of such a stage. Made once."""
        return self._relative(self.ranks, tensor)

    def for_submesh(self, ranks: int, tensor: int = 1) -> CostModel:
        """So many neighbouring ranks, in a node or whole nodes, all else equal: to plan one of several pipelines.

        Made once. A plan for them may be moved to any multiple of their number.
        """
        require_teams(self.cluster_cost, ranks, tensor)
        return self._relative(ranks, tensor)

    def _relative(self, ranks: int, tensor: int) -> CostModel:
        known = self.cluster_cost._kin
        if (ranks, tensor) not in known:
            part = self.cluster_cost.cluster.subcluster(ranks)
            known[ranks, tensor] = CostModel(
                part, self.model, *self._asked, tensor=tensor, cluster_cost=self.cluster_cost
            )
        return known[ranks, tensor]

    # -- memory -----------------------------------------------------------------

    @property
    def policies(self) -> tuple[MemoryPolicy, ...]:
        """The policies that hold at least a token, of plans with one stage; SeqloomError if there is none."""
        if self._fitting:
            return self._fitting
        raise too_small(self)

    def capacity(self, policy: MemoryPolicy) -> int:
        """Tokens a rank can hold in one round."""
        self._check(policy)
        return self._capacity[policy]

    def fixed_bytes(self, policy: MemoryPolicy) -> int:
        """Bytes of a rank before any token: parameters, gradients, optimiser, working buffers."""
        return self.engine.fixed_bytes(policy)

    def token_bytes(self, policy: MemoryPolicy) -> float:
        """Bytes that each token on a rank adds in a round."""
        return self.engine.token_bytes(policy)

    @property
    def budget_bytes(self) -> int:
        """Memory per device that plans may use."""
        return self.engine.budget_bytes

    def limits(self, reduce: Reduce | None = None) -> Limits:
        """What a plan must respect, for one way of reducing gradients (the first policy's by default)."""
        chosen = self.policies[0].reduce if reduce is None else reduce
        capacity = tuple((v.checkpoint, self._capacity[v]) for v in self.policies if v.reduce == chosen)
        return Limits(self.ranks, self.node_size, self.model.heads, capacity, self.pad_multiple)

    def plan_memory(self, plan: Plan) -> np.ndarray:
        """int64[ranks]: peak bytes of every rank over the rounds of a plan."""
        return closed_form.plan_memory(self, plan)

    def _tokens_that_fit(self, policy: MemoryPolicy) -> int:
        room = self.engine.budget_bytes - self.engine.fixed_bytes(policy)
        return max(0, int(room // self.engine.token_bytes(policy)))

    # -- time -------------------------------------------------------------------

    def padded_lengths(self, lengths: np.ndarray) -> np.ndarray:
        """int64[n] tokens the documents occupy: lengths rounded up to the granule."""
        exact = np.asarray(lengths, dtype=np.int64)
        return -(-exact // self.pad_multiple) * self.pad_multiple

    def tables(
        self, lengths: Sequence[int] | np.ndarray, policy: MemoryPolicy, shapes: Sequence[GroupShape] | None = None
    ) -> CostTables:
        """Everything planners compare, for documents of these lengths; of all shapes, or of these."""
        return cost_tables(self, lengths, self._priced(policy), self.shapes if shapes is None else tuple(shapes))

    def fixed_cost(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> dict[str, int]:
        """ns of a group before any document, part by part."""
        key = (shape, policy, reach)
        if key not in self._fixed:
            self._fixed[key] = {n: _ns(v) for n, v in self.engine.fixed_ns(shape, policy, reach).items()}
        return self._fixed[key]

    def group_cost(self, group: Group, policy: MemoryPolicy) -> CostBreakdown:
        """Named parts of one group's forward and backward, by where its ranks really lie."""
        return self.group_costs([group], policy)[0]

    def group_costs(self, groups: Sequence[Group], policy: MemoryPolicy) -> list[CostBreakdown]:
        """``group_cost`` of many groups, priced together.

        A piece ``[a, b)`` of a document costs what ``[0, b)`` costs beyond ``[0, a)``, and in a ring what it takes
        to share the keys and values of ``[0, a)`` again.
        """
        policy = self._priced(policy)
        alike: dict[tuple[GroupShape, GroupTraffic], list[int]] = {}
        for i, group in enumerate(groups):
            alike.setdefault(self.shape_and_traffic(group), []).append(i)
        priced: list[CostBreakdown] = [CostBreakdown()] * len(groups)
        for place, members in alike.items():
            fixed = self.fixed_cost(place[0], policy, place[1])
            sums = span_sums(self, [groups[i] for i in members], place, policy)
            for row, i in enumerate(members):
                added = {name: int(values[row]) for name, values in sums.items()}
                priced[i] = CostBreakdown(**{name: fixed.get(name, 0) + added.get(name, 0) for name in fixed | added})
        return priced

    def shape_and_traffic(self, group: Group) -> tuple[GroupShape, GroupTraffic]:
        """The row of the tables that a group is priced by, and where its messages go."""
        shape = GroupShape(group.ulysses, group.ring, group.method)
        reach = group_traffic(group.ranks, shape, self.cluster.nic_of_gpu, group.route, self.tensor)
        return shape._replace(routed=reach.proxies > 0), reach

    def route(self, shape: GroupShape, ranks: Sequence[int]) -> Route | None:
        """How a group's keys and values cross nodes: the proxies, and slices for ranks that are rather full.

        None where the shape is not routed, the group stays in a node or a node has one card.
        """
        if not shape.routed:
            return None
        key = (shape, tuple(ranks))
        if key not in self._routes:
            self._routes[key] = self.engine.route(
                shape, key[1], min((self._capacity[v] for v in self._fitting), default=PROBED)
            )
        return self._routes[key]

    def group(self, shape: GroupShape, ranks: Sequence[int], spans: Sequence[Span]) -> Group:
        """A group of this shape on these ranks: what the tables price, as planners put it into a plan."""
        own = tuple(ranks)
        return Group(own, shape.ulysses, shape.ring, tuple(spans), shape.method, self.route(shape, own))

    def round_times(
        self,
        work: StageMicroBatch,
        policy: MemoryPolicy,
        stage: LayerRange | None = None,
        priced: Sequence[CostBreakdown] | None = None,
    ) -> RoundTimes:
        """Time of a round: of every rank in all its groups, of every network card and link.

        Args:
            work: its groups may share ranks, and tokens may have a layout of their own in linear layers.
            policy: whose checkpoint the work has.
            stage: which part of the model the work is; None: all of it.
            priced: parts of its groups, if they are known.
        """
        return rounds.round_times(self, work, self._priced(policy), stage, priced)

    def step_overhead_ns(self, policy: MemoryPolicy) -> int:
        """ns once per step: optimiser, reduction once per step, sum over replicas."""
        self._check(policy)
        return _ns(self.engine.step_overhead(policy))

    def step_communication_ns(self, policy: MemoryPolicy) -> int:
        """ns of the step's overhead that are communication: reduction once per step, sum over replicas."""
        self._check(policy)
        return _ns(self.engine.step_communication(policy))

    def plan_ns(self, plan: Plan) -> int:
        """Step time of a plan in closed form (one-stage pipelines)."""
        return closed_form.plan_ns(self, plan)

    def document_ns(
        self, tokens: np.ndarray, places: Sequence[tuple[GroupShape, GroupTraffic]], policy: MemoryPolicy
    ) -> dict[str, np.ndarray]:
        """int64[S, n] per part: ns that each document adds to a group of each shape."""
        return document_ns(self, tokens, places, policy)

    def aligned_traffic(self, shape: GroupShape) -> GroupTraffic:
        """Reach of the shape on any aligned block."""
        ranks = tuple(range(shape.degree))
        return group_traffic(ranks, shape, self.cluster.nic_of_gpu, self.route(shape, ranks), self.tensor)

    def token_rates(self, shape: GroupShape, policy: MemoryPolicy, reach: GroupTraffic) -> dict[str, float]:
        """ns that each token adds to a group, part by part, attention apart."""
        key = (shape, policy, reach)
        if key not in self._rates:
            self._rates[key] = self.engine.token_ns(shape, policy, reach)
        return self._rates[key]

    def _priced(self, policy: MemoryPolicy) -> MemoryPolicy:
        """The policy by whose constants this one takes as long: running a stage again is running its layers again."""
        if policy.checkpoint == Checkpoint.STAGE:
            policy = policy._replace(checkpoint=Checkpoint.FULL)
        self._check(policy)
        return policy

    def _check(self, policy: MemoryPolicy) -> None:
        if policy.resident and any(policy.checkpoint == known.checkpoint for known in self.engine.policies):
            return  # the memory of a stage has other limits
        if self._capacity.get(policy, 0) < 1:
            legal = ", ".join(str(v) for v in self.policies)
            raise SeqloomError(f"policy {policy} is not possible here; choose one of {legal}")


def _ns(value: float) -> int:
    return int(np.rint(value))
