"""The search behind ``flex``: ask the decoder for shorter and shorter steps, and change its parameters one at a time.

The budget counts decodings, so the same inputs give the same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from seqloom.planners.compiled import kernels
from seqloom.planners.loops import MAX_LIMITS, NEVER, BatchTables, DecodedRounds, DecodeParams, RankAssignment

LIMIT_GROWTH = 22
"""Per cent from one time limit of a round to the next; finer steps cost time and find little."""
TOLERANCE = 500
"""Bisection stops when the time is known to one part in this many."""
STRIDE = 400
"""The local search aims at times shorter by one part in this many."""
PLATEAU = 66
"""Decodings after which a change that is only as good is taken too, to leave a point that nothing improves."""
MAX_LEAST_DEGREES = 16
"""Random changes draw the least degree of a round from the first so many, counted cyclically."""
REORDERED_BELOW = 64
"""Batches of fewer documents than this may change the order of placement."""
LARGE_PROBLEM = 1 << 20
"""Ranks times documents from which on only the real shard groups are tried, with fewer limits per round."""


@dataclass
class FlexSearch:
    """One search for the shortest step: the best assignment so far and what it took."""

    tables: BatchTables
    shard_group: int
    """Ranks of a real shard group; ``tables.shard_group`` is the virtual one."""
    params: DecodeParams
    """What the search starts from."""
    rounds: DecodedRounds
    """The last decoding."""
    ranks: RankAssignment
    """The ranks of the last complete decoding."""
    best_ns: int = int(NEVER)
    """Shortest step, over real shard groups."""
    reached_ns: int = int(NEVER)
    """Shortest target met, over virtual shard groups."""
    best: tuple[DecodedRounds, RankAssignment] | None = None
    evaluations: int = 0

    @classmethod
    def over(cls, tables: BatchTables, virtual: int) -> FlexSearch:
        """Start a search with virtual shard groups of ``virtual`` ranks."""
        n = len(tables.tokens)
        large = tables.ranks * n > LARGE_PROBLEM
        usable = [is_usable(int(degree), virtual, tables) for degree in tables.degrees]
        solo_ns = np.where(np.array(usable)[:, None], tables.solo_ns, NEVER)
        order = np.argsort(-tables.tokens, kind="stable")
        growth = LIMIT_GROWTH * 2 if large else LIMIT_GROWTH
        params = DecodeParams(order, True, np.zeros(n, np.int64), np.full(n, -1, np.int64), growth)
        rounds = DecodedRounds.empty(n, tables.ranks // virtual)
        ranks = RankAssignment.empty(n, tables.ranks // tables.shard_group)
        return cls(tables._replace(shard_group=virtual, solo_ns=solo_ns), tables.shard_group, params, rounds, ranks)

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
            for change in changes(len(taken), random):
                if left == 0 or self.evaluations >= stop:
                    break
                candidate = change(params, taken)
                remaining = self.attempt(target, candidate)
                if remaining < left or (remaining == left and self.evaluations > first + PLATEAU):
                    params, left, taken = candidate, remaining, self._limits_taken()
            if left:
                break
            self.bisect(bound, params, 3)

    def _limits_taken(self) -> np.ndarray:
        """The limit index of every round of the last decoding."""
        return self.rounds.limit_index[: max(1, self.rounds.count[1])].copy()


Change = Callable[[DecodeParams, np.ndarray], DecodeParams]
"""From the current parameters, and the limits that they led to, to parameters that differ in one respect."""


def changes(rounds: int, random: Random) -> Iterator[Change]:
    """Changes to try, endless: first every early round's limit, nearest ones first, then anything at random."""
    for step in (1, -1, 2, -2, 3, -3, 5, -4, 7, -6, 9):
        for index in range(min(rounds, 6)):
            yield partial(shift_limit, index=index, step=step)
    while True:
        yield partial(change_at_random, random=random)


def shift_limit(params: DecodeParams, taken: np.ndarray, *, index: int, step: int) -> DecodeParams:
    """Take a neighbouring limit for one of the first rounds."""
    index = min(index, len(taken) - 1)
    return params._replace(limit_index=replaced(params.limit_index, index, max(0, int(taken[index]) + step)))


def change_at_random(params: DecodeParams, taken: np.ndarray, *, random: Random) -> DecodeParams:
    """Change the order (of small batches), the degree that a document starts from, or some round's limit."""
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


def tiles(degree: int, shard_group: int, node: int) -> bool:
    """Whether aligned blocks of this degree lie alike in every shard group, or are made of whole shard groups."""
    return degree % shard_group == 0 if degree > shard_group else shard_group >= node or shard_group % degree == 0


def is_usable(degree: int, virtual: int, tables: BatchTables) -> bool:
    """Whether groups of this degree, decoded on virtual shard groups, always find ranks on the real ones."""
    if not tiles(degree, virtual, tables.node):
        return False
    return virtual == tables.shard_group or max(degree, tables.shard_group) % min(degree, tables.shard_group) == 0
