"""Decode a target time into a plan: can this batch finish within ``target`` ns, and how?

Documents that no single shard group can finish in time go first, each wide group as a round of its own on the least
loaded
aligned block of shard groups. Then the shard groups are filled one after another, round by round. For every round
several time
limits are tried and the most efficient one is kept: value placed per rank-nanosecond spent. Long documents ask for
long rounds, in which ranks with short documents would run out of memory long before they run out of time, so where to
set the limit is the heart of the matter; the search in ``flex`` perturbs exactly these choices.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.planners.compiled import kernel
from seqloom.planners.fill import NEVER, Tables, block_count, block_start, fill_round

LADDER_STEPS = 24
"""Limits tried for one round, at most."""


NEAR = 102
"""Limits of a ladder closer than this, per cent, are tried as one."""


class Keys(NamedTuple):
    """What the search may change about a decoding."""

    order: np.ndarray
    """int64[n]: documents in the order in which they are placed."""
    falling: bool
    """Whether that order is by falling length."""
    widen: np.ndarray
    """int64[n]: degrees a document is moved up beyond the smallest that meets the target."""
    rung: np.ndarray
    """int64[m]: step of its ladder that the i-th filled round takes (counted cyclically); -1 = the most efficient."""
    step: int
    """Growth from one limit of the ladder to the next, per cent."""


class Draft(NamedTuple):
    """A decoding: which document is in which group, which group in which round, which round on which shard groups."""

    group_of: np.ndarray
    """int64[n]: group of each document, -1 where none was found."""
    group_shape: np.ndarray
    group_start: np.ndarray
    """int64[n]: first rank of each group, counted from the first rank of its round."""
    group_round: np.ndarray
    round_shard_group: np.ndarray
    """int64[n]: first shard group of each round."""
    round_width: np.ndarray
    """int64[n]: shard groups of each round."""
    count: np.ndarray
    """int64[2]: groups, rounds."""
    rung: np.ndarray
    """int64[n]: for the i-th round that filled a single shard group, the step of its ladder that was taken."""
    load: np.ndarray
    """int64[I]: when each shard group is done, ns."""

    @classmethod
    def empty(cls, documents: int, shard_groups: int) -> Draft:
        """Room for the decoding of that many documents on that many shard groups."""
        sizes = {"count": 2, "load": shard_groups}
        return cls(**{name: np.zeros(sizes.get(name, documents), np.int64) for name in cls._fields})


@kernel
def place_wide(t: Tables, target: int, keys: Keys, draft: Draft) -> bool:
    """Place the documents that need more than one shard group; False if one cannot be placed in time."""
    n = t.tokens.shape[0]
    needs = np.full(n, -1, np.int64)
    for k in range(n):
        for d in range(t.degrees.shape[0]):
            if t.alone[d, k] <= target:
                needs[k] = d
                break
        if needs[k] < 0:
            return False
        for _ in range(keys.widen[k]):
            if needs[k] + 1 < t.degrees.shape[0] and t.alone[needs[k] + 1, k] <= target:
                needs[k] += 1
    shard_groups = draft.load.shape[0]
    for d in range(t.degrees.shape[0] - 1, -1, -1):
        if t.degrees[d] <= t.shard_group:
            break
        width = t.degrees[d] // t.shard_group
        open_group = np.full(shard_groups, -1, np.int64)
        room = np.zeros(shard_groups, np.int64)
        lanes = np.zeros((shard_groups, t.cost.shape[0]), np.int64)
        began = np.zeros(shard_groups, np.int64)
        for k in keys.order:
            if needs[k] == d and not place_one_wide(t, k, d, width, target, open_group, room, lanes, began, draft):
                return False
    return True


@kernel
def place_one_wide(
    t: Tables,
    k: int,
    d: int,
    width: int,
    target: int,
    open_group: np.ndarray,
    room: np.ndarray,
    lanes: np.ndarray,
    began: np.ndarray,
    draft: Draft,
) -> bool:
    """Put one wide document on the block where it ends first, joining that block's last group if memory allows."""
    best, best_end, best_joins = -1, target + 1, False
    for index in range(block_count(t.degrees[d], t.ranks, t.node)):
        block = block_start(index, t.degrees[d], t.node) // t.shard_group
        group = open_group[block]
        if group >= 0 and room[block] >= t.tokens[k]:
            spent = 0
            for lane in range(t.cost.shape[0]):
                spent = max(spent, lanes[block, lane] + t.cost[lane, draft.group_shape[group], k])
            if began[block] + spent < best_end:
                best, best_end, best_joins = block, began[block] + spent, True
        end = draft.load[block : block + width].max() + t.alone[d, k]
        if end < best_end:
            best, best_end, best_joins = block, end, False
    if best < 0:
        return False
    if not best_joins:
        group, index = draft.count[0], draft.count[1]
        draft.group_shape[group] = t.alone_shape[d, k]
        draft.group_start[group] = 0
        draft.group_round[group] = index
        draft.round_shard_group[index] = best
        draft.round_width[index] = width
        draft.count[0] += 1
        draft.count[1] += 1
        open_group[best] = group
        room[best] = t.degrees[d] * t.capacity
        lanes[best] = t.fixed[:, t.alone_shape[d, k]]
        began[best] = draft.load[best : best + width].max()
    group = open_group[best]
    draft.group_of[k] = group
    room[best] -= t.tokens[k]
    lanes[best] += t.cost[:, draft.group_shape[group], k]
    draft.load[best : best + width] = best_end
    return True


@kernel
def limit_ladder(t: Tables, k: int, budget: int, step: int, ladder: np.ndarray) -> int:
    """Time limits worth trying for a round that starts with document ``k``, ascending; returns how many."""
    lowest = NEVER
    count = 0
    for d in range(t.degrees.shape[0]):
        if t.degrees[d] > t.shard_group:
            break
        if t.alone[d, k] <= budget and count < LADDER_STEPS // 2:
            lowest = min(lowest, t.alone[d, k])
            ladder[count] = t.alone[d, k]
            count += 1
    if count == 0:
        return 0
    limit = lowest
    while count < LADDER_STEPS - 1 and limit < budget and limit < 5 * lowest:
        limit = limit * (100 + step) // 100
        if limit < budget:
            ladder[count] = limit
            count += 1
    ladder[count] = budget
    count += 1
    ladder[:count].sort()
    kept = 1
    for index in range(1, count):  # limits this near to each other fill alike
        if ladder[index] * 100 > ladder[kept - 1] * NEAR:
            ladder[kept] = ladder[index]
            kept += 1
    return kept


@kernel
def best_rung(
    t: Tables,
    budget: int,
    waiting: np.ndarray,
    least: int,
    falling: bool,
    ladder: np.ndarray,
    joined: np.ndarray,
    shapes: np.ndarray,
    starts: np.ndarray,
    load: np.ndarray,
    tokens: np.ndarray,
) -> int:
    """The most efficient way to fill a round: value placed per rank-nanosecond spent.

    Every limit of the ladder is tried with groups of any size, and the longest one with groups of each size or more:
    where memory is tight, larger groups pack better. The arrays from ``joined`` on are those of ``fill_round``.
    """
    useful = t.fixed.max() * 6 // 5 + 1  # less time than this left over is as good as lost
    last = ladder.shape[0] - 1
    best, best_gain = last, -1.0
    for index in range(last + np.searchsorted(t.degrees, t.shard_group, "right")):
        rung, floor = min(index, last), max(0, index - last)
        if t.shard_group % t.degrees[floor]:
            continue  # groups all of a size that does not tile the shard group leave ranks idle
        groups, longest, value = fill_round(
            t, ladder[rung], floor, t.shard_group, waiting, least, falling, joined, shapes, starts, load, tokens
        )
        spent = longest if budget - longest >= useful else budget
        gain = value / (max(spent, 1) * t.shard_group)
        if groups > 0 and gain > best_gain:
            best, best_gain = rung + floor * LADDER_STEPS, gain
    return best


@kernel
def keep_round(
    shard_group: int,
    waiting: np.ndarray,
    groups: int,
    joined: np.ndarray,
    shapes: np.ndarray,
    starts: np.ndarray,
    draft: Draft,
) -> None:
    """Write a filled round into the draft."""
    first, index = draft.count[0], draft.count[1]
    draft.group_shape[first : first + groups] = shapes[:groups]
    draft.group_start[first : first + groups] = starts[:groups]
    draft.group_round[first : first + groups] = index
    for place in range(waiting.shape[0]):
        if joined[place] >= 0:
            draft.group_of[waiting[place]] = first + joined[place]
    draft.round_shard_group[index] = shard_group
    draft.round_width[index] = 1
    draft.count[0] += groups
    draft.count[1] += 1


@kernel
def fill_shard_group(
    t: Tables, target: int, shard_group: int, waiting: np.ndarray, keys: Keys, filled: int, draft: Draft
) -> tuple[np.ndarray, int]:
    """Fill one shard group up to the target, round by round; returns who still waits and how many rounds are filled."""
    shapes, starts, tokens = (
        np.empty(t.shard_group, np.int64),
        np.empty(t.shard_group, np.int64),
        np.empty(t.shard_group, np.int64),
    )
    load = np.empty((t.cost.shape[0], t.shard_group), np.int64)
    ladder = np.empty(LADDER_STEPS + 2, np.int64)
    while waiting.shape[0] > 0:
        budget = target - draft.load[shard_group]
        rungs = 0
        for k in waiting:  # the longest document that this shard group can still finish in time sets the ladder
            rungs = limit_ladder(t, k, budget, keys.step, ladder)
            if rungs > 0:
                break
        if rungs == 0:
            break
        least = t.tokens[waiting].min()
        joined = np.empty(waiting.shape[0], np.int64)
        rung = keys.rung[filled % keys.rung.shape[0]]
        if rung < 0:
            tried = ladder[:rungs]
            rung = best_rung(t, budget, waiting, least, keys.falling, tried, joined, shapes, starts, load, tokens)
        joined[:] = -1
        limit = ladder[min(rung % LADDER_STEPS, rungs - 1)]
        floor = rung // LADDER_STEPS % np.searchsorted(t.degrees, t.shard_group, "right")
        groups, longest, _ = fill_round(
            t, limit, floor, t.shard_group, waiting, least, keys.falling, joined, shapes, starts, load, tokens
        )
        draft.rung[filled] = rung
        if groups == 0:
            break
        keep_round(shard_group, waiting, groups, joined, shapes, starts, draft)
        draft.load[shard_group] += longest
        filled += 1
        waiting = waiting[joined < 0]
    return waiting, filled


@kernel
def decode(t: Tables, target: int, keys: Keys, draft: Draft) -> int:
    """Fill ``draft`` with a plan that ends within ``target`` ns.

    Returns:
        total value of the documents for which no place was found: 0 means that the target is met.
    """
    draft.group_of[:] = -1
    draft.count[:] = 0
    draft.load[:] = 0
    if not place_wide(t, target, keys, draft):
        return t.value.sum()
    waiting = keys.order[draft.group_of[keys.order] < 0]
    done = np.zeros(draft.load.shape[0], np.int64)
    filled = 0
    for _ in range(draft.load.shape[0]):
        if waiting.shape[0] == 0:
            break
        shard_group = -1  # the shard group with the least time left: long documents still find room on the others
        for candidate in range(draft.load.shape[0]):
            if not done[candidate] and (shard_group < 0 or draft.load[candidate] > draft.load[shard_group]):
                shard_group = candidate
        done[shard_group] = 1
        waiting, filled = fill_shard_group(t, target, shard_group, waiting, keys, filled, draft)
    return t.value[waiting].sum()
