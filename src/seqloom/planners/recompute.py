"""Choose what a round recomputes: the fastest checkpointing whose memory holds the round's tokens.

First one checkpoint for all layers of a round, by which planners search: plans of one stage choose it here, pipelines
for every micro-batch on every stage in `planners.pipeline.recompute_offload`. Then, for all of them, how many layers
recompute less in the memory that is left (`with_lighter_layers`). The plan carries the choice; `models.layer_wrapper`
carries it out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.plan_cost import tokens_on_ranks
from seqloom.plan import Checkpoint, Plan, Reduce, Round, StageMicroBatch
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


def with_lighter_layers(plan: Plan, cost: CostModel) -> Plan:
    """Let as many layers of every round recompute less as memory holds; returns the same plan if that changes nothing.

    On several stages every micro-batch chooses on each of them. A plan of stages that would not be faster stays as it
    is: layers that nobody waits for need no memory.
    """
    alike, pipelines = without_lighter_layers(plan), []
    for pipeline in alike.pipelines:
        memory = PipelineMemory(alike, cost, pipeline)
        lightest = _lightest_rounds if len(pipeline.stages) == 1 else _lightest_units
        pipelines.append(replace(pipeline, rounds=lightest(memory)))
    lighter = replace(plan, pipelines=tuple(pipelines))
    if lighter == plan:
        return plan
    staged = any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    return plan if staged and predicted_ns(lighter, cost) >= predicted_ns(plan, cost) else lighter


def without_lighter_layers(plan: Plan) -> Plan:
    """Let all layers of every round recompute alike."""
    pipelines = []
    for pipeline in plan.pipelines:
        works = [[replace(work, lighter_layers=0) for work in current.by_stage] for current in pipeline.rounds]
        pipelines.append(replace(pipeline, rounds=tuple(Round(tuple(each)) for each in works)))
    return replace(plan, pipelines=tuple(pipelines))


def _lightest_rounds(memory: PipelineMemory) -> tuple[Round, ...]:
    """The rounds of a pipeline of one stage with as many lighter layers as memory holds."""

    def lightest(work: StageMicroBatch) -> StageMicroBatch:
        if not _has_choice(memory, work):
            return work
        tokens = tokens_on_ranks(memory.cost, work)

        def exceeds(count: int) -> bool:
            peak = memory.round_bytes(replace(work, lighter_layers=count), tokens)
            return bool(peak.max() > memory.cost.budget_bytes)

        return _with_most_layers(memory, 0, work, int(tokens.max()), exceeds)

    return tuple(Round((lightest(current.by_stage[0]),)) for current in memory.pipeline.rounds)


def _lightest_units(memory: PipelineMemory) -> tuple[Round, ...]:
    """The rounds of a pipeline of several stages with lighter layers in the memory that is left from F to B.

    Those that go backward first choose first: of equal intervals that share memory, this fits most.
    """
    pipeline, chosen = memory.pipeline, [list(current.by_stage) for current in memory.pipeline.rounds]
    for pp_rank in range(len(pipeline.ranks_by_pp_rank)):
        if any(_has_choice(memory, works[s]) for works in chosen for s in pipeline.stages_of(pp_rank)):
            free = _FreeMemory.of(memory, pp_rank)
            for s, r in free.units:
                if _has_choice(memory, chosen[r][s]):
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
        own = cost.with_tensor(memory.pipeline.stages[stage].tensor).memory
        work = memory.pipeline.rounds[number].by_stage[stage]
        tokens = tokens_on_ranks(cost, work)[self.ranks]
        held = self.during[begin : end + 1], self.after[begin:end]  # while it holds its activations
        room = np.concatenate(held).min(axis=0)

        def added(count: int) -> np.ndarray:
            alike, mixed = (own.activation_bytes(layers, work.checkpoint, False, n).held for n in (0, count))
            return tokens * (mixed - alike)

        found = _with_most_layers(memory, stage, work, int(tokens.max()), lambda n: bool((added(n) > room).any()))
        for free in held:
            free -= added(found.lighter_layers)
        return found


def _has_choice(memory: PipelineMemory, work: StageMicroBatch) -> bool:
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
