"""Plans of parts of the cluster, side by side, as one plan: ranks shifted, documents renumbered."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from math import inf
from typing import Any, NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.planners.flex import plan_flex
from seqloom.planners.hydraulis.assign import Assignment, assign, problem_of, rank_strategies
from seqloom.planners.hydraulis.config import Block, SchemeCosts, Strategy, blocks
from seqloom.planners.hydraulis.costs import check_strategies, costs_of, plan_gathered, scheme_costs, switch_ns
from seqloom.planners.hydraulis.propose import MOST, propose
from seqloom.planners.pipeline import plan_pipeline
from seqloom.simulate import predicted_ns


class Planned(NamedTuple):
    """A plan of some of the documents, made for as many ranks as its part of the cluster has."""

    plan: Plan
    start: int
    """First rank of the part."""
    documents: Sequence[int]
    """Numbers in the whole batch of the documents of `plan`, in its order."""


def merge(parts: Sequence[Planned], lengths: np.ndarray, cost: CostModel, planner: str) -> Plan:
    """One plan of several, on disjoint ranks of the cluster.

    A checkpoint's capacity becomes the largest that any part has: parts differ in what their stages leave free, and
    each was planned within its own.

    Args:
        parts: they hold every document once; parts without documents are left out before.
        lengths: int64[n] tokens of the whole batch.
        cost: of the whole cluster.
        planner: name to put on the plan.
    """
    capacity: dict[Checkpoint, int] = {}
    for part in parts:
        for checkpoint, tokens in part.plan.limits.capacity:
            capacity[checkpoint] = max(tokens, capacity.get(checkpoint, 0))
    limits = replace(
        parts[0].plan.limits,
        ranks=cost.ranks,
        node_size=cost.node_size,
        capacity=tuple((checkpoint, capacity[checkpoint]) for checkpoint in Checkpoint if checkpoint in capacity),
    )
    pipelines = [_moved(pipeline, part) for part in parts for pipeline in part.plan.pipelines]
    return Plan(limits, cost.sharding, Reduce.STEP, tuple(lengths.tolist()), tuple(pipelines), planner)


def _moved(pipeline: Pipeline, part: Planned) -> Pipeline:
    stages = tuple(replace(stage, ranks=_shifted(stage.ranks, part.start)) for stage in pipeline.stages)
    rounds = tuple(Round(tuple(_work(work, part) for work in current.work)) for current in pipeline.rounds)
    return Pipeline(stages, rounds, pipeline.actions)


def _work(work: StageMicroBatch, part: Planned) -> StageMicroBatch:
    assert work.attention is None and work.linear is None, "parts are planned without layouts of their own"
    return replace(work, groups=tuple(_group(group, part) for group in work.groups))


def _group(group: Group, part: Planned) -> Group:
    route = group.route
    return replace(
        group,
        ranks=_shifted(group.ranks, part.start),
        spans=tuple(Span(part.documents[document], first, stop) for document, first, stop in group.spans),
        route=None if route is None else replace(route, proxies=_shifted(route.proxies, part.start)),
    )


def _shifted(ranks: Sequence[int], start: int) -> tuple[int, ...]:
    return tuple(rank + start for rank in ranks)


# ---- merged: planners.strategies.planner
# Planner ``hydraulis``: the strategy for this batch, and a full plan of every pipeline in it.
#
# Three numbers per scheme choose the few best strategies and deal out the documents. Then every pipeline is planned
# like
# a cluster of its own: by ``pipeline`` where it has several stages, by ``flex`` where it has one; one that is
# gathered
# for every pass has the micro-batches of the assignment. How long these plans really take corrects the three
# numbers, and
# the documents are dealt once more. The best plan by full prices is taken.


TRIED = 3
"""Strategies that are planned in full, the ones with different blocks."""
CORRECTIONS = 1
"""Times that the documents are dealt again, by what the plans of the best strategy take."""
NEAR_PERCENT = 101
"""Plans are made quickly at first; those that are so near to the fastest are searched in full."""


def propose_strategies(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    tokens_per_step: int | None = None,
    most: int = MOST,
    seed: int = 0,
) -> tuple[Strategy, ...]:
    """A short list of strategies for a data set on this cluster, see `propose`; sharding must be free.

    Args:
        lengths: int64[n] tokens of the data's documents; the longest is held by the first strategy.
        cost: prices the model on the cluster.
        tokens_per_step: of one optimiser step; None: the lengths are one step.
        most: strategies to return.
        seed: of the sample steps.
    """
    require_free(cost)
    array = Batch.of(lengths).lengths
    costs = scheme_costs(cost, int(array.max()))
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
        cost: prices of the whole cluster.
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
    built: list[Built] = []
    refused: list[SeqloomError] = []
    tried: set[tuple[Hashable, ...]] = set()
    switches = [switch_ns(strategy, cost) for strategy in known]
    for assignment in rank_strategies(array, known, costs, switches):
        strategy = known[assignment.strategy]
        alike = tuple(block.planned_like for block in blocks(strategy, cost.ranks, cost.node_size))
        if alike in tried or len(tried) == TRIED:
            continue  # planned together, their pipelines are the same
        tried.add(alike)
        try:
            built += quickly(array, strategy, assignment, cost, seed, built)
        except SeqloomError as error:  # its memory is tighter than three numbers can say
            tried.discard(alike)
            refused.append(error)
    if not built:
        raise refused[0]
    for _ in range(CORRECTIONS):
        with suppress(SeqloomError):
            best = min(built, key=lambda made: made.ns)
            again = corrected(array, known[best.assignment.strategy], costs, best)
            built += quickly(array, known[again.strategy], again, cost, seed, built)
    near = [made for made in built if made.ns <= limit_ns(built)]
    return min((searched(made, array, cost, seed) for made in near), key=lambda made: made.ns).plan


def require_free(cost: CostModel) -> None:
    """Refuse any sharding under which parameters cannot go where the next step wants them."""
    if cost.sharding != Sharding.FREE:
        raise SeqloomError(
            f"planner hydraulis under sharding {cost.sharding.value}: stages differ from step to step, so parameters "
            "must be free to move; use sharding free (--sharding free), or another planner"
        )


class Part(NamedTuple):
    """The plan of a block."""

    block: Block
    documents: list[int]
    plan: Plan
    ns: int


class Built(NamedTuple):
    """A plan, the assignment it was made from, and what it takes."""

    plan: Plan
    ns: int
    assignment: Assignment
    parts: tuple[Part, ...]

    @classmethod
    def of(cls, parts: Sequence[Part], assignment: Assignment, lengths: np.ndarray, cost: CostModel) -> Built:
        """Put the plans of all blocks side by side."""
        planned = [Planned(part.plan, part.block.start, part.documents) for part in parts]
        plan = merge(sorted(planned, key=lambda part: part.start), lengths, cost, "hydraulis")
        return cls(plan, predicted_ns(plan, cost), assignment, tuple(parts))

    @property
    def pipelines_ns(self) -> dict[int, int]:
        """ns of every pipeline that has documents, by its index in the strategy."""
        return {index: part.ns for part in self.parts for index in part.block.pipelines}


def build(lengths: np.ndarray, strategy: Strategy, assignment: Assignment, cost: CostModel, seed: int) -> Built:
    """The full plan of an assignment."""
    return searched(quickly(lengths, strategy, assignment, cost, seed)[0], lengths, cost, seed)


def quickly(
    lengths: np.ndarray,
    strategy: Strategy,
    assignment: Assignment,
    cost: CostModel,
    seed: int,
    known: Sequence[Built] = (),
) -> list[Built]:
    """The plan of an assignment, quickly made; nothing where it is known or far slower than the best that is.

    What should take longest is planned first: once it alone is too slow, the rest need not be planned. Beside stages
    that wait, ranks that share a machine are faster than in a plan of their own.
    """
    shares = {}
    for block in blocks(strategy, cost.ranks, cost.node_size):
        documents = sorted(document for index in block.pipelines for document in assignment.documents(index))
        if documents:
            shares[block] = documents
    stay = not any(block.scheme.gathered for block in shares)  # others depend on their micro-batches too
    if stay and any(shares == {part.block: part.documents for part in made.parts} for made in known):
        return []
    parts = []
    least = cost.engine.solo_time_ratio if any(block.scheme.stages > 1 for block in shares) else 1.0
    for block in sorted(shares, key=lambda block: -max(assignment.pipelines_ns[index] for index in block.pipelines)):
        planned = _planned(block, shares[block], assignment, lengths, cost, seed, quick=True)
        parts.append(Part(block, shares[block], *planned))
        if parts[-1].ns * least > limit_ns(known):
            return []
    return [Built.of(parts, assignment, lengths, cost)]


def limit_ns(known: Sequence[Built]) -> float:
    """ns above which a quick plan cannot become the best one."""
    return min((made.ns for made in known), default=inf) * NEAR_PERCENT / 100


def searched(built: Built, lengths: np.ndarray, cost: CostModel, seed: int) -> Built:
    """The same assignment with plans that are searched in full, the slowest first, as long as these gain by it."""
    parts = sorted(built.parts, key=lambda part: -part.ns)
    gained = 0
    for part in parts:
        plan, ns = _planned(part.block, part.documents, built.assignment, lengths, cost, seed, quick=False)
        if ns >= part.ns:
            break
        parts[gained] = part._replace(plan=plan, ns=ns)
        gained += 1
    if not gained:
        return built
    made = Built.of(parts, built.assignment, lengths, cost)
    return made if made.ns < built.ns else built


def _planned(
    block: Block,
    documents: list[int],
    assignment: Assignment,
    lengths: np.ndarray,
    cost: CostModel,
    seed: int,
    *,
    quick: bool,
) -> tuple[Plan, int]:
    """A plan of documents for the ranks of a block, and what it takes, ns."""
    inside, own = cost.for_submesh(block.ranks, block.scheme.tensor), tuple(lengths[documents].tolist())
    if block.scheme.gathered:
        place = {document: number for number, document in enumerate(documents)}
        batches = [[place[each] for each in batch] for batch in assignment.batches[block.pipelines[0]]]
        plan = plan_gathered(lengths[documents], batches, inside, block.scheme)
        return plan, predicted_ns(plan, inside)
    if block.scheme.stages > 1:
        return _staged(inside, block.scheme.stages, own)
    return _flexible(inside, own, seed, quick)


@lru_cache(maxsize=128)
def _staged(inside: CostModel, stages: int, lengths: tuple[int, ...]) -> tuple[Plan, int]:
    """Made once: strategies share blocks, and often these get the same documents again."""
    plan = plan_pipeline(np.array(lengths, dtype=np.int64), inside, stages=stages)
    return plan, predicted_ns(plan, inside)


@lru_cache(maxsize=128)
def _flexible(inside: CostModel, lengths: tuple[int, ...], seed: int, quick: bool) -> tuple[Plan, int]:
    plan = plan_flex(np.array(lengths, dtype=np.int64), inside, seed=seed, quick=quick)
    return plan, predicted_ns(plan, inside)


def corrected(lengths: np.ndarray, strategy: Strategy, costs: SchemeCosts, built: Built) -> Assignment:
    """The documents dealt once more, with every pipeline's prices scaled to what its plan takes."""
    order = np.argsort(-lengths, kind="stable")
    problem = problem_of(lengths[order], strategy, costs)
    expected = built.assignment.pipelines_ns
    scale = np.array([built.pipelines_ns.get(j, ns) / ns if ns else 1.0 for j, ns in enumerate(expected)])
    return assign(
        problem._replace(
            cost=np.rint(problem.cost * scale[:, None]).astype(np.int64),
            fixed=np.rint(problem.fixed * scale).astype(np.int64),
        ),
        order,
        built.assignment.strategy,
    )
