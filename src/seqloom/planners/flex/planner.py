"""Planner ``flex``: FlexSP's problem on true lengths, without buckets and without a solver, in milliseconds.

The decoder (`loops.decode`) answers "can this batch finish within this time, and how?". ``flex`` asks it:

1. bisection on the time, with the real shard groups and with wider virtual ones, for every policy;
2. a local search around the best answer, at a slightly shorter time than it reached: change where a round's limit is
   set, which degree a long document starts from, or (small batches) the order of placement; keep what leaves less work
   unplaced; when nothing is left, the time is beaten and the next one is tried;
3. where memory made it choose a policy that recomputes: part of the batch in rounds of a faster one.
"""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.plan import Plan
from seqloom.planners.flex.search import LARGE_PROBLEM, REORDERED_BELOW, FlexSearch
from seqloom.planners.loops import NEVER, BatchTables, DecodedRounds, RankAssignment
from seqloom.planners.problem import CHECKPOINTS, BatchProblem, GroupPlacement, fitting_problems

SMALL_CLUSTER = 16
"""Up to this many ranks every virtual shard group is tried."""
NEAR_BOUND = 64
"""One part in this many above the bound, and virtual shard groups are not tried on a large batch."""
QUICK_PART = 24
"""A quick plan has one in so many of the usual decodings for its local search."""
MIXTURES = (15, 30, 45, 60, 75)
"""Parts of the step, per cent, that rounds of a faster policy are tried for."""


def plan_flex(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    evaluations: int | None = None,
    seed: int = 0,
    only: MemoryPolicy | None = None,
    quick: bool = False,
) -> Plan:
    """Plan a batch: start every policy that can still win, and search the best one further.

    Args:
        lengths: int64[n] tokens.
        evaluations: decodings for the local search; None chooses by size.
        seed: start of its pseudo-random choices.
        only: the one policy to plan for; None tries all.
        quick: whether a small part of the local search is enough: to compare batches or clusters, not to run the plan.
    """
    problems = fitting_problems(lengths, cost) if only is None else [BatchProblem.of(lengths, cost, only)]
    bounds = [work_bound(problem.batch_tables) for problem in problems]
    overheads = [cost.step_overhead_ns(problem.policy) for problem in problems]
    best: tuple[int, int, list[FlexSearch]] | None = None
    for index in sorted(range(len(problems)), key=lambda index: bounds[index] + overheads[index]):
        if best is not None and bounds[index] + overheads[index] >= best[0]:
            break  # even at its bound this policy would not win
        searches = start_searches(problems[index].batch_tables, bounds[index])
        step = searches[0].best_ns + overheads[index]
        if best is None or step < best[0]:
            best = (step, index, searches)
    assert best is not None
    _, index, searches = best
    if quick and evaluations is None:
        evaluations = default_evaluations(searches[0].tables, searches[0].shard_group) // QUICK_PART
    search = finish_searches(searches, bounds[index], evaluations, seed)
    assert search.best is not None
    rounds = rounds_of(problems[index], *search.best)
    faster = faster_variants(problems[index]) if only is None else []
    rounds = mix_checkpoints(problems[index], faster, rounds, search.best_ns)
    return problems[index].plan(rounds, "flex")


def work_bound(tables: BatchTables) -> int:
    """A quick lower bound on the step without its overhead, ns: cheapest work and memory share over all ranks."""
    best = int(tables.solo_ns.min(axis=0).max())
    degree = tables.shape_degree[:, None]
    fits = tables.tokens <= degree * tables.capacity
    for lane in range(len(tables.cost)):
        share = tables.fixed[lane][:, None] * tables.tokens // tables.capacity
        work = np.where(fits, tables.cost[lane] * degree + share, NEVER)
        best = max(best, int(work.min(axis=0).sum()) // tables.ranks)
    return max(best, 1)


def start_searches(tables: BatchTables, bound: int) -> list[FlexSearch]:
    """Bisect once per virtual shard group, as long as there is much to gain; the best first."""
    searches: list[FlexSearch] = []
    for virtual in virtual_shard_groups(tables):
        if searches and len(tables.tokens) >= REORDERED_BELOW and searches[0].best_ns - bound <= bound // NEAR_BOUND:
            break
        search = FlexSearch.over(tables, virtual)
        search.bisect(bound, search.params, 12)
        searches.append(search)
    return sorted(searches, key=lambda search: search.best_ns)


def virtual_shard_groups(tables: BatchTables) -> list[int]:
    """Shard group sizes to decode with: the real one, the whole cluster, and on small clusters every block between."""
    shard_group, ranks, node = tables.shard_group, tables.ranks, tables.node
    between = [
        int(degree)
        for degree in tables.degrees
        if shard_group < degree < ranks <= SMALL_CLUSTER and degree % shard_group == 0 and ranks % degree == 0
        if degree % node == 0 or node % degree == 0
    ]
    world = [ranks] if shard_group < ranks and ranks * len(tables.tokens) <= LARGE_PROBLEM else []
    return [shard_group, *between, *world]


def finish_searches(searches: list[FlexSearch], bound: int, evaluations: int | None, seed: int) -> FlexSearch:
    """Spend the local search on the best start (on all of them if the batch is small); returns the best of all.

    Args:
        evaluations: decodings for each local search; None chooses by size.
    """
    tables = searches[0].tables
    budget = default_evaluations(tables, searches[0].shard_group) if evaluations is None else evaluations
    for search in searches if len(tables.tokens) < REORDERED_BELOW else searches[:1]:
        search.climb(bound, budget, seed)
    return min(searches, key=lambda search: search.best_ns)


def default_evaluations(tables: BatchTables, shard_group: int) -> int:
    """Decodings spent on local search: many for small batches, where each is quick and each document counts."""
    if shard_group < tables.ranks and tables.ranks * len(tables.tokens) > LARGE_PROBLEM:
        return 0  # there the bisection already ends where the search would
    total = 100_000 if shard_group == tables.ranks else 50_000
    return max(8, min(1_000, total // (len(tables.tokens) * len(tables.shape_degree))))


def rounds_of(
    problem: BatchProblem, rounds: DecodedRounds, ranks: RankAssignment, documents: np.ndarray | None = None
) -> list[list[GroupPlacement]]:
    """List the groups of every round of an assignment, in running order.

    Args:
        documents: int64[m] ids of the documents that were decoded; None if all of the problem's were.
    """
    members: list[list[int]] = [[] for _ in range(int(rounds.count[0]))]
    ids = range(len(rounds.group_of)) if documents is None else documents.tolist()
    for document, group in zip(ids, rounds.group_of.tolist(), strict=True):
        if group >= 0:
            members[group].append(document)
    placed: dict[int, list[GroupPlacement]] = {}
    for group, held in enumerate(members):
        shape = problem.tables.shapes[rounds.group_shape[group]]
        placed.setdefault(int(ranks.round_of[group]), []).append(GroupPlacement(shape, int(ranks.start[group]), held))
    return [placed[index] for index in sorted(placed)]


def faster_variants(problem: BatchProblem) -> list[BatchProblem]:
    """The same batch under the policies that keep more activations and reduce gradients at the same time."""
    cost, policy = problem.cost, problem.policy
    faster = CHECKPOINTS[: CHECKPOINTS.index(policy.checkpoint)]
    return [
        BatchProblem(problem.lengths, cost, v, cost.tables(problem.lengths, v))
        for v in cost.policies
        if v.reduce == policy.reduce and v.checkpoint in faster
    ]


def mix_checkpoints(
    problem: BatchProblem, faster: list[BatchProblem], rounds: list[list[GroupPlacement]], best_ns: int
) -> list[list[GroupPlacement]]:
    """Return these rounds, or better ones of which the first keep more activations than the rest.

    Where memory is tight, a slow policy that recomputes holds the batch in fewer rounds. Part of the batch may still
    run in rounds of a faster policy: they are filled up to a part of the step, the rest is planned as before.
    """
    for other in faster:
        shard_group = other.batch_tables.shard_group
        soonest = FlexSearch.over(other.batch_tables, shard_group).tables.solo_ns.min(axis=0)
        for part in MIXTURES:
            target = best_ns * part // 100
            early = np.flatnonzero(soonest <= target)
            if not len(early):
                continue
            first = FlexSearch.over(subset(other.batch_tables, early), shard_group)
            left = first.attempt(target, first.params)
            late = np.setdiff1d(np.arange(len(problem.lengths)), early[first.rounds.group_of >= 0])
            if left == 0 or not first.rounds.count[0] or not len(late):
                continue  # all or nothing in the faster policy: that has been planned already
            spent = first.assign_ranks()
            rest = subset(problem.batch_tables, late)
            second = start_searches(rest, work_bound(rest))[0]
            if second.best is not None and spent + second.best_ns < best_ns:
                best_ns = spent + second.best_ns
                rounds = rounds_of(other, first.rounds, first.ranks, early)
                rounds += rounds_of(problem, *second.best, late)
    return rounds


def subset(tables: BatchTables, documents: np.ndarray) -> BatchTables:
    """The tables of some of the documents."""
    return tables._replace(
        tokens=tables.tokens[documents],
        cost=np.ascontiguousarray(tables.cost[:, :, documents]),
        solo_ns=np.ascontiguousarray(tables.solo_ns[:, documents]),
        solo_shape=np.ascontiguousarray(tables.solo_shape[:, documents]),
        value=tables.value[documents],
    )
