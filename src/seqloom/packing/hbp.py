"""Packs of documents: the longest that still fits, again and again, until nothing does.

This is first fit decreasing, pack by pack instead of document by document. Documents stand in ascending order; what is
taken is skipped by links to the next shorter one that is left, so that taking a document costs about the same however
many there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from seqloom.cost import CostModel
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.packing.levels import Level, level_sets
from seqloom.packing.packing import Packing
from seqloom.planners.compiled import kernels

# ---- merged: planners.hbp.steps
# Packs become steps: those of a level by attention work, as many as a step has; and the order of the steps.


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


# ---- merged: planners.hbp.planner
# Planner ``hbp``: hierarchical balance packing of a fixed data set, decided as a whole before training.
#
# Unlike the planners of a batch it decides which documents make a batch. Packs have one of a few lengths; a step
# has
# packs of one length only, all run alike, and of nearly equal attention work. Three ideas, one file each:
#
#     levels.py   lengths of packs, and the cheapest way to run each
#     fill.py     packs: a level's own documents, gaps filled with shorter ones
#     steps.py    packs of a level sorted by attention work, cut into steps; levels alternate


TRIED = 50_000
"""Documents of a data set on which levels are tried."""


def hbp(
    lengths: Sequence[int] | np.ndarray,
    cost: CostModel,
    tokens_per_step: int,
    *,
    levels: Sequence[Level] | None = None,
    short_first: int = 0,
    seed: int = 0,
) -> Packing:
    """Pack a data set into steps.

    Args:
        lengths: int64[n] tokens of every document.
        cost: prices packs; its profile chooses the levels.
        tokens_per_step: no step has more tokens.
        levels: instead of those that the profile chooses, shortest packs first; `profiled` makes one.
        short_first: so many first steps take packs of the lowest level only, as far as there are any.
        seed: of the order of a level's steps.

    Raises:
        SeqloomError: a document that no level holds.
    """
    if short_first < 0:
        raise SeqloomError(f"{short_first} short steps first; give 0 or more")
    array = _checked_lengths(lengths, tokens_per_step)
    if levels is None:
        chosen = choose_levels(array, cost, tokens_per_step)
    else:
        chosen = _checked_levels(levels, array, cost, tokens_per_step)
    return _packed(array, cost, chosen, short_first, seed)


def choose_levels(lengths: np.ndarray, cost: CostModel, tokens_per_step: int) -> tuple[Level, ...]:
    """The levels under which the data set, or every k-th document of a large one, takes least time.

    The arguments are those of `hbp`; of equal sets, the one with fewer levels.
    """
    every = -(-len(lengths) // TRIED)
    tried = np.sort(lengths)[::-1][::every]  # the longest document is among them
    return min(
        level_sets(lengths, cost, tokens_per_step),
        key=lambda levels: int(_packed(tried, cost, levels, 0, 0).step_ns.sum()),
    )


def plain_packing(lengths: Sequence[int] | np.ndarray, cost: CostModel, tokens_per_step: int) -> Packing:
    """What a trainer without levels does: one length of packs, that of the longest document, first fit in data order.

    The same arguments, the same way to choose how packs are run and the same value as `hbp`: to compare with.
    """
    array = _checked_lengths(lengths, tokens_per_step)
    (top,) = next(level_sets(array, cost, tokens_per_step))
    pack = np.empty(len(array), dtype=np.int64)
    count = kernels().first_fit(cost.padded_lengths(array) // cost.pad_multiple, top.tokens // cost.pad_multiple, pack)
    starts = np.append(np.arange(0, count, top.packs), count)
    steps = Steps(np.arange(count), starts, np.zeros(len(starts) - 1, dtype=np.int64))
    return _packing("first-fit", array, cost, (top,), pack, steps)


def _packed(lengths: np.ndarray, cost: CostModel, levels: tuple[Level, ...], short_first: int, seed: int) -> Packing:
    """Pack under given levels."""
    pack, pack_levels = _packs(cost.padded_lengths(lengths) // cost.pad_multiple, cost.pad_multiple, levels)
    order = np.argsort(pack, kind="stable")
    work = np.add.reduceat(np.square(lengths[order]), np.searchsorted(pack[order], np.arange(len(pack_levels))))
    steps = cut(work, pack_levels, levels)
    running = running_order(steps.levels, short_first=short_first, seed=seed)
    return _packing("hbp", lengths, cost, levels, pack, steps.reordered(running))


def _packs(sizes: np.ndarray, granule: int, levels: Sequence[Level]) -> tuple[np.ndarray, np.ndarray]:
    """(int64[n] the pack of every document, int64[P] the level of every pack), from the longest packs down.

    Args:
        sizes: int64[n] granules of every document.
        granule: tokens.
        levels: of the data set.
    """
    order = np.argsort(sizes, kind="stable")
    ascending = sizes[order]
    upto = np.searchsorted(ascending, np.arange(int(ascending[-1]) + 1), side="right")
    left = np.arange(len(sizes) + 1)
    found = np.empty(len(sizes), dtype=np.int64)
    pack_levels: list[int] = []
    for index in reversed(range(len(levels))):
        room = levels[index].tokens // granule
        low = int(upto[min(levels[index - 1].tokens // granule, len(upto) - 1)]) if index else 0
        made = kernels().fill_packs(ascending, upto, left, room, low, levels[index].packs, len(pack_levels), found)
        pack_levels += [index] * made
    pack = np.empty_like(found)
    pack[order] = found
    return _even_end(pack, sizes, granule, levels, np.array(pack_levels))


def _even_end(
    pack: np.ndarray, sizes: np.ndarray, granule: int, levels: Sequence[Level], pack_levels: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Deal the documents of the data set's last step, if it is not whole, evenly to as many packs as a step has.

    Only the lowest level in use can have such a step: others are made whole with shorter documents.
    """
    index = int(pack_levels[-1])
    level = levels[index]
    rest = int((pack_levels == index).sum()) % level.packs
    members = np.flatnonzero(pack >= len(pack_levels) - rest)
    if not len(members):
        return pack, pack_levels
    count = min(level.packs, len(members))
    chosen = dealt(sizes[members], count, level.tokens // granule)
    if chosen is None:
        return pack, pack_levels
    whole = len(pack_levels) - rest
    pack[members] = whole + chosen
    return pack, np.append(pack_levels[:whole], [index] * count)


def _packing(
    name: str, lengths: np.ndarray, cost: CostModel, levels: tuple[Level, ...], pack: np.ndarray, steps: Steps
) -> Packing:
    """Put documents in the order in which their packs run."""
    place = np.empty_like(steps.packs)
    place[steps.packs] = np.arange(len(steps.packs))
    documents = np.argsort(place[pack], kind="stable")
    starts = np.searchsorted(place[pack][documents], np.arange(len(place) + 1))
    return Packing(name, lengths, cost, levels, documents, starts, steps.starts, steps.levels)


def _checked_lengths(lengths: Sequence[int] | np.ndarray, tokens_per_step: int) -> np.ndarray:
    if tokens_per_step < 1:
        raise SeqloomError(f"{tokens_per_step} tokens per step hold no document; give 1 or more")
    return Batch.of(lengths).lengths


def _checked_levels(
    levels: Sequence[Level], lengths: np.ndarray, cost: CostModel, tokens_per_step: int
) -> tuple[Level, ...]:
    """The levels asked for, if they rise, hold the longest document, and fit in memory and in a step."""
    longest = int(cost.padded_lengths(lengths).max())
    rising = all(a.tokens < b.tokens for a, b in pairwise(levels))
    if not levels or not rising or levels[-1].tokens < longest:
        given = ", ".join(str(level.tokens) for level in levels) or "none"
        raise SeqloomError(
            f"levels of {given} tokens: give rising ones, the last of at least {longest}, as the longest document has"
        )
    for level in levels:
        most = level.shape.degree * cost.capacity(level.policy) if level.shape in cost.shapes else 0
        if level.tokens > most:
            raise SeqloomError(
                f"a level of {level.tokens} tokens on groups of shape {level.shape}, which hold {most} here; "
                "choose it with `profiled`"
            )
        if level.packs * level.tokens > tokens_per_step:
            raise SeqloomError(
                f"a level with {level.packs} packs of {level.tokens} tokens in a step of {tokens_per_step}; "
                "lower its packs, or raise the tokens per step"
            )
    return tuple(levels)
