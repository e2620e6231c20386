"""What every micro-batch recomputes or offloads on every stage: times and memory of micro-batches, and the choice.

`MicroBatchCosts` prices all micro-batches on all stages at once, with the simulator's numbers up to what several groups
of a micro-batch put on one NIC. `ActivationMemory` walks along the actions of a pp_rank. Where activations exceed the
memory, the micro-batch in flight for which storing less costs the least time per byte takes a cheaper policy. That
never asks for more memory elsewhere than a micro-batch needs while it is worked on, which the next walk sees.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes, offload_ns, pp_rank_bytes
from seqloom.cost.plan_cost import COST_COLUMNS, rank_costs, rank_times, scale_to_layers
from seqloom.plan import Action, ActionKind, Checkpoint, Group, LayerRange, Limits, Reduce, StageMicroBatch, sort_groups
from seqloom.planners.pipeline.long_sequences import StageGroups
from seqloom.planners.pipeline.micro_batches import MicroBatches
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.schedules import Schedule, Times
from seqloom.schedules.memory import UnitMemory, memory_walk
from seqloom.simulate.microbatch import FULL_SHARE, extend_for_offload, forward_and_weight_cuts, share_between

WALKS = 8
"""Walks along a row of actions before it is given up."""

Choice = np.ndarray
"""int64[stages, micro-batches]: index of the policy of every micro-batch on every stage."""


class ActivationPolicy(NamedTuple):
    """How a stage stores the activations of a micro-batch: what it recomputes, and whether it offloads the rest."""

    checkpoint: Checkpoint
    offload: bool = False


def policies_of(limits: Limits) -> tuple[ActivationPolicy, ...]:
    """Policies that a plan may use, the fastest first; those that offload come last."""
    known = [checkpoint for checkpoint, _ in limits.capacity]
    offloaded = [c for c in (Checkpoint.FULL, Checkpoint.STAGE, Checkpoint.PROFILE) if c in known]
    return (*map(ActivationPolicy, known), *(ActivationPolicy(c, offload=True) for c in offloaded))


def stage_micro_batch(
    cost: CostModel, layout: StageLayout, groups: StageGroups, pp_rank: int, policy: ActivationPolicy
) -> StageMicroBatch:
    """One stage's part of a micro-batch, on the ranks of its pp_rank."""
    first = pp_rank * layout.ranks_per_stage
    placed = [
        Group(tuple(range(first + at, first + at + shape.degree)), shape.ulysses, shape.ring, spans, shape.method)
        for shape, at, spans in groups
    ]
    return StageMicroBatch(sort_groups(placed, cost.node_size), policy.checkpoint, offload=policy.offload)


class KVBytes(NamedTuple):
    """Keys and values of sequences in pieces. int64[stages, micro-batches] bytes on the fullest rank."""

    begun: np.ndarray  # come with a micro-batch's forward
    returning: np.ndarray  # gradients that come with its backward
    done: np.ndarray  # both, freed after it


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
        """Micro-batches are priced as if each had ranks of its own."""
        self.cost, self.layout, self.micro_batches, self.lengths = cost, layout, micro_batches, lengths
        self.policies = tuple(policies)
        parts = [stage_micro_batch(cost, layout, groups, 0, self.policies[0]) for groups in micro_batches.groups]
        self._groups: list[Group] = [group for part in parts for group in part.groups]
        self._owner = np.repeat(np.arange(len(parts)), [len(part.groups) for part in parts])
        self._tables: dict[Checkpoint, np.ndarray] = {}
        self._times: dict[ActivationPolicy, Times] = {}

    def times(self, choice: Choice) -> Times:
        """int64[stages, micro-batches] ns of forward, input half and weight half, each under its own policy."""
        first = int(choice.flat[0])
        if (choice == first).all():
            return self.times_under(self.policies[first])
        times = [self.times_under(policy) for policy in self.policies]
        columns = zip(*(each[:3] for each in times), strict=True)
        picked = [np.take_along_axis(np.stack(column), choice[None], axis=0)[0] for column in columns]
        return Times(*picked, split_overhead=times[0].split_overhead)

    def times_under(self, policy: ActivationPolicy) -> Times:
        """Times with all micro-batches under one policy; stages of equal sizes are priced once."""
        if policy == ActivationPolicy(Checkpoint.STAGE):  # running the stage again is running its layers again
            return self.times_under(ActivationPolicy(Checkpoint.FULL))
        if policy not in self._times:
            ranges = self.layout.layer_ranges
            sizes = [(layers.stop - layers.first, layers.has_head) for layers in ranges]
            by_size = {
                size: self._stage_times(layers, policy)
                for size, layers in dict(zip(sizes, ranges, strict=True)).items()
            }
            columns = [np.stack([by_size[size][k] for size in sizes]) for k in range(3)]
            split = [[self.cost.engine.split_overhead_ns(count)] for count, _ in sizes]
            self._times[policy] = Times(*columns, split_overhead=np.array(split, dtype=np.int64))
        return self._times[policy]

    def _stage_times(self, layers: LayerRange, policy: ActivationPolicy) -> tuple[np.ndarray, ...]:
        """int64[micro-batches] each of forward, input half, weight half on one stage."""
        width, count = self.layout.ranks_per_stage, len(self.micro_batches.groups)
        table = scale_to_layers(layers, self._table(policy.checkpoint))
        degrees = np.array([len(group.ranks) for group in self._groups])
        group = np.repeat(np.arange(len(degrees)), degrees)
        rank = np.concatenate([np.array(group.ranks) for group in self._groups]) + width * self._owner[group]
        parts = rank_costs(table, rank, group, width * count)
        rank_ns, _ = rank_times(parts, table, rank, group, degrees == 1)
        slowest = rank_ns.reshape(count, width).argmax(axis=1) + width * np.arange(count)
        length = np.maximum(rank_ns[slowest], parts[:, COST_COLUMNS.index("link")].reshape(count, width).max(axis=1))
        forward, weights = forward_and_weight_cuts(
            parts[slowest], rank_ns[slowest], policy.checkpoint, self.cost.engine.matmul_share
        )
        if policy.offload:
            held = self.cost.memory.activation_bytes(layers, policy.checkpoint, offload=False).held
            copied = np.array([offload_ns(held * tokens) for tokens in self.tokens.tolist()])
            length, forward, weights = extend_for_offload(length, forward, weights, copied)
        edges = (np.zeros_like(forward), forward, weights, np.full_like(forward, FULL_SHARE))
        return tuple(share_between(length, low, high) for low, high in pairwise(edges))

    def _table(self, checkpoint: Checkpoint) -> np.ndarray:
        """int64[groups, len(COST_COLUMNS)]: cost parts of all groups, all layers."""
        checkpoint = Checkpoint.FULL if checkpoint == Checkpoint.STAGE else checkpoint
        if checkpoint not in self._tables:
            policy = MemoryPolicy(checkpoint, Reduce.STEP, resident=True)
            self._tables[checkpoint] = self.cost.group_costs(self._groups, policy)
        return self._tables[checkpoint]

    @cached_property
    def tokens(self) -> np.ndarray:
        """int64[micro-batches]: tokens on the fullest rank."""
        held = np.zeros((len(self.micro_batches.groups), self.layout.ranks_per_stage), dtype=np.int64)
        for number, group in zip(self._owner.tolist(), self._groups, strict=True):
            edges = self.cost.padded_lengths(np.array([(start, stop) for _, start, stop in group.spans]))
            held[number, list(group.ranks)] += -(-int((edges[:, 1] - edges[:, 0]).sum()) // group.degree)
        return held.max(axis=1)

    @cached_property
    def message_ns(self) -> int:
        """ns of a message between stages: the median micro-batch's, between the first two."""
        order = np.argsort(self.tokens, kind="stable")
        return self.cost.stage_message_ns(int(self.tokens[order[len(order) // 2]]), *self.layout.stages[:2])

    @cached_property
    def kv_bytes(self) -> KVBytes:
        """Keys and values that stages hold for sequences in pieces."""
        shape = (3, len(self.layout.layer_ranges), len(self.micro_batches.groups), self.layout.ranks_per_stage)
        begun, returning, done = found = np.zeros(shape, dtype=np.int64)
        for number, group in zip(self._owner.tolist(), self._groups, strict=True):
            ranks = list(group.ranks)
            for document, start, stop in group.spans:
                length = int(self.lengths[document])
                if stop - start == length:
                    continue
                for stage, layers in enumerate(self.layout.layer_ranges):
                    keys, gradients = kv_cache_bytes(self.cost, layers, group, length)
                    begun[stage, number, ranks] += keys if start == 0 else 0
                    done[stage, number, ranks] += keys + gradients if start == 0 else 0
                    returning[stage, number, ranks] += gradients if stop == length else 0
        return KVBytes(*found.max(axis=3))


class ActivationMemory:
    """Bytes that micro-batches hold on the fullest rank under every policy, and the choice of policies that fit."""

    def __init__(self, costs: MicroBatchCosts, limits: Limits) -> None:
        """`limits` say how many tokens of a micro-batch a rank may hold under each checkpointing."""
        self.costs = costs
        cost, layout, policies = costs.cost, costs.layout, costs.policies
        shard_group = layout.shard_group_size(cost)
        self.free = [
            cost.budget_bytes - pp_rank_bytes(cost, ranges, shard_group) for ranges in layout.ranges_by_pp_rank
        ]
        capacity = dict(limits.capacity)
        self._allowed = [(costs.tokens <= capacity[policy.checkpoint]).tolist() for policy in policies]
        per_token = np.array(
            [[cost.memory.activation_bytes(layers, *policy) for layers in layout.layer_ranges] for policy in policies]
        )
        by_kind = np.moveaxis(per_token, 2, 0)  # [kind of `ActivationBytes`, policy, stage]
        self._bytes = np.ceil(by_kind[..., None] * costs.tokens)
        self._lists = self._bytes.tolist()
        self._kv = [column.tolist() for column in costs.kv_bytes]

    def held(self, choice: Choice) -> np.ndarray:
        """int64[stages, micro-batches]: bytes from forward to backward.

        Keys and values of a sequence count by its pieces' tokens, rounded up.
        """
        tokens, begun = self.costs.tokens, self.costs.kv_bytes.begun
        keys = np.zeros_like(begun)
        sequence = np.array([unit.sequence for unit in self.costs.micro_batches.units])
        for each in np.unique(sequence):
            own = sequence == each
            total = max(1, int(tokens[own].sum()))
            keys[:, own] = -(-begun[:, own].sum(axis=1)[:, None] * tokens[own] // total)
        return self._at(0, choice).astype(np.int64) + keys

    def caps(self, choice: Choice) -> list[int]:
        """Bytes that micro-batches may hold on every pp_rank beside the one that runs and gradients that return.

        A backward in halves needs nothing more, unless `fuses_backward` says that it should be whole.
        """
        transient = np.maximum(self._at(1, choice), self._at(2, choice))
        most = transient.max(axis=1) + self.costs.kv_bytes.returning.max(axis=1)
        stages = list(zip(most.tolist(), self.costs.layout.pp_rank_of_stage, strict=True))
        return [
            int(free - max(own for own, place in stages if place == pp_rank)) for pp_rank, free in enumerate(self.free)
        ]

    def fuses_backward(self, choice: Choice) -> np.ndarray:
        """bool[stages, micro-batches]: whether a backward in halves would hold more from I to W than before."""
        return self._at(3, choice) > self._at(0, choice)

    def _at(self, kind: int, choice: Choice) -> np.ndarray:
        """float64[stages, micro-batches]: one kind of holding, every micro-batch under its own policy."""
        return np.take_along_axis(self._bytes[kind], choice[None], axis=0)[0]

    def peaks(self, schedule: Schedule, choice: Choice) -> list[float]:
        """Peak bytes of micro-batches on every pp_rank, beyond its state."""
        chosen = choice.tolist()
        return [self._peak(row, chosen) for row in schedule.rows]

    def fit(self, schedule: Schedule, choice: Choice) -> Choice | None:
        """Take cheaper policies than `choice` has until every pp_rank fits; None where none is enough.

        Offloading is used only where recomputing is not enough.
        """
        times = [self.costs.times_under(policy) for policy in self.costs.policies]
        total = [(each.forward + each.backward_input + each.backward_weight).tolist() for each in times]
        recomputing = sum(not policy.offload for policy in self.costs.policies)
        chosen = choice.tolist()
        for row, free in zip(schedule.rows, self.free, strict=True):
            if not any(self._fit_row(row, chosen, free, total[:count]) for count in (recomputing, len(total))):
                return None
        return np.array(chosen, dtype=np.int64)

    def _fit_row(
        self, row: Sequence[Action], chosen: list[list[int]], free: int, total: Sequence[list[list[int]]]
    ) -> bool:
        """Change the policies of one pp_rank until it fits, by those that have times, [policy][stage][micro-batch]."""
        for _ in range(WALKS):
            if self._peak(row, chosen) <= free:
                return True
            if not self._lower(row, chosen, free, total):
                return False
        return False

    def _peak(self, row: Sequence[Action], chosen: list[list[int]]) -> float:
        return max((max(peak, after) for _, peak, after in self._walk(row, chosen)), default=0.0)

    def _walk(self, row: Sequence[Action], chosen: list[list[int]]) -> Iterator[tuple[Action, float, float]]:
        """Yield (action, bytes at its peak, bytes after it); policies may change on the way."""

        def unit_of(action: Action) -> UnitMemory:
            s, u = action.stage, action.round or 0
            policy = chosen[s][u]
            return UnitMemory(*(kind[policy][s][u] for kind in self._lists), *(column[s][u] for column in self._kv))

        return memory_walk(row, unit_of)

    def _lower(
        self, row: Sequence[Action], chosen: list[list[int]], free: int, total: Sequence[list[list[int]]]
    ) -> bool:
        """Walk a row once; wherever it holds too much, let micro-batches store less. Return whether any does."""
        saved = 0.0
        in_flight: dict[tuple[int, int], None] = {}
        changed = False
        for action, peak, after in self._walk(row, chosen):
            key = action.stage, action.round or 0
            if action.kind is ActionKind.F:
                in_flight[key] = None
            while max(peak, after) - saved > free:
                saving = self._cheapest(in_flight, chosen, total)
                if saving is None:
                    return changed
                s, u, policy, bytes_saved = saving
                chosen[s][u] = policy
                changed = True
                saved += bytes_saved
            if action.kind in (ActionKind.B, ActionKind.I):
                in_flight.pop(key, None)
        return changed

    def _cheapest(
        self, in_flight: Iterable[tuple[int, int]], chosen: list[list[int]], total: Sequence[list[list[int]]]
    ) -> tuple[int, int, int, float] | None:
        """(stage, micro-batch, policy, bytes saved) of the change that costs the least time per byte it saves."""
        best: tuple[float, tuple[int, int, int, float]] | None = None
        held = self._lists[0]
        for s, u in in_flight:
            now = chosen[s][u]
            for policy in range(now + 1, len(total)):
                saved = held[now][s][u] - held[policy][s][u]
                if saved <= 0 or not self._allowed[policy][u]:
                    continue
                price = max(0, total[policy][s][u] - total[now][s][u]) / saved
                if best is None or price < best[0]:
                    best = price, (s, u, policy, saved)
        return None if best is None else best[1]
