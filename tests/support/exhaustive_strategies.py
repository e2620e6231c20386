"""Plain exhaustive search over strategies, dispatches and packings: the yardstick for small cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from seqloom.planners.hydraulis.strategy import ConfigCost, ConfigCosts, ParallelConfig
from seqloom.planners.loops import one_f_one_b_ns


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield every way to put the items into non-empty sets."""
    if not items:
        yield []
        return
    first, *rest = items
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for k in range(len(smaller)):
            yield [*smaller[:k], [first, *smaller[k]], *smaller[k + 1 :]]


def micro_batch_ns(cost: ConfigCost, lengths: np.ndarray) -> int:
    """ns of one micro-batch of these documents on a stage, forward and backward."""
    return cost.fixed + int(cost.documents_ns(lengths).sum())


def best_packing(lengths: Sequence[int], cost: ConfigCost, stages: int) -> int | None:
    """ns of the best packing of these documents; the smallest micro-batches run first and last. None: it has none."""
    if not lengths:
        return 0
    found = []
    for sets in partitions(lengths):
        if all(sum(own) <= cost.max_tokens for own in sets):
            rising = sorted(micro_batch_ns(cost, np.array(own)) for own in sets)
            found.append(int(one_f_one_b_ns(np.array(rising[0::2] + rising[1::2][::-1]), stages)))
    return min(found, default=None)


Known = dict[tuple[ParallelConfig, tuple[int, ...]], int | None]
"""Packings that were searched before, by config and documents."""


def best_assignment(
    lengths: Sequence[int], configs: Sequence[ParallelConfig], costs: ConfigCosts, known: Known | None = None
) -> int | None:
    """ns of the best dispatch and packing on pipelines of these configs. None: a document fits nowhere."""
    known = {} if known is None else known
    best: int | None = None
    for places in itertools.product(range(len(configs)), repeat=len(lengths)):
        times = []
        for j, config in enumerate(configs):
            own = tuple(length for length, place in zip(lengths, places, strict=True) if place == j)
            if (config, own) not in known:
                known[config, own] = best_packing(own, costs[config], config.stages)
            times.append(known[config, own])
        if None not in times:
            slowest = max(time for time in times if time is not None)
            best = slowest if best is None else min(best, slowest)
    return best


def all_mixtures(configs: Sequence[ParallelConfig], ranks: int) -> Iterator[tuple[ParallelConfig, ...]]:
    """Yield every choice of configs, each any number of times, that uses all ranks."""
    if ranks == 0:
        yield ()
    elif configs:
        first, *rest = configs
        for copies in range(ranks // first.ranks + 1):
            for others in all_mixtures(rest, ranks - copies * first.ranks):
                yield (first,) * copies + others
