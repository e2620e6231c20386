"""Activation recomputation and offloading in a pipeline: choose the policy of every micro-batch on every stage.

`MicroBatchCosts` prices all micro-batches on all stages at once, as the simulator does except for contention of a
micro-batch's groups on one NIC. `ActivationMemory` walks along the actions of a pp_rank. Where activations exceed the
memory, it changes the policy of the micro-batch in flight that saves memory for the least time per byte. A new policy
may raise the transient memory of its micro-batch elsewhere; the next walk accounts for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape, MemoryPolicy
from seqloom.cost.forward_backward import (
    FULL_SHARE,
    extend_for_offload,
    forward_and_weight_cuts,
    share_between,
)
from seqloom.cost.memory import pp_rank_bytes
from seqloom.cost.plan_cost import COST_COLUMNS, expert_costs, rank_costs, rank_times, scale_to_layers
from seqloom.plan import Action, ActionKind, Checkpoint, Group, LayerRange, Limits, Reduce, StageMicroBatch, sort_groups
from seqloom.plan.pipeline import deal_head
from seqloom.planners.pipeline.long_sequences import StageGroups
from seqloom.planners.pipeline.micro_batches import MicroBatches
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.schedules import Schedule, Times
from seqloom.schedules.memory import UnitMemory, memory_walk
from seqloom.simulate.memory import KVCacheChanges, kv_cache_changes

WALKS = 8
"""Walks along a row of actions, at most, to make it fit."""

Choice = np.ndarray
"""int64[stages, micro-batches]: index of the policy of every micro-batch on every stage."""


class ActivationPolicy(NamedTuple):
    """Which activations of a micro-batch a stage recomputes, and whether all its layers offload the others."""

    checkpoint: Checkpoint
    offload: bool = False

    def offloaded_layers(self, layers: LayerRange) -> int:
        """Layers of a stage that are offloaded."""
        return (layers.stop - layers.first) if self.offload else 0


def policies_of(limits: Limits) -> tuple[ActivationPolicy, ...]:
    """Policies that a plan may use, the fastest first; those that offload come last."""
    kept = (ActivationPolicy(checkpoint) for checkpoint, _ in limits.capacity)
    return (*kept, *(ActivationPolicy(checkpoint, offload=True) for checkpoint, _ in limits.offload_capacity))


def policy_capacity(limits: Limits, policy: ActivationPolicy) -> int:
    """Tokens of a micro-batch that a rank holds under a policy."""
    return dict(limits.offload_capacity if policy.offload else limits.capacity)[policy.checkpoint]


def stage_micro_batch(
    cost: CostModel, layout: StageLayout, groups: StageGroups, stage: int, policy: ActivationPolicy
) -> StageMicroBatch:
    """One stage's part of a micro-batch, on the ranks of its pp_rank."""
    first = layout.pp_rank_of_stage[stage] * layout.ranks_per_stage
    placed = [cost.group(shape, range(first + at, first + at + shape.degree), spans) for shape, at, spans in groups]
    offloaded = policy.offloaded_layers(layout.layer_ranges[stage])
    return StageMicroBatch(sort_groups(placed, cost.node_size), policy.checkpoint, offloaded_layers=offloaded)


def stage_micro_batches(
    cost: CostModel, layout: StageLayout, groups: StageGroups, policies: Sequence[ActivationPolicy]
) -> tuple[StageMicroBatch, ...]:
    """All stages' parts of a micro-batch under their policies; head stages have that of the last stage with layers."""
    last = len(layout.layers) - layout.heads - 1
    works = [stage_micro_batch(cost, layout, groups, s, policy) for s, policy in enumerate(policies[: last + 1])]
    heads = deal_head(works[last], [layout.ranks(pp_rank) for pp_rank in range(layout.heads)]) if layout.heads else ()
    return (*works, *heads)


class MicroBatchCosts:
    """Times and memory of micro-batches on every stage; computed on first use."""

    def __init__(
        self,
        cost: CostModel,
        layout: StageLayout,
        micro_batches: MicroBatches,
        lengths: np.ndarray,
        policies: Sequence[ActivationPolicy],
    ) -> None:
        self.cost, self.layout, self.micro_batches, self.lengths = cost, layout, micro_batches, lengths
        self.policies = tuple(policies)
        placed = [stage_micro_batch(cost, layout, groups, 0, self.policies[0]) for groups in micro_batches.groups]
        self._placed = [part.groups for part in placed]
        self._groups: list[Group] = [group for groups in self._placed for group in groups]
        self._owner = np.repeat(np.arange(len(placed)), list(map(len, self._placed)))
        self._tables: dict[tuple[CostModel, Checkpoint], np.ndarray] = {}
        self._times: dict[ActivationPolicy, Times] = {}

    def times(self, choice: Choice) -> Times:
        """int64[stages, micro-batches] ns of forward, input half and weight half under the chosen policies."""
        first = int(choice.flat[0])
        if (choice == first).all():
            return self.times_under(self.policies[first])
        times = [self.times_under(policy) for policy in self.policies]
        columns = zip(*(each[:3] for each in times), strict=True)
        picked = [np.take_along_axis(np.stack(column), choice[None], axis=0)[0] for column in columns]
        return Times(*picked, split_overhead=times[0].split_overhead)

    def times_under(self, policy: ActivationPolicy) -> Times:
        """Times with all micro-batches under one policy; equal stages are priced once."""
        if policy == ActivationPolicy(Checkpoint.STAGE):  # recomputing a stage is recomputing its layers
            return self.times_under(ActivationPolicy(Checkpoint.FULL))
        if policy not in self._times:
            ranges = self.layout.layer_ranges[: len(self.layout.layers) - self.layout.heads]
            alike = [(self.cost.for_layers(each), each.stop - each.first, each.has_head) for each in ranges]
            found = {
                key: self._stage_times(layers, policy) for key, layers in dict(zip(alike, ranges, strict=True)).items()
            }
            heads = self._head_times(policy.checkpoint)
            columns = [np.stack([*(found[key][k] for key in alike), *heads[k]]) for k in range(3)]
            split = [[self.cost.engine.split_overhead_ns(count)] for count in self.layout.layers]
            self._times[policy] = Times(*columns, split_overhead=np.array(split, dtype=np.int64))
        return self._times[policy]

    def _stage_times(self, layers: LayerRange, policy: ActivationPolicy) -> tuple[np.ndarray, ...]:
        """int64[micro-batches] ns each of forward, input half and weight half, on one stage."""
        width, count = self.layout.ranks_per_stage, len(self.micro_batches.groups)
        cost = self.cost.for_layers(layers)
        table = scale_to_layers(cost, layers, self._table(cost, policy.checkpoint))
        degrees = np.array([len(group.ranks) for group in self._groups])
        group = np.repeat(np.arange(len(degrees)), degrees)
        rank = np.concatenate([np.array(group.ranks) for group in self._groups]) + width * self._owner[group]
        policed = MemoryPolicy(policy.checkpoint, Reduce.STEP, resident=True)
        parts = expert_costs(cost, rank_costs(table, rank, group, width * count), policed, layers)
        rank_ns, _ = rank_times(parts, table, rank, group, degrees == 1)
        slowest = rank_ns.reshape(count, width).argmax(axis=1) + width * np.arange(count)
        length = np.maximum(rank_ns[slowest], parts[:, COST_COLUMNS.index("link")].reshape(count, width).max(axis=1))
        forward, weights = forward_and_weight_cuts(
            parts[slowest], rank_ns[slowest], cost.engine.forward(policy.checkpoint), cost.engine.matmul_share
        )
        if policy.offload:
            size = self.cost.memory.host_bytes(layers, policy.checkpoint, policy.offloaded_layers(layers))
            copied = self.cost.engine.copy_ns(size * self.tokens)
            length, forward, weights = extend_for_offload(length, forward, weights, copied)
        edges = (np.zeros_like(forward), forward, weights, np.full_like(forward, FULL_SHARE))
        return tuple(share_between(length, low, high) for low, high in pairwise(edges))

    def _head_times(self, checkpoint: Checkpoint) -> np.ndarray:
        """int64[3, head stages, micro-batches] ns of forward, input half and weight half, which has none of it."""
        heads, count = self.layout.heads, len(self.micro_batches.groups)
        if not heads:
            return np.zeros((3, 0, count), dtype=np.int64)
        policy, shape = MemoryPolicy(checkpoint, Reduce.STEP, resident=True), GroupShape(1, 1)
        rate = self.cost.engine.token_ns(shape, policy, self.cost.aligned_traffic(shape))["head"]
        most = np.zeros((heads, count), dtype=np.int64)
        for number, stages in enumerate(self._dealt):
            for k, work in enumerate(stages):
                for group in work.groups:
                    edges = self.cost.padded_lengths(np.array([(start, stop) for _, start, stop in group.spans]))
                    ns = np.rint(rate * edges).astype(np.int64)
                    most[k, number] = max(most[k, number], int((ns[:, 1] - ns[:, 0]).sum()))
        parts = np.zeros((most.size, len(COST_COLUMNS)), dtype=np.int64)
        parts[:, COST_COLUMNS.index("head")] = most.ravel()
        shares = self.cost.engine.forward(checkpoint), self.cost.engine.matmul_share
        forward, _ = forward_and_weight_cuts(parts, most.ravel(), *shares)
        early = share_between(most, np.zeros_like(most), forward.reshape(most.shape))
        return np.stack([early, most - early, np.zeros_like(most)])

    @cached_property
    def _dealt(self) -> list[tuple[StageMicroBatch, ...]]:
        """Of every micro-batch the parts of the head stages."""
        blocks = [self.layout.ranks(pp_rank) for pp_rank in range(self.layout.heads)]
        works = (StageMicroBatch(groups, self.policies[0].checkpoint) for groups in self._placed)
        return [deal_head(work, blocks) for work in works]

    @cached_property
    def stage_tokens(self) -> np.ndarray:
        """int64[stages, micro-batches]: tokens on the fullest rank of every stage."""
        with_layers = np.tile(self.tokens, (len(self.layout.layers) - self.layout.heads, 1))
        if not self.layout.heads:
            return with_layers
        heads = [[max((g.tokens for g in work.groups), default=0) for work in stages] for stages in self._dealt]
        return np.concatenate([with_layers, np.array(heads, dtype=np.int64).T])

    def _table(self, cost: CostModel, checkpoint: Checkpoint) -> np.ndarray:
        """int64[groups, len(COST_COLUMNS)] ns of all groups, all layers that `cost` prices."""
        checkpoint = Checkpoint.FULL if checkpoint == Checkpoint.STAGE else checkpoint
        key = cost, checkpoint
        if key not in self._tables:
            policy = MemoryPolicy(checkpoint, Reduce.STEP, resident=True)
            self._tables[key] = cost.group_costs(self._groups, policy)
        return self._tables[key]

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64[micro-batches]: tokens on the fullest rank."""
        tokens = np.zeros((len(self._placed), self.layout.ranks_per_stage), dtype=np.int64)
        for number, group in zip(self._owner.tolist(), self._groups, strict=True):
            edges = self.cost.padded_lengths(np.array([(start, stop) for _, start, stop in group.spans]))
            tokens[number, list(group.ranks)] += -(-int((edges[:, 1] - edges[:, 0]).sum()) // group.degree)
        return tokens.max(axis=1)

    @cached_property
    def message_ns(self) -> int:
        """ns of the message of a median micro-batch between the first two stages."""
        order = np.argsort(self.tokens, kind="stable")
        return self.cost.stage_message_ns(int(self.tokens[order[len(order) // 2]]), *self.layout.stages[:2])

    @cached_property
    def kv_bytes(self) -> KVCacheChanges:
        """int64[stages, micro-batches] bytes on the fullest rank."""
        found, ranges = {}, self.layout.layer_ranges
        alike = [(self.cost.for_layers(layers), layers.stop - layers.first) for layers in ranges]
        for key, layers in dict(zip(alike, ranges, strict=True)).items():
            changes = [kv_cache_changes(self.cost, layers, groups, self.lengths) for groups in self._placed]
            found[key] = np.array(changes).max(axis=2)
        return KVCacheChanges(*np.stack([found[key] for key in alike]).transpose(2, 0, 1))


class ActivationMemory:
    """Bytes of micro-batches on the fullest rank under every policy, and the choice of policies that fit."""

    def __init__(self, costs: MicroBatchCosts, limits: Limits) -> None:
        """`limits` give the capacity of a rank under every checkpointing."""
        self.costs = costs
        cost, layout, policies = costs.cost, costs.layout, costs.policies
        shard_group = layout.shard_group_size(cost)
        self.free = [
            cost.budget_bytes - pp_rank_bytes(cost, ranges, shard_group) for ranges in layout.ranges_by_pp_rank
        ]
        self._allowed = [(costs.tokens <= policy_capacity(limits, policy)).tolist() for policy in policies]
        per_token = np.array(
            [
                [
                    cost.memory.activation_bytes(layers, policy.checkpoint, policy.offloaded_layers(layers))
                    for layers in layout.layer_ranges
                ]
                for policy in policies
            ]
        )
        columns = np.ceil(np.moveaxis(per_token, 2, 0)[..., None] * costs.stage_tokens)
        self._bytes = UnitMemory(*columns)  # float64[policies, stages, micro-batches] each
        self._lists = columns.tolist()
        self._kv_lists = [column.tolist() for column in costs.kv_bytes]
        self._units: dict[tuple[int, int, int], UnitMemory] = {}  # of a policy, stage and micro-batch, on first use

    @cached_property
    def _total_ns(self) -> list[list[list[int]]]:
        """Forward and backward of [policy][stage][micro-batch]."""
        return [np.sum(self.costs.times_under(policy)[:3], axis=0).tolist() for policy in self.costs.policies]

    def allows(self, policy: int) -> bool:
        """Whether ranks may hold the tokens of every micro-batch under this policy."""
        return all(self._allowed[policy])

    def held(self, choice: Choice) -> np.ndarray:
        """int64[stages, micro-batches]: bytes from forward to backward.

        Every piece counts its share, by tokens and rounded up, of the keys and values of its sequence.
        """
        tokens, allocated = self.costs.tokens, self.costs.kv_bytes.kv
        shares = np.zeros_like(allocated)
        sequence = np.array([unit.sequence for unit in self.costs.micro_batches.units])
        for number in np.unique(sequence):
            own = sequence == number
            total = max(1, int(tokens[own].sum()))
            shares[:, own] = -(-allocated[:, own].sum(axis=1)[:, None] * tokens[own] // total)
        return _chosen(self._bytes.held, choice).astype(np.int64) + shares

    def caps(self, choice: Choice) -> list[int]:
        """Bytes that micro-batches in flight may hold on every pp_rank, beside transient memory and KV gradients.

        A split backward needs nothing more, except where `fuses_backward`.
        """
        transient = np.maximum(_chosen(self._bytes.forward, choice), _chosen(self._bytes.backward, choice))
        heads = len(transient) - self.costs.layout.heads
        transient[heads:] += _chosen(self._bytes.held, choice)[heads:]  # nothing else is run between their F and B
        most = transient.max(axis=1) + self.costs.kv_bytes.kv_grad.max(axis=1)
        pp_ranks = np.array(self.costs.layout.pp_rank_of_stage)
        return [int(free - most[pp_ranks == pp_rank].max()) for pp_rank, free in enumerate(self.free)]

    def fuses_backward(self, choice: Choice) -> np.ndarray:
        """bool[stages, micro-batches]: whether a split backward would hold more from I to W than before it."""
        return _chosen(self._bytes.deferred, choice) > _chosen(self._bytes.held, choice)

    def peaks(self, schedule: Schedule, choice: Choice) -> list[float]:
        """Peak bytes of micro-batches on every pp_rank."""
        chosen = choice.tolist()
        return [self._peak(row, chosen) for row in schedule.rows]

    def fit(self, schedule: Schedule, choice: Choice) -> Choice | None:
        """Change policies to ones that store less until every pp_rank fits; None if that is not enough.

        Policies that offload are used only where recomputing is not enough.
        """
        recomputing = sum(not policy.offload for policy in self.costs.policies)
        chosen = choice.tolist()
        for row, free in zip(schedule.rows, self.free, strict=True):
            if not any(self._fit_row(row, chosen, free, count) for count in (recomputing, len(self.costs.policies))):
                return None
        return np.array(chosen, dtype=np.int64)

    def _fit_row(self, row: Sequence[Action], chosen: list[list[int]], free: int, policies: int) -> bool:
        """Change the policies of one pp_rank, among the first `policies`, until it fits; return whether it does."""
        for _ in range(WALKS):
            if self._peak(row, chosen) <= free:
                return True
            if not self._lower(row, chosen, free, policies):
                return False
        return False

    def _peak(self, row: Sequence[Action], chosen: list[list[int]]) -> float:
        return max((max(peak, after) for _, peak, after in self._walk(row, chosen)), default=0.0)

    def _walk(self, row: Sequence[Action], chosen: list[list[int]]) -> Iterator[tuple[Action, float, float]]:
        """Yield (action, bytes at its peak, bytes after it); the caller may change `chosen` on the way."""

        def unit_of(action: Action) -> UnitMemory:
            s, u = action.stage, action.round or 0
            key = (policy := chosen[s][u]), s, u
            if key not in self._units:
                kinds = (kind[policy][s][u] for kind in self._lists), (kv[s][u] for kv in self._kv_lists)
                self._units[key] = UnitMemory(*chain(*kinds))
            return self._units[key]

        return memory_walk(row, unit_of)

    def _lower(self, row: Sequence[Action], chosen: list[list[int]], free: int, policies: int) -> bool:
        """Walk a row once; where it exceeds the memory, change policies in flight. Return whether any changed."""
        saved = 0.0
        in_flight: dict[tuple[int, int], None] = {}
        for action, peak, after in self._walk(row, chosen):
            key = action.stage, action.round or 0
            if action.kind is ActionKind.F:
                in_flight[key] = None
            while max(peak, after) - saved > free:
                change = self._cheapest(in_flight, chosen, policies)
                if change is None:
                    return saved > 0
                s, u, policy, bytes_saved = change
                chosen[s][u] = policy
                saved += bytes_saved
            if action.kind in (ActionKind.B, ActionKind.I):
                in_flight.pop(key, None)
        return saved > 0

    def _cheapest(
        self, in_flight: Iterable[tuple[int, int]], chosen: list[list[int]], policies: int
    ) -> tuple[int, int, int, float] | None:
        """(stage, micro-batch, policy, bytes saved) of the change that costs the least time per byte it saves."""
        best: tuple[float, tuple[int, int, int, float]] | None = None
        held, total = self._lists[0], self._total_ns
        for s, u in in_flight:
            now = chosen[s][u]
            for policy in range(now + 1, policies):
                saved = held[now][s][u] - held[policy][s][u]
                if saved <= 0 or not self._allowed[policy][u]:
                    continue
                price = max(0, total[policy][s][u] - total[now][s][u]) / saved
                if best is None or price < best[0]:
                    best = price, (s, u, policy, saved)
        return None if best is None else best[1]


def _chosen(table: np.ndarray, choice: Choice) -> np.ndarray:
    """float64[stages, micro-batches]: entries of float64[policies, stages, micro-batches] under the chosen policies."""
    return np.take_along_axis(table, choice[None], axis=0)[0]
