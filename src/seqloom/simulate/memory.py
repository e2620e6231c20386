"""Peak memory of every rank of a plan."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.plan_cost import idle_memory, pipeline_memory, tokens_on_ranks
from seqloom.cost.resharding import UnshardMemory, dp_cp_size, unshard_times_by_stage
from seqloom.cost.stages import StageMemory
from seqloom.plan import ActionKind, Pipeline, Plan, StageMicroBatch


def peak_memory(plan: Plan, cost: CostModel) -> np.ndarray:
    """int64[ranks] bytes. Pipelines of one stage: the cost model's own figure. Stages: a walk along the hosts' rows."""
    peak = idle_memory(cost, plan)
    for pipeline in plan.pipelines:
        if len(pipeline.stages) == 1:
            peak = np.maximum(peak, pipeline_memory(cost, plan, pipeline))
            continue
        for host, ranks in enumerate(pipeline.ranks_by_pp_rank):
            used = _state(plan, cost, pipeline, host) + _walk(plan, cost, pipeline, host)[list(ranks)]
            peak[list(ranks)] = np.ceil(used).astype(np.int64)
    return peak


class _Load(NamedTuple):
    """What a unit takes on a stage; float64[ranks] bytes each, see `Holding`."""

    held: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    deferred: np.ndarray
    split: np.ndarray


def _state(plan: Plan, cost: CostModel, pipeline: Pipeline, host: int) -> np.ndarray:
    """float64[ranks of the host] bytes before any token."""
    stages = {stage: _stage_memory(cost, pipeline, stage) for stage in pipeline.stages_of(host)}
    working = max(stage.working_bytes() for stage in stages.values())
    passes = _passes(cost, pipeline)
    state = {}
    for shard_group in plan.limits.shard_groups(plan.sharding, pipeline.ranks_by_pp_rank[host]):
        own = working
        for number, stage in stages.items():
            own += passes[number].always if number in passes else stage.state_bytes(len(shard_group))
        state |= dict.fromkeys(shard_group, own)
    return np.array([state[rank] for rank in pipeline.ranks_by_pp_rank[host]], dtype=np.float64)


def _stage_memory(cost: CostModel, pipeline: Pipeline, stage: int) -> StageMemory:
    return StageMemory(cost.with_tensor(pipeline.stages[stage].tensor), pipeline.layer_ranges[stage])


def _passes(cost: CostModel, pipeline: Pipeline) -> dict[int, UnshardMemory]:
    """What the stages hold that are gathered for every pass."""
    found = {}
    for stage in unshard_times_by_stage(cost, pipeline):
        memory = _stage_memory(cost, pipeline, stage)
        found[stage] = UnshardMemory.of(memory.cost, memory.share, dp_cp_size(pipeline.stages[stage]))
    return found


def _walk(plan: Plan, cost: CostModel, pipeline: Pipeline, host: int) -> np.ndarray:
    """float64[ranks] bytes: the most that units and their documents' keys and values hold at once on a host."""
    loads, carries = {}, {}
    for stage in pipeline.stages_of(host):
        memory = _stage_memory(cost, pipeline, stage)
        for r, current in enumerate(pipeline.rounds):
            work = current.by_stage[stage]
            tokens = tokens_on_ranks(cost, work).astype(np.float64)
            loads[stage, r] = _Load(*(each * tokens for each in memory.activation_bytes(work.checkpoint, work.offload)))
            carries[stage, r] = carried_changes(plan, memory, work)
    live, most = np.zeros(cost.ranks), np.zeros(cost.ranks)
    passes, late = _passes(cost, pipeline), set()
    for action in pipeline.actions[host]:
        key = action.stage, action.round
        if action.kind not in _CHANGES or key not in loads:
            continue
        load, carry = loads[key], carries[key]
        _, copies, layer, rest, halves = passes.get(action.stage, _STAYS)
        if action.kind == ActionKind.F:
            live = live + load.held + carry.begun
            most = np.maximum(most, live + load.forward + copies)
        elif action.kind == ActionKind.W:
            live = live + (0 if action.stage in late else halves)
            late.add(action.stage)
            most = np.maximum(most, live + copies)
            live = live - load.deferred
        else:
            live = live + carry.returning
            split = action.kind == ActionKind.I
            most = np.maximum(most, live + load.backward + copies + layer + (load.split if split else 0.0))
            live = live - load.held - carry.done + (load.deferred if split else 0.0)
            ending = load.backward + copies + layer + rest if copies else 0.0
            most = np.maximum(most, live + ending)
    return most


_STAYS = UnshardMemory(0, 0, 0, 0, 0)  # what a stage has stays for the step: it is in its state
_CHANGES = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)


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
