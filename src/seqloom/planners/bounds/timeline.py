"""The bound from the ranks' timelines: side by side and one after another, in shares of groups and of the step."""

from __future__ import annotations

import numpy as np

from seqloom.planners.bounds.options import Options, first_feasible, longest_bound
from seqloom.planners.bounds.roundings import PRECISION, ROUNDINGS, Rounding


def timeline_bound(options: Options, start: float) -> float:
    """The shortest step in which the documents fit side by side and one after another on the ranks' timelines."""
    bound = max(start, longest_bound(options))
    tuned = tuned_share(options, bound)
    for share in (tuned, options.share):
        paid = options.cost + options.fixed * share
        for time in ROUNDINGS:
            bound = first_feasible(lambda step: _overfull(options, paid, time, step), bound)  # noqa: B023
    return bound


def tuned_share(options: Options, step: float) -> np.ndarray:
    """float64[O, n]: parts of a group's memory, rounded by the function that suits each degree best.

    Groups of one degree are filled by documents at that degree only, so every degree may have its own function:
    a long document in a wide group often keeps others out, while short ones fill small groups to the last token.
    """
    share = options.share.copy()
    reachable = options.alone <= max(step, longest_bound(options)) * (1 + PRECISION)

    def total(candidate: np.ndarray) -> float:
        work = options.degree * (options.cost + options.fixed * candidate)
        return float(np.where(reachable, work, np.inf).min(axis=0).sum())

    best = total(share)
    for degree in np.unique(options.degree)[::-1]:
        rows = options.degree[:, 0] == degree
        for rounding in ROUNDINGS[1:]:
            candidate = share.copy()
            candidate[rows] = np.minimum(rounding(options.share[rows]), 1.0)
            value = total(candidate)
            if value > best:
                best, share = value, candidate
    return share


def _overfull(options: Options, paid: np.ndarray, time: Rounding, step: float) -> bool:
    """Whether the documents need more than all ranks for a step of this length."""
    need = options.degree * time(paid / step)
    need = np.where(options.alone <= step * (1 + PRECISION), need, np.inf).min(axis=0)
    return bool(need.sum() > options.ranks * (1 + PRECISION))
