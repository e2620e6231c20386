"""Planner ``flex``: the FlexSP problem on true lengths, without buckets, without a solver, in milliseconds.

The decoder answers "can this batch finish within this time, and how?". The search asks it:

1. bisection on the time, once with the real islands and once with each wider virtual island;
2. a local search around the best answer, at a slightly shorter time than it reached: change where a round's limit is
   set, which degree a long document starts from, or (small batches) the order of placement; keep what leaves less work
   unplaced; when nothing is left, the time is beaten and the next one is tried.

The budget counts decodings, so the same inputs give the same plan on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.plan import Plan
from seqloom.planners.decode import LADDER_STEPS, Draft, Keys, decode
from seqloom.planners.fill import NEVER, Tables
from seqloom.planners.problem import Problem, Seat, fitting_problems, to_plan
from seqloom.planners.settle import Seats, settle

LADDER_GROWTH = 22
"""Per cent from one time limit of a round's ladder to the next; finer steps cost time and find little."""
TOLERANCE = 500
"""Bisection stops when the time is known to one part in this many."""
STRIDE = 400
"""The local search aims at times shorter by one part in this many."""
SMALL_CLUSTER = 16
"""Up to this many ranks every virtual island is tried."""
LARGE_PROBLEM = 1 << 20
"""Ranks times documents from which on only the real islands are tried, with fewer limits per round, and no further."""
MOST_FLOORS = 16
"""Random changes draw the least degree of a round from the first so many, counted cyclically."""
SETTLED = 66
"""Decodings after which a change that is only as good is taken too, to get away from where nothing improves."""
NEAR_BOUND = 64
"""One part in this many above the bound, and virtual islands are not tried on a large batch."""
ORDERED_BELOW = 64
"""Batches of fewer documents than this may change the order of placement."""


@dataclass
class Search:
    """The state of one search: the best seating found so far and what it took."""

    tables: Tables
    island: int
    """Real island size, ranks; ``tables.island`` is the virtual one."""
    keys: Keys
    draft: Draft
    seats: Seats
    best_ns: int = int(NEVER)
    """Shortest step found, over real islands."""
    reached: int = int(NEVER)
    """Shortest target met, over virtual islands."""
    best: tuple[Draft, Seats] | None = None
    evaluations: int = 0

    @classmethod
    def over(cls, tables: Tables, virtual: int) -> Search:
        """Start a search with islands of ``virtual`` ranks."""
        n = len(tables.tokens)
        large = tables.ranks * n > LARGE_PROBLEM
        usable = [usable_degree(int(degree), virtual, tables) for degree in tables.degrees]
        alone = np.where(np.array(usable)[:, None], tables.alone, NEVER)
        order = np.argsort(-tables.tokens, kind="stable")
        growth = LADDER_GROWTH * 2 if large else LADDER_GROWTH
        keys = Keys(order, True, np.zeros(n, np.int64), np.full(n, -1, np.int64), growth)
        draft = Draft.empty(n, tables.ranks // virtual)
        seats = Seats.empty(n, tables.ranks // tables.island)
        return cls(tables._replace(island=virtual, alone=alone), tables.island, keys, draft, seats)

    def attempt(self, target: int, keys: Keys) -> int:
        """Decode once; returns the value left unplaced, and remembers the seating if it is the best so far."""
        self.evaluations += 1
        left = int(decode(self.tables, target, keys, self.draft))
        if left == 0:
            self.reached = min(self.reached, int(self.draft.load.max()))
            step = int(settle(self.tables, self.draft, self.island, self.seats))
            if step < self.best_ns:
                self.best_ns = step
                self.best = (Draft(*(a.copy() for a in self.draft)), Seats(*(a.copy() for a in self.seats)))
        return left

    def bisect(self, bound: int, keys: Keys, attempts: int) -> None:
        """Find the shortest target that these keys meet, between ``bound`` and the best known."""
        low, high = bound - 1, min(self.reached, bound * 9 // 8)
        if self.best is None:
            while self.attempt(high, keys):
                low, high = high, high * 3 // 2
        for _ in range(attempts):
            high = min(high, self.reached)
            if high - low <= bound // TOLERANCE:
                break
            middle = (low + high) // 2
            if self.attempt(middle, keys):
                low = middle

    def climb(self, bound: int, evaluations: int, seed: int) -> None:
        """Improve the best answer by changing one key at a time, for that many decodings."""
        random = Random(seed)
        keys, stop = self.keys, self.evaluations + evaluations
        while self.evaluations < stop and self.best_ns > bound + bound // 1000:
            target = self.reached - self.reached // STRIDE
            left = self.attempt(target, keys)
            rungs, first = self.rungs_taken(), self.evaluations
            for change in changes(len(rungs), random):
                if left == 0 or self.evaluations >= stop:
                    break
                candidate = change(keys, rungs)
                remaining = self.attempt(target, candidate)
                if remaining < left or (remaining == left and self.evaluations > first + SETTLED):
                    keys, left, rungs = candidate, remaining, self.rungs_taken()
            if left:
                break
            self.bisect(bound, keys, 3)

    def rungs_taken(self) -> np.ndarray:
        """The steps of their ladders that the rounds of the last decoding took."""
        return self.draft.rung[: max(1, self.draft.count[1])].copy()


Change = Callable[[Keys, np.ndarray], Keys]
"""From the current keys, and the rungs that they led to, to keys that differ in one respect."""


def changes(rounds: int, random: Random) -> Iterator[Change]:
    """Changes to try, endless: first every early round's limit, nearest steps first, then anything at random."""
    for step in (1, -1, 2, -2, 3, -3, 5, -4, 7, -6, 9):
        for index in range(min(rounds, 6)):
            yield partial(shift_rung, index=index, step=step)
    while True:
        yield partial(change_at_random, random=random)


def shift_rung(keys: Keys, rungs: np.ndarray, *, index: int, step: int) -> Keys:
    """Take a neighbouring limit for one of the first rounds."""
    index = min(index, len(rungs) - 1)
    return keys._replace(rung=replaced(keys.rung, index, max(0, int(rungs[index]) + step)))


def change_at_random(keys: Keys, rungs: np.ndarray, *, random: Random) -> Keys:
    """Change the order (of small batches), the degree that a document starts from, or some round's limit."""
    n, draw = len(keys.order), random.random()
    if n < ORDERED_BELOW and draw < 0.5:
        return keys._replace(order=shuffled(keys.order, random), falling=False)
    if draw < 0.7:
        document = int(keys.order[int(n * random.random() ** 2)])
        return keys._replace(widen=replaced(keys.widen, document, 1 - int(keys.widen[document])))
    rung = int(random.random() * LADDER_STEPS * MOST_FLOORS) if random.random() < 0.85 else -1
    return keys._replace(rung=replaced(keys.rung, int(len(rungs) * random.random()), rung))


def replaced(array: np.ndarray, index: int, value: int) -> np.ndarray:
    """A copy of the array with one entry changed."""
    copy = array.copy()
    copy[index] = value
    return copy


def shuffled(order: np.ndarray, random: Random) -> np.ndarray:
    """The order with one to three documents moved to other places."""
    moved = order.tolist()
    for _ in range(1 + int(3 * random.random())):
        document = moved.pop(int(len(moved) * random.random()))
        moved.insert(int((len(moved) + 1) * random.random()), document)
    return np.array(moved, np.int64)


def tiles(degree: int, island: int, node: int) -> bool:
    """Whether aligned blocks of this degree lie the same way in every island, or are made of whole islands."""
    return degree % island == 0 if degree > island else island >= node or island % degree == 0


def usable_degree(degree: int, virtual: int, tables: Tables) -> bool:
    """Whether groups of this degree can be decoded on virtual islands and then always be seated on the real ones."""
    if not tiles(degree, virtual, tables.node):
        return False
    return virtual == tables.island or max(degree, tables.island) % min(degree, tables.island) == 0


def virtual_islands(tables: Tables) -> list[int]:
    """Island sizes to decode with: the real one, the whole cluster, and on small clusters every block between."""
    island, ranks, node = tables.island, tables.ranks, tables.node
    between = [
        int(degree)
        for degree in tables.degrees
        if island < degree < ranks <= SMALL_CLUSTER and degree % island == 0 and ranks % degree == 0
        if degree % node == 0 or node % degree == 0
    ]
    world = [ranks] if island < ranks and ranks * len(tables.tokens) <= LARGE_PROBLEM else []
    return [island, *between, *world]


def default_evaluations(tables: Tables, island: int) -> int:
    """Decodings spent on local search: many for small batches, where each is quick and each document counts."""
    if island < tables.ranks and tables.ranks * len(tables.tokens) > LARGE_PROBLEM:
        return 0  # there the bisection already ends where the search would
    total = 100_000 if island == tables.ranks else 50_000
    return max(8, min(1_000, total // (len(tables.tokens) * len(tables.shape_degree))))


def work_bound(tables: Tables) -> int:
    """A quick lower bound on the step without its overhead, ns: cheapest work and memory share over all ranks."""
    best = int(tables.alone.min(axis=0).max())
    degree = tables.shape_degree[:, None]
    room = degree * tables.capacity
    for lane in range(len(tables.cost)):
        share = tables.fixed[lane][:, None] * tables.tokens // tables.capacity
        work = np.where(tables.tokens <= room, tables.cost[lane] * degree + share, NEVER)
        best = max(best, int(work.min(axis=0).sum()) // tables.ranks)
    return max(best, 1)


def start_searches(tables: Tables, bound: int) -> list[Search]:
    """Bisect once per virtual island, as long as there is much to gain; the best first."""
    searches: list[Search] = []
    for virtual in virtual_islands(tables):
        if searches and len(tables.tokens) >= ORDERED_BELOW and searches[0].best_ns - bound <= bound // NEAR_BOUND:
            break
        search = Search.over(tables, virtual)
        search.bisect(bound, search.keys, 12)
        searches.append(search)
    return sorted(searches, key=lambda search: search.best_ns)


def finish_searches(searches: list[Search], bound: int, evaluations: int | None, seed: int) -> Search:
    """Spend the local search on the best start (on all of them if the batch is small); returns the best of all.

    Args:
        evaluations: decodings for each local search; None chooses by size.
    """
    tables = searches[0].tables
    budget = default_evaluations(tables, searches[0].island) if evaluations is None else evaluations
    for search in searches if len(tables.tokens) < ORDERED_BELOW else searches[:1]:
        search.climb(bound, budget, seed)
    return min(searches, key=lambda search: search.best_ns)


def rounds_of(problem: Problem, draft: Draft, seats: Seats) -> list[list[Seat]]:
    """The seating as rounds of seats, in running order."""
    members: list[list[int]] = [[] for _ in range(int(draft.count[0]))]
    for document, group in enumerate(draft.group_of.tolist()):
        members[group].append(document)
    rounds: dict[int, list[Seat]] = {}
    for group, documents in enumerate(members):
        seat = Seat(problem.tables.shapes[draft.group_shape[group]], int(seats.start[group]), documents)
        rounds.setdefault(int(seats.round_of[group]), []).append(seat)
    return [rounds[index] for index in sorted(rounds)]


def plan_flex(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    evaluations: int | None = None,
    seed: int = 0,
    only: Variant | None = None,
) -> Plan:
    """Plan a batch. Every variant that can still win is started, the best one is searched further.

    Args:
        lengths: int64[n] tokens.
        evaluations: decodings for the local search; None chooses by size.
        seed: start of its pseudo-random choices.
        only: the one variant to plan for; None tries all.
    """
    problems = fitting_problems(lengths, cost) if only is None else [Problem.of(lengths, cost, only)]
    bounds = [work_bound(problem.search) for problem in problems]
    overheads = [cost.step_overhead_ns(problem.variant) for problem in problems]
    best: tuple[int, int, list[Search]] | None = None
    for index in sorted(range(len(problems)), key=lambda index: bounds[index] + overheads[index]):
        if best is not None and bounds[index] + overheads[index] >= best[0]:
            break  # even at its bound this variant would not win
        searches = start_searches(problems[index].search, bounds[index])
        step = searches[0].best_ns + overheads[index]
        if best is None or step < best[0]:
            best = (step, index, searches)
    assert best is not None
    _, index, searches = best
    search = finish_searches(searches, bounds[index], evaluations, seed)
    assert search.best is not None
    return to_plan(problems[index], rounds_of(problems[index], *search.best), "flex")
