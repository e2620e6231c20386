"""The bound from the ranks' timelines: side by side and one after another, in shares of memory and of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqloom.planners.bounds.options import Block, Options, first_feasible
from seqloom.planners.bounds.roundings import PRECISION, ROUNDINGS, Rounding, steps

IDENTITY = ROUNDINGS[0]
OF_GROUPS = (steps(1), steps(2))
"""Functions that are tried, beside the identity, on what a group costs before its first document."""


def timeline_bound(options: Options, start: float) -> float:
    """The shortest step in which the documents fit side by side and one after another on the ranks' timelines."""
    bound = max(start, options.longest)
    groups = group_costs(options, bound)
    for memory in dict.fromkeys((tuned_rounding(options, bound), IDENTITY)):
        paid = [
            block.cost + block.once * np.minimum(memory(block.share), 1.0) + extra
            for block, extra in zip(options.blocks, groups, strict=True)
        ]
        for time in ROUNDINGS:
            bound = first_feasible(lambda step: _overfull(options, paid, time, step), bound)  # noqa: B023
    return bound


def places(block: Block, rounding: Rounding) -> np.ndarray:
    """float64[O, m]: rounds of ranks that a document fills, all its ranks together."""
    return block.degree * np.minimum(rounding(block.share), 1.0)


def tuned_rounding(options: Options, step: float) -> Rounding:
    """The function that makes the most of a rank's memory.

    One for all degrees, because documents of any degree may share it.
    """

    def total(rounding: Rounding) -> float:
        def value(block: Block) -> np.ndarray:
            return np.where(block.open_until(step), block.work + block.once * places(block, rounding), np.inf)

        return float(options.least(value).sum())

    return max(ROUNDINGS, key=total)


def group_costs(options: Options, step: float) -> list[np.ndarray]:
    """float64[O, m] per block: what each document pays of what its group costs before the first.

    A group has one degree, so every degree may have its own function: a long document in a wide group often keeps
    others out, while short ones fill small groups to the last token.
    """
    paid = [block.extra * block.share for block in options.blocks]

    def total(block: Block, extra: np.ndarray) -> float:
        value = block.work + block.degree * (block.once * block.share + extra)
        return float(np.where(block.open_until(step), value, np.inf).min(axis=0).sum())

    for index, block in enumerate(options.blocks):
        best = total(block, paid[index])
        for degree in np.unique(block.degree[block.extra > 0])[::-1]:
            rows = block.degree[:, 0] == degree
            for rounding in OF_GROUPS:
                candidate = paid[index].copy()
                candidate[rows] = block.extra[rows] * np.minimum(rounding(block.share[rows]), 1.0)
                value = total(block, candidate)
                if value > best:
                    best, paid[index] = value, candidate
    return paid


def _overfull(options: Options, paid: Sequence[np.ndarray], time: Rounding, step: float) -> bool:
    """Whether the documents need more than all ranks for a step of this length.

    What other ranks may take over is no part that could be rounded; it leaves so much less of the ranks' time to those
    that are.
    """
    need, pool = 0.0, 0.0
    for block, whole in zip(options.blocks, paid, strict=True):
        stays = whole if time is IDENTITY else np.maximum(whole - block.pool, 0.0)
        parts = np.where(block.open_until(step), block.degree * time(stays / step), np.inf)
        need += float(parts.min(axis=0).sum())
        if time is not IDENTITY:
            pool += float((block.degree * block.pool).min(axis=0).sum())
    room = options.ranks * time.most(1 - pool / (options.ranks * step))
    return need > room * (1 + PRECISION)
