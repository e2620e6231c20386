"""Dual feasible functions: parts that sum to at most one still do so after rounding.

They round up what a document keeps others from using. Two documents that each fill more than half of a group cannot
share it, so each may be counted as a whole group. All of them are superadditive: parts that sum to at most ``z`` sum to
at most ``rounding(z)`` after rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from seqloom.planners.bounds.prices import Prices
from seqloom.planners.loops import NEVER

PRECISION = 1e-7
"""Relative slack against rounding in floating point; the bound stays below the truth."""


@dataclass(frozen=True)
class Rounding:
    """A dual feasible function."""

    function: Callable[[np.ndarray], np.ndarray]
    whole: float
    """Parts above this count as one; the function is nowhere above ``part / whole``."""

    def __call__(self, share: np.ndarray) -> np.ndarray:
        """Parts after rounding."""
        return self.function(share)

    def most(self, mean: float) -> float:
        """The most that ``rounding(z)`` is on average, if ``z`` is at most ``mean`` on average."""
        return min(1.0, max(0.0, mean) / self.whole)


def identity(share: np.ndarray) -> np.ndarray:
    """Count every part as it is."""
    return share


def steps(count: int) -> Rounding:
    """The dual feasible function ``floor((count + 1) x) / count``, exact at multiples of ``1 / (count + 1)``."""

    def rounding(share: np.ndarray) -> np.ndarray:
        scaled = share * (count + 1)
        whole = np.abs(scaled - np.rint(scaled)) < 1e-12  # a part just below must not count as if it reached
        return np.where(whole, share, np.floor(scaled) / count)

    return Rounding(rounding, count / (count + 1))


def without_small(least: float) -> Rounding:
    """The dual feasible function that ignores parts below ``least`` and rounds parts above ``1 - least`` up to one."""

    def rounding(share: np.ndarray) -> np.ndarray:
        kept = np.where(share < least + PRECISION, 0.0, share)
        return np.where(share > 1 - least + PRECISION, 1.0, kept)

    return Rounding(rounding, 1 - least)


ROUNDINGS: tuple[Rounding, ...] = (
    Rounding(identity, 1.0),
    steps(1),
    steps(2),
    steps(3),
    without_small(0.15),
    without_small(0.25),
    without_small(0.35),
    without_small(0.45),
)

NEGLIGIBLE = 0.15
"""Parts below this count as nothing in every rounding but the identity."""


# ---- merged: planners.bounds.options
# Every way to run every document, as arrays: what all parts of the bound look at.


NEAR = 1e-4
"""Bisections for the shortest step stop at this part of it."""


@dataclass(frozen=True, eq=False)
class Block:
    """Documents with the same ways to run: ``O`` ways, ``m`` documents, one lane. ns."""

    degree: np.ndarray
    """float64[O, 1]"""
    once: np.ndarray
    """float64[O, 1]: what a round costs a rank."""
    extra: np.ndarray
    """float64[O, 1]: what the group costs each of its ranks before any document."""
    cost: np.ndarray
    """float64[O, m]: what the document adds to each of its ranks."""
    pool: np.ndarray
    """float64[O, m]: of that, what other ranks may take over."""
    alone: np.ndarray
    """float64[O, m]: least time of a round with this document; NEVER where memory does not hold it."""
    share: np.ndarray
    """float64[O, m]: part of a rank's memory that the document fills, on each of its ranks."""
    tokens: np.ndarray
    """float64[m]"""

    @cached_property
    def work(self) -> np.ndarray:
        """float64[O, m]: what the document costs all its ranks together."""
        return self.degree * self.cost

    def open_until(self, step: float) -> np.ndarray:
        """bool[O, m]: ways that finish in a step of this length."""
        return self.alone <= step * (1 + PRECISION)

    def part(self, ways: np.ndarray, documents: np.ndarray) -> Block:
        """Some ways of some documents."""
        return Block(
            degree=self.degree[ways],
            once=self.once[ways],
            extra=self.extra[ways],
            cost=self.cost[ways][:, documents],
            pool=self.pool[ways][:, documents],
            alone=self.alone[ways][:, documents],
            share=self.share[ways][:, documents],
            tokens=self.tokens[documents],
        )


@dataclass(frozen=True, eq=False)
class Options:
    """Every way to run the documents of a batch, under all policies a plan may mix, in one lane. ns."""

    blocks: tuple[Block, ...]
    once: float
    """Least that a round costs a rank."""
    density: float
    """Least that a token costs the rank that computes its linear part."""
    capacity: float
    """Tokens a rank holds in one round, in the policy that holds most."""
    ranks: int
    longest: float
    """No step is shorter than its most demanding document, run as fast as it can be."""

    @classmethod
    def of(cls, prices: Sequence[Prices], ranks: int, lane: int) -> Options:
        """One lane of the priced policies; documents that are best off on one rank in any case have no other way."""
        tokens = prices[0].tokens
        alone = np.concatenate([p.alone for p in prices])
        every = Block(
            degree=np.concatenate([p.degree for p in prices])[:, None],
            once=np.concatenate([np.full(len(p.degree), p.once[lane]) for p in prices])[:, None],
            extra=np.concatenate([p.extra[lane] for p in prices])[:, None],
            cost=np.concatenate([p.cost[lane] for p in prices]),
            pool=np.concatenate([p.pool if lane < 2 else np.zeros_like(p.pool) for p in prices]),
            alone=alone,
            share=np.concatenate([tokens / (p.degree[:, None] * p.capacity) for p in prices]),
            tokens=tokens,
        )
        longest = float(alone.min(axis=0).max())
        density = (every.work / tokens)[alone < float(NEVER)].min()
        if every.pool.any():
            density = min(density, *(p.linear for p in prices))
        level = np.where(alone < float(NEVER), every.work, np.inf).min(axis=0).sum() / ranks
        whole = every.degree[:, 0] == every.degree.min()
        settled = _settled(every, len(prices), longest, max(longest, float(level)))
        blocks = every.part(whole, settled), every.part(np.ones_like(whole), ~settled)
        return cls(
            blocks=tuple(block for block in blocks if len(block.tokens)),
            once=float(every.once.min()),
            density=float(density),
            capacity=max(p.capacity for p in prices),
            ranks=ranks,
            longest=longest,
        )

    @cached_property
    def tokens(self) -> np.ndarray:
        """float64[n], block after block."""
        return np.concatenate([block.tokens for block in self.blocks])

    def least(self, value: Callable[[Block], np.ndarray]) -> np.ndarray:
        """float64[n]: every document's least value over its ways, block after block."""
        return np.concatenate([value(block).min(axis=0) for block in self.blocks])

    def least_work(self, step: float) -> np.ndarray:
        """float64[n]: work of every document in the cheapest way that finishes in a step of this length."""
        return self.least(lambda block: np.where(block.open_until(step), block.work, np.inf))


def _settled(every: Block, policies: int, longest: float, step: float) -> np.ndarray:
    """bool[n]: documents for which one rank (or team) is the best choice in every argument and under every policy.

    It is open in any step, does the least work, and is too small for any rounding to see in a step of this length.
    """
    settled = np.ones(len(every.tokens), bool)
    for rows in np.split(np.arange(len(every.degree)), policies):
        first = rows[0]  # the least degree
        small = every.cost[first] + every.once[first] * every.share[first] < NEGLIGIBLE * step
        settled &= small & (every.share[first] < NEGLIGIBLE) & (every.alone[first] <= longest)
        settled &= every.work[first] <= every.work[rows].min(axis=0)
    return settled


def densest_work(work: np.ndarray, tokens: np.ndarray, room: float) -> float:
    """The most work that so many tokens' room can hold, with the last document in part."""
    order = np.argsort(-work / tokens, kind="stable")
    filled = np.cumsum(tokens[order])
    part = np.clip(1 - (filled - room) / tokens[order], 0.0, 1.0)
    return float((part * work[order]).sum())


def first_feasible(impossible: Callable[[float], bool], low: float) -> float:
    """Bisect for the shortest step that is not impossible; returns its lower end, ``low`` or more."""
    if not impossible(low * (1 + NEAR)):
        return low
    high = 2 * low
    while impossible(high):
        low, high = high, 2 * high
    while high - low > NEAR * low:
        middle = (low + high) / 2
        if impossible(middle):
            low = middle
        else:
            high = middle
    return low
