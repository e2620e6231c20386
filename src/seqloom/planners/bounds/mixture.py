"""The bound from checkpointing: rounds that keep more are faster and hold less, and every round makes one choice.

Under full sharding a plan has so many rounds of each variant. Rounds of a fast variant save at most so much per token
that they hold; enumerating the numbers of rounds of each variant gives a bound that a free choice for every document
would miss.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from seqloom.planners.bounds.prices import Prices

MOST_ROUNDS = 12
"""Plans of more rounds are left to the other parts of the bound."""


def mixture_bound(prices: Sequence[Prices], ranks: int) -> float:
    """ns that no plan beats whose rounds, all over the whole cluster, each use one of these variants."""
    tokens = float(prices[0].tokens.sum())
    held = np.array([p.capacity * ranks for p in prices])  # tokens of one round
    fixed = np.stack([p.once for p in prices], axis=1)  # [L, V]
    work = np.stack([(p.cost * p.degree[:, None]).min(axis=1) for p in prices])  # [V, L, n]
    slowest = work.max(axis=0)
    saved = ((slowest - work) / prices[0].tokens).max(axis=2).T  # [L, V] ns per token in a round of that variant
    best = np.inf
    for rounds in range(1, MOST_ROUNDS + 1):
        if rounds * fixed.min(axis=1).max() >= best:
            return best
        for choice in itertools.combinations_with_replacement(range(len(prices)), rounds):
            count = np.bincount(choice, minlength=len(prices))
            if count @ held < tokens:
                continue  # these rounds do not hold the batch
            kept = _most_saved(saved, count * held, tokens)
            best = min(best, float((fixed @ count + (slowest.sum(axis=1) - kept) / ranks).max()))
    return min(best, float((MOST_ROUNDS + 1) * fixed.min(axis=1).max()))


def _most_saved(saved: np.ndarray, room: np.ndarray, tokens: float) -> np.ndarray:
    """float64[L]: the most that can be saved in each lane if each variant's rounds hold so many tokens at most."""
    most = np.zeros(len(saved))
    for lane, rates in enumerate(saved):
        left = tokens
        for variant in np.argsort(-rates, kind="stable"):
            taken = min(left, room[variant])
            most[lane] += rates[variant] * taken
            left -= taken
    return most
