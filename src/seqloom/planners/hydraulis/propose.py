"""Lengths of a data set as a few sums per class: what a step of it holds on average."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import gcd

import numpy as np

from seqloom.errors import SeqloomError
from seqloom.planners.hydraulis.assign import assign, lower_bound, problem_of
from seqloom.planners.hydraulis.config import ConfigCost, ParallelConfig, SchemeCosts, Strategy, fits_nodes, placed

CLASSES = 48
"""Classes of length, beside those that end where a scheme's memory ends."""


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Documents of one step by class of length, rising.

    Attributes:
        edges: int64[classes] the longest document of each class, tokens.
        count: float64[classes] documents of a step; may be below 1.
        tokens: float64[classes] their tokens.
        squares: float64[classes] their squared tokens.
    """

    edges: np.ndarray
    count: np.ndarray
    tokens: np.ndarray
    squares: np.ndarray

    @classmethod
    def of(
        cls, lengths: np.ndarray, tokens_per_step: int | None = None, ends: Iterable[int] = (), classes: int = CLASSES
    ) -> Histogram:
        """Sort documents into classes of about equal tokens.

        Args:
            lengths: int64[n] tokens of the data's documents.
            tokens_per_step: of one optimiser step; None: the lengths are one step.
            ends: lengths at which a class must end, tokens: the longest documents of schemes.
            classes: to make, beside those.
        """
        rising = np.sort(np.asarray(lengths, dtype=np.int64))
        upto = np.cumsum(rising)
        cuts = np.searchsorted(upto, np.linspace(0, upto[-1], classes + 1)[1:])
        wanted = {int(length) for length in rising[np.minimum(cuts, len(rising) - 1)]}
        wanted |= {int(end) for end in ends if rising[0] <= end < rising[-1]}
        edges = np.array(sorted(wanted | {int(rising[-1])}), dtype=np.int64)
        stops = np.searchsorted(rising, edges, side="right")
        filled = np.diff(stops, prepend=0) > 0
        edges, stops = edges[filled], stops[filled]
        starts = np.concatenate([[0], stops[:-1]])
        scale = 1.0 if tokens_per_step is None else tokens_per_step / float(upto[-1])
        values = rising.astype(np.float64)
        sums = [np.add.reduceat(column, starts) * scale for column in (np.ones_like(values), values, values * values)]
        return cls(rising[stops - 1], *sums)

    def upto(self, length: int, tokens: float | None = None) -> Histogram:
        """The classes up to this length, with as many tokens as before, or as given."""
        keep = self.edges <= length
        kept = float(self.tokens[keep].sum())
        scale = (float(self.tokens.sum()) if tokens is None else tokens) / kept
        return Histogram(
            self.edges[keep], self.count[keep] * scale, self.tokens[keep] * scale, self.squares[keep] * scale
        )


# ---- merged: planners.strategies.partition
# The dynamic programme of the proposal: intervals of length to pipelines, so that the slowest interval is done
# early.
#
# ``best[n][s]`` is the least time in which n units of GPUs run all documents of classes below s. The longest of
# these
# classes, from some class on, get d pipelines of one scheme; the rest is ``best`` of what is left:
#
#     best[n][s] = min( best[n - 1][s],
#                       min over scheme k, copies d, class r < s of  max( best[n - d k][r], time_kd(r, s) ) )


NEVER = np.iinfo(np.int64).max // 4
MOST_UNITS = 64
"""Units that the GPUs of a cluster are counted in, at most."""


def partition(histogram: Histogram, costs: SchemeCosts, ranks: int) -> tuple[int, Counter[ParallelConfig]]:
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
    chosen: Counter[ParallelConfig] = Counter()
    n, s = len(best) - 1, classes
    while s > 0 and n > 0 and best[n, s] < NEVER:
        while (n, s) not in taken:
            n -= 1
        k, s_before = taken[n, s]
        scheme, copies, used = options[k]
        chosen[scheme] += copies
        n, s = n - used, s_before
    return int(best[-1, -1]), chosen


def unit_of(costs: Mapping[ParallelConfig, ConfigCost], ranks: int) -> int:
    """GPUs that are counted together: what all schemes have in common, and more on a large cluster."""
    unit = gcd(ranks, *(scheme.ranks for scheme in costs))
    while ranks // unit > MOST_UNITS and ranks % (2 * unit) == 0:
        unit *= 2
    return unit


def interval_times(histogram: Histogram, cost: ConfigCost, stages: int, copies: np.ndarray) -> np.ndarray:
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


# ---- merged: planners.strategies.propose
# The proposal: a short list of strategies for a data set, made once, before the run.
#
# 1. For every class of length, the dynamic programme says how an average step whose longest document is of that
# class
#    is best split; GPUs that it leaves over are filled up. It says the same for sample steps: some as the data has
#    them, and one whose longest document just fits each scheme, since a rare long document still has its step.
# 2. All of these, and every homogeneous strategy, are tried on the samples.
# 3. The list begins with the fastest strategy that holds the longest document, and takes in, one after the other,
#    whichever saves most time over all samples when every sample takes the best of the list. For one step alone it
# is
#    simply the fastest ones.


MOST = 8
"""Strategies of the short list: each is warmed up before the first step."""
NATURAL_SAMPLES = 24
"""Sample steps as the data has them."""
WORTH = 1000
"""A strategy is taken in where it saves one part in this many of all samples' time."""
Mixture = Counter[ParallelConfig]


def propose(
    lengths: np.ndarray,
    costs: SchemeCosts,
    ranks: int,
    node_size: int,
    *,
    tokens_per_step: int | None = None,
    most: int = MOST,
    seed: int = 0,
) -> tuple[Strategy, ...]:
    """Propose strategies that together suit every step of a data set; the one for the longest documents comes first.

    Args:
        lengths: int64[n] tokens of the data's documents.
        costs: of the schemes to choose from; those that have no place on the nodes are left out.
        ranks: of the cluster.
        node_size: ranks of a node.
        tokens_per_step: of one optimiser step; None: the lengths are one step, to be proposed for alone.
        most: strategies to return.
        seed: of the sample steps.
    """
    data = np.asarray(lengths, dtype=np.int64)
    legal = {scheme: cost for scheme, cost in costs.items() if fits_nodes(scheme, ranks, node_size)}
    room = max((cost.longest for cost in legal.values()), default=0)
    if room < data.max():
        raise SeqloomError(
            f"the longest document has {data.max()} tokens, but the largest of {len(legal)} schemes holds {room}; "
            f"drop longer documents (--max-length {max(room, 1)}), raise the memory budget or use more GPUs"
        )
    histogram = Histogram.of(data, tokens_per_step, (cost.longest for cost in legal.values()))
    samples = [data] if tokens_per_step is None else list(sample_steps(data, legal, tokens_per_step, seed))
    bench = Bench(samples, legal, ranks, node_size)
    for mixture in mixtures(histogram, samples, legal, ranks):
        bench.enter(mixture)
    return bench.fastest(most) if tokens_per_step is None else bench.shortlist(most)


def mixtures(histogram: Histogram, samples: Sequence[np.ndarray], costs: SchemeCosts, ranks: int) -> Iterator[Mixture]:
    """Candidates: the best split for every longest class and for every sample, and all homogeneous ones.

    They use all ranks.
    """
    ends = [cost.longest for cost in costs.values()]
    average = [histogram.upto(edge) for edge in histogram.edges.tolist()]
    for steps in (*average, *(Histogram.of(sample, None, ends) for sample in samples)):
        ns, chosen = partition(steps, costs, ranks)
        if ns < NEVER:
            yield from filled(chosen, costs, ranks)
    for scheme in costs:
        if ranks % scheme.ranks == 0:
            yield Counter({scheme: ranks // scheme.ranks})


def filled(chosen: Mixture, costs: SchemeCosts, ranks: int) -> Iterator[Mixture]:
    """The mixture with pipelines added until no rank is left over: more of its own, or the fastest that fit."""
    left = ranks - sum(scheme.ranks * copies for scheme, copies in chosen.items())
    more = Counter(chosen)
    by_speed = sorted(costs, key=lambda scheme: (costs[scheme].linear * scheme.ranks, scheme))
    for scheme in [*sorted(chosen, key=lambda scheme: (scheme.ranks, scheme)), *by_speed]:
        copies = left // scheme.ranks
        if copies:
            more[scheme] += copies
            left -= copies * scheme.ranks
    if left == 0:
        yield more


def sample_steps(data: np.ndarray, costs: SchemeCosts, tokens: int, seed: int) -> Iterator[np.ndarray]:
    """Steps of about `tokens` tokens drawn from the data: some natural ones, and one for every scheme's longest."""
    draw = np.random.default_rng(seed)
    longest, least = int(data.max()), int(data.min())
    limits = sorted({min(cost.longest, longest) for cost in costs.values() if cost.longest >= least})
    for number, limit in enumerate([longest] * NATURAL_SAMPLES + limits):
        short = data[data <= limit]
        size = max(1, int(np.ceil(tokens / short.mean())))
        step = short[draw.integers(0, len(short), size)]
        step = step[: max(1, int(np.searchsorted(np.cumsum(step), tokens, side="right")))]
        yield step if number < NATURAL_SAMPLES else np.append(step[:-1], limit)


class Bench:
    """Candidate strategies and their times on sample steps."""

    def __init__(self, samples: Sequence[np.ndarray], costs: SchemeCosts, ranks: int, node_size: int) -> None:
        """Sort every sample, longest first."""
        self.samples = [np.sort(sample)[::-1] for sample in samples]
        self.costs, self.ranks, self.node_size = costs, ranks, node_size
        self.strategies: list[Strategy] = []
        self.times: list[np.ndarray] = []
        self.best = np.full(len(samples), NEVER, dtype=np.int64)
        self._seen: set[frozenset[tuple[ParallelConfig, int]]] = set()

    def enter(self, mixture: Mixture) -> bool:
        """Price a candidate, int64[samples] ns, unless it is known or has no place; says whether it was new."""
        key = frozenset((scheme, copies) for scheme, copies in mixture.items() if copies)
        if key in self._seen:
            return False
        self._seen.add(key)
        strategy = placed(mixture.elements(), self.costs, self.ranks, self.node_size)
        if strategy is None:
            return False
        self.strategies.append(strategy)
        own = [self._time(*given) for given in zip(self.samples, repeat(strategy), self.best.tolist())]
        self.times.append(np.array(own, dtype=np.int64))
        self.best = np.minimum(self.best, self.times[-1])
        return True

    def _time(self, sample: np.ndarray, strategy: Strategy, best: int) -> int:
        """ns of a sample; where even the lower bound is above the best so far, that bound."""
        if strategy.longest < sample[0]:
            return NEVER
        problem = problem_of(sample, strategy, self.costs)
        bound = lower_bound(problem)
        return bound if bound >= best else assign(problem, np.arange(len(sample))).ns

    def fastest(self, most: int) -> tuple[Strategy, ...]:
        """The fastest of all on the first sample; what holds it comes before what does not."""
        order = sorted(range(len(self.times)), key=lambda k: (int(self.times[k][0]), k))
        return tuple(self.strategies[k] for k in order[:most] if self.times[k][0] < NEVER)

    def shortlist(self, most: int) -> tuple[Strategy, ...]:
        """The list of step 3."""
        times = np.stack(self.times)
        totals = np.where(times < NEVER, times, 0).sum(axis=1)
        whole = [k for k in range(len(times)) if (times[k] < NEVER).all()]
        picked = [min(whole, key=lambda k: (int(totals[k]), k))]
        reached = times[picked[0]].copy()
        while len(picked) < most:
            sums = np.minimum(reached[None, :], times).sum(axis=1)
            k = int(sums.argmin())
            if (int(reached.sum()) - int(sums[k])) * WORTH <= int(reached.sum()):
                break
            picked.append(k)
            reached = np.minimum(reached, times[k])
        return tuple(self.strategies[k] for k in picked)
