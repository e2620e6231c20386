"""Step time and memory of a whole plan in closed form, from the same integers the planners compare.

Rounds are totally ordered and there is no barrier between them. A round joins the islands that its groups
connect; it starts when all ranks of those islands are free and holds them until its slowest rank is done
(they meet in every parameter gather). Ranks of other islands are not touched.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

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
        busy = _busy_ns(cost, work, variant)
        for joined, ranks in _connected(work, island_of):
            finish = max(ready[i] for i in joined) + max(busy[rank] for rank in ranks)
            for i in joined:
                ready[i] = finish
    return max(ready, default=0) + overhead


def plan_memory(cost: CostModel, plan: Plan) -> np.ndarray:
    """int64[ranks]: peak bytes of every rank over the rounds."""
    peak = np.zeros(cost.ranks, dtype=np.int64)
    for work in _works(plan):
        variant = Variant(work.checkpoint, plan.reduce)
        tokens = np.zeros(cost.ranks, dtype=np.int64)
        for group in work.groups:
            edges = np.array([(span.start, span.stop) for span in group.spans], dtype=np.int64).reshape(-1, 2)
            held = int((cost.tokens(edges[:, 1]) - cost.tokens(edges[:, 0])).sum())
            tokens[list(group.ranks)] += -(-held // group.degree)
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


def _busy_ns(cost: CostModel, work: Work, variant: Variant) -> dict[int, int]:
    """ns every rank computes in a round; a rank in several groups runs them one after the other."""
    busy: dict[int, int] = defaultdict(int)
    for group, parts in zip(work.groups, cost.groups_parts(work.groups, variant), strict=True):
        total = parts.total_ns
        for rank in group.ranks:
            busy[rank] += total
    return busy


def _connected(work: Work, island_of: dict[int, int]) -> list[tuple[list[int], list[int]]]:
    """Islands that the groups of a round join, with the ranks at work in them: [(islands, ranks)]."""
    parent: dict[int, int] = {}

    def root(i: int) -> int:
        while parent.setdefault(i, i) != i:
            i = parent[i]
        return i

    for group in work.groups:
        first = root(island_of[group.ranks[0]])
        for rank in group.ranks:
            parent[root(island_of[rank])] = first
    islands: dict[int, list[int]] = defaultdict(list)
    ranks: dict[int, list[int]] = defaultdict(list)
    for i in sorted(parent):
        islands[root(i)].append(i)
    for group in work.groups:
        ranks[root(island_of[group.ranks[0]])] += group.ranks
    return [(islands[key], ranks[key]) for key in islands]
