"""Every way to run every document, as arrays: what all parts of the bound look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.planners.bounds.roundings import PRECISION, ROUNDINGS
from seqloom.planners.fill import NEVER


@dataclass(frozen=True, eq=False)
class Options:
    """Every way to run a document, under all variants a plan may mix: ``O`` ways, ``n`` documents, one lane. ns."""

    degree: np.ndarray
    """float64[O, 1]"""
    cost: np.ndarray
    """float64[O, n]: what the document adds to its group."""
    fixed: np.ndarray
    """float64[O, 1]: what the group costs before it."""
    alone: np.ndarray
    """float64[O, n]: time of a group with this document only, over all lanes; NEVER where memory does not hold it."""
    share: np.ndarray
    """float64[O, n]: part of the group's memory that the document fills."""
    tokens: np.ndarray
    """float64[n]"""
    capacity: float
    """Tokens a rank holds in one round, in the variant that holds most."""
    ranks: int
    island: int

    @classmethod
    def of(cls, lengths: np.ndarray, cost: CostModel, variants: Sequence[Variant], lane: int) -> Options:
        """Price the documents in every shape under each of the variants."""
        tables = [cost.tables(lengths, variant) for variant in variants]
        degrees = np.unique(tables[0].degree)
        degree = np.tile(degrees, len(tables)).astype(float)[:, None]
        room = degree * np.repeat([float(t.capacity) for t in tables], len(degrees))[:, None]
        tokens = tables[0].tokens.astype(float)

        def cheapest(values: list[np.ndarray]) -> np.ndarray:
            """The best shape of every degree, variant by variant: one row for what was one per shape."""
            return np.concatenate(
                [[v[t.degree == d].min(axis=0) for d in degrees] for v, t in zip(values, tables, strict=True)]
            ).astype(float)

        alone = cheapest([(t.cost + t.fixed[:, :, None]).max(axis=0) for t in tables])
        return cls(
            degree=degree,
            cost=cheapest([t.cost[lane] for t in tables]),
            fixed=cheapest([t.fixed[lane][:, None] for t in tables]),
            alone=np.where(tokens <= room, alone, float(NEVER)),
            share=tokens / room,
            tokens=tokens,
            capacity=float(max(t.capacity for t in tables)),
            ranks=cost.ranks,
            island=cost.island_size,
        )


def longest_bound(options: Options) -> float:
    """No step is shorter than its most demanding document, run as fast as it can be."""
    return float(options.alone.min(axis=0).max())


def needs_all_ranks(options: Options, open_to: np.ndarray) -> np.ndarray:
    """bool[n]: documents whose only open degree is the whole cluster."""
    return ~open_to[options.degree[:, 0] != options.ranks].any(axis=0)


def whole_rounds(options: Options, whole: np.ndarray) -> int:
    """Rounds that documents on the whole cluster need at least, by memory."""
    share = options.share[options.degree[:, 0] == options.ranks]
    if not whole.any() or not len(share):
        return 0
    needed = max(float(np.minimum(rounding(share), 1.0).min(axis=0)[whole].sum()) for rounding in ROUNDINGS)
    return int(np.ceil(needed * (1 - PRECISION)))


def densest_work(work: np.ndarray, tokens: np.ndarray, room: float) -> float:
    """The most work that so many tokens' room can hold, with the last document in part."""
    order = np.argsort(-work / tokens, kind="stable")
    filled = np.cumsum(tokens[order])
    part = np.clip(1 - (filled - room) / tokens[order], 0.0, 1.0)
    return float((part * work[order]).sum())


def first_feasible(impossible: Callable[[float], bool], low: float) -> float:
    """Bisect for the shortest step that is not impossible; returns its lower end, ``low`` or more."""
    if not impossible(low * (1 + 1e-3)):
        return low
    high = 2 * low
    while impossible(high):
        low, high = high, 2 * high
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        if impossible(middle):
            low = middle
        else:
            high = middle
    return low
