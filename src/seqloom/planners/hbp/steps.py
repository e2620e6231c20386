"""Packs become steps: those of a level by attention work, as many as a step has; and the order of the steps."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from seqloom.planners.hbp.levels import Level


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Packs in running order, cut into steps.

    Attributes:
        packs: int64[P], numbers of packs.
        starts: int64[S + 1], where in ``packs`` each step begins; the last one is P.
        levels: int64[S], index of each step's level.
    """

    packs: np.ndarray
    starts: np.ndarray
    levels: np.ndarray

    def reordered(self, order: np.ndarray) -> Steps:
        """The same steps in another order, int64[S]."""
        counts = np.diff(self.starts)
        pieces = np.split(self.packs, self.starts[1:-1])
        starts = np.concatenate([[0], np.cumsum(counts[order])])
        return Steps(np.concatenate([pieces[k] for k in order.tolist()]), starts, self.levels[order])


def cut(work: np.ndarray, pack_levels: np.ndarray, levels: Sequence[Level]) -> Steps:
    """Sort the packs of every level by their work, most first, and cut consecutive ones into steps.

    So packs that run side by side take nearly the same time. Packs that make no whole step, the last ones of a level,
    are a step of their own: they are not full, and would leave ranks waiting in any other.

    Args:
        work: int64[P], the sum of squared lengths of every pack.
        pack_levels: int64[P], index of every pack's level.
        levels: of the data set.
    """
    packs, counts, owners = [], [], []
    for index, level in enumerate(levels):
        own = np.flatnonzero(pack_levels == index)
        whole = len(own) - len(own) % level.packs
        packs += [own[:whole][np.argsort(-work[own[:whole]], kind="stable")], own[whole:]]
        sizes = [level.packs] * (whole // level.packs) + [len(own) - whole] * (len(own) > whole)
        counts += sizes
        owners += [index] * len(sizes)
    return Steps(np.concatenate(packs), np.concatenate([[0], np.cumsum(counts)]), np.array(owners, dtype=np.int64))


def running_order(levels: np.ndarray, *, short_first: int, seed: int) -> np.ndarray:
    """int64[S]: levels alternate in proportion to their steps; those of one level come in an order of chance.

    Args:
        levels: int64[S], index of each step's level.
        short_first: so many first steps are of the lowest level, as far as there are any.
        seed: of that chance.
    """
    keys = np.random.Philox(np.random.SeedSequence([seed])).random_raw(len(levels))  # a stream that numpy keeps
    shuffled = np.argsort(keys, kind="stable")
    lowest = shuffled[levels[shuffled] == levels.min()][:short_first]
    rest = shuffled[~np.isin(shuffled, lowest)]
    place = np.empty(len(rest))
    for level in np.unique(levels[rest]).tolist():
        own = levels[rest] == level
        place[own] = (np.arange(own.sum()) + 0.5) / own.sum()  # evenly over the run
    return np.concatenate([lowest, rest[np.lexsort((levels[rest], place))]])


def dealt(sizes: np.ndarray, packs: int, room: int) -> np.ndarray | None:
    """int64[n]: documents dealt to so many packs, longest first, each to the one with the least; None: one overflows.

    Args:
        sizes: int64[n] tokens.
        packs: to deal to.
        room: tokens of a pack.
    """
    heap = [(0, pack) for pack in range(packs)]
    chosen = np.empty(len(sizes), dtype=np.int64)
    for document in np.argsort(-sizes, kind="stable").tolist():
        held, pack = heap[0]
        held += int(sizes[document])
        if held > room:
            return None
        chosen[document] = pack
        heapq.heapreplace(heap, (held, pack))
    return chosen
