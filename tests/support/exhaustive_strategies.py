"""Plain exhaustive search over strategies, dispatches and packings: the yardstick for small cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from seqloom.planners.hydraulis.config import ConfigCost, ParallelConfig, SchemeCosts
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


def best_packing(lengths: Sequence[int], cost: ConfigCost, stages: int) -> int | None:
    """ns of the best packing of these documents; the smallest micro-batches run first and last. None: it has none."""
    if not lengths:
        return 0
    found = []
    for sets in partitions(lengths):
        if all(sum(own) <= cost.longest for own in sets):
            rising = sorted(cost.micro_batch_ns(np.array(own)) for own in sets)
            found.append(int(one_f_one_b_ns(np.array(rising[0::2] + rising[1::2][::-1]), stages)))
    return min(found, default=None)


Known = dict[tuple[ParallelConfig, tuple[int, ...]], int | None]
"""Packings that were searched before, by scheme and documents."""


def best_assignment(
    lengths: Sequence[int], schemes: Sequence[ParallelConfig], costs: SchemeCosts, known: Known | None = None
) -> int | None:
    """ns of the best dispatch and packing on pipelines of these schemes. None: a document fits nowhere."""
    known = {} if known is None else known
    best: int | None = None
    for places in itertools.product(range(len(schemes)), repeat=len(lengths)):
        times = []
        for j, scheme in enumerate(schemes):
            own = tuple(length for length, place in zip(lengths, places, strict=True) if place == j)
            if (scheme, own) not in known:
                known[scheme, own] = best_packing(own, costs[scheme], scheme.stages)
            times.append(known[scheme, own])
        if None not in times:
            slowest = max(time for time in times if time is not None)
            best = slowest if best is None else min(best, slowest)
    return best


def all_mixtures(schemes: Sequence[ParallelConfig], ranks: int) -> Iterator[tuple[ParallelConfig, ...]]:
    """Yield every choice of schemes, each any number of times, that uses all ranks."""
    if ranks == 0:
        yield ()
    elif schemes:
        first, *rest = schemes
        for copies in range(ranks // first.ranks + 1):
            for others in all_mixtures(rest, ranks - copies * first.ranks):
                yield (first,) * copies + others
