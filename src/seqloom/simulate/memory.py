"""Peak memory of every rank of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes
from seqloom.cost.plan_cost import tokens_on_ranks
from seqloom.cost.resharding import UnshardMemory, dp_cp_size, unshard_times_by_stage
from seqloom.plan import Group, LayerRange, Pipeline, Plan, Sharding
from seqloom.plan.action import B, F, I, W
from seqloom.schedules.memory import UnitMemory, memory_walk

_RESIDENT = UnshardMemory(0, 0, 0, 0, 0)  # the parameters of a stage stay for the step: they are in its state


def peak_memory(plan: Plan, cost: CostModel) -> np.ndarray:
    """int64[ranks] bytes. Pipelines of one stage: the closed form. Stages: a walk along the rows of actions."""
    peak = np.full(cost.ranks, cost.memory.idle_bytes, dtype=np.int64)
    for pipeline in plan.pipelines:
        stages, layers = pipeline.stages, pipeline.layer_ranges
        unsharded = {  # of the stages that are unsharded for every pass
            s: UnshardMemory.of(cost.with_tensor(stages[s].tensor), layers[s], dp_cp_size(stages[s]))
            for s in unshard_times_by_stage(cost, pipeline)
        }
        if len(pipeline.stages) == 1:
            everywhere = len(plan.pipelines) == 1 and plan.sharding != Sharding.FREE  # all ranks share its parameters
            ranks = np.arange(cost.ranks) if everywhere else np.array(pipeline.ranks)
            peak[ranks] = np.maximum(peak[ranks], _one_stage_bytes(plan, cost, pipeline, unsharded.get(0))[ranks])
            continue
        for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
            state = _state_bytes(plan, cost, pipeline, pp_rank, unsharded)
            walked = _walk(plan, cost, pipeline, pp_rank, unsharded)
            peak[list(ranks)] = np.ceil(state + walked[list(ranks)]).astype(np.int64)
    return peak


def _one_stage_bytes(plan: Plan, cost: CostModel, pipeline: Pipeline, unsharded: UnshardMemory | None) -> np.ndarray:
    """int64[ranks]: peak bytes of the ranks of a pipeline of one stage over its rounds."""
    memory, layers = cost.with_tensor(pipeline.stages[0].tensor).memory, pipeline.layer_ranges[0]
    peak = np.zeros(cost.ranks, dtype=np.int64)
    for work in (current.by_stage[0] for current in pipeline.rounds):
        tokens = tokens_on_ranks(cost, work)
        if unsharded is None:
            policy = MemoryPolicy(work.checkpoint, plan.reduce)
            fixed, activations = memory.fixed_bytes(policy), tokens * memory.token_bytes(policy, work.lighter_layers)
        else:  # in forward, at the start of the backward, at its end
            kept = work.checkpoint, False, work.lighter_layers
            held, forward, backward, *_ = memory.activation_bytes(layers, *kept)
            fixed = memory.working_bytes(layers) + unsharded.always + unsharded.copies
            starts = np.maximum(tokens * (held + forward), tokens * (held + backward) + unsharded.layer)
            activations = np.maximum(starts, tokens * backward + unsharded.layer + unsharded.rest)
        peak = np.maximum(peak, fixed + np.ceil(activations).astype(np.int64))
    return peak


def _state_bytes(
    plan: Plan, cost: CostModel, pipeline: Pipeline, pp_rank: int, unsharded: dict[int, UnshardMemory]
) -> np.ndarray:
    """float64[ranks of the pipeline rank] bytes before any token."""
    stages, layers = pipeline.stages_of(pp_rank), pipeline.layer_ranges
    memory = {s: cost.with_tensor(pipeline.stages[s].tensor).memory for s in stages}
    working, state = max(memory[s].working_bytes(layers[s]) for s in stages), {}
    for shard_group in plan.shard_groups_of(pipeline, pp_rank):
        sharded = {s: memory[s].state_bytes(layers[s], len(shard_group)) for s in stages if s not in unsharded}
        own = working + sum(sharded[s] if s in sharded else unsharded[s].always for s in stages)
        state |= dict.fromkeys(shard_group, own)
    return np.array([state[rank] for rank in pipeline.ranks_by_pp_rank[pp_rank]], dtype=np.float64)


def _walk(
    plan: Plan, cost: CostModel, pipeline: Pipeline, pp_rank: int, unsharded: dict[int, UnshardMemory]
) -> np.ndarray:
    """float64[ranks] bytes: the most that micro-batches and KV caches of their documents hold at once on a rank."""
    units: dict[tuple[int, int | None], UnitMemory] = {}
    for stage in pipeline.stages_of(pp_rank):
        own, layers = cost.with_tensor(pipeline.stages[stage].tensor), pipeline.layer_ranges[stage]
        _, copies, layer, _, _ = unsharded.get(stage, _RESIDENT)
        for r, current in enumerate(pipeline.rounds):
            work = current.by_stage[stage]
            tokens = tokens_on_ranks(cost, work).astype(np.float64)
            per_token = own.memory.activation_bytes(layers, work.checkpoint, work.offload, work.lighter_layers)
            unit = UnitMemory(*(each * tokens for each in per_token))
            units[stage, r] = unit._replace(
                forward=unit.forward + copies,
                backward=unit.backward + copies + layer,
                weight=copies,
                **kv_cache_changes(own, layers, work.groups, plan.documents)._asdict(),
            )
    most, weight_gradients, split = np.zeros(cost.ranks), 0, set()
    row = (action for action in pipeline.actions[pp_rank] if action.kind in (F, B, I, W))
    for action, peak, after in memory_walk(row, lambda action: units[action.stage, action.round]):
        _, copies, _, rest, halves = unsharded.get(action.stage, _RESIDENT)
        if action.kind is W and action.stage not in split:
            weight_gradients += halves
            split.add(action.stage)
        most = np.maximum(most, peak + weight_gradients)
        if action.kind in (B, I):
            ending = units[action.stage, action.round].backward + rest if copies else 0.0
            most = np.maximum(most, after + weight_gradients + ending)
    return most


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
