"""Proposal of Hydraulis: a short list of strategies for a data set, made once, before the run.

1. For every class of document lengths, a dynamic programme finds the best mix of pipelines for an average step whose
   longest document is of that class; more pipelines fill the GPUs that are left. It does the same for sample steps:
   random ones, and for every parallel config one whose longest document just fits it, since rare long documents have
   their step too.
2. All of these mixes, and every homogeneous one, are timed on the samples, the switch to each counted. A switch moves
   the more the fewer GPUs a pipeline has, so there are also mixes without the small configs.
3. The list begins with the fastest strategy that holds the longest document. Then strategies join greedily, each time
   the one that saves most time when every sample takes the best of the list. For a single step the list has the
   fastest ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from seqloom.errors import MemoryBudgetError, how_to_drop
from seqloom.planners.hydraulis.dispatch import assign, lower_bound, problem_of
from seqloom.planners.hydraulis.strategy import (
    ConfigCost,
    ConfigCosts,
    ParallelConfig,
    Strategy,
    fits_nodes,
    place_pipelines,
)

CLASSES = 48
"""Classes of length, beside those that end at a config's capacity."""
NEVER = np.iinfo(np.int64).max // 4
MAX_UNITS = 64
"""Units of GPUs that the dynamic programme counts in, at most."""
MAX_STRATEGIES = 8
"""Strategies of the short list: each is warmed up before the first step."""
RANDOM_SAMPLES = 24
"""Random sample steps."""
LEAST_GAIN = 1000
"""A strategy joins the list if it saves one part in this many of the time of all samples."""
Mix = Counter[ParallelConfig]
"""How many pipelines of each config."""


def propose(
    lengths: np.ndarray,
    costs: ConfigCosts,
    ranks: int,
    node_size: int,
    *,
    tokens_per_step: int | None = None,
    most: int = MAX_STRATEGIES,
    seed: int = 0,
    switch_ns: Callable[[Strategy], int] | None = None,
) -> tuple[Strategy, ...]:
    """Propose at most `most` strategies that together suit every step of a data set; the first holds its longest.

    Configs that do not fit the nodes are left out. Without `tokens_per_step`, the lengths are the only step.
    `switch_ns` says what the switch to a strategy adds to a step; None: nothing.
    """
    data = np.asarray(lengths, dtype=np.int64)
    legal = {config: cost for config, cost in costs.items() if fits_nodes(config, ranks, node_size)}
    limits = [cost.max_tokens for cost in legal.values()]
    most_tokens = max(limits, default=0)
    if most_tokens < data.max():
        raise MemoryBudgetError(
            f"the longest document has {data.max()} tokens, but the largest of {len(legal)} parallel configs holds "
            f"{most_tokens}; {how_to_drop(most_tokens)}, raise the memory budget or use more GPUs"
        )
    histogram = Histogram.of(data, tokens_per_step, limits)
    samples = [data] if tokens_per_step is None else list(sample_steps(data, limits, tokens_per_step, seed))
    candidates = Candidates(samples, legal, ranks, node_size, switch_ns)
    averages = [histogram.upto(edge) for edge in histogram.edges.tolist()]
    for steps in (*averages, *(Histogram.of(sample, None, limits) for sample in samples)):
        ns, mix = best_mix(steps, legal, ranks)
        if ns < NEVER:
            candidates.add(fill_ranks(mix, legal, ranks))
    if switch_ns is not None:
        for least in sorted({config.ranks for config in legal})[1:]:
            large = {config: cost for config, cost in legal.items() if config.ranks >= least}
            ns, mix = best_mix(histogram, large, ranks)
            if ns < NEVER:
                candidates.add(fill_ranks(mix, large, ranks))
    for config in legal:
        if ranks % config.ranks == 0:
            candidates.add(Counter({config: ranks // config.ranks}))
    return candidates.fastest(most) if tokens_per_step is None else candidates.shortlist(most)


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """Documents of an average step by class of length, rising."""

    edges: np.ndarray  # int64[classes] the longest document of each class, tokens
    count: np.ndarray  # float64[classes] documents of a step; may be below 1
    tokens: np.ndarray  # float64[classes] their tokens
    squares: np.ndarray  # float64[classes] their squared tokens

    @classmethod
    def of(
        cls, lengths: np.ndarray, tokens_per_step: int | None = None, ends: Iterable[int] = (), classes: int = CLASSES
    ) -> Histogram:
        """Sort documents into so many classes of about equal tokens, beside those that must end at `ends`.

        Without `tokens_per_step`, the lengths are one step.
        """
        rising = np.sort(np.asarray(lengths, dtype=np.int64))
        upto = np.cumsum(rising)
        cuts = np.searchsorted(upto, np.linspace(0, upto[-1], classes + 1)[1:])
        wanted = {int(length) for length in rising[np.minimum(cuts, len(rising) - 1)]}
        wanted |= {int(end) for end in ends if rising[0] <= end < rising[-1]}
        edges = np.array(sorted(wanted | {int(rising[-1])}), dtype=np.int64)
        stops = np.unique(np.searchsorted(rising, edges, side="right"))
        starts = np.concatenate([[0], stops[:-1]])
        scale = 1.0 if tokens_per_step is None else tokens_per_step / float(upto[-1])
        values = rising.astype(np.float64)
        sums = [np.add.reduceat(column, starts) * scale for column in (np.ones_like(values), values, values * values)]
        return cls(rising[stops - 1], *sums)

    def upto(self, length: int) -> Histogram:
        """The classes up to this length, scaled to as many tokens as all classes have."""
        inside = self.edges <= length
        scale = float(self.tokens.sum()) / float(self.tokens[inside].sum())
        columns = (column[inside] * scale for column in (self.count, self.tokens, self.squares))
        return Histogram(self.edges[inside], *columns)


def best_mix(histogram: Histogram, costs: ConfigCosts, ranks: int) -> tuple[int, Mix]:
    """Find the fastest mix of pipelines for a step's documents: (ns, pipelines of each config).

    The dynamic programme assigns intervals of length to pipelines. ``best[n][s]`` is the least time in which n units of
    GPUs run all documents of classes below s. The classes from r on get d pipelines of config k, those below r the
    other GPUs:

        best[n][s] = min( best[n - 1][s],
                          min over config k, copies d, class r < s of  max( best[n - d k][r], time_kd(r, s) ) )

    GPUs may be left. Where no config holds the longest class, the time is `NEVER`.
    """
    unit = gcd(ranks, *(config.ranks for config in costs))
    while ranks // unit > MAX_UNITS and ranks % (2 * unit) == 0:
        unit *= 2
    options, times = [], []
    for config, cost in costs.items():
        copies = [d for d in range(1, ranks // config.ranks + 1) if d * config.ranks % unit == 0]
        options += [(config, d, d * config.ranks // unit) for d in copies]
        times.append(interval_times(histogram, cost, config.stages, np.array(copies, dtype=np.int64)))
    units = np.array([option[2] for option in options])
    small_first = np.argsort(units, kind="stable")  # of equal times, the one on the fewest GPUs
    options, units = [options[k] for k in small_first.tolist()], units[small_first]
    time = np.concatenate(times)[small_first]
    classes = len(histogram.edges)
    best = np.full((ranks // unit + 1, classes + 1), NEVER, dtype=np.int64)
    best[:, 0] = 0
    taken: dict[tuple[int, int], tuple[int, int]] = {}
    for n in range(1, len(best)):
        fitting = int(np.searchsorted(units, n, side="right"))
        if not fitting:  # fewer GPUs than the smallest config has
            continue
        reached = np.maximum(best[n - units[:fitting], :, None], time[:fitting])
        value = reached.min(axis=1)
        pick = value.argmin(axis=0)
        least = value[pick, np.arange(classes + 1)]
        for s in np.flatnonzero(least < best[n - 1]).tolist():
            taken[n, s] = (int(pick[s]), int(reached[pick[s], :, s].argmin()))
        best[n] = np.minimum(best[n - 1], least)
    mix: Mix = Counter()
    n, s = len(best) - 1, classes
    while s > 0 and n > 0 and best[n, s] < NEVER:
        while (n, s) not in taken:
            n -= 1
        k, s = taken[n, s]
        config, copies, used = options[k]
        mix[config] += copies
        n -= used
    return int(best[-1, -1]), mix


def interval_times(histogram: Histogram, cost: ConfigCost, stages: int, copies: np.ndarray) -> np.ndarray:
    """int64[d, classes + 1, classes + 1]: ns of classes r to s - 1 on int64[d] copies of one config; NEVER elsewhere.

    Pipelines share the documents evenly, but a document of the longest class is on one of them. The number of
    micro-batches is the best one, as in `loops.estimate_pipeline_ns`.
    """
    sums = [
        np.concatenate([[0.0], np.cumsum(column)]) for column in (histogram.count, histogram.tokens, histogram.squares)
    ]
    count, tokens, squares = (total[None, :] - total[:, None] for total in sums)
    largest = np.concatenate([[0.0], cost.documents_ns(histogram.edges).astype(np.float64)])[None, :]
    shared = copies[:, None, None]
    work = np.maximum((cost.square * squares + cost.linear * tokens) / shared, largest)
    least = np.maximum(np.ceil(tokens / shared / max(cost.max_tokens, 1)), 1.0)
    if stages == 1:
        time = work + least * cost.fixed
    else:
        wanted = np.floor(np.sqrt(work * (stages - 1) / max(cost.fixed, 1)))
        most = np.minimum(np.ceil(work / np.maximum(largest, 1.0)), np.maximum(count / shared, 1.0))
        batches = np.maximum(least, np.minimum(wanted, most))
        time = work + batches * cost.fixed + (stages - 1) * (np.maximum(largest, work / batches) + cost.fixed)
    holds = np.concatenate([[False], histogram.edges <= cost.max_tokens])[None, :]
    rising = np.arange(len(sums[0]))[:, None] < np.arange(len(sums[0]))[None, :]
    return np.where(holds & rising, np.minimum(np.rint(time), NEVER), NEVER).astype(np.int64)


def fill_ranks(mix: Mix, costs: ConfigCosts, ranks: int) -> Mix | None:
    """Add pipelines of the mix's configs, or the fastest that fit, until no rank is left; None if one is left."""
    left = ranks - sum(config.ranks * copies for config, copies in mix.items())
    more = Counter(mix)
    by_speed = sorted(costs, key=lambda config: (costs[config].linear * config.ranks, config))
    for config in [*sorted(mix, key=lambda config: (config.ranks, config)), *by_speed]:
        copies, left = divmod(left, config.ranks)
        more[config] += copies
    return None if left else +more


def sample_steps(data: np.ndarray, limits: Iterable[int], tokens: int, seed: int) -> Iterator[np.ndarray]:
    """Draw steps of about `tokens` tokens from the data: random ones, and one per config with its longest document."""
    draw = np.random.default_rng(seed)
    longest, shortest = int(data.max()), int(data.min())
    ends = sorted({min(limit, longest) for limit in limits if limit >= shortest})
    for number, limit in enumerate([longest] * RANDOM_SAMPLES + ends):
        short = data[data <= limit]
        size = max(1, int(np.ceil(tokens / short.mean())))
        step = short[draw.integers(0, len(short), size)]
        step = step[: max(1, int(np.searchsorted(np.cumsum(step), tokens, side="right")))]
        yield step if number < RANDOM_SAMPLES else np.append(step[:-1], limit)


class Candidates:
    """Candidate strategies and their times on sample steps."""

    def __init__(
        self,
        samples: Sequence[np.ndarray],
        costs: ConfigCosts,
        ranks: int,
        node_size: int,
        switch_ns: Callable[[Strategy], int] | None = None,
    ) -> None:
        self.samples = [np.sort(sample)[::-1] for sample in samples]  # longest first
        self.costs, self.ranks, self.node_size, self.switch_ns = costs, ranks, node_size, switch_ns
        self.strategies: list[Strategy] = []
        self.times: list[np.ndarray] = []
        self.best = np.full(len(samples), NEVER, dtype=np.int64)
        self._seen: set[frozenset[tuple[ParallelConfig, int]]] = set()

    def add(self, mix: Mix | None) -> None:
        """Place a mix and time it on all samples, unless it is known or does not fit."""
        if mix is None or (key := frozenset(mix.items())) in self._seen:
            return
        self._seen.add(key)
        strategy = place_pipelines(mix.elements(), self.costs, self.ranks, self.node_size)
        if strategy is None:
            return
        switch = self.switch_ns(strategy) if self.switch_ns else 0
        times = [
            self._time(sample, strategy, switch, best)
            for sample, best in zip(self.samples, self.best.tolist(), strict=True)
        ]
        self.strategies.append(strategy)
        self.times.append(np.array(times, dtype=np.int64))
        self.best = np.minimum(self.best, self.times[-1])

    def _time(self, sample: np.ndarray, strategy: Strategy, switch: int, best: int) -> int:
        """ns of a sample and the switch; the lower bound if that is above the best time so far.

        A strategy that is far behind the best one is not searched further.
        """
        if strategy.max_tokens < sample[0]:
            return NEVER
        problem = problem_of(sample, strategy, self.costs)
        bound = lower_bound(problem) + switch
        beat = None if best >= NEVER else best - switch
        return bound if bound >= best else assign(problem, np.arange(len(sample)), switch_ns=switch, beat=beat).ns

    def fastest(self, most: int) -> tuple[Strategy, ...]:
        """The fastest strategies on the first sample."""
        order = sorted(range(len(self.times)), key=lambda k: (int(self.times[k][0]), k))
        return tuple(self.strategies[k] for k in order[:most] if self.times[k][0] < NEVER)

    def shortlist(self, most: int) -> tuple[Strategy, ...]:
        """The strategies that together are fastest on all samples, chosen greedily; the first holds every sample."""
        times = np.stack(self.times)
        totals = np.where(times < NEVER, times, 0).sum(axis=1)
        holding = [k for k in range(len(times)) if (times[k] < NEVER).all()]
        picked = [min(holding, key=lambda k: (int(totals[k]), k))]
        reached = times[picked[0]].copy()
        while len(picked) < most:
            sums = np.minimum(reached[None, :], times).sum(axis=1)
            k = int(sums.argmin())
            if (int(reached.sum()) - int(sums[k])) * LEAST_GAIN <= int(reached.sum()):
                break
            picked.append(k)
            reached = np.minimum(reached, times[k])
        return tuple(self.strategies[k] for k in picked)
