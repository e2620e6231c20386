"""Time of every micro-batch on every stage: who waits for whom, and where forward, backward and weight half end.

Groups join the shard groups that they touch. The ranks of joined shard groups form a component: they start together and
leave together, when the slowest of them is done. Until then the others wait.

    rank 0   |FFFFFBBBBBBBBBB|        component 0: one group over ranks 0 and 1, another on rank 2;
    rank 1   |FFFFFBBBBBBBBBB|        rank 3 has no tokens and waits
    rank 2   |FFFBBBBBB      |
    rank 3   |               |

The cost model prices forward and backward together. All groups of a component are cut at the same share of their time,
that of the rank that works longest, so a component's forward and backward are exactly as long as both together.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.forward_backward import FULL_SHARE, computing_ns, scale, share_between
from seqloom.cost.plan_cost import (
    RoundTimes,
    component_passes,
    group_table,
    round_components,
    round_times,
    step_overhead,
    sums_before,
)
from seqloom.cost.resharding import exposed_reshard_ns, unshard_times_by_stage
from seqloom.plan import ActionKind, LayerRange, Pipeline, Plan, StageMicroBatch

# -- one micro-batch on one stage -----------------------------------------------


class MicroBatchKey(NamedTuple):
    """A micro-batch on a stage of a plan."""

    pipeline: int
    stage: int
    round: int


@dataclass(frozen=True, slots=True, eq=False)
class ActionTimes:
    """F, B, I or W of a micro-batch. ns from the start of the action; members as in `MicroBatchTimes`."""

    duration: np.ndarray  # int64[components]
    start: np.ndarray  # int64[members]
    stop: np.ndarray  # int64[members]
    comm: np.ndarray  # int64[members] exposed communication


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatchTimes:
    """A micro-batch on a stage, priced. Members are pairs of a group and one of its ranks, as in `RoundTimes`. ns."""

    rank: np.ndarray  # int64[members]
    group: np.ndarray  # int64[members] index of the group in its `StageMicroBatch`
    degree: np.ndarray  # int64[members] ranks of the group
    before: np.ndarray  # int64[members] time of the rank's earlier groups of this round
    total: np.ndarray  # int64[members] forward and backward of the group
    comm: np.ndarray  # int64[members] exposed communication of the group
    component: np.ndarray  # int64[members]
    length: np.ndarray  # int64[components] forward and backward of the slowest rank, NIC or link
    forward: np.ndarray  # int64[components] where forward ends, in units of 2**-20 of the length
    weights: np.ndarray  # int64[components] where the weight half begins
    split_overhead: int  # what the weight half takes more where it runs by itself
    shard_groups: tuple[tuple[int, ...], ...]  # of every component
    nic: np.ndarray  # int64[nodes, nics] how long each NIC is occupied
    link: np.ndarray  # int64[ranks] how long each NVLink port is occupied

    @classmethod
    def of(
        cls,
        cost: CostModel,
        work: StageMicroBatch,
        layers: LayerRange,
        times: RoundTimes,
        component: np.ndarray,
        joined: list[list[int]],
    ) -> MicroBatchTimes:
        """Cut the price of a micro-batch where its forward and its input half end; `round_components` tells who waits.

        Offloaded activations are copied to host memory behind the forward, and back behind the backward.
        """
        rank, group = times.member_rank, times.member_group
        length, forward, weights = component_passes(cost, work, layers, times, component)
        degrees = np.array([*(len(each.ranks) for each in work.groups), 1])  # the last: ranks without a group
        before = sums_before(rank, times.member_ns)
        return cls(
            rank=rank,
            group=group,
            degree=degrees[group],
            before=before,
            total=times.member_ns,
            comm=_exposed(times, before),
            component=component[rank],
            length=length,
            forward=forward,
            weights=weights,
            split_overhead=cost.engine.split_overhead_ns(layers.stop - layers.first),
            shard_groups=tuple(map(tuple, joined)),
            nic=times.nic_ns,
            link=times.link_ns,
        )

    def scaled(self, share: int) -> MicroBatchTimes:
        """All times multiplied with a share in units of 2**-20."""
        times = ("before", "total", "comm", "length", "split_overhead")
        return replace(self, **{name: scale(getattr(self, name), share) for name in times})

    def action(self, kind: ActionKind) -> ActionTimes:
        """Times of F, B, I or W.

        The cuts are rounded down on the time a rank has spent so far, so that a rank's actions add up to its time to
        the nanosecond and none of them outlasts the component's.
        """
        none, whole = np.zeros_like(self.forward), np.full_like(self.forward, FULL_SHARE)
        low, high = {
            ActionKind.F: (none, self.forward),
            ActionKind.B: (self.forward, whole),
            ActionKind.I: (self.forward, self.weights),
            ActionKind.W: (self.weights, whole),
        }[kind]
        duration = share_between(self.length, low, high)
        low, high, most = (each[self.component] for each in (low, high, duration))
        start = np.minimum(share_between(self.before, low, high), most)
        stop = np.minimum(share_between(self.before + self.total, low, high), most)
        comm = np.minimum(share_between(self.comm, low, high), stop - start)
        if kind is ActionKind.W and self.split_overhead:
            more = self.split_overhead
            duration, start, stop = duration + more, start + more * (self.before > 0), stop + more
        return ActionTimes(duration, start, stop, comm)


def _exposed(times: RoundTimes, before: np.ndarray) -> np.ndarray:
    """int64[members] exposed communication: a rank's time that is not computing, by its members' shares."""
    waits = (times.rank_ns - computing_ns(times.parts))[times.member_rank]
    whole = np.maximum(times.rank_ns, 1)[times.member_rank].astype(np.float64)
    low, high = ((waits * (edge / whole)).astype(np.int64) for edge in (before, before + times.member_ns))
    return high - low


# -- all micro-batches of a plan ------------------------------------------------


def price(plan: Plan, cost: CostModel) -> dict[MicroBatchKey, MicroBatchTimes]:
    """Price every micro-batch of every stage; on identical stages once."""
    shard_group_of, times = {rank: i for i, ranks in enumerate(plan.shard_groups) for rank in ranks}, {}
    for p, pipeline in enumerate(plan.pipelines):
        identical = IdenticalStages.of(cost, pipeline, shard_group_of)
        layers, resident = identical.layers, len(pipeline.stages) > 1 or bool(identical.unsharded)
        batches: dict[tuple[MemoryPolicy, CostModel, int, int], dict[Hashable, list[tuple[int, int]]]] = {}
        for s, stage in enumerate(pipeline.stages):
            for r, work in enumerate(current.by_stage[s] for current in pipeline.rounds):
                policy = MemoryPolicy(work.checkpoint, plan.reduce, resident)
                own = cost.for_stage(stage).for_layers(layers[s])
                batch = batches.setdefault((policy, own, work.lighter_layers, stage.layer_count), {})
                batch.setdefault(identical.key(s, r, work), []).append((s, r))
        for (policy, *_), same in batches.items():
            works = [pipeline.rounds[r].by_stage[s] for (s, r), *_ in same.values()]
            (stage, _), *_ = next(iter(same.values()))
            own = cost.for_stage(pipeline.stages[stage])
            groups = [group for work in works for group in work.groups]
            table = group_table(own, groups, policy, works[0], layers[stage])
            costs = np.split(table, np.cumsum([len(work.groups) for work in works])[:-1])
            for work, priced, places in zip(works, costs, same.values(), strict=True):
                s = places[0][0]
                meeting = pipeline.stages[s].ranks if s in identical.unsharded else ()
                round_ns = round_times(own, work, policy, layers[s], priced)
                waiting = round_components(work, shard_group_of, meeting)
                first = MicroBatchTimes.of(own, work, layers[s], round_ns, *waiting)
                times |= {MicroBatchKey(p, other, r): identical.moved(first, s, other) for other, r in places}
    return times


@dataclass(frozen=True, slots=True)
class IdenticalStages:
    """Stages of a pipeline that differ only in their ranks: a micro-batch is priced on one and moved to the others.

    Pipeline ranks mostly have as many ranks each, at the same places of their nodes. A micro-batch whose groups lie
    alike on two stages takes as long on both if they have as many layers.
    """

    layers: tuple[LayerRange, ...]
    first_rank: list[int]  # of every stage
    first_shard_group: list[int]  # of every stage
    node_size: int
    aligned: bool  # whether all pipeline ranks, several and equally fast, lie in their nodes in the same way
    unsharded: frozenset[int]  # stages that are unsharded for every pass

    @classmethod
    def of(cls, cost: CostModel, pipeline: Pipeline, shard_group_of: dict[int, int]) -> IdenticalStages:
        """Compare the ranks of one pipeline."""
        blocks, size = pipeline.ranks_by_pp_rank, cost.node_size
        width, start = len(blocks[0]), blocks[0][0]
        even = all(block == tuple(range(start + i * width, start + (i + 1) * width)) for i, block in enumerate(blocks))
        even = even and len(pipeline.stages) > 1
        first = [stage.ranks[0] for stage in pipeline.stages]
        return cls(
            layers=pipeline.layer_ranges,
            first_rank=first,
            first_shard_group=[shard_group_of[rank] for rank in first],
            node_size=size,
            aligned=even and not cost.speeds and start % width == 0 and (size % width == 0 or width % size == 0),
            unsharded=frozenset(unshard_times_by_stage(cost, pipeline)),
        )

    def key(self, stage: int, number: int, work: StageMicroBatch) -> Hashable:
        """What two micro-batches of one policy and tensor degree have in common if they take as long."""
        routed = work.linear is not None or any(group.route is not None for group in work.groups)
        if not self.aligned or routed:
            return stage, number
        layers, first = self.layers[stage], self.first_rank[stage]
        groups = tuple(
            (group.ranks[0] - first, group.ranks[-1] - first, GroupShape.of(group), group.spans)
            for group in work.groups
        )
        return layers.stop - layers.first, layers.has_head, work.offloaded_layers, stage in self.unsharded, groups

    def moved(self, times: MicroBatchTimes, stage: int, other: int) -> MicroBatchTimes:
        """The times of a stage on the ranks of an identical one."""
        ranks = self.first_rank[other] - self.first_rank[stage]
        numbers = self.first_shard_group[other] - self.first_shard_group[stage]
        if not ranks:
            return times
        return replace(
            times,
            rank=times.rank + ranks,
            shard_groups=tuple(tuple(number + numbers for number in joined) for joined in times.shard_groups),
            nic=np.roll(times.nic, ranks // self.node_size, axis=0),
            link=np.roll(times.link, ranks),
        )


def computing_by_rank(plan: Plan, cost: CostModel) -> np.ndarray:
    """int64[ranks]: ns in which a rank computes in forwards and backwards, without what it waits for or sends."""
    total = np.zeros(cost.ranks, dtype=np.int64)
    for times in price(plan, cost).values():
        np.add.at(total, times.rank, times.total - times.comm)
    return total


# -- once per step --------------------------------------------------------------


def end_ns(plan: Plan, cost: CostModel, times: dict[MicroBatchKey, MicroBatchTimes]) -> tuple[int, int]:
    """(ns, of that communication) of a step beside its rounds, with the exposed resharding time."""
    overlap_windows = [(0, 0)] * len(plan.pipelines)
    for p, rounds in ((p, len(pipeline.rounds)) for p, pipeline in enumerate(plan.pipelines) if pipeline.rounds):
        first, last = (int(times[MicroBatchKey(p, 0, r)].length.min()) for r in (0, rounds - 1))
        overlap_windows[p] = (first, last)
    exposed = exposed_reshard_ns(cost, plan.pipelines, overlap_windows)
    total, communication = step_overhead(plan, cost)
    return total + exposed, communication + exposed
