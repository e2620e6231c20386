"""Choose what a round recomputes: the fastest checkpointing whose memory holds the round's tokens.

Plans of one stage over all ranks choose here: first one checkpoint for all layers of a round, by which planners search,
then how many of its layers recompute less in the memory that is left (`with_lighter_layers`). Pipelines choose for
every micro-batch on every stage, see `planners.pipeline.recompute_offload`. The plan carries the choice;
`models.layer_wrapper` carries it out.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.plan_cost import tokens_on_ranks
from seqloom.plan import Checkpoint, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.plan.limits import mixed_capacity

CHECKPOINTS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.PROFILE)
"""From the fastest, which keeps the most activations, to the slowest."""


def checkpoint_capacities(cost: CostModel, reduce: Reduce) -> dict[Checkpoint, int]:
    """Tokens a rank holds in a round, under each checkpoint that goes with this way to reduce gradients."""
    return {policy.checkpoint: cost.capacity(policy) for policy in cost.policies if policy.reduce == reduce}


def fastest_checkpoint(capacities: dict[Checkpoint, int], tokens: int) -> Checkpoint | None:
    """The fastest checkpoint that holds so many tokens on a rank; None: none does."""
    return next((checkpoint for checkpoint in CHECKPOINTS if capacities.get(checkpoint, -1) >= tokens), None)


def with_lighter_layers(plan: Plan, cost: CostModel) -> Plan:
    """Let as many layers of every round recompute less as memory holds; returns the same plan if no layer can.

    Plans of several stages, and of parameters that move, stay as they are.
    """
    [pipeline, *others] = plan.pipelines
    if others or len(pipeline.stages) > 1 or plan.sharding == Sharding.FREE:
        return plan
    own = cost.with_tensor(pipeline.stages[0].tensor)
    rounds = tuple(Round((_lightest(current.by_stage[0], plan, own),)) for current in pipeline.rounds)
    return plan if rounds == pipeline.rounds else replace(plan, pipelines=(replace(pipeline, rounds=rounds),))


def without_lighter_layers(plan: Plan) -> Plan:
    """Let all layers of every round recompute alike."""
    pipelines = []
    for pipeline in plan.pipelines:
        works = [[replace(work, lighter_layers=0) for work in current.by_stage] for current in pipeline.rounds]
        pipelines.append(replace(pipeline, rounds=tuple(Round(tuple(each)) for each in works)))
    return replace(plan, pipelines=tuple(pipelines))


def _lightest(work: StageMicroBatch, plan: Plan, cost: CostModel) -> StageMicroBatch:
    """The work with as many lighter layers as its fullest rank holds."""
    capacities, lighter = dict(plan.limits.capacity), work.checkpoint.lighter
    if lighter not in capacities or work.offload:
        return work
    policy, tokens = MemoryPolicy(work.checkpoint, plan.reduce), int(tokens_on_ranks(cost, work).max())
    room, layers = cost.budget_bytes - cost.memory.fixed_bytes(policy), cost.model.layers

    def exceeds(count: int) -> bool:
        allowed = mixed_capacity(capacities[work.checkpoint], capacities[lighter], count, layers)
        return tokens > allowed or tokens * cost.memory.token_bytes(policy, count) > room

    return replace(work, lighter_layers=bisect_left(range(1, layers), True, key=exceeds))
