"""Peak memory of every rank of a plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.plan_cost import idle_memory, pipeline_memory, tokens_on_ranks
from seqloom.cost.resharding import UnshardMemory, dp_cp_size, unshard_times_by_stage
from seqloom.cost.stages import StageMemory
from seqloom.plan import Pipeline, Plan, StageMicroBatch
from seqloom.plan.action import B, F, I, W
from seqloom.schedules.memory import UnitMemory, memory_walk


def peak_memory(plan: Plan, cost: CostModel) -> np.ndarray:
    """int64[ranks] bytes. Pipelines of one stage: the cost model's own figure. Stages: a walk along the hosts' rows."""
    peak = idle_memory(cost, plan)
    for pipeline in plan.pipelines:
        if len(pipeline.stages) == 1:
            peak = np.maximum(peak, pipeline_memory(cost, plan, pipeline))
            continue
        for pp_rank, ranks in enumerate(pipeline.ranks_by_pp_rank):
            used = _state(plan, cost, pipeline, pp_rank) + _walk(plan, cost, pipeline, pp_rank)[list(ranks)]
            peak[list(ranks)] = np.ceil(used).astype(np.int64)
    return peak


def _state(plan: Plan, cost: CostModel, pipeline: Pipeline, pp_rank: int) -> np.ndarray:
    """float64[ranks of the pp_rank] bytes before any token."""
    stages = {stage: _stage_memory(cost, pipeline, stage) for stage in pipeline.stages_of(pp_rank)}
    working = max(stage.working_bytes() for stage in stages.values())
    passes = _passes(cost, pipeline)
    state = {}
    for shard_group in plan.limits.shard_groups(plan.sharding, pipeline.ranks_by_pp_rank[pp_rank]):
        own = working
        for number, stage in stages.items():
            own += passes[number].always if number in passes else stage.state_bytes(len(shard_group))
        state |= dict.fromkeys(shard_group, own)
    return np.array([state[rank] for rank in pipeline.ranks_by_pp_rank[pp_rank]], dtype=np.float64)


def _stage_memory(cost: CostModel, pipeline: Pipeline, stage: int) -> StageMemory:
    return StageMemory(cost.with_tensor(pipeline.stages[stage].tensor), pipeline.layer_ranges[stage])


def _passes(cost: CostModel, pipeline: Pipeline) -> dict[int, UnshardMemory]:
    """What the stages hold that are gathered for every pass."""
    found = {}
    for stage in unshard_times_by_stage(cost, pipeline):
        memory = _stage_memory(cost, pipeline, stage)
        found[stage] = UnshardMemory.of(memory.cost, memory.share, dp_cp_size(pipeline.stages[stage]))
    return found


def _walk(plan: Plan, cost: CostModel, pipeline: Pipeline, pp_rank: int) -> np.ndarray:
    """float64[ranks] bytes: peak of units and of their documents' keys and values on a pipeline rank."""
    units, passes = {}, _passes(cost, pipeline)
    for stage in pipeline.stages_of(pp_rank):
        memory = _stage_memory(cost, pipeline, stage)
        _, copies, layer, _, _ = passes.get(stage, _STAYS)
        for r, current in enumerate(pipeline.rounds):
            work = current.by_stage[stage]
            tokens = tokens_on_ranks(cost, work).astype(np.float64)
            sizes = (each * tokens for each in memory.activation_bytes(work.checkpoint, work.offload))
            unit, carried = UnitMemory(*sizes), carried_changes(plan, memory, work)
            units[stage, r] = unit._replace(
                forward=unit.forward + copies,
                backward=unit.backward + copies + layer,
                weight=copies,
                kv=carried.begun,
                kv_grad=carried.returning,
                kv_freed=carried.done,
            )
    most, weight_gradients, late = np.zeros(cost.ranks), 0, set()
    row = (action for action in pipeline.actions[pp_rank] if action.kind in (F, B, I, W))
    for action, peak, after in memory_walk(row, lambda action: units[action.stage, action.round]):
        _, copies, _, rest, halves = passes.get(action.stage, _STAYS)
        if action.kind is W and action.stage not in late:
            weight_gradients += halves
            late.add(action.stage)
        most = np.maximum(most, peak + weight_gradients)
        if action.kind in (B, I):
            ending = units[action.stage, action.round].backward + rest if copies else 0.0
            most = np.maximum(most, after + weight_gradients + ending)
    return most


_STAYS = UnshardMemory(0, 0, 0, 0, 0)  # what a stage has stays for the step: it is in its state


class Carried(NamedTuple):
    """Keys and values that a unit begins or ends to hold on a stage. float64[ranks] bytes."""

    begun: np.ndarray  # its F is the document's first: keys and values of all its tokens
    returning: np.ndarray  # its backward is the document's first: their gradients
    done: np.ndarray  # its backward is the document's last: both go


def carried_changes(plan: Plan, memory: StageMemory, work: StageMicroBatch) -> Carried:
    """What a unit changes in the keys and values of documents in pieces."""
    begun, returning, done = (np.zeros(memory.cost.ranks) for _ in range(3))
    for group in work.groups:
        for document, start, stop in group.spans:
            length = plan.documents[document]
            if stop - start == length:
                continue
            keys, gradients = memory.kv_cache_bytes(group, length)
            ranks = list(group.ranks)
            if start == 0:
                begun[ranks] += keys
                done[ranks] += keys + gradients
            if stop == length:
                returning[ranks] += gradients
    return Carried(begun, returning, done)
