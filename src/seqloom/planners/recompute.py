"""Choose what the layers of a round recompute and offload: the fastest that memory holds.

First one checkpoint for all layers of a round, by which planners search: plans of one stage choose it here, pipelines
for every micro-batch on every stage in `planners.pipeline.recompute_offload`. Then `with_layer_choices` chooses for
single layers:

    lighter layers      in the memory that is left, the last layers recompute less
    offloaded layers    where memory does not hold a round of a plan of one stage, the first layers store their
                        activations in host memory, as few as are needed; only with capacities that count on it, see
                        `CostModel.with_offload`

The plan carries the choice; `models.layer_wrapper` and `models.offload` carry it out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.model import OFFLOADED
from seqloom.cost.plan_cost import round_ns, tokens_on_ranks
from seqloom.plan import Checkpoint, Pipeline, Plan, Reduce, Round, StageMicroBatch
from seqloom.plan.action import B, F, I
from seqloom.plan.limits import mixed_capacity
from seqloom.simulate import predicted_ns
from seqloom.simulate.memory import PipelineMemory

CHECKPOINTS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.PROFILE)
"""From the fastest, which keeps the most activations, to the slowest."""


def checkpoint_capacities(cost: CostModel, reduce: Reduce) -> dict[Checkpoint, int]:
    """Tokens a rank holds in a round, under each checkpoint that goes with this way to reduce gradients."""
    return {policy.checkpoint: cost.capacity(policy) for policy in cost.policies if policy.reduce == reduce}


def fastest_checkpoint(capacities: dict[Checkpoint, int], tokens: int) -> Checkpoint | None:
    """The fastest checkpoint that holds so many tokens on a rank; None: none does."""
    return next((checkpoint for checkpoint in CHECKPOINTS if capacities.get(checkpoint, -1) >= tokens), None)


def with_layer_choices(plan: Plan, cost: CostModel) -> Plan:
    """Let as many layers of every round recompute less as memory holds, and offload as few as it does not hold.

    On several stages every micro-batch chooses on each of them. A plan of stages that would not be faster stays as it
    is: layers that nobody waits for need no memory. Returns the same plan if nothing changes.
    """
    alike, pipelines = without_layer_choices(plan), []
    for pipeline in alike.pipelines:
        memory = PipelineMemory(alike, cost, pipeline)
        one_by_one = len(pipeline.stages) == 1 and not pipeline.has_pieces(plan.documents)
        choose = _choose_for_rounds if one_by_one else _choose_for_units
        pipelines.append(replace(pipeline, rounds=choose(memory)))
    chosen = without_unused_limits(replace(plan, pipelines=tuple(pipelines)))
    if chosen == plan:
        return plan
    staged = any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    return plan if (staged or plan.has_pieces) and predicted_ns(chosen, cost) >= predicted_ns(plan, cost) else chosen


def without_layer_choices(plan: Plan) -> Plan:
    """Let all layers of every round recompute alike, and offload none in plans of one stage."""

    def alike(work: StageMicroBatch, pipeline: Pipeline) -> StageMicroBatch:
        offloaded = work.offloaded_layers if len(pipeline.stages) > 1 else 0
        return replace(work, lighter_layers=0, offloaded_layers=offloaded)

    pipelines = []
    for pipeline in plan.pipelines:
        rounds = (Round(tuple(alike(work, pipeline) for work in current.by_stage)) for current in pipeline.rounds)
        pipelines.append(replace(pipeline, rounds=tuple(rounds)))
    return replace(plan, pipelines=tuple(pipelines))


def without_offload(plan: Plan) -> Plan:
    """The plan with all activations on the GPU, whether they fit or not: what it takes less is the price of copies."""
    pipelines = []
    for pipeline in plan.pipelines:
        works = ([replace(work, offloaded_layers=0) for work in current.by_stage] for current in pipeline.rounds)
        pipelines.append(replace(pipeline, rounds=tuple(Round(tuple(each)) for each in works)))
    return replace(plan, pipelines=tuple(pipelines))


def without_unused_limits(plan: Plan) -> Plan:
    """The plan with capacities of offloaded rounds only if it has such rounds."""
    if any(offloaded_counts(plan)):
        return plan
    return replace(plan, limits=replace(plan.limits, offload_capacity=()))


def offloaded_counts(plan: Plan) -> list[int]:
    """Layers that are offloaded, of every micro-batch on every stage."""
    rounds = (current for pipeline in plan.pipelines for current in pipeline.rounds)
    return [work.offloaded_layers for current in rounds for work in current.by_stage]


# -- one stage --------------------------------------------------------------------------------------------------------


def _choose_for_rounds(memory: PipelineMemory) -> tuple[Round, ...]:
    """The rounds of a pipeline of one stage: with lighter layers, or with the fastest choice if layers may offload."""
    choose = _fastest_choice if memory.cost.counts_offload else _with_lighter_layers
    return tuple(Round((choose(memory, current.by_stage[0]),)) for current in memory.pipeline.rounds)


def _fastest_choice(memory: PipelineMemory, work: StageMicroBatch) -> StageMicroBatch:
    """The work under the fastest choice that fits: everything on the GPU, or layers of either checkpoint offloaded."""
    capacity, tokens = dict(memory.plan.limits.capacity), tokens_on_ranks(memory.cost, work)
    stored = [replace(work, checkpoint=each) for each in CHECKPOINTS if capacity.get(each, -1) >= tokens.max()]
    fitting = [each for each in stored if memory.round_bytes(each, tokens).max() <= memory.cost.budget_bytes]
    options = [_with_lighter_layers(memory, each) for each in fitting[:1]]
    for checkpoint in OFFLOADED:
        offloaded = _with_offloaded_layers(memory, replace(work, checkpoint=checkpoint), tokens)
        options += [] if offloaded is None else [offloaded]
    return min(options, key=lambda each: round_ns(memory.cost, memory.plan, memory.pipeline, each), default=work)


def _with_lighter_layers(memory: PipelineMemory, work: StageMicroBatch) -> StageMicroBatch:
    """The work with as many lighter layers as fit."""
    if not _has_lighter(memory, work):
        return work
    tokens = tokens_on_ranks(memory.cost, work)

    def exceeds(count: int) -> bool:
        peak = memory.round_bytes(replace(work, lighter_layers=count), tokens)
        return bool(peak.max() > memory.cost.budget_bytes)

    return _with_most_layers(memory, 0, work, int(tokens.max()), exceeds)


def _with_offloaded_layers(memory: PipelineMemory, work: StageMicroBatch, tokens: np.ndarray) -> StageMicroBatch | None:
    """The work with as few offloaded layers as fit; None: memory, or host memory, does not hold it."""
    limits, layers = memory.plan.limits, memory.pipeline.stages[0].layer_count
    plain, offloaded = (dict(each).get(work.checkpoint) for each in (limits.capacity, limits.offload_capacity))
    if plain is None or offloaded is None:
        return None

    def fits(count: int) -> bool:
        peak = memory.round_bytes(replace(work, offloaded_layers=count), tokens)
        allowed = mixed_capacity(plain, offloaded, count, layers)
        return int(tokens.max()) <= allowed and bool(peak.max() <= memory.cost.budget_bytes)

    count = 1 + bisect_left(range(1, layers + 1), True, key=fits)
    found = replace(work, offloaded_layers=min(count, layers))
    if count > layers or memory.cost.host_bytes is None:
        return found if count <= layers else None
    state = memory.cost.memory.host_state_bytes(memory.pipeline.layer_ranges, memory.cost.shard_group_size)
    away = int(memory.round_host_bytes(found, tokens).max())
    return found if away + state <= memory.cost.host_bytes else None


# -- several stages, or documents in pieces ----------------------------------------------------------------------------


def _choose_for_units(memory: PipelineMemory) -> tuple[Round, ...]:
    """The rounds of a pipeline of several stages with lighter layers in the memory that is left from F to B.

    Those that go backward first choose first: of equal intervals that share memory, this fits most.
    """
    pipeline, chosen = memory.pipeline, [list(current.by_stage) for current in memory.pipeline.rounds]
    for pp_rank in range(len(pipeline.ranks_by_pp_rank)):
        if any(_has_lighter(memory, works[s]) for works in chosen for s in pipeline.stages_of(pp_rank)):
            free = _FreeMemory.of(memory, pp_rank)
            for s, r in free.units:
                if _has_lighter(memory, chosen[r][s]):
                    chosen[r][s] = free.lightest(s, r)
    return tuple(Round(tuple(works)) for works in chosen)


@dataclass(frozen=True, eq=False)
class _FreeMemory:
    """What the actions of a pipeline rank leave free of its memory, float64[actions, ranks] bytes."""

    memory: PipelineMemory
    ranks: list[int]
    during: np.ndarray  # while each of them runs
    after: np.ndarray  # where each ends
    units: dict[tuple[int, int], tuple[int, int]]  # of every (stage, round) its F and its B or I, by ascending B or I

    @classmethod
    def of(cls, memory: PipelineMemory, pp_rank: int) -> _FreeMemory:
        actions, during, after = zip(*memory.walk(pp_rank), strict=True)
        begins = {(each.stage, each.round): at for at, each in enumerate(actions) if each.kind is F}
        ends = {(each.stage, each.round): at for at, each in enumerate(actions) if each.kind in (B, I)}
        budget, units = memory.cost.budget_bytes, {unit: (begins[unit], end) for unit, end in ends.items()}
        ranks = list(memory.pipeline.ranks_by_pp_rank[pp_rank])
        return cls(memory, ranks, budget - np.stack(during), budget - np.stack(after), units)

    def lightest(self, stage: int, number: int) -> StageMicroBatch:
        """Give a micro-batch as many lighter layers as fit, and take their memory."""
        memory, (begin, end) = self.memory, self.units[stage, number]
        cost, layers = memory.cost, memory.pipeline.layer_ranges[stage]
        own = cost.for_stage(memory.pipeline.stages[stage]).memory
        work = memory.pipeline.rounds[number].by_stage[stage]
        tokens = tokens_on_ranks(cost, work)[self.ranks]
        held = self.during[begin : end + 1], self.after[begin:end]  # while it holds its activations
        room = np.concatenate(held).min(axis=0)

        def added(count: int) -> np.ndarray:
            alike, mixed = (own.activation_bytes(layers, work.checkpoint, 0, n).held for n in (0, count))
            return tokens * (mixed - alike)

        found = _with_most_layers(memory, stage, work, int(tokens.max()), lambda n: bool((added(n) > room).any()))
        for free in held:
            free -= added(found.lighter_layers)
        return found


def _has_lighter(memory: PipelineMemory, work: StageMicroBatch) -> bool:
    """Whether layers of a work may recompute less."""
    return work.checkpoint.lighter in dict(memory.plan.limits.capacity) and not work.offload


def _with_most_layers(
    memory: PipelineMemory, stage: int, work: StageMicroBatch, tokens: int, exceeds: Callable[[int], bool]
) -> StageMicroBatch:
    """The work with as many lighter layers as limits allow to its fullest rank, and as do not exceed the memory."""
    capacity, layers = dict(memory.plan.limits.capacity), memory.pipeline.stages[stage].layer_count
    heavy, light = capacity[work.checkpoint], capacity[cast("Checkpoint", work.checkpoint.lighter)]

    def too_many(count: int) -> bool:
        return tokens > mixed_capacity(heavy, light, count, layers) or exceeds(count)

    return replace(work, lighter_layers=bisect_left(range(1, layers), True, key=too_many))
