"""The best plan of a small batch by dynamic programming over sets of documents: the oracle of planners and bounds.

It searches the whole plan space of ``flex``: every way to cut a shard group into aligned blocks, every division of the
documents among groups, rounds, shard groups and wide blocks. With ``n`` documents it tries 3^n pairs of sets, which is
feasible up to about 13 documents on 8 ranks.
"""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np

from seqloom.cost import CostModel, CostTables, MemoryPolicy
from seqloom.errors import SeqloomError
from seqloom.planners.loops import NEVER

if find_spec("numba"):
    from numba import njit

    kernel = njit(cache=True)
else:

    def kernel(loop):
        """Leave the loop as it is."""
        return loop


@kernel
def side_by_side(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
    """``out(S) = min(out(S), min over A of max(left(A), right(S - A)))``: two blocks work at the same time."""
    for s in range(out.shape[0]):
        a = s
        while True:
            out[s] = min(out[s], max(left[a], right[s ^ a]))
            if a == 0:
                break
            a = (a - 1) & s


@kernel
def one_after_another(first: np.ndarray, then: np.ndarray, out: np.ndarray) -> None:
    """``out(S) = min over A of first(A) + then(S - A)``."""
    for s in range(out.shape[0]):
        a = s
        while True:
            out[s] = min(out[s], first[a] + then[s ^ a])
            if a == 0:
                break
            a = (a - 1) & s


@kernel
def in_rounds(once: np.ndarray, out: np.ndarray) -> None:
    """``out(S)`` = least sum of ``once`` over the ways to deal ``S`` into rounds."""
    out[0] = 0
    for s in range(1, out.shape[0]):
        lowest = s & -s
        rest = s ^ lowest
        a = rest
        while True:
            out[s] = min(out[s], once[a | lowest] + out[rest ^ a])
            if a == 0:
                break
            a = (a - 1) & rest


def single_group(tables: CostTables, degree: int) -> np.ndarray:
    """int64[2^n] ns: one group of this degree with exactly these documents, in its best shape."""
    n = len(tables.tokens)
    member = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
    best = np.full(1 << n, NEVER)
    for shape in np.flatnonzero(tables.degree == degree):
        streams = tables.fixed[:, shape, None] + np.einsum("sk,lk->ls", member, tables.cost[:, shape])
        best = np.minimum(best, streams.max(axis=0))
    best[member @ tables.tokens > degree * tables.capacity] = NEVER
    best[0] = 0
    return best


def shard_group_round(tables: CostTables, cost: CostModel, shard_group: int) -> np.ndarray:
    """int64[2^n] ns: one round of one shard group, over every cut of its ranks into aligned blocks."""
    degrees = set(tables.degree.tolist())
    whole = {degree: single_group(tables, degree) for degree in degrees if degree <= shard_group}
    found: dict[tuple[int, int], np.ndarray] = {}
    for width in range(1, shard_group + 1):
        for start in range(shard_group - width + 1):
            best = np.full(1 << len(tables.tokens), NEVER)
            best[0] = 0
            if width in whole and cost.family.contains(start, width):
                best = whole[width].copy()
            for middle in range(start + 1, start + width):
                side_by_side(found[start, middle - start], found[middle, start + width - middle], best)
            found[start, width] = best
    return found[0, shard_group]


def shortest_step(lengths: np.ndarray, cost: CostModel, policy: MemoryPolicy) -> int:
    """ns of the best plan of this batch under one policy, without the step's overhead."""
    tables = cost.tables(np.asarray(lengths, np.int64), policy)
    block = cost.shard_group_size
    best = np.full(1 << len(tables.tokens), NEVER)
    in_rounds(shard_group_round(tables, cost, block), best)
    wider = [degree for degree in sorted(set(tables.degree.tolist())) if degree > block]
    for degree in wider:
        if degree % block or degree // block != 2:
            raise SeqloomError(f"degree {degree} above blocks of {block}: the oracle needs degrees that double")
        halves = np.full_like(best, NEVER)
        side_by_side(best, best, halves)
        wide = np.full_like(best, NEVER)
        in_rounds(single_group(tables, degree), wide)
        best = np.full_like(halves, NEVER)
        one_after_another(wide, halves, best)
        block = degree
    while block < cost.ranks:  # blocks that no degree joins still work side by side
        halves = np.full_like(best, NEVER)
        side_by_side(best, best, halves)
        best, block = halves, block * 2
    return int(best[-1])
