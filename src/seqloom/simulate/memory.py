"""Peak memory of every rank of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes
from seqloom.cost.plan_cost import tokens_on_ranks
from seqloom.cost.resharding import UnshardMemory, dp_cp_size, unshard_times_by_stage
from seqloom.plan import Action, Checkpoint, Group, LayerRange, Pipeline, Plan, Sharding, StageMicroBatch
from seqloom.plan.action import B, F, I, W
from seqloom.schedules.memory import UnitMemory, memory_walk

_RESIDENT = UnshardMemory(0, 0, 0, 0, 0)  # the parameters of a stage stay for the step: they are in its state


def peak_memory(plan: Plan, cost: CostModel) -> np.ndarray:
    """int64[ranks] bytes. Whole documents on one stage: the closed form. Else a walk along the rows of actions."""
    peak = np.full(cost.ranks, cost.memory.idle_bytes, dtype=np.int64)
    for pipeline in plan.pipelines:
        memory = PipelineMemory(plan, cost, pipeline)
        if len(pipeline.stages) == 1 and not pipeline.has_pieces(plan.documents):
            everywhere = len(plan.pipelines) == 1 and plan.sharding != Sharding.FREE  # all ranks share its parameters
            ranks = np.arange(cost.ranks) if everywhere else np.array(pipeline.ranks)
            for current in pipeline.rounds:
                peak[ranks] = np.maximum(peak[ranks], memory.round_bytes(current.by_stage[0])[ranks])
            continue
        for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
            most = memory.state_bytes(pp_rank)
            for _, during, after in memory.walk(pp_rank):
                most = np.maximum(np.maximum(most, during), after)
            peak[list(ranks)] = np.ceil(most).astype(np.int64)
    return peak


def peak_host_memory(plan: Plan, cost: CostModel) -> np.ndarray:
    """int64[ranks] bytes in host memory: activations of offloaded layers, and the optimiser if it is there."""
    activations, state = np.zeros((2, cost.ranks), dtype=np.int64)
    if plan.sharding == Sharding.FREE:
        state += cost.memory.host_state_bytes((), 1)
    for pipeline in plan.pipelines:
        memory, layers = PipelineMemory(plan, cost, pipeline), pipeline.layer_ranges
        offloads = any(work.offload for current in pipeline.rounds for work in current.by_stage)
        walked = len(pipeline.stages) > 1 or (offloads and pipeline.has_pieces(plan.documents))
        if offloads and not walked:
            for current in pipeline.rounds:
                activations = np.maximum(activations, memory.round_host_bytes(current.by_stage[0]))
        for pp_rank in range(len(pipeline.ranks_by_pp_rank)):
            stages = pipeline.stages_of(pp_rank)
            if offloads and walked:
                for held in memory.host_walk(pp_rank):
                    activations = np.maximum(activations, np.ceil(held).astype(np.int64))
            own = cost.for_stage(pipeline.stages[stages[0]]).memory
            for shard_group in plan.shard_groups_of(pipeline, pp_rank) if plan.sharding != Sharding.FREE else ():
                state[list(shard_group)] = own.host_state_bytes([layers[s] for s in stages], len(shard_group))
    return activations + state


@dataclass(frozen=True, eq=False)
class PipelineMemory:
    """Bytes of the ranks of one pipeline of a plan."""

    plan: Plan
    cost: CostModel
    pipeline: Pipeline

    def round_bytes(self, work: StageMicroBatch, tokens: np.ndarray | None = None) -> np.ndarray:
        """int64[ranks]: peak bytes in a round of a pipeline of one stage; it need not be one of the plan's.

        `tokens` are those on the ranks, int64[ranks], where they are known.
        """
        layers, unsharded = self.pipeline.layer_ranges[0], self._unsharded.get(0)
        memory = self.cost.for_stage(self.pipeline.stages[0]).memory
        tokens = tokens_on_ranks(self.cost, work) if tokens is None else tokens
        if unsharded is None:
            policy = MemoryPolicy(work.checkpoint, self.plan.reduce)
            per_token = memory.token_bytes(policy, work.offloaded_layers, work.lighter_layers)
            fixed, activations = memory.fixed_bytes(policy), tokens * per_token
        else:  # in forward, at the start of the backward, at its end
            kept = work.checkpoint, work.offloaded_layers, work.lighter_layers
            held, forward, backward, *_ = memory.activation_bytes(layers, *kept)
            fixed = memory.working_bytes(layers) + unsharded.always + unsharded.copies
            starts = np.maximum(tokens * (held + forward), tokens * (held + backward) + unsharded.layer)
            activations = np.maximum(starts, tokens * backward + unsharded.layer + unsharded.rest)
        return fixed + np.ceil(activations).astype(np.int64)

    def round_host_bytes(self, work: StageMicroBatch, tokens: np.ndarray | None = None) -> np.ndarray:
        """int64[ranks]: bytes of activations in host memory in a round of a pipeline of one stage."""
        memory = self.cost.for_stage(self.pipeline.stages[0]).memory
        tokens = tokens_on_ranks(self.cost, work) if tokens is None else tokens
        size = memory.host_bytes(self.pipeline.layer_ranges[0], work.checkpoint, work.offloaded_layers)
        return np.ceil(tokens * size).astype(np.int64)

    def host_walk(self, pp_rank: int) -> Iterator[np.ndarray]:
        """Yield float64[ranks] bytes of activations in host memory, action by action of a pipeline rank."""
        units = {}
        for s in self.pipeline.stages_of(pp_rank):
            memory = self.cost.for_stage(self.pipeline.stages[s]).memory
            for r, work in enumerate(current.by_stage[s] for current in self.pipeline.rounds):
                size = memory.host_bytes(self.pipeline.layer_ranges[s], work.checkpoint, work.offloaded_layers)
                units[s, r] = UnitMemory(size * tokens_on_ranks(self.cost, work).astype(np.float64))
        row = (action for action in self.pipeline.actions[pp_rank] if action.kind in (F, B, I, W))
        for _, peak, _ in memory_walk(row, lambda action: units[action.stage, action.round or 0]):
            yield peak

    def state_bytes(self, pp_rank: int) -> np.ndarray:
        """float64[ranks of the pipeline rank] bytes before any token."""
        plan, pipeline, unsharded = self.plan, self.pipeline, self._unsharded
        stages, layers = pipeline.stages_of(pp_rank), pipeline.layer_ranges
        memory = {s: self.cost.for_stage(pipeline.stages[s]).memory for s in stages}
        if len(pipeline.stages) == 1 and not unsharded:  # its layers are gathered one by one
            fixed = memory[0].fixed_bytes(MemoryPolicy(Checkpoint.NONE, plan.reduce))
            return np.full(len(pipeline.ranks), fixed, dtype=np.float64)
        working, state = max(memory[s].working_bytes(layers[s]) for s in stages), {}
        for shard_group in plan.shard_groups_of(pipeline, pp_rank):
            sharded = {s: memory[s].state_bytes(layers[s], len(shard_group)) for s in stages if s not in unsharded}
            own = working + sum(sharded[s] if s in sharded else unsharded[s].always for s in stages)
            state |= dict.fromkeys(shard_group, own)
        return np.array([state[rank] for rank in pipeline.ranks_by_pp_rank[pp_rank]], dtype=np.float64)

    def walk(self, pp_rank: int) -> Iterator[tuple[Action, np.ndarray, np.ndarray]]:
        """Yield the F, B, I and W of a pipeline rank with float64[its ranks] bytes: while it runs, and where it ends.

        Those are the state, what micro-batches hold, and KV caches of their documents.
        """
        state, ranks = self.state_bytes(pp_rank), list(self.pipeline.ranks_by_pp_rank[pp_rank])
        units = {(s, r): unit for s in self.pipeline.stages_of(pp_rank) for r, unit in enumerate(self.units(s))}
        row = (action for action in self.pipeline.actions[pp_rank] if action.kind in (F, B, I, W))
        weight_gradients, split = 0, set()
        for action, peak, after in memory_walk(row, lambda action: units[action.stage, action.round or 0]):
            _, copies, _, rest, halves = self._unsharded.get(action.stage, _RESIDENT)
            if action.kind is W and action.stage not in split:
                weight_gradients += halves
                split.add(action.stage)
            ending = 0.0
            if action.kind in (B, I) and copies:
                ending = units[action.stage, action.round or 0].backward + rest
            yield (
                action,
                state + (peak + weight_gradients)[ranks],
                state + (np.zeros(self.cost.ranks) + after + weight_gradients + ending)[ranks],
            )

    def units(self, stage: int) -> Iterator[UnitMemory]:
        """Yield the float64[ranks] bytes of every micro-batch on a stage."""
        own, layers = self.cost.for_stage(self.pipeline.stages[stage]), self.pipeline.layer_ranges[stage]
        _, copies, layer, _, _ = self._unsharded.get(stage, _RESIDENT)
        for work in (current.by_stage[stage] for current in self.pipeline.rounds):
            tokens = tokens_on_ranks(self.cost, work).astype(np.float64)
            kept = work.checkpoint, work.offloaded_layers, work.lighter_layers
            per_token = own.memory.activation_bytes(layers, *kept)
            unit = UnitMemory(*(each * tokens for each in per_token))
            yield unit._replace(
                forward=unit.forward + copies,
                backward=unit.backward + copies + layer,
                weight=copies,
                **kv_cache_changes(own, layers, work.groups, self.plan.documents)._asdict(),
            )

    @cached_property
    def _unsharded(self) -> dict[int, UnshardMemory]:
        """Of the stages that are unsharded for every pass."""
        stages, layers = self.pipeline.stages, self.pipeline.layer_ranges
        return {
            s: UnshardMemory.of(self.cost.for_stage(stages[s]), layers[s], dp_cp_size(stages[s]))
            for s in unshard_times_by_stage(self.cost, self.pipeline)
        }


class KVCacheChanges(NamedTuple):
    """Keys and values of documents in pieces that a micro-batch allocates and frees. int64[ranks] bytes."""

    kv: np.ndarray  # its F is the document's first: keys and values of all its tokens
    kv_grad: np.ndarray  # its backward is the document's first: their gradients
    kv_freed: np.ndarray  # its backward is the document's last: frees both


def kv_cache_changes(
    cost: CostModel, layers: LayerRange, groups: Sequence[Group], lengths: Sequence[int] | np.ndarray
) -> KVCacheChanges:
    """Compute the changes of KV caches by a micro-batch of these groups; `lengths` are those of all documents."""
    kv, kv_grad, kv_freed = (np.zeros(cost.ranks, dtype=np.int64) for _ in range(3))
    for group in groups:
        for document, start, stop in group.spans:
            length, ranks = int(lengths[document]), list(group.ranks)
            if stop - start == length:
                continue
            keys, gradients = kv_cache_bytes(cost, layers, group, length)
            if start == 0:
                kv[ranks] += keys
                kv_freed[ranks] += keys + gradients
            if stop == length:
                kv_grad[ranks] += gradients
    return KVCacheChanges(kv, kv_grad, kv_freed)
