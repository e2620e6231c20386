"""The proposal: a short list of strategies for a data set, made once, before the run.

1. For every class of length, the dynamic programme says how an average step whose longest document is of that class
   is best split; GPUs that it leaves over are filled up. It says the same for sample steps: some as the data has
   them, and one whose longest document just fits each scheme, since a rare long document still has its step.
2. All of these, and every homogeneous strategy, are tried on the samples.
3. The list begins with the fastest strategy that holds the longest document, and takes in, one after the other,
   whichever saves most time over all samples when every sample takes the best of the list. For one step alone it is
   simply the fastest ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import repeat

import numpy as np

from seqloom.errors import SeqloomError
from seqloom.planners.strategies.assign import assign, lower_bound, problem_of
from seqloom.planners.strategies.histogram import Histogram
from seqloom.planners.strategies.partition import NEVER, partition
from seqloom.planners.strategies.place import fits_nodes, placed
from seqloom.planners.strategies.price import SchemeCosts
from seqloom.planners.strategies.values import Scheme, Strategy

MOST = 8
"""Strategies of the short list: each is warmed up before the first step."""
NATURAL_SAMPLES = 24
"""Sample steps as the data has them."""
WORTH = 1000
"""A strategy is taken in where it saves one part in this many of all samples' time."""
Mixture = Counter[Scheme]


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
        self._seen: set[frozenset[tuple[Scheme, int]]] = set()

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
