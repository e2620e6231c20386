"""Planner ``flex``: FlexSP's problem on true lengths, without buckets and without a solver, in milliseconds.

The decoder (`loops.decode`) answers "can this batch finish within this time, and how?". ``flex`` asks it:

1. bisection on the time, with the real shard groups and with wider virtual ones, for every policy;
2. a local search around the best answer, at a slightly shorter time than it reached: change where a round's limit is
   set, which degree a long document starts from, or (small batches) the order of placement; keep what leaves less work
   unplaced; when nothing is left, the time is beaten and the next one is tried;
3. where memory made it choose a policy that recomputes: part of the batch in rounds of a faster one.

The budget counts decodings, so the same inputs give the same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, repeat
from random import Random

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.plan import Plan
from seqloom.planners.compiled import kernels
from seqloom.planners.loops import MAX_LIMITS, NEVER, BatchTables, DecodedRounds, DecodeParams, RankAssignment
from seqloom.planners.problem import BatchProblem, GroupPlacement, fitting_problems
from seqloom.planners.recompute import CHECKPOINTS

SMALL_CLUSTER = 16
"""Up to this many ranks every virtual shard group is tried."""
NEAR_BOUND = 64
"""One part in this many above the bound, and virtual shard groups are not tried on a large batch."""
QUICK_PART = 24
"""A quick plan has one in so many of the usual decodings for its local search."""
MIXTURES = (15, 30, 45, 60, 75)
"""Parts of the step, per cent, that rounds of a faster policy are tried for."""
LIMIT_GROWTH = 22
"""Per cent from one time limit of a round to the next; finer steps cost time and find little."""
TOLERANCE = 500
"""Bisection stops when the time is known to one part in this many."""
STRIDE = 400
"""The local search aims at times shorter by one part in this many."""
PLATEAU = 66
"""Decodings after which the local search also takes a change that is only as good, to leave a local optimum."""
MAX_LEAST_DEGREES = 16
"""Random changes draw the least degree of a round from the first so many, counted cyclically."""
REORDERED_BELOW = 64
"""Batches of fewer documents than this may change the order of placement."""
LARGE_PROBLEM = 1 << 20
"""Ranks times documents from which on only the real shard groups are tried, with fewer limits per round."""
BISECTIONS = 12
"""Targets that one bisection tries."""
HUGE_PROBLEM = 1 << 25
"""Ranks times documents from which on a decoding tries few limits, and is tried few times."""


def plan_flex(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    evaluations: int | None = None,
    seed: int = 0,
    only: MemoryPolicy | None = None,
    quick: bool = False,
) -> Plan:
    """Plan a batch, int64[n] tokens: start every policy that can still win, and search the best one further.

    Args:
        evaluations: decodings for the local search; None chooses by size.
        only: the one policy to plan for; None tries all.
        quick: whether a small part of the local search is enough: to compare batches or clusters, not to run the plan.
    """
    problems = fitting_problems(lengths, cost, only)
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
    rounds = placed_rounds(problems[index], *search.best)
    if only is None and problem_size(problems[index].batch_tables) <= HUGE_PROBLEM:
        rounds = mix_checkpoints(problems[index], rounds, search.best_ns)
    return problems[index].plan(rounds, "flex")


def problem_size(tables: BatchTables) -> int:
    """Ranks times documents."""
    return tables.ranks * len(tables.tokens)


def searched_ns(problem: BatchProblem) -> int:
    """The shortest step, ns without its overhead, that the search finds under one policy."""
    bound = work_bound(problem.batch_tables)
    return finish_searches(start_searches(problem.batch_tables, bound), bound, None, 0).best_ns


def work_bound(tables: BatchTables) -> int:
    """A quick lower bound on the step without its overhead, ns: cheapest work and memory share over all ranks."""
    best = int(tables.solo_ns.min(axis=0).max())
    degree = tables.shape_degree[:, None]
    fits = tables.tokens <= degree * tables.capacity
    for cost, fixed in zip(tables.cost, tables.fixed, strict=True):
        share = fixed[:, None] * tables.tokens // tables.capacity
        work = np.where(fits, cost * degree + share, NEVER)
        best = max(best, int(work.min(axis=0).sum()) // tables.ranks)
    return max(best, 1)


def start_searches(tables: BatchTables, bound: int) -> list[FlexSearch]:
    """Bisect once per virtual shard group, as long as there is much to gain; the best first."""
    searches: list[FlexSearch] = []
    for virtual in virtual_shard_groups(tables):
        if searches and len(tables.tokens) >= REORDERED_BELOW and searches[0].best_ns - bound <= bound // NEAR_BOUND:
            break
        search = FlexSearch.over(tables, virtual)
        search.bisect(bound, search.params, BISECTIONS if problem_size(tables) <= HUGE_PROBLEM else 4)
        searches.append(search)
    return sorted(searches, key=lambda search: search.best_ns)


def virtual_shard_groups(tables: BatchTables) -> list[int]:
    """Shard group sizes to decode with: the real one, the whole cluster, and on small clusters every block between."""
    shard_group, ranks, node = tables.shard_group, tables.ranks, tables.node
    if tables.block_class.any():
        return [shard_group]  # a group of ranks that differ stays on the block by whose speed it was filled
    between = [
        int(degree)
        for degree in tables.degrees
        if shard_group < degree < ranks <= SMALL_CLUSTER and degree % shard_group == 0 and ranks % degree == 0
        if degree % node == 0 or node % degree == 0
    ]
    world = [ranks] if shard_group < ranks and problem_size(tables) <= LARGE_PROBLEM else []
    return [shard_group, *between, *world]


def finish_searches(searches: list[FlexSearch], bound: int, evaluations: int | None, seed: int) -> FlexSearch:
    """Spend the local search on the best start (on all of them if the batch is small); returns the best of all."""
    tables = searches[0].tables
    budget = default_evaluations(tables, searches[0].shard_group) if evaluations is None else evaluations
    for search in searches if len(tables.tokens) < REORDERED_BELOW else searches[:1]:
        search.climb(bound, budget, seed)
    return min(searches, key=lambda search: search.best_ns)


def default_evaluations(tables: BatchTables, shard_group: int) -> int:
    """Decodings spent on local search: many for small batches, where each is quick and each document counts."""
    size = problem_size(tables)
    if size > HUGE_PROBLEM or (shard_group < tables.ranks and size > LARGE_PROBLEM):
        return 0  # there the bisection already ends where the search would
    total = 100_000 if shard_group == tables.ranks else 50_000
    return max(8, min(1_000, total // (len(tables.tokens) * len(tables.shape_degree))))


def placed_rounds(
    problem: BatchProblem, rounds: DecodedRounds, ranks: RankAssignment, documents: np.ndarray | None = None
) -> list[list[GroupPlacement]]:
    """List the groups of every round of a decoding of these documents (None: all), in running order."""
    members: list[list[int]] = [[] for _ in range(int(rounds.count[0]))]
    ids = range(len(rounds.group_of)) if documents is None else documents.tolist()
    for document, group in zip(ids, rounds.group_of.tolist(), strict=True):
        if group >= 0:
            members[group].append(document)
    placed: dict[int, list[GroupPlacement]] = {}
    for group, held in enumerate(members):
        shape = problem.shape_of_row(int(rounds.group_shape[group]))
        placed.setdefault(int(ranks.round_of[group]), []).append(GroupPlacement(shape, int(ranks.start[group]), held))
    return [placed[index] for index in sorted(placed)]


def mix_checkpoints(
    problem: BatchProblem, rounds: list[list[GroupPlacement]], best_ns: int
) -> list[list[GroupPlacement]]:
    """Return these rounds, or faster ones of which the first recompute less than the rest.

    Where memory is tight, a slow policy that recomputes holds the batch in fewer rounds. Part of the batch may still
    run in rounds of a faster policy: they are filled up to a part of the step, the rest is planned as before.
    """
    for other in _faster_problems(problem):
        shard_group = other.batch_tables.shard_group
        soonest = FlexSearch.over(other.batch_tables, shard_group).tables.solo_ns.min(axis=0)
        for part in MIXTURES:
            target = best_ns * part // 100
            early = np.flatnonzero(soonest <= target)
            if not len(early):
                continue
            first = FlexSearch.over(_subset(other.batch_tables, early), shard_group)
            left = first.attempt(target, first.params)
            late = np.setdiff1d(np.arange(len(problem.lengths)), early[first.rounds.group_of >= 0])
            if left == 0 or not first.rounds.count[0] or not len(late):
                continue  # all or nothing in the faster policy: that has been planned already
            spent = first.assign_ranks()
            rest = _subset(problem.batch_tables, late)
            second = start_searches(rest, work_bound(rest))[0]
            if second.best is not None and spent + second.best_ns < best_ns:
                best_ns = spent + second.best_ns
                rounds = placed_rounds(other, first.rounds, first.ranks, early)
                rounds += placed_rounds(problem, *second.best, late)
    return rounds


def _faster_problems(problem: BatchProblem) -> list[BatchProblem]:
    """The same batch under the policies that recompute less and reduce gradients at the same time."""
    faster = CHECKPOINTS[: CHECKPOINTS.index(problem.policy.checkpoint)]
    alike = [policy for policy in problem.cost.policies if policy.reduce == problem.policy.reduce]
    return [BatchProblem(problem.lengths, problem.cost, policy) for policy in alike if policy.checkpoint in faster]


def _subset(tables: BatchTables, documents: np.ndarray) -> BatchTables:
    return tables._replace(
        tokens=tables.tokens[documents],
        cost=np.ascontiguousarray(tables.cost[:, :, documents]),
        solo_ns=np.ascontiguousarray(tables.solo_ns[:, documents]),
        solo_shape=np.ascontiguousarray(tables.solo_shape[:, documents]),
        value=tables.value[documents],
    )


def tiles(degree: int, shard_group: int, node: int) -> bool:
    """Whether aligned blocks of this degree lie alike in every shard group, or are made of whole shard groups."""
    return degree % shard_group == 0 if degree > shard_group else shard_group >= node or shard_group % degree == 0


@dataclass
class FlexSearch:
    """A search for the shortest step: ask the decoder for shorter and shorter ones, change one parameter at a time."""

    tables: BatchTables
    shard_group: int  # Ranks of a real shard group; ``tables.shard_group`` is the virtual one
    params: DecodeParams  # Parameters that the search starts from
    rounds: DecodedRounds  # The last decoding
    ranks: RankAssignment  # The ranks of the last complete decoding
    best_ns: int = int(NEVER)  # Shortest step, over real shard groups
    reached_ns: int = int(NEVER)  # Shortest target met, over virtual shard groups
    best: tuple[DecodedRounds, RankAssignment] | None = None
    evaluations: int = 0

    @classmethod
    def over(cls, tables: BatchTables, virtual: int) -> FlexSearch:
        """Start a search with virtual shard groups of ``virtual`` ranks.

        It uses the degrees that tile them and whose groups always find ranks on the real shard groups too.
        """
        n, real = len(tables.tokens), tables.shard_group
        usable = [
            tiles(degree, virtual, tables.node) and (virtual == real or max(degree, real) % min(degree, real) == 0)
            for degree in tables.degrees.tolist()
        ]
        solo_ns = np.where(np.array(usable)[:, None], tables.solo_ns, NEVER)
        order = np.argsort(-tables.tokens, kind="stable")
        size = problem_size(tables)
        growth = LIMIT_GROWTH * (1 if size <= LARGE_PROBLEM else 2 if size <= HUGE_PROBLEM else 8)
        none, own = np.zeros(n, np.int64), np.full(n, -1, np.int64)
        params = DecodeParams(order, True, none, own, growth, size <= HUGE_PROBLEM)
        rounds = DecodedRounds.empty(n, tables.ranks // virtual)
        ranks = RankAssignment.empty(n, tables.ranks // real)
        return cls(tables._replace(shard_group=virtual, solo_ns=solo_ns), real, params, rounds, ranks)

    def attempt(self, target: int, params: DecodeParams) -> int:
        """Decode once; returns the value left unplaced, and remembers the assignment if it is the best so far."""
        self.evaluations += 1
        left = int(kernels().decode(self.tables, target, params, self.rounds))
        if left == 0:
            self.reached_ns = min(self.reached_ns, int(self.rounds.load.max()))
            step = self.assign_ranks()
            if step < self.best_ns:
                self.best_ns = step
                rounds = DecodedRounds(*(array.copy() for array in self.rounds))
                self.best = (rounds, RankAssignment(*(array.copy() for array in self.ranks)))
        return left

    def assign_ranks(self) -> int:
        """Give the groups of the last decoding their ranks; returns the step's time, ns."""
        return int(kernels().assign_ranks(self.tables, self.rounds, self.shard_group, self.ranks))

    def bisect(self, bound: int, params: DecodeParams, attempts: int) -> None:
        """Find the shortest target that these parameters meet, between ``bound`` and the best known."""
        low, high = bound - 1, min(self.reached_ns, bound * 9 // 8)
        if self.best is None:
            while high < NEVER and self.attempt(high, params):
                low, high = high, high * 3 // 2 + 1
        for _ in range(attempts):
            high = min(high, self.reached_ns)
            if high - low <= bound // TOLERANCE:
                break
            middle = (low + high) // 2
            if self.attempt(middle, params):
                low = middle

    def climb(self, bound: int, evaluations: int, seed: int) -> None:
        """Improve the best answer by changing one parameter at a time, for that many decodings."""
        if self.best is None:
            return  # these virtual shard groups hold no plan
        random = Random(seed)
        params, stop = self.params, self.evaluations + evaluations
        while self.evaluations < stop and self.best_ns > bound + bound // 1000:
            target = self.reached_ns - self.reached_ns // STRIDE
            left = self.attempt(target, params)
            taken, first = self._limits_taken(), self.evaluations
            for shift in shifts(len(taken)):
                if left == 0 or self.evaluations >= stop:
                    break
                candidate = changed(params, taken, shift, random)
                remaining = self.attempt(target, candidate)
                if remaining < left or (remaining == left and self.evaluations > first + PLATEAU):
                    params, left, taken = candidate, remaining, self._limits_taken()
            if left:
                break
            self.bisect(bound, params, 3)

    def _limits_taken(self) -> np.ndarray:
        return self.rounds.limit_index[: max(1, self.rounds.count[1])].copy()


def shifts(rounds: int) -> Iterator[tuple[int, int] | None]:
    """(Round, steps of its limit) of the early rounds, nearest limits first; then None, any change, without end."""
    steps = (1, -1, 2, -2, 3, -3, 5, -4, 7, -6, 9)
    return chain([(index, step) for step in steps for index in range(min(rounds, 6))], repeat(None))


def changed(params: DecodeParams, taken: np.ndarray, shift: tuple[int, int] | None, random: Random) -> DecodeParams:
    """Parameters that differ in one respect from those that led to these limits.

    Without a shift, change at random the order (of small batches), the degree that a document starts from, or some
    round's limit.
    """
    if shift is not None:
        index = min(shift[0], len(taken) - 1)
        return params._replace(limit_index=replaced(params.limit_index, index, max(0, int(taken[index]) + shift[1])))
    n, draw = len(params.order), random.random()
    if n < REORDERED_BELOW and draw < 0.5:
        return params._replace(order=reordered(params.order, random), descending=False)
    if draw < 0.7:
        document = int(params.order[int(n * random.random() ** 2)])
        extra = replaced(params.extra_degrees, document, 1 - int(params.extra_degrees[document]))
        return params._replace(extra_degrees=extra)
    limit = int(random.random() * MAX_LIMITS * MAX_LEAST_DEGREES) if random.random() < 0.85 else -1
    return params._replace(limit_index=replaced(params.limit_index, int(len(taken) * random.random()), limit))


def replaced(array: np.ndarray, index: int, value: int) -> np.ndarray:
    """Copy the array with one entry changed."""
    copy = array.copy()
    copy[index] = value
    return copy


def reordered(order: np.ndarray, random: Random) -> np.ndarray:
    """Move one to three documents to other places."""
    moved = order.tolist()
    for _ in range(1 + int(3 * random.random())):
        document = moved.pop(int(len(moved) * random.random()))
        moved.insert(int((len(moved) + 1) * random.random()), document)
    return np.array(moved, np.int64)
