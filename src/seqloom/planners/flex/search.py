"""The search behind ``flex``: ask the decoder for shorter and shorter steps, and change its choices one at a time.

The budget counts decodings, so the same inputs give the same answer on any machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

import numpy as np

from seqloom.planners.fill import NEVER, Tables
from seqloom.planners.flex.assign_ranks import Seats, settle
from seqloom.planners.flex.decode import LADDER_STEPS, Draft, Keys, decode

LADDER_GROWTH = 22
"""Per cent from one time limit of a round's ladder to the next; finer steps cost time and find little."""
TOLERANCE = 500
"""Bisection stops when the time is known to one part in this many."""
STRIDE = 400
"""The local search aims at times shorter by one part in this many."""
SETTLED = 66
"""Decodings after which a change that is only as good is taken too, to get away from where nothing improves."""
MOST_FLOORS = 16
"""Random changes draw the least degree of a round from the first so many, counted cyclically."""
ORDERED_BELOW = 64
"""Batches of fewer documents than this may change the order of placement."""
LARGE_PROBLEM = 1 << 20
"""Ranks times documents from which on only the real shard groups are tried, with fewer limits per round, and no
further.
"""


@dataclass
class Search:
    """The state of one search: the best seating found so far and what it took."""

    tables: Tables
    shard_group: int
    """Real shard group size, ranks; ``tables.shard_group`` is the virtual one."""
    keys: Keys
    draft: Draft
    seats: Seats
    best_ns: int = int(NEVER)
    """Shortest step found, over real shard groups."""
    reached: int = int(NEVER)
    """Shortest target met, over virtual shard groups."""
    best: tuple[Draft, Seats] | None = None
    evaluations: int = 0

    @classmethod
    def over(cls, tables: Tables, virtual: int) -> Search:
        """Start a search with shard groups of ``virtual`` ranks."""
        n = len(tables.tokens)
        large = tables.ranks * n > LARGE_PROBLEM
        usable = [usable_degree(int(degree), virtual, tables) for degree in tables.degrees]
        alone = np.where(np.array(usable)[:, None], tables.alone, NEVER)
        order = np.argsort(-tables.tokens, kind="stable")
        growth = LADDER_GROWTH * 2 if large else LADDER_GROWTH
        keys = Keys(order, True, np.zeros(n, np.int64), np.full(n, -1, np.int64), growth)
        draft = Draft.empty(n, tables.ranks // virtual)
        seats = Seats.empty(n, tables.ranks // tables.shard_group)
        return cls(tables._replace(shard_group=virtual, alone=alone), tables.shard_group, keys, draft, seats)

    def attempt(self, target: int, keys: Keys) -> int:
        """Decode once; returns the value left unplaced, and remembers the seating if it is the best so far."""
        self.evaluations += 1
        left = int(decode(self.tables, target, keys, self.draft))
        if left == 0:
            self.reached = min(self.reached, int(self.draft.load.max()))
            step = int(settle(self.tables, self.draft, self.shard_group, self.seats))
            if step < self.best_ns:
                self.best_ns = step
                self.best = (Draft(*(a.copy() for a in self.draft)), Seats(*(a.copy() for a in self.seats)))
        return left

    def bisect(self, bound: int, keys: Keys, attempts: int) -> None:
        """Find the shortest target that these keys meet, between ``bound`` and the best known."""
        low, high = bound - 1, min(self.reached, bound * 9 // 8)
        if self.best is None:
            while high < NEVER and self.attempt(high, keys):
                low, high = high, high * 3 // 2 + 1
        for _ in range(attempts):
            high = min(high, self.reached)
            if high - low <= bound // TOLERANCE:
                break
            middle = (low + high) // 2
            if self.attempt(middle, keys):
                low = middle

    def climb(self, bound: int, evaluations: int, seed: int) -> None:
        """Improve the best answer by changing one key at a time, for that many decodings."""
        if self.best is None:
            return  # these virtual shard groups hold no plan
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


def tiles(degree: int, shard_group: int, node: int) -> bool:
    """Whether aligned blocks of this degree lie the same way in every shard group, or are made of whole shard
    groups.
    """
    return degree % shard_group == 0 if degree > shard_group else shard_group >= node or shard_group % degree == 0


def usable_degree(degree: int, virtual: int, tables: Tables) -> bool:
    """Whether groups of this degree can be decoded on virtual shard groups and then always be seated on the
    real ones.
    """
    if not tiles(degree, virtual, tables.node):
        return False
    return virtual == tables.shard_group or max(degree, tables.shard_group) % min(degree, tables.shard_group) == 0
