"""Planner ``hydraulis``: choose the strategy for a batch, and plan each of its pipelines in full.

The four numbers of every parallel config (`ConfigCost`) rank the strategies and dispatch the documents. Then the
planner plans every block of ranks as a separate cluster: with ``pipeline`` if it has several stages, with ``flex`` if
it has one; a pipeline that reshards after forward runs the micro-batches of the assignment. The times of these plans
correct the numbers, and the documents are dispatched once more. The fastest plan by the full cost model wins.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from math import inf
from typing import Any, NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.plan.pipeline import with_reshard_after_forward
from seqloom.planners.flex import plan_flex
from seqloom.planners.hydraulis.costs import (
    check_strategies,
    config_costs,
    costs_of,
    group_shapes,
    switch_ns,
    token_capacity,
)
from seqloom.planners.hydraulis.dispatch import Assignment, assign, problem_of, rank_strategies
from seqloom.planners.hydraulis.propose import MAX_STRATEGIES, propose
from seqloom.planners.hydraulis.strategy import ConfigCosts, ParallelConfig, Strategy, fits_nodes
from seqloom.planners.pipeline import plan_pipeline
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.schedules import build_schedule
from seqloom.simulate import predicted_ns

PLANNED_STRATEGIES = 3
"""Strategies to plan, each with different blocks."""
NEAR_PERCENT = 101
"""Every plan is made with a quick search first; those this near to the fastest get the full search."""


def propose_strategies(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    tokens_per_step: int | None = None,
    most: int = MAX_STRATEGIES,
    seed: int = 0,
    most_tensor: int | None = None,
) -> tuple[Strategy, ...]:
    """Propose a short list of strategies for a data set on this cluster, see `propose`; sharding must be free.

    Args:
        lengths: int64[n] tokens of the data's documents; the first strategy holds the longest.
        tokens_per_step: of one optimiser step; None: the lengths are one step.
        most: strategies to return.
        seed: of sampled steps.
        most_tensor: largest tensor degree that the model can run with; None: any that its shapes allow.
    """
    require_free(cost)
    array = Batch.of(lengths).lengths
    costs = config_costs(cost, int(array.max()), most_tensor)
    return propose(
        array,
        costs,
        cost.ranks,
        cost.node_size,
        tokens_per_step=tokens_per_step,
        most=most,
        seed=seed,
        switch_ns=lambda strategy: switch_ns(strategy, cost),
    )


def plan_strategies(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    strategies: Sequence[Strategy | Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> Plan:
    """Plan a batch, int64[n] tokens, with the best of several strategies; sharding must be free.

    Candidates are values or `Strategy.as_dict`; None proposes some for this batch. The seed is for ``flex`` inside a
    pipeline.
    """
    require_free(cost)
    array = Batch.of(lengths).lengths
    if strategies is None:
        known = propose_strategies(array, cost)
    else:
        known = tuple(map(Strategy.from_dict, strategies))
        check_strategies(known, cost)
    costs = costs_of(known, cost)
    planner = _BlockPlanner(array, cost, seed)
    plans: list[StrategyPlan] = []
    refused: list[SeqloomError] = []
    tried: set[tuple[Hashable, ...]] = set()
    switches = [switch_ns(strategy, cost) for strategy in known]
    for assignment in rank_strategies(array, known, costs, switches):
        strategy = known[assignment.strategy]
        same_plans = tuple(block.plan_key for block in blocks(strategy, cost.ranks, cost.node_size))
        if same_plans in tried or len(tried) == PLANNED_STRATEGIES:
            continue
        tried.add(same_plans)
        try:
            plans += planner.quick_plan(strategy, assignment, plans)
        except SeqloomError as error:  # the four numbers underestimate its memory
            tried.discard(same_plans)
            refused.append(error)
    if not plans:
        raise refused[0]
    with suppress(SeqloomError):
        best = min(plans, key=lambda each: each.ns)
        again = redispatch(array, known[best.assignment.strategy], costs, best)
        plans += planner.quick_plan(known[again.strategy], again, plans)
    near = [each for each in plans if each.ns <= limit_ns(plans)]
    return min((planner.search_in_full(each) for each in near), key=lambda each: each.ns).plan


def plan_assignment(lengths: np.ndarray, strategy: Strategy, assignment: Assignment, cost: CostModel) -> Plan:
    """Plan an assignment with the full search."""
    planner = _BlockPlanner(lengths, cost, 0)
    return planner.search_in_full(planner.quick_plan(strategy, assignment)[0]).plan


def require_free(cost: CostModel) -> None:
    """Refuse any sharding that fixes the parameters of a rank."""
    if cost.sharding != Sharding.FREE:
        raise SeqloomError(
            f"planner hydraulis under sharding {cost.sharding.value}: stages differ from step to step, so parameters "
            "must be free to move; use sharding free (--sharding free; of a run plan.sharding), or another planner"
        )


class Block(NamedTuple):
    """Ranks that are planned together: one pipeline of several stages, or neighbouring pipelines of one stage."""

    start: int
    ranks: int
    config: ParallelConfig
    pipelines: tuple[int, ...]  # Indices in the strategy

    @property
    def plan_key(self) -> Hashable:
        """Everything that the plan of a block depends on, except its documents."""
        config = self.config
        return self.start, self.ranks, config if config.reshard_after_forward else (config.stages, config.tensor)


def blocks(strategy: Strategy, ranks: int, node_size: int) -> Iterator[Block]:
    """Divide the ranks of a strategy into blocks.

    Neighbouring pipelines of one stage and one tensor degree hold the same parameters, so a block may join them: then
    they can also share a long document.
    """
    pipes = sorted(enumerate(strategy.pipelines), key=lambda entry: entry[1].ranks)
    at = 0
    while at < len(pipes):
        config, first = pipes[at][1].parallel, pipes[at][1].ranks[0]
        last = at
        for stop in range(at + 1, len(pipes)):
            both = config, pipes[stop][1].parallel
            if any(each.stages > 1 or each.reshard_after_forward or each.tensor != config.tensor for each in both):
                break
            size = pipes[stop][1].ranks[-1] + 1 - first
            wide = ParallelConfig(1, config.tensor, size // config.tensor)
            if first % size == 0 and fits_nodes(wide, ranks, node_size):
                last = stop
        size = pipes[last][1].ranks[-1] + 1 - first
        yield Block(first, size, config, tuple(index for index, _ in pipes[at : last + 1]))
        at = last + 1


class BlockPlan(NamedTuple):
    """The plan of a block's documents; ranks and documents are numbered from 0."""

    block: Block
    documents: list[int]  # Numbers of the plan's documents in the batch
    plan: Plan
    ns: int


class StrategyPlan(NamedTuple):
    """The plan of an assignment, its predicted time, and the plans of its blocks."""

    plan: Plan
    ns: int
    assignment: Assignment
    blocks: tuple[BlockPlan, ...]


def limit_ns(plans: Sequence[StrategyPlan]) -> float:
    """Time above which a quick plan gets no full search."""
    return min((each.ns for each in plans), default=inf) * NEAR_PERCENT / 100


@dataclass(frozen=True, eq=False)
class _BlockPlanner:
    """Plans the blocks of assignments of one batch, first quickly, then in full."""

    lengths: np.ndarray
    cost: CostModel
    seed: int

    def quick_plan(
        self, strategy: Strategy, assignment: Assignment, known: Sequence[StrategyPlan] = ()
    ) -> list[StrategyPlan]:
        """Plan an assignment with quick searches; return an empty list if the plan is known or slower than the best.

        The block with the longest estimate is planned first: if it is too slow, the others need no plan. On CPU
        clusters, ranks that share a machine with waiting stages are faster than in a separate plan.
        """
        shares = {}
        for block in blocks(strategy, self.cost.ranks, self.cost.node_size):
            documents = sorted(document for index in block.pipelines for document in assignment.documents(index))
            if documents:
                shares[block] = documents
        resharding = any(block.config.reshard_after_forward for block in shares)  # their micro-batches matter too
        if not resharding and shares in ({part.block: part.documents for part in each.blocks} for each in known):
            return []
        least = self.cost.engine.solo_time_ratio if any(block.config.stages > 1 for block in shares) else 1.0
        parts = []
        for block in sorted(shares, key=lambda block: -max(assignment.pipelines_ns[k] for k in block.pipelines)):
            parts.append(self._plan_block(block, shares[block], assignment, quick=True))
            if parts[-1].ns * least > limit_ns(known):
                return []
        return [self._merge(parts, assignment)]

    def search_in_full(self, quick: StrategyPlan) -> StrategyPlan:
        """Plan the same assignment with full searches, the slowest block first, until one gains nothing."""
        parts = sorted(quick.blocks, key=lambda part: -part.ns)
        gained = 0
        for part in parts:
            full = self._plan_block(part.block, part.documents, quick.assignment, quick=False)
            if full.ns >= part.ns:
                break
            parts[gained] = full
            gained += 1
        if not gained:
            return quick
        merged = self._merge(parts, quick.assignment)
        return merged if merged.ns < quick.ns else quick

    def _plan_block(self, block: Block, documents: list[int], assignment: Assignment, *, quick: bool) -> BlockPlan:
        inside = self.cost.for_submesh(block.ranks, block.config.tensor)
        lengths = self.lengths[documents]
        if block.config.reshard_after_forward:
            number = {document: k for k, document in enumerate(documents)}
            batches = [[number[each] for each in batch] for batch in assignment.batches[block.pipelines[0]]]
            plan = plan_resharding_pipeline(lengths, batches, inside, block.config)
            return BlockPlan(block, documents, plan, predicted_ns(plan, inside))
        stages = block.config.stages  # of several there is one search, quick or not
        return BlockPlan(
            block, documents, *_planned(inside, stages, tuple(lengths.tolist()), self.seed, quick or stages > 1)
        )

    def _merge(self, parts: Sequence[BlockPlan], assignment: Assignment) -> StrategyPlan:
        """Put the plans of all blocks side by side, on the ranks of the cluster.

        The capacity of a checkpoint becomes the largest of any block: each block was planned within its own.
        """
        ordered = sorted(parts, key=lambda part: part.block.start)
        own = [part.plan.limits for part in ordered]
        limits = replace(
            own[0],
            ranks=self.cost.ranks,
            node_size=self.cost.node_size,
            capacity=_largest(each.capacity for each in own),
            offload_capacity=_largest(each.offload_capacity for each in own),
        )
        pipelines = tuple(_renumbered(pipeline, part) for part in ordered for pipeline in part.plan.pipelines)
        documents = tuple(self.lengths.tolist())
        plan = Plan(limits, self.cost.sharding, Reduce.STEP, documents, pipelines, "hydraulis")
        return StrategyPlan(plan, predicted_ns(plan, self.cost), assignment, tuple(parts))


def _largest(capacities: Iterable[tuple[tuple[Checkpoint, int], ...]]) -> tuple[tuple[Checkpoint, int], ...]:
    """The largest capacity of every checkpoint."""
    found: dict[Checkpoint, int] = {}
    for checkpoint, tokens in chain.from_iterable(capacities):
        found[checkpoint] = max(tokens, found.get(checkpoint, 0))
    return tuple((checkpoint, found[checkpoint]) for checkpoint in Checkpoint if checkpoint in found)


def plan_resharding_pipeline(
    lengths: np.ndarray, batches: Sequence[Sequence[int]], cost: CostModel, config: ParallelConfig
) -> Plan:
    """Plan given micro-batches for a pipeline that reshards after forward.

    All ranks of a stage take part in every pass, so every round has one group as wide as the stage; 1F1B order:

        0UNSHARD0 0F0 0RESHARD0   0UNSHARD0 0B0 0RESHARD0   0UNSHARD1 0F1 0RESHARD1 ..

    ``batches`` has the documents of every micro-batch, in running order; ``cost`` is that of the pipeline's ranks.
    """
    width = config.ranks_per_stage
    held = token_capacity(cost, config.stages, config.reshard_after_forward)
    capacity = {policy: tokens for policy, tokens in held.items() if tokens > 0}
    needs = [-(-int(cost.padded_lengths(lengths[list(batch)]).sum()) // width) for batch in batches]
    if config.stages > 1:  # several are in flight, and each may be the largest
        needs = [max(needs)] * len(needs)
    stages = StageLayout.of(cost, config.stages).stages
    shapes = group_shapes(cost, config)
    rounds = []
    for batch, need in zip(batches, needs, strict=True):
        policy = next((policy for policy, tokens in capacity.items() if tokens >= need), None)
        if policy is None:
            raise SeqloomError(
                f"a micro-batch of {need * width} tokens for pipeline {config}, which holds "
                f"{max(capacity.values(), default=0) * width}; raise the memory budget or use more GPUs"
            )
        tables = cost.tables(lengths[list(batch)], policy, shapes)
        times = [tables.group_ns(index, np.arange(len(batch))) for index in range(len(shapes))]
        shape = shapes[times.index(min(times))]
        spans = tuple(Span(document, 0, int(lengths[document])) for document in batch)
        groups = [cost.group(shape, stage.ranks, spans) for stage in stages]
        rounds.append(Round(tuple(StageMicroBatch((group,), policy.checkpoint) for group in groups)))
    rows = build_schedule("1f1b", config.stages, len(batches)).pipeline_actions()
    limits = tuple((policy.checkpoint, tokens) for policy, tokens in capacity.items())
    return Plan(
        limits=Limits(cost.ranks, cost.node_size, cost.model.heads, limits, cost.pad_multiple),
        sharding=cost.sharding,
        reduce=Reduce.STEP,
        documents=tuple(lengths.tolist()),
        pipelines=(with_reshard_after_forward(Pipeline(stages, tuple(rounds), rows)),),
        planner="hydraulis",
    )


@lru_cache(maxsize=256)
def _planned(inside: CostModel, stages: int, lengths: tuple[int, ...], seed: int, quick: bool) -> tuple[Plan, int]:
    """(plan, ns) of a block; cached, because strategies share blocks and often give them the same documents."""
    array = np.array(lengths, dtype=np.int64)
    staged = stages > 1
    plan = plan_pipeline(array, inside, stages=stages) if staged else plan_flex(array, inside, seed=seed, quick=quick)
    return plan, predicted_ns(plan, inside)


def _renumbered(pipeline: Pipeline, part: BlockPlan) -> Pipeline:
    """Renumber a pipeline's ranks and documents from its block to the cluster and the batch."""

    def shifted(ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(rank + part.block.start for rank in ranks)

    def moved(group: Group) -> Group:
        route = group.route
        return replace(
            group,
            ranks=shifted(group.ranks),
            spans=tuple(Span(part.documents[document], first, stop) for document, first, stop in group.spans),
            route=None if route is None else replace(route, proxies=shifted(route.proxies)),
        )

    stages = tuple(replace(stage, ranks=shifted(stage.ranks)) for stage in pipeline.stages)
    rounds = []
    for current in pipeline.rounds:
        assert all(work.attention is None and work.linear is None for work in current.by_stage), (
            "blocks have no layouts"
        )
        rounds.append(Round(tuple(replace(work, groups=tuple(map(moved, work.groups))) for work in current.by_stage)))
    return Pipeline(stages, tuple(rounds), pipeline.actions)


def redispatch(lengths: np.ndarray, strategy: Strategy, costs: ConfigCosts, plan: StrategyPlan) -> Assignment:
    """Dispatch the documents once more, with every pipeline's costs scaled to the time of its block's plan."""
    order = np.argsort(-lengths, kind="stable")
    problem = problem_of(lengths[order], strategy, costs)
    planned_ns = {index: part.ns for part in plan.blocks for index in part.block.pipelines}
    expected = plan.assignment.pipelines_ns
    scale = np.array([planned_ns.get(j, ns) / ns if ns else 1.0 for j, ns in enumerate(expected)])
    scaled = np.rint(problem.cost * scale[:, None]), np.rint(problem.fixed * scale)
    cost, fixed = (each.astype(np.int64) for each in scaled)
    return assign(problem._replace(cost=cost, fixed=fixed), order, plan.assignment.strategy)
