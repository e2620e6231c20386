"""Stages that differ only in their ranks: priced once, moved to the others.

Hosts of a pipeline are mostly alike: as many ranks each, at the same places of their nodes. A unit that sits on every
host in the same way takes as long on two stages with as many layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import copy_ns
from seqloom.cost.plan_cost import COST_COLUMNS, RoundTimes, round_components, tokens_on_ranks
from seqloom.cost.resharding import exposed_reshard_ns, unshard_times_by_stage
from seqloom.cost.shapes import STREAMS
from seqloom.cost.stages import StageMemory, stage_overhead_ns
from seqloom.plan import ActionKind, Checkpoint, LayerRange, Pipeline, Plan, StageMicroBatch


class MicroBatchKey(NamedTuple):
    """Where in a plan."""

    pipeline: int
    stage: int
    round: int


def stage_layers(pipeline: Pipeline) -> list[LayerRange | None]:
    """What every stage has of the model; None: all of it."""
    return [None] if len(pipeline.stages) == 1 else [*pipeline.layer_ranges]


@dataclass(frozen=True, slots=True)
class IdenticalStages:
    """Which stages of a pipeline are alike."""

    shares: tuple[LayerRange | None, ...]
    first: tuple[int, ...]
    """First rank of every stage's host."""
    shard_groups: tuple[int, ...]
    """First shard group of every stage's host."""
    tensors: tuple[int, ...]
    """Tensor degree of every stage."""
    node_size: int
    alike: bool
    """Whether all hosts lie in their nodes in the same way."""
    together: frozenset[int]
    """Stages that are gathered for every pass."""

    @classmethod
    def of(cls, plan: Plan, cost: CostModel, number: int) -> IdenticalStages:
        """Look at the hosts of one pipeline of a plan."""
        pipeline, size = plan.pipelines[number], cost.node_size
        hosts = pipeline.ranks_by_pp_rank
        width, start = len(hosts[0]), hosts[0][0]
        even = all(host == tuple(range(start + h * width, start + (h + 1) * width)) for h, host in enumerate(hosts))
        alike = even and start % width == 0 and (size % width == 0 or width % size == 0)
        home = {rank: i for i, shard_group in enumerate(plan.shard_groups) for rank in shard_group}
        own = [hosts[pipeline.pp_rank_of(stage)][0] for stage in range(len(pipeline.stages))]
        return cls(
            shares=tuple(stage_layers(pipeline)),
            first=tuple(own),
            shard_groups=tuple(home[rank] for rank in own),
            tensors=tuple(stage.tensor for stage in pipeline.stages),
            node_size=size,
            alike=alike,
            together=frozenset(unshard_times_by_stage(cost, pipeline)),
        )

    def key(self, place: MicroBatchKey, work: StageMicroBatch) -> Hashable:
        """What two works of a round have in common if they take as long."""
        share = self.shares[place.stage]
        plain = work.linear is None and all(group.route is None for group in work.groups)
        if not self.alike or share is None or not plain:
            return place
        first = self.first[place.stage]
        groups = tuple(
            (group.ranks[0] - first, group.ranks[-1] - first, group.ulysses, group.ring, group.method, group.spans)
            for group in work.groups
        )
        joined = place.stage in self.together
        return share.stop - share.first, share.has_head, self.tensors[place.stage], work.offload, joined, groups

    def moved(self, window: MicroBatchTimes, stage: int, other: int) -> MicroBatchTimes:
        """The window of a stage on the ranks of another one that is alike."""
        ranks, shard_groups = self.first[other] - self.first[stage], self.shard_groups[other] - self.shard_groups[stage]
        if not ranks:
            return window
        return replace(
            window,
            rank=window.rank + ranks,
            shard_groups=tuple(
                tuple(shard_group + shard_groups for shard_group in joined) for joined in window.shard_groups
            ),
            nic=np.roll(window.nic, ranks // self.node_size, axis=0),
            link=np.roll(window.link, ranks),
        )


# ---- merged: simulate.split
# Which share of a rank's time is forward, and which is the weight half of its backward.
#
# The cost model prices forward and backward together. Shares by part, with ``full`` and ``selective``
# checkpointing counting what is recomputed as backward:
#
#     linear, head   backward is twice forward; recomputing adds another forward. Of a linear layer's backward
#                    half of the matrix products are for weights
#     attention      backward is 2.5 times forward, nothing of it for weights
#     ulysses        two exchanges in forward, two in backward, and those that are repeated
#     ring, gathered keys
#                    K and V travel in both; dK and dV in backward, in float32
#     remap, tensor  like ulysses; what tensor ranks repeat is a whole forward
#     gather         once for forward and once for backward; gradients are reduced in backward
#     fixed          what a layer costs however few tokens it has: as much in forward as in backward


COMPUTING = tuple(name for name in STREAMS[0] if name not in ("ulysses", "kv_gather", "remap", "tensor"))
"""Parts in which the GPU computes; whatever else a rank's time holds is exposed communication."""

_PARTS = 1 << 16
_WHOLE = 1260  # divisible by 2, 3, 4, 5, 7 and 9: shares are integers
_PLAIN = {
    "linear": _WHOLE // 3,
    "head": _WHOLE // 3,
    "attention": _WHOLE * 2 // 7,
    "steps": _WHOLE // 2,
    "ulysses": _WHOLE // 2,
    "ring": _WHOLE // 4,
    "kv_gather": _WHOLE // 4,
    "remap": _WHOLE // 2,
    "tensor": _WHOLE // 2,
    "gather": _WHOLE // 2,
    "network": _WHOLE // 3,
    "fixed": _WHOLE // 2,
}
_SELECTIVE = {
    "linear": _WHOLE // 4,
    "ulysses": _WHOLE * 2 // 5,
    "remap": _WHOLE * 2 // 5,
    "tensor": _WHOLE // 3,
}
_FULL = {
    "linear": _WHOLE // 4,
    "attention": _WHOLE * 2 // 9,
    "steps": _WHOLE // 3,
    "ulysses": _WHOLE // 3,
    "ring": _WHOLE // 5,
    "kv_gather": _WHOLE // 5,
    "remap": _WHOLE // 3,
    "tensor": _WHOLE // 3,
    "fixed": _WHOLE // 3,
}
FORWARD = {
    Checkpoint.NONE: _PLAIN,
    Checkpoint.PROFILE: _PLAIN,
    Checkpoint.SELECTIVE: _PLAIN | _SELECTIVE,
    Checkpoint.FULL: _PLAIN | _FULL,
    Checkpoint.STAGE: _PLAIN | _FULL,
}


def computing_ns(parts: np.ndarray) -> np.ndarray:
    """int64[ranks]: ns in which the GPU computes."""
    return parts[:, [COST_COLUMNS.index(name) for name in COMPUTING]].sum(axis=1)


def forward_ns(parts: np.ndarray, total: np.ndarray, checkpoint: Checkpoint) -> np.ndarray:
    """int64[ranks]: ns of the forward of ranks that take `total` ns.

    Its longest lane, as far as the backward keeps room for its own computing: a gather that does not fit
    behind the forward is hidden by the backward.
    """
    share = np.array([FORWARD[checkpoint].get(name, 0) for name in COST_COLUMNS])
    early = parts * share // _WHOLE
    late = computing_ns(parts) - computing_ns(early)
    lanes = _lanes(early, parts[:, COST_COLUMNS.index("ring")] > 0)
    return np.minimum(lanes.max(axis=1), total - late)


def weights_ns(parts: np.ndarray, checkpoint: Checkpoint, products: float) -> np.ndarray:
    """int64[ranks]: ns of the weight half of the backward: as many matrix products as the forward has.

    The head's are not among them: its chunks of logits are gone after the input half.

    Args:
        parts: int64[ranks, parts] ns.
        checkpoint: what is kept.
        products: share of the part `linear` that is matrix products.
    """
    forward = parts[:, COST_COLUMNS.index("linear")] * FORWARD[checkpoint]["linear"] // _WHOLE
    return forward * round(products * _PARTS) // _PARTS


def _lanes(parts: np.ndarray, ring: np.ndarray) -> np.ndarray:
    """int64[ranks, 3] ns per lane; the ring's lane counts only where there is a ring."""
    lanes = [parts[:, [COST_COLUMNS.index(name) for name in lane]].sum(axis=1) for lane in STREAMS]
    lanes[1] = np.where(ring, lanes[1], 0)
    return np.stack(lanes, axis=1)


# ---- merged: simulate.window
# A window: one stage's share of a round, priced, with the ranks that go through it in lock step.
#
# Groups join the shard groups that they touch. Joined shard groups form a component: its ranks start together and leave
# together, when the slowest of them is done. Until then the others wait.
#
#     rank 0   |FFFFFBBBBBBBBBB|        component 0: one group over ranks 0 and 1, another on rank 2;
#     rank 1   |FFFFFBBBBBBBBBB|        rank 3 has no tokens and waits
#     rank 2   |FFFBBBBBB      |
#     rank 3   |               |
#
# Forward and backward of all groups of a component are cut at the same share of their time, that of the rank
# that works longest. So a component's forward and backward are exactly as long as both together.


_BITS = 20  # shares are in units of 2**-20: products with times up to 2**43 ns (two hours) stay in int64


@dataclass(frozen=True, slots=True, eq=False)
class ActionTimes:
    """One action of a window. ns; members as in `Window`, times counted from the start of the action."""

    duration: np.ndarray  # int64[components]
    start: np.ndarray  # int64[members]
    stop: np.ndarray  # int64[members]
    comm: np.ndarray  # int64[members] exposed communication


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchTimes:
    """Members are pairs of a group and one of its ranks, as in `RoundTimes`. ns."""

    rank: np.ndarray  # int64[members]
    group: np.ndarray  # int64[members] index of the group in its `Work`
    degree: np.ndarray  # int64[members] ranks of the group
    before: np.ndarray  # int64[members] what the rank's earlier groups of this round take
    total: np.ndarray  # int64[members] forward and backward of the group
    comm: np.ndarray  # int64[members] exposed communication of the group
    component: np.ndarray  # int64[members]
    length: np.ndarray  # int64[components] forward and backward of the longest rank, card or link
    forward: np.ndarray  # int64[components] where forward ends, in units of 2**-20 of the length
    weights: np.ndarray  # int64[components] where the weight half begins
    apart: int  # what the weight half takes more where it runs by itself
    shard_groups: tuple[tuple[int, ...], ...]  # of every component
    held: np.ndarray  # int64[components] ranks, also those without tokens
    nic: np.ndarray  # int64[nodes, nics] how long each card is taken
    link: np.ndarray  # int64[ranks] how long each NVLink port is taken

    def scaled(self, share: int) -> MicroBatchTimes:
        """The window with all its times a share of what they are, in units of 2**-20."""
        times = ("before", "total", "comm", "length", "apart")
        return replace(self, **{name: getattr(self, name) * share >> _BITS for name in times})

    def phase(self, kind: ActionKind) -> ActionTimes:
        """Return what F, B, I or W of this window takes.

        The cuts are rounded down on the time a rank has spent so far, so that a rank's actions add up to its
        time to the nanosecond and none of them outlasts the component's.
        """
        none, whole = np.zeros_like(self.forward), np.full_like(self.forward, 1 << _BITS)
        low, high = {
            ActionKind.F: (none, self.forward),
            ActionKind.B: (self.forward, whole),
            ActionKind.I: (self.forward, self.weights),
            ActionKind.W: (self.weights, whole),
        }[kind]
        duration = share_between(self.length, low, high)
        low, high = low[self.component], high[self.component]
        most = duration[self.component]
        start = np.minimum(share_between(self.before, low, high), most)
        stop = np.minimum(share_between(self.before + self.total, low, high), most)
        comm = np.minimum(share_between(self.comm, low, high), stop - start)
        if kind is ActionKind.W and self.apart:
            duration, start, stop = duration + self.apart, start + self.apart * (self.before > 0), stop + self.apart
        return ActionTimes(duration, start, stop, comm)


def share_between(time: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The part of a time from one share to another, in units of 2**-20; parts that follow each other add up."""
    return (time * high >> _BITS) - (time * low >> _BITS)


def forward_and_weight_cuts(
    parts: np.ndarray, load: np.ndarray, checkpoint: Checkpoint, products: float
) -> tuple[np.ndarray, np.ndarray]:
    """Where forward ends and the weight half begins, as shares of 2**-20, of ranks with these parts and this time.

    `products` as in `weights_ns`.
    """
    forward = _share(forward_ns(parts, load, checkpoint), load)
    return forward, np.maximum((1 << _BITS) - _share(weights_ns(parts, checkpoint, products), load), forward)


def extend_for_offload(
    length: np.ndarray, forward: np.ndarray, weights: np.ndarray, least: int | np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(length, forward, weights), with forward and the input half of the backward not shorter than `least` ns."""
    ends = [length * share >> _BITS for share in (forward, weights)]
    early = np.maximum(ends[0], least)
    late = early + np.maximum(ends[1] - ends[0], least)
    longer = late + length - ends[1]
    if np.array_equal(longer, length):
        return length, forward, weights
    return longer, -(-(early << _BITS) // np.maximum(longer, 1)), -(-(late << _BITS) // np.maximum(longer, 1))


FULL_SHARE = 1 << _BITS
"""The share that is everything."""


@dataclass(frozen=True, slots=True)
class ShardGroups:
    """The shard groups of a plan, numbered."""

    of_rank: dict[int, int]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, plan: Plan) -> ShardGroups:
        """Number the shard groups over all pipelines: no two have the same number."""
        shard_groups = plan.shard_groups
        return cls(
            {rank: i for i, shard_group in enumerate(shard_groups) for rank in shard_group},
            tuple(map(len, shard_groups)),
        )


def window_of(
    work: StageMicroBatch,
    times: RoundTimes,
    shard_groups: ShardGroups,
    products: float,
    copied: int = 0,
    apart: int = 0,
    together: tuple[int, ...] = (),
) -> MicroBatchTimes:
    """Find out who waits for whom.

    Args:
        work: the stage's share of the round.
        times: its price.
        shard groups: of the plan; all ranks of a shard group that the round touches take part in it.
        products: share of linear layers' time that is matrix products.
        copied: ns of copying what is kept to host memory, behind the forward, and back, behind the backward.
        apart: ns that the halves of a backward take more than a whole one.
        together: ranks that meet before and after every pass.
    """
    rank, group = times.member_rank, times.member_group
    component, joined = round_components(work, shard_groups.of_rank, together)
    member = component[rank]
    total, load = times.member_ns, times.rank_ns
    length = times.component_ns(component)
    slowest = np.array([rank[member == k][load[rank[member == k]].argmax()] for k in range(len(joined))])
    forward, weights = forward_and_weight_cuts(times.parts[slowest], load[slowest], work.checkpoint, products)
    length, forward, weights = extend_for_offload(length, forward, weights, copied)
    degrees = np.array([*(len(each.ranks) for each in work.groups), 1])  # the last: ranks without a group
    return MicroBatchTimes(
        rank=rank,
        group=group,
        degree=degrees[group],
        before=_earlier(rank, total),
        total=total,
        comm=_exposed(times),
        component=member,
        length=length,
        forward=forward,
        weights=weights,
        apart=apart,
        shard_groups=tuple(map(tuple, joined)),
        held=np.array([sum(shard_groups.sizes[i] for i in numbers) for numbers in joined], dtype=np.int64),
        nic=times.nic_ns,
        link=times.link_ns,
    )


def _share(time: np.ndarray, length: np.ndarray) -> np.ndarray:
    return (time << _BITS) // np.maximum(length, 1)


def _exposed(times: RoundTimes) -> np.ndarray:
    """int64[members] communication that nothing hides: a rank's time that is not computing, by its members' shares."""
    waits = times.rank_ns - computing_ns(times.parts)
    rank = times.member_rank
    upto = _earlier(rank, times.member_ns) + times.member_ns
    whole = np.maximum(times.rank_ns, 1)[rank].astype(np.float64)
    cuts = [(waits[rank] * (edge / whole)).astype(np.int64) for edge in (upto - times.member_ns, upto)]
    return cuts[1] - cuts[0]


def _earlier(rank: np.ndarray, time: np.ndarray) -> np.ndarray:
    """int64[members]: what the rank's earlier members take."""
    order = np.argsort(rank, kind="stable")
    sums = np.cumsum(time[order]) - time[order]
    _, first = np.unique(rank[order], return_index=True)
    repeats = np.diff(np.append(first, len(rank)))
    before = np.empty_like(sums)
    before[order] = sums - np.repeat(sums[first], repeats)
    return before


# ---- merged: simulate.price
# From a plan to priced windows: every stage of every round, in integer nanoseconds.


def price(plan: Plan, cost: CostModel) -> dict[MicroBatchKey, MicroBatchTimes]:
    """Price every `Work`, and turn it into its window."""
    shard_groups = ShardGroups.of(plan)
    windows = {}
    for (policy, p, tensor), works in _alike(plan, cost).items():
        twins, own_cost = IdenticalStages.of(plan, cost, p), cost.with_tensor(tensor)
        shares = stage_layers(plan.pipelines[p])
        own: dict[Hashable, list[tuple[MicroBatchKey, StageMicroBatch]]] = defaultdict(list)
        for place, work in works:
            own[twins.key(place, work)].append((place, work))
        first = [members[0] for members in own.values()]
        parts = iter(own_cost.group_costs([group for _, work in first for group in work.groups], policy))
        for (place, work), members in zip(first, own.values(), strict=True):
            priced = list(islice(parts, len(work.groups)))
            times = own_cost.round_times(work, policy, shares[place.stage], priced)
            copied = _copied(own_cost, work, shares[place.stage])
            apart = own_cost.engine.split_overhead_ns(_layers(own_cost, shares[place.stage]))
            stage = plan.pipelines[p].stages[place.stage]
            together = stage.ranks if place.stage in twins.together else ()
            window = window_of(work, times, shard_groups, own_cost.engine.matmul_share, copied, apart, together)
            for other, _ in members:
                windows[other] = twins.moved(window, place.stage, other.stage)
    return windows


def _layers(cost: CostModel, share: LayerRange | None) -> int:
    """Layers of a stage; None: all of them."""
    return cost.model.layers if share is None else share.stop - share.first


def _copied(cost: CostModel, work: StageMicroBatch, share: LayerRange | None) -> int:
    """ns of copying what is kept of a unit to host memory, on its fullest rank."""
    if not work.offload or share is None:
        return 0
    kept = StageMemory(cost, share).activation_bytes(work.checkpoint, offload=False).held
    return copy_ns(kept * int(tokens_on_ranks(cost, work).max()))


def _alike(
    plan: Plan, cost: CostModel
) -> dict[tuple[MemoryPolicy, int, int], list[tuple[MicroBatchKey, StageMicroBatch]]]:
    """Return the works of every policy, pipeline and tensor degree: what is priced in one go."""
    works: dict[tuple[MemoryPolicy, int, int], list[tuple[MicroBatchKey, StageMicroBatch]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        resident = len(pipeline.stages) > 1 or bool(unshard_times_by_stage(cost, pipeline))
        for r, current in enumerate(pipeline.rounds):
            for s, work in enumerate(current.by_stage):
                policy = MemoryPolicy(work.checkpoint, plan.reduce, resident)
                works[policy, p, pipeline.stages[s].tensor].append((MicroBatchKey(p, s, r), work))
    return works


def end_ns(plan: Plan, cost: CostModel, windows: dict[MicroBatchKey, MicroBatchTimes]) -> tuple[int, int]:
    """What the step costs once, beside its rounds, and how much of that is communication."""
    shades = []
    for p, pipeline in enumerate(plan.pipelines):
        ends = [windows[MicroBatchKey(p, 0, r)] for r in (0, len(pipeline.rounds) - 1)] if pipeline.rounds else []
        shades.append((int(ends[0].length.min()), int(ends[1].length.min())) if ends else (0, 0))
    moved = exposed_reshard_ns(cost, plan.pipelines, shades)
    total, communication = step_overhead(plan, cost)
    return total + moved, communication + moved


def step_overhead(plan: Plan, cost: CostModel) -> tuple[int, int]:
    """ns of the end of the step on the slowest host, and how much of that is communication. The same for all rounds."""
    costs = [(0, 0)]
    for pipeline in plan.pipelines:
        if len(pipeline.stages) > 1:
            costs += [_host_end(plan, cost, pipeline, host) for host in range(len(pipeline.ranks_by_pp_rank))]
            continue
        own = cost.with_tensor(pipeline.stages[0].tensor)
        for checkpoint in {current.by_stage[0].checkpoint for current in pipeline.rounds}:
            policy = MemoryPolicy(checkpoint, plan.reduce, bool(unshard_times_by_stage(cost, pipeline)))
            costs.append((own.step_overhead_ns(policy), own.step_communication_ns(policy)))
    return max(costs)


def _host_end(plan: Plan, cost: CostModel, pipeline: Pipeline, host: int) -> tuple[int, int]:
    """The end of a step on one host: of all its stages, by the widest shard group that it has.

    Stages of a host have one tensor degree, or are priced by that of the first.
    """
    stages, ranks = pipeline.stages_of(host), pipeline.ranks_by_pp_rank[host]
    own = cost.with_tensor(pipeline.stages[stages[0]].tensor)
    shard_groups = plan.limits.shard_groups(plan.sharding, ranks)
    return stage_overhead_ns(
        own, [pipeline.layer_ranges[stage] for stage in stages], len(ranks), min(map(len, shard_groups))
    )
