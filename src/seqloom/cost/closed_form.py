"""Step time and memory of a whole plan in closed form, from the same integers the planners compare.

Rounds are totally ordered and there is no barrier between them. A round joins the islands that its groups
connect; it starts when all ranks of those islands are free and holds them until its slowest rank is done
(they meet in every parameter gather). Ranks of other islands are not touched.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from seqloom.cost.rounds import tokens_on_ranks
from seqloom.cost.values import Variant
from seqloom.errors import SeqloomError

if TYPE_CHECKING:
    from seqloom.cost.model import CostModel
    from seqloom.plan import Plan, Work


def plan_ns(cost: CostModel, plan: Plan) -> int:
    """Latest finish over all islands, plus what a step costs once."""
    works, islands = _works(plan), plan.islands
    ready = [0] * len(islands)
    island_of = {rank: i for i, island in enumerate(islands) for rank in island}
    overhead = 0
    for work in works:
        variant = Variant(work.checkpoint, plan.reduce)
        overhead = max(overhead, cost.step_overhead_ns(variant))
        times = cost.round_times(work, variant)
        for joined, ranks in _connected(work, island_of):
            finish = max(ready[i] for i in joined) + times.joined_ns(ranks)
            for i in joined:
                ready[i] = finish
    return max(ready, default=0) + overhead


def plan_memory(cost: CostModel, plan: Plan) -> np.ndarray:
    """int64[ranks]: peak bytes of every rank over the rounds."""
    peak = np.zeros(cost.ranks, dtype=np.int64)
    for work in _works(plan):
        variant = Variant(work.checkpoint, plan.reduce)
        tokens = tokens_on_ranks(cost, work)
        used = cost.fixed_bytes(variant) + np.ceil(tokens * cost.token_bytes(variant)).astype(np.int64)
        peak = np.maximum(peak, used)
    return peak


def _works(plan: Plan) -> list[Work]:
    """The work of every round, pipeline after pipeline (on disjoint islands, so their order is free)."""
    works: list[Work] = []
    for pipeline in plan.pipelines:
        if len(pipeline.stages) != 1:
            raise SeqloomError(
                f"a pipeline of {len(pipeline.stages)} stages has no closed form; simulate the plan instead"
            )
        works += [current.work[0] for current in pipeline.rounds]
    return works


def _connected(work: Work, island_of: dict[int, int]) -> list[tuple[list[int], list[int]]]:
    """Islands that the groups of a round and their proxies join, with the ranks at work: [(islands, ranks)]."""
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        while parent.setdefault(i, i) != i:
            i = parent[i]
        return i

    parties = [group.party for group in work.groups]
    if work.linear is not None:  # ranks that have tokens in linear layers only
        parties += [(rank,) for rank in np.unique(work.linear.rank).tolist()]
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
