"""Step time and memory of a whole plan in closed form, from the same integers the planners compare.

Rounds are totally ordered and there is no barrier between them. A round joins the islands that its groups
connect; it starts when all ranks of those islands are free and holds them until its slowest rank is done
(they meet in every parameter gather). Ranks of other islands are not touched.

Under free sharding the step also has what it does not hide of moving parameters and gradients, see `relaying`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.analytic import AnalyticEngine
from seqloom.cost.memory import free_bytes
from seqloom.cost.passes import column_of, one_stage_bytes, passes_ns, priced_passes
from seqloom.cost.relaying import relay_ns
from seqloom.cost.rounds import tokens_on_ranks
from seqloom.cost.values import Variant
from seqloom.errors import SeqloomError
from seqloom.plan import Sharding

if TYPE_CHECKING:
    from seqloom.cost.model import CostModel
    from seqloom.plan import Pipeline, Plan, Work


def plan_ns(cost: CostModel, plan: Plan) -> int:
    """Latest finish over all islands, plus what a step costs once."""
    _require_one_stage(plan)
    islands = plan.islands
    ready = [0] * len(islands)
    island_of = {rank: i for i, island in enumerate(islands) for rank in island}
    overhead, shades = 0, []
    for pipeline in plan.pipelines:
        own, shortest = cost.with_tensor(pipeline.stages[0].tensor), []
        together = _together(cost, pipeline)
        for work in _works(pipeline):
            variant = Variant(work.checkpoint, plan.reduce, bool(together))
            overhead = max(overhead, own.step_overhead_ns(variant))
            times = own.round_times(work, variant)
            parts = [(joined, times.joined_ns(ranks)) for joined, ranks in _connected(work, island_of, together)]
            shortest.append(min(time for _, time in parts))
            for joined, time in parts:
                finish = max(ready[i] for i in joined) + time
                for i in joined:
                    ready[i] = finish
        shades.append((shortest[0], shortest[-1]) if shortest else (0, 0))
        moved = passes_ns(cost, pipeline) if together else 0
        for i in {island_of[rank] for rank in together}:
            ready[i] += moved
    return max(ready, default=0) + overhead + relay_ns(cost, plan.pipelines, shades)


def plan_memory(cost: CostModel, plan: Plan) -> np.ndarray:
    """int64[ranks]: peak bytes of every rank over the rounds."""
    _require_one_stage(plan)
    peak = idle_memory(cost, plan)
    for pipeline in plan.pipelines:
        peak = np.maximum(peak, pipeline_memory(cost, plan, pipeline))
    return peak


def idle_memory(cost: CostModel, plan: Plan) -> np.ndarray:
    """int64[ranks]: bytes of ranks in no stage: under free sharding, their part of the optimiser's state."""
    own = 0
    if plan.sharding == Sharding.FREE and isinstance(cost.engine, AnalyticEngine):
        memory = cost.engine.memory
        own = free_bytes(0, memory.parameters, memory.owners)
    return np.full(cost.ranks, own, dtype=np.int64)


def pipeline_memory(cost: CostModel, plan: Plan, pipeline: Pipeline) -> np.ndarray:
    """int64[ranks]: peak bytes of the ranks of a pipeline of one stage over its rounds, 0 of all others.

    Where parameters are sharded over all ranks, a single pipeline is all there is.
    """
    own, peak = cost.with_tensor(pipeline.stages[0].tensor), np.zeros(cost.ranks, dtype=np.int64)
    together = _together(cost, pipeline)
    for work in _works(pipeline):
        variant = Variant(work.checkpoint, plan.reduce)
        tokens = tokens_on_ranks(own, work)
        if together:
            used = one_stage_bytes(own, column_of(pipeline.stages[0]), work.checkpoint, tokens)
        else:
            used = own.fixed_bytes(variant) + np.ceil(tokens * own.token_bytes(variant)).astype(np.int64)
        peak = np.maximum(peak, used)
    if len(plan.pipelines) > 1 or plan.sharding == Sharding.FREE:
        peak[np.setdiff1d(np.arange(cost.ranks), pipeline.ranks)] = 0
    return peak


def _together(cost: CostModel, pipeline: Pipeline) -> tuple[int, ...]:
    """Ranks of the only stage where they meet in every pass, because parameters are gathered for it; else ()."""
    return pipeline.stages[0].ranks if priced_passes(cost, pipeline) else ()


def _require_one_stage(plan: Plan) -> None:
    for pipeline in plan.pipelines:
        if len(pipeline.stages) != 1:
            raise SeqloomError(
                f"a pipeline of {len(pipeline.stages)} stages has no closed form; simulate the plan instead"
            )


def _works(pipeline: Pipeline) -> list[Work]:
    """The work of every round. Pipelines are on disjoint islands, so their order is free."""
    return [current.work[0] for current in pipeline.rounds]


def _connected(
    work: Work, island_of: dict[int, int], together: tuple[int, ...] = ()
) -> list[tuple[list[int], list[int]]]:
    """Islands that the groups of a round and their proxies join, with the ranks at work: [(islands, ranks)].

    Ranks that are `together` are joined too.
    """
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        while parent.setdefault(i, i) != i:
            i = parent[i]
        return i

    parties = [group.party for group in work.groups]
    if work.linear is not None:  # ranks that have tokens in linear layers only
        parties += [(rank,) for rank in np.unique(work.linear.rank).tolist()]
    parties += [together] * bool(together)
    for party in parties:
        first = root(island_of[party[0]])
        for rank in party:
            parent[root(island_of[rank])] = first
    islands: dict[int, list[int]] = defaultdict(list)
    ranks: dict[int, list[int]] = defaultdict(list)
    for i in sorted(parent):
        islands[root(i)].append(i)
    for party in parties:
        ranks[root(island_of[party[0]])] += party
    return [(islands[key], ranks[key]) for key in islands]
