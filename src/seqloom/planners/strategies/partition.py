"""The dynamic programme of the proposal: intervals of length to pipelines, so that the slowest interval is done early.

``best[n][s]`` is the least time in which n units of GPUs run all documents of classes below s. The longest of these
classes, from some class on, get d pipelines of one scheme; the rest is ``best`` of what is left:

    best[n][s] = min( best[n - 1][s],
                      min over scheme k, copies d, class r < s of  max( best[n - d k][r], time_kd(r, s) ) )
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import gcd

import numpy as np

from seqloom.planners.strategies.histogram import Histogram
from seqloom.planners.strategies.price import SchemeCost, SchemeCosts
from seqloom.planners.strategies.values import Scheme

NEVER = np.iinfo(np.int64).max // 4
MOST_UNITS = 64
"""Units that the GPUs of a cluster are counted in, at most."""


def partition(histogram: Histogram, costs: SchemeCosts, ranks: int) -> tuple[int, Counter[Scheme]]:
    """The fastest split of a step's documents: (ns, how many pipelines of each scheme).

    GPUs may be left over. With no scheme that holds the longest class the time is `NEVER`.
    """
    unit = unit_of(costs, ranks)
    options, times = [], []
    for scheme, cost in costs.items():
        copies = [d for d in range(1, ranks // scheme.ranks + 1) if d * scheme.ranks % unit == 0]
        options += [(scheme, d, d * scheme.ranks // unit) for d in copies]
        times.append(interval_times(histogram, cost, scheme.stages, np.array(copies, dtype=np.int64)))
    units = np.array([option[2] for option in options])
    small_first = np.argsort(units, kind="stable")  # of equal times, the one on the fewest GPUs
    options, units = [options[k] for k in small_first.tolist()], units[small_first]
    time = np.concatenate(times)[small_first]
    classes = len(histogram.edges)
    best = np.full((ranks // unit + 1, classes + 1), NEVER, dtype=np.int64)
    best[:, 0] = 0
    taken: dict[tuple[int, int], tuple[int, int]] = {}
    for n in range(1, len(best)):
        open_ = int(np.searchsorted(units, n, side="right"))
        reached = np.maximum(best[n - units[:open_], :, None], time[:open_])
        value = reached.min(axis=1)
        pick = value.argmin(axis=0)
        least = value[pick, np.arange(classes + 1)]
        for s in np.flatnonzero(least < best[n - 1]).tolist():
            taken[n, s] = (int(pick[s]), int(reached[pick[s], :, s].argmin()))
        best[n] = np.minimum(best[n - 1], least)
    chosen: Counter[Scheme] = Counter()
    n, s = len(best) - 1, classes
    while s > 0 and n > 0 and best[n, s] < NEVER:
        while (n, s) not in taken:
            n -= 1
        k, s_before = taken[n, s]
        scheme, copies, used = options[k]
        chosen[scheme] += copies
        n, s = n - used, s_before
    return int(best[-1, -1]), chosen


def unit_of(costs: Mapping[Scheme, SchemeCost], ranks: int) -> int:
    """GPUs that are counted together: what all schemes have in common, and more on a large cluster."""
    unit = gcd(ranks, *(scheme.ranks for scheme in costs))
    while ranks // unit > MOST_UNITS and ranks % (2 * unit) == 0:
        unit *= 2
    return unit


def interval_times(histogram: Histogram, cost: SchemeCost, stages: int, copies: np.ndarray) -> np.ndarray:
    """int64[d, classes + 1, classes + 1]: ns of classes r to s - 1 on int64[d] copies of one scheme; NEVER elsewhere.

    Documents are shared out evenly, but the longest class has at least one document, which is on one pipeline. The
    number of micro-batches is the best one, as in `clock.estimate`.
    """
    sums = [
        np.concatenate([[0.0], np.cumsum(column)]) for column in (histogram.count, histogram.tokens, histogram.squares)
    ]
    count, tokens, squares = (total[None, :] - total[:, None] for total in sums)
    alone = np.concatenate([[0.0], cost.documents_ns(histogram.edges).astype(np.float64)])[None, :]
    shared = copies[:, None, None]
    work = np.maximum((cost.square * squares + cost.linear * tokens) / shared, alone)
    least = np.maximum(np.ceil(tokens / shared / max(cost.longest, 1)), 1.0)
    if stages == 1:
        time = work + least * cost.fixed
    else:
        wanted = np.floor(np.sqrt(work * (stages - 1) / max(cost.fixed, 1)))
        most = np.minimum(np.ceil(work / np.maximum(alone, 1.0)), np.maximum(count / shared, 1.0))
        batches = np.maximum(least, np.minimum(wanted, most))
        time = work + batches * cost.fixed + (stages - 1) * (np.maximum(alone, work / batches) + cost.fixed)
    holds = np.concatenate([[False], histogram.edges <= cost.longest])[None, :]
    rising = np.arange(len(sums[0]))[:, None] < np.arange(len(sums[0]))[None, :]
    return np.where(holds & rising, np.minimum(np.rint(time), NEVER), NEVER).astype(np.int64)
