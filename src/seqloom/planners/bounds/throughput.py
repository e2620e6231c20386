"""The bound from throughput: all tokens and all work must get through the ranks in whole rounds."""

from __future__ import annotations

import itertools

import numpy as np

from seqloom.planners.bounds.options import (
    Options,
    densest_work,
    first_feasible,
    longest_bound,
    needs_all_ranks,
    whole_rounds,
)
from seqloom.planners.bounds.roundings import PRECISION
from seqloom.planners.fill import NEVER

JOINING_STEPS = 9
"""Amounts of tokens for which it is tried whether they join the rounds of whole-cluster documents."""


def throughput_bound(options: Options, start: float) -> float:
    """The shortest step in which the ranks get through all tokens and all work in whole rounds."""
    fixed = float(options.fixed.min())
    work = np.where(options.alone < float(NEVER), options.degree * options.cost, np.inf)
    density = float((work / options.tokens).min())
    if fixed <= 0 or density <= 0:
        return start
    whole = needs_all_ranks(options, options.alone < float(NEVER))

    def impossible(step: float) -> bool:
        cheapest = np.where(options.alone <= step * (1 + PRECISION), work, np.inf).min(axis=0)
        if overloaded(options, step, float(options.tokens.sum()), float(cheapest.sum()), density):
            return True
        return bool(whole.any()) and _apart_overloaded(options, step, whole, cheapest, density)

    return first_feasible(impossible, max(start, longest_bound(options)))


def _apart_overloaded(options: Options, step: float, whole: np.ndarray, cheapest: np.ndarray, density: float) -> bool:
    """Whether the step is too short if documents that need the whole cluster run in rounds of their own.

    Others may join these rounds, as far as memory allows and at that degree's price; what remains must get done in the
    time that remains. Every number of such rounds, and every amount that joins, is ruled out in turn.
    """
    widest = options.degree[:, 0] == options.ranks
    tokens, others = options.tokens[~whole], cheapest[~whole]
    joining = options.cost[widest].min(axis=0)[~whole] / tokens  # ns that a token costs all ranks together
    own = float(options.cost[widest].min(axis=0)[whole].sum())
    for rounds in range(whole_rounds(options, whole), len(options.tokens) + 1):
        left = step - rounds * float(options.fixed.min()) - own
        if left < 0 or not len(tokens):
            return left < 0
        room = rounds * options.ranks * options.capacity - float(options.tokens[whole].sum())
        joined = np.linspace(0.0, min(room, float(tokens.sum())), JOINING_STEPS)
        for low, high in itertools.pairwise(joined):
            rest = float(others.sum()) - densest_work(others, tokens, high)
            time = left - low * float(joining.min())
            if time >= 0 and not overloaded(options, time, float(tokens.sum()) - high, rest, density):
                return False
    return True


def overloaded(options: Options, step: float, tokens: float, work: float, density: float) -> bool:
    """Whether so many tokens and so much work, at least ``density`` per token, are too much for the ranks.

    A rank that runs ``r`` rounds holds at most ``r`` times its capacity and has ``step - r x fixed`` left to work. Half
    a round is no use, which a count of rounds in fractions does not see.
    """
    if tokens <= 0:
        return False
    fixed = float(options.fixed.min())
    rounds = np.arange(1, min(step / fixed, len(options.tokens)) + 1)
    if not len(rounds):
        return True
    time = step - rounds * fixed
    held = np.minimum(rounds * options.capacity, time / density)
    if tokens > options.ranks * held.max() * (1 + PRECISION):
        return True
    prices = fixed / options.capacity * 2.0 ** np.arange(-3, 5)
    room = options.ranks * (prices[:, None] * held + time).max(axis=1)
    return bool((prices * tokens + work > room * (1 + PRECISION)).any())
