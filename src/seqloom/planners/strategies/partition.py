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
    options = [
        (scheme, copies, copies * scheme.ranks // unit)
        for scheme in costs
        for copies in range(1, ranks // scheme.ranks + 1)
        if copies * scheme.ranks % unit == 0
    ]
    times = [interval_times(histogram, costs[scheme], scheme.stages, copies) for scheme, copies, _ in options]
    classes = len(histogram.edges)
    best = np.full((ranks // unit + 1, classes + 1), NEVER, dtype=np.int64)
    best[:, 0] = 0
    taken: dict[tuple[int, int], tuple[int, int]] = {}
    for n in range(1, len(best)):
        best[n] = best[n - 1]
        source = np.full(classes + 1, -1)
        start = np.zeros(classes + 1, dtype=np.int64)
        for k, (_, _, units) in enumerate(options):
            if units <= n:
                reached = np.maximum(best[n - units][:, None], times[k])
                first = reached.argmin(axis=0)
                value = reached[first, np.arange(classes + 1)]
                better = value < best[n]
                best[n][better], source[better], start[better] = value[better], k, first[better]
        for s in np.flatnonzero(source >= 0).tolist():
            taken[n, s] = (int(source[s]), int(start[s]))
    chosen: Counter[Scheme] = Counter()
    n, s = len(best) - 1, classes
    while s > 0 and n > 0 and best[n, s] < NEVER:
        while (n, s) not in taken:
            n -= 1
        k, s_before = taken[n, s]
        scheme, copies, units = options[k]
        chosen[scheme] += copies
        n, s = n - units, s_before
    return int(best[-1, -1]), chosen


def unit_of(costs: Mapping[Scheme, SchemeCost], ranks: int) -> int:
    """GPUs that are counted together: what all schemes have in common, and more on a large cluster."""
    unit = gcd(ranks, *(scheme.ranks for scheme in costs))
    while ranks // unit > MOST_UNITS and ranks % (2 * unit) == 0:
        unit *= 2
    return unit


def interval_times(histogram: Histogram, cost: SchemeCost, stages: int, copies: int) -> np.ndarray:
    """int64[classes + 1, classes + 1]: ns of classes r to s - 1 on so many pipelines of one scheme; NEVER elsewhere.

    Documents are shared out evenly, but the longest class has at least one document, which is on one pipeline. The
    number of micro-batches is the best one, as in `clock.estimate`.
    """
    sums = [
        np.concatenate([[0.0], np.cumsum(column)]) for column in (histogram.count, histogram.tokens, histogram.squares)
    ]
    count, tokens, squares = (total[None, :] - total[:, None] for total in sums)
    alone = np.concatenate([[0.0], cost.documents_ns(histogram.edges).astype(np.float64)])[None, :]
    work = np.maximum((cost.square * squares + cost.linear * tokens) / copies, alone)
    least = np.maximum(np.ceil(tokens / copies / max(cost.longest, 1)), 1.0)
    if stages == 1:
        time = work + least * cost.fixed
    else:
        wanted = np.floor(np.sqrt(work * (stages - 1) / max(cost.fixed, 1)))
        most = np.minimum(np.ceil(work / np.maximum(alone, 1.0)), np.maximum(count / copies, 1.0))
        batches = np.maximum(least, np.minimum(wanted, most))
        time = work + batches * cost.fixed + (stages - 1) * (np.maximum(alone, work / batches) + cost.fixed)
    holds = np.concatenate([[False], histogram.edges <= cost.longest])[None, :]
    rising = np.arange(len(sums[0]))[:, None] < np.arange(len(sums[0]))[None, :]
    return np.where(holds & rising, np.minimum(np.rint(time), NEVER), NEVER).astype(np.int64)
