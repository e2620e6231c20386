"""Planner ``hydraulis``: choose the strategy for a batch, and plan every pipeline of it in full.

Four numbers per parallel config rank the strategies and dispatch the documents. Then every block of ranks is planned
like a cluster of its own: by ``pipeline`` where it has several stages, by ``flex`` where it has one; a pipeline that
reshards after every forward has the micro-batches of the assignment. How long these plans take corrects the numbers,
and the documents are dispatched once more. The fastest plan by full costs is taken.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, Sharding
from seqloom.planners.flex import plan_flex
from seqloom.planners.hydraulis.costs import (
    check_strategies,
    config_costs,
    costs_of,
    plan_resharding_pipeline,
    switch_ns,
)
from seqloom.planners.hydraulis.dispatch import Assignment, assign, problem_of, rank_strategies
from seqloom.planners.hydraulis.propose import MOST, propose
from seqloom.planners.hydraulis.strategy import ConfigCosts, ParallelConfig, Strategy, fits_nodes
from seqloom.planners.pipeline import plan_pipeline
from seqloom.simulate import predicted_ns

TRIED = 3
"""Strategies that are planned in full, the ones with different blocks."""
CORRECTIONS = 1
"""Times that documents are dispatched again, by the times of the best strategy's plans."""
NEAR_PERCENT = 101
"""Plans are made with a quick search first; those this near to the fastest are searched in full."""


def propose_strategies(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    tokens_per_step: int | None = None,
    most: int = MOST,
    seed: int = 0,
) -> tuple[Strategy, ...]:
    """Propose a short list of strategies for a data set on this cluster, see `propose`; sharding must be free.

    Args:
        lengths: int64[n] tokens of the data's documents; the first strategy holds the longest.
        cost: prices the model on the cluster.
        tokens_per_step: of one optimiser step; None: the lengths are one step.
        most: strategies to return.
        seed: of the sample steps.
    """
    require_free(cost)
    array = Batch.of(lengths).lengths
    costs = config_costs(cost, int(array.max()))
    return propose(array, costs, cost.ranks, cost.node_size, tokens_per_step=tokens_per_step, most=most, seed=seed)


def plan_strategies(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    strategies: Sequence[Strategy | Mapping[str, Any]] | None = None,
    seed: int = 0,
) -> Plan:
    """Plan a batch with the best of several strategies; sharding must be free.

    Args:
        lengths: int64[n] tokens.
        cost: prices of the cluster.
        strategies: to choose from, as values or as `Strategy.as_dict`; None proposes some for this batch alone.
        seed: of the pseudo-random choices of ``flex`` inside a pipeline.
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
        if same_plans in tried or len(tried) == TRIED:
            continue
        tried.add(same_plans)
        try:
            plans += planner.quick_plan(strategy, assignment, plans)
        except SeqloomError as error:  # its memory is tighter than four numbers can say
            tried.discard(same_plans)
            refused.append(error)
    if not plans:
        raise refused[0]
    for _ in range(CORRECTIONS):
        with suppress(SeqloomError):
            best = min(plans, key=lambda each: each.ns)
            again = redispatch(array, known[best.assignment.strategy], costs, best)
            plans += planner.quick_plan(known[again.strategy], again, plans)
    near = [each for each in plans if each.ns <= limit_ns(plans)]
    return min((planner.search_in_full(each) for each in near), key=lambda each: each.ns).plan


def plan_assignment(lengths: np.ndarray, strategy: Strategy, assignment: Assignment, cost: CostModel) -> Plan:
    """Plan documents that are dispatched already, searched in full."""
    planner = _BlockPlanner(lengths, cost, 0)
    return planner.search_in_full(planner.quick_plan(strategy, assignment)[0]).plan


def require_free(cost: CostModel) -> None:
    """Refuse any sharding under which parameters cannot move to where the next step needs them."""
    if cost.sharding != Sharding.FREE:
        raise SeqloomError(
            f"planner hydraulis under sharding {cost.sharding.value}: stages differ from step to step, so parameters "
            "must be free to move; use sharding free (--sharding free), or another planner"
        )


class Block(NamedTuple):
    """Ranks that are planned together: one pipeline of several stages, or neighbouring pipelines of one stage."""

    start: int
    ranks: int
    config: ParallelConfig
    pipelines: tuple[int, ...]
    """Indices in the strategy."""

    @property
    def plan_key(self) -> Hashable:
        """Everything that the plan of a block depends on, beside its documents."""
        config = self.config
        return self.start, self.ranks, config if config.reshard_after_forward else (config.stages, config.tensor)


def blocks(strategy: Strategy, ranks: int, node_size: int) -> Iterator[Block]:
    """Divide the ranks of a strategy into blocks.

    Neighbours of one stage and one tensor degree hold the same parameters. Planned together they may share a long
    document, and nothing is lost.
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
    """The plan of a block's documents, on ranks and with documents numbered from 0."""

    block: Block
    documents: list[int]
    """Numbers of the plan's documents in the batch."""
    plan: Plan
    ns: int


class StrategyPlan(NamedTuple):
    """The plan of an assignment, its predicted time, and the plans of its blocks."""

    plan: Plan
    ns: int
    assignment: Assignment
    blocks: tuple[BlockPlan, ...]


def limit_ns(plans: Sequence[StrategyPlan]) -> float:
    """ns above which a quick plan cannot become the best one."""
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
        """Plan an assignment with quick searches; return nothing where the plan is known or slower than the best.

        The block that should take longest is planned first: once it alone is too slow, the others need no plan.
        Beside stages that wait, ranks that share a machine are faster than in a plan of their own.
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
        """Plan the same assignment with full searches, the slowest block first, as long as these gain by it."""
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

        A checkpoint's capacity becomes the largest of any block: blocks differ in what their stages leave free, and
        each was planned within its own.
        """
        ordered = sorted(parts, key=lambda part: part.block.start)
        capacity: dict[Checkpoint, int] = {}
        for part in ordered:
            for checkpoint, tokens in part.plan.limits.capacity:
                capacity[checkpoint] = max(tokens, capacity.get(checkpoint, 0))
        limits = replace(
            ordered[0].plan.limits,
            ranks=self.cost.ranks,
            node_size=self.cost.node_size,
            capacity=tuple((checkpoint, capacity[checkpoint]) for checkpoint in Checkpoint if checkpoint in capacity),
        )
        pipelines = tuple(_moved(pipeline, part) for part in ordered for pipeline in part.plan.pipelines)
        documents = tuple(self.lengths.tolist())
        plan = Plan(limits, self.cost.sharding, Reduce.STEP, documents, pipelines, "hydraulis")
        return StrategyPlan(plan, predicted_ns(plan, self.cost), assignment, tuple(parts))


@lru_cache(maxsize=256)
def _planned(inside: CostModel, stages: int, lengths: tuple[int, ...], seed: int, quick: bool) -> tuple[Plan, int]:
    """(plan, ns) of a block; cached, because strategies share blocks and often give them the same documents."""
    array = np.array(lengths, dtype=np.int64)
    if stages > 1:
        plan = plan_pipeline(array, inside, stages=stages)
    else:
        plan = plan_flex(array, inside, seed=seed, quick=quick)
    return plan, predicted_ns(plan, inside)


def _moved(pipeline: Pipeline, part: BlockPlan) -> Pipeline:
    """A pipeline with the ranks of its block and the documents of the batch."""

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
    return assign(
        problem._replace(
            cost=np.rint(problem.cost * scale[:, None]).astype(np.int64),
            fixed=np.rint(problem.fixed * scale).astype(np.int64),
        ),
        order,
        plan.assignment.strategy,
    )
