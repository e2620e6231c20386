"""The bound from throughput: all tokens and all work must get through the ranks in whole rounds."""

from __future__ import annotations

import numpy as np

from seqloom.planners.bounds.options import Options, first_feasible
from seqloom.planners.bounds.roundings import PRECISION


def throughput_bound(options: Options, start: float) -> float:
    """The shortest step in which the ranks get through all tokens and all work in whole rounds."""
    if options.once <= 0 or options.density <= 0:
        return start
    tokens = float(options.tokens.sum())

    def impossible(step: float) -> bool:
        return overloaded(options, step, tokens, float(options.least_work(step).sum()))

    return first_feasible(impossible, max(start, options.longest))


def overloaded(options: Options, step: float, tokens: float, work: float) -> bool:
    """Whether so many tokens and so much work are too much for the ranks.

    A rank that runs ``r`` rounds computes at most ``r`` times its capacity of tokens and has ``step - r x once`` left
    to work. Half a round is no use, which a count of rounds in fractions does not see.
    """
    rounds = np.arange(1, min(step / options.once, len(options.tokens)) + 1)
    if not len(rounds):
        return True
    time = step - rounds * options.once
    held = np.minimum(rounds * options.capacity, time / options.density)
    if tokens > options.ranks * held.max() * (1 + PRECISION):
        return True
    prices = options.once / options.capacity * 2.0 ** np.arange(-3, 5)
    room = options.ranks * (prices[:, None] * held + time).max(axis=1)
    return bool((prices * tokens + work > room * (1 + PRECISION)).any())
