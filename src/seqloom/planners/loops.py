"""The planners' hot loops: integer arrays in, integer arrays out.

All of them stand in this file because `planners.compiled` hands it to numba as a whole: numba knows that its machine
code is out of date by the file's own time stamp. They are plain Python, they use integers and IEEE doubles only, and so
they give the same bits whether they are compiled or not. Callers take them from `compiled.kernels()`.

    aligned blocks    which ranks a group may have
    fill_round        documents into the groups of one round, under a time limit (planner flex)
    decode            documents into rounds on shard groups, within a target time (planner flex)
    assign_ranks      the ranks of every group once the real shard groups count (planner flex)
    packing           first fit, least loaded first, and hierarchical packs (all planners)
    pipelines         documents to pipelines and micro-batches (planner hydraulis)

Letters in shapes: ``n`` documents, ``L`` streams (compute, compute with ring messages, network), ``S`` group shapes,
``D`` degrees, ``I`` shard groups. All times are ns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NEVER = np.int64(1) << np.int64(60)
"""A time that no step reaches: marks what cannot be done."""
MAX_LIMITS = 24
"""Time limits tried for one round, at most."""
LIMIT_SPACING_PERCENT = 102
"""Of time limits closer to each other than this, only the first is tried: they fill a round alike."""
MAX_BATCH_COUNTS = 24
"""Numbers of micro-batches tried for a pipeline, from the least that may hold its tokens."""


# Aligned blocks of ranks, as `GroupFamily.blocks` lists them: whole nodes, or ranks inside one node. (Planner flex.)


def block_count(degree: int, ranks: int, node: int) -> int:
    """Count the aligned blocks of this degree in ``[0, ranks)``."""
    if degree >= node or ranks < node:
        return ranks // degree
    return ranks // node * (node // degree)


def block_start(index: int, degree: int, node: int) -> int:
    """First rank of an aligned block; ranks at the end of a node that make no whole block are left out."""
    if degree >= node:
        return index * degree
    blocks = node // degree
    return index // blocks * node + index % blocks * degree


def class_of_block(start: int, degree: int, rank_class: np.ndarray) -> int:
    """Class of a block of ranks: that of its slowest rank."""
    return rank_class[start : start + degree].max()


def lowest_free_block(
    degree: int, first: int, taken: np.ndarray, node: int, wanted: int, rank_class: np.ndarray
) -> int:
    """Index, from ``first`` on, of the lowest aligned block of a class without a taken rank; `block_count`: none.

    ``rank_class``, int64[ranks], has the classes of the ranks of ``taken``; ``wanted`` -1 is any.

    Taking the lowest block leaves holes that grow with their address: whatever powers of two sum up to the ranks fit.
    """
    index, count = first, block_count(degree, taken.shape[0], node)
    while index < count:
        start = block_start(index, degree, node)
        if taken[start : start + degree].max() == 0 and (
            wanted < 0 or class_of_block(start, degree, rank_class) == wanted
        ):
            break
        index += 1
    return index


def place_aligned_blocks(degrees: np.ndarray, ranks: int, node: int, starts: np.ndarray) -> bool:
    """Place blocks of int64[g] falling degrees on the lowest free aligned ranks of ``[0, ranks)``; False: no room.

    ``starts``, int64[g], receives the first rank of each block.
    """
    taken = np.zeros(ranks, np.int64)
    for group in range(degrees.shape[0]):
        degree = degrees[group]
        index = lowest_free_block(degree, 0, taken, node, -1, taken)
        if index == block_count(degree, ranks, node):
            return False
        starts[group] = block_start(index, degree, node)
        taken[starts[group] : starts[group] + degree] = 1
    return True


# One round: documents, longest first, into groups that all finish within a time limit. (Planner flex.)
#
# The innermost loops take single arrays, not `OpenGroups`: numba counts references whenever it reads an array from a
# tuple, which takes longer than their work.


class BatchTables(NamedTuple):
    """One batch under one policy of the cost model.

    Where ranks differ in speed, every shape has a row for each class of blocks that it may have, and ``degrees`` every
    degree as often, the fastest class first.
    """

    tokens: np.ndarray  # int64[n]: tokens a document occupies, padded
    cost: np.ndarray  # int64[L, S, n]: time that a document adds to each stream of a group of each shape
    fixed: np.ndarray  # int64[L, S]: time of a group before its first document
    shape_degree: np.ndarray  # int64[S]: ranks of a group of each shape, ascending
    degrees: np.ndarray  # int64[D]: the degrees, ascending; distinct where all ranks are equally fast
    solo_ns: np.ndarray  # int64[D, n]: time of a group with this document only, in its best shape; NEVER: too long
    solo_shape: np.ndarray  # int64[D, n]: that best shape
    value: np.ndarray  # int64[n] rank-ns: a document's cheapest work plus its share of a round's fixed cost
    capacity: int  # Tokens one rank holds in one round
    ranks: int  # Ranks of the cluster
    shard_group: int  # Ranks that run every round together
    node: int  # Ranks of a node: aligned blocks smaller than it do not cross it
    block_class: np.ndarray  # int64[D]: class of the blocks of each degree, by their slowest rank; 0: the fastest
    rank_class: np.ndarray  # int64[ranks]: class of each rank


class OpenGroups(NamedTuple):
    """The groups of a round while it is filled; one per rank at most."""

    shape: np.ndarray  # int64[ranks]: index of each group's shape
    start: np.ndarray  # int64[ranks]: first rank of each group, counted from the round's first rank
    tokens: np.ndarray  # int64[ranks]: tokens of each group
    load: np.ndarray  # int64[L, ranks]: time of each stream of each group
    by_shape: np.ndarray  # int64[S, ranks]: groups of each shape that have memory left, the most loaded first
    listed: np.ndarray  # int64[S]: how many groups `by_shape` lists for each shape
    taken: np.ndarray  # int64[ranks]: 1 where a rank has a group
    cursor: np.ndarray  # int64[D]: index of the first aligned block of each degree that may still be free


def no_groups(t: BatchTables, ranks: int) -> OpenGroups:
    """Allocate the groups of a round of so many ranks."""
    return OpenGroups(
        np.empty(ranks, np.int64),
        np.empty(ranks, np.int64),
        np.empty(ranks, np.int64),
        np.empty((t.cost.shape[0], ranks), np.int64),
        np.empty((t.shape_degree.shape[0], ranks), np.int64),
        np.empty(t.shape_degree.shape[0], np.int64),
        np.empty(ranks, np.int64),
        np.empty(t.degrees.shape[0], np.int64),
    )


def next_placeable(t: BatchTables, limit: int, waiting: np.ndarray, place: int, groups: OpenGroups) -> int:
    """First position after ``place`` whose document some group may still hold; ``waiting`` falls in length."""
    best, by_shape, listed, tokens, load = waiting.shape[0], groups.by_shape, groups.listed, groups.tokens, groups.load
    for s in range(listed.shape[0]):
        if listed[s] == 0:
            continue
        time_left = limit - load[0, by_shape[s, listed[s] - 1]]
        tokens_left = 0
        for at in range(listed[s]):
            tokens_left = max(tokens_left, t.shape_degree[s] * t.capacity - tokens[by_shape[s, at]])
        low, high = place + 1, best
        while low < high:
            middle = (low + high) // 2
            k = waiting[middle]
            if t.cost[0, s, k] <= time_left and t.tokens[k] <= tokens_left:
                high = middle
            else:
                low = middle + 1
        best = low
    return best


def fullest_group(
    t: BatchTables,
    k: int,
    limit: int,
    most: int,
    by_shape: np.ndarray,
    listed: np.ndarray,
    tokens: np.ndarray,
    load: np.ndarray,
) -> tuple[int, int]:
    """(shape, position in its list) of the most loaded group of the smallest shape, up to degree ``most``, for ``k``.

    (-1, -1) if no group can take document ``k``.
    """
    cost, shape_degree = t.cost, t.shape_degree
    for s in range(listed.shape[0]):
        if shape_degree[s] > most or listed[s] == 0:
            continue
        tokens_left = shape_degree[s] * t.capacity - t.tokens[k]
        time_left = limit - cost[0, s, k]
        low, high = 0, listed[s]
        while low < high:
            middle = (low + high) // 2
            if load[0, by_shape[s, middle]] <= time_left:
                high = middle
            else:
                low = middle + 1
        for at in range(low, listed[s]):
            g = by_shape[s, at]
            fits = tokens[g] <= tokens_left
            for stream in range(1, cost.shape[0]):
                fits = fits and load[stream, g] + cost[stream, s, k] <= limit
            if fits:
                return s, at
    return -1, -1


def smallest_new_group(
    t: BatchTables,
    k: int,
    limit: int,
    least_degree: int,
    free: int,
    taken: np.ndarray,
    cursor: np.ndarray,
    rank_class: np.ndarray,
) -> tuple[int, int]:
    """(index of the degree, first rank) of the smallest group, from ``least_degree`` up, that ``k`` may open.

    (-1, -1) if there is none. A round only ever takes ranks, so the search goes on from where it ended before.
    """
    for d in range(least_degree, t.degrees.shape[0]):
        degree = t.degrees[d]
        if degree > free:
            break
        if t.solo_ns[d, k] <= limit:
            cursor[d] = lowest_free_block(degree, cursor[d], taken, t.node, t.block_class[d], rank_class)
            if cursor[d] < block_count(degree, taken.shape[0], t.node):
                return d, block_start(cursor[d], degree, t.node)
    return -1, -1


def fill_round(
    t: BatchTables,
    limit: int,
    least_degree: int,
    waiting: np.ndarray,
    shortest: int,
    descending: bool,
    joined: np.ndarray,
    groups: OpenGroups,
    rank_class: np.ndarray,
) -> tuple[int, int, int]:
    """Fill one round up to ``limit`` ns with documents from ``waiting``: the innermost loop of planner flex.

    A document joins the fullest group that still has room (best fit), on the smallest degree that can hold it, because
    a smaller degree loses less time to communication. Where no group has room and ranks are free, it opens a group of
    the smallest degree that finishes in time.

    Args:
        least_degree: index of the smallest degree a group may have.
        waiting: int64[w] documents in the order in which they are tried.
        shortest: tokens of the smallest of them.
        descending: whether that order is by falling length: then runs of documents that cannot fit are skipped.
        joined: int64[w], receives the group of each document that is placed; other entries stay as they are.
        groups: receives the groups of the round.
        rank_class: int64[ranks of the round], see `BatchTables`.

    Returns:
        groups opened, time of the round (ns), total value placed.
    """
    shape, start_of, tokens, load, by_shape, listed, taken, cursor = groups
    listed[:] = 0
    taken[:] = 0
    cursor[:] = 0
    free, count, longest, value = taken.shape[0], 0, 0, 0
    place = 0
    while place < waiting.shape[0]:
        k = waiting[place]
        d, start = smallest_new_group(t, k, limit, least_degree, free, taken, cursor, rank_class)
        most = t.degrees[d] if d >= 0 else taken.shape[0]
        s, at = fullest_group(t, k, limit, most, by_shape, listed, tokens, load)
        if s < 0 and d < 0:
            skip = descending and free == 0
            place = next_placeable(t, limit, waiting, place, groups) if skip else place + 1
            continue
        if s < 0:
            s = t.solo_shape[d, k]
            at = listed[s]
            by_shape[s, at] = count
            shape[count], start_of[count], tokens[count] = s, start, 0
            load[:, count] = t.fixed[:, s]
            taken[start : start + t.shape_degree[s]] = 1
            listed[s] += 1
            free -= t.shape_degree[s]
            count += 1
        group = by_shape[s, at]
        joined[place] = group
        value += t.value[k]
        tokens[group] += t.tokens[k]
        for stream in range(t.cost.shape[0]):
            load[stream, group] += t.cost[stream, s, k]
            longest = max(longest, load[stream, group])
        while at > 0 and load[0, by_shape[s, at - 1]] < load[0, group]:
            by_shape[s, at] = by_shape[s, at - 1]
            at -= 1
        by_shape[s, at] = group
        if tokens[group] + shortest > t.shape_degree[s] * t.capacity:  # full: no document looks at it again
            by_shape[s, at : listed[s] - 1] = by_shape[s, at + 1 : listed[s]]
            listed[s] -= 1
        place += 1
    return count, longest, value


# Decoding: can this batch finish within a target time, and how? (Planner flex.)


class DecodeParams(NamedTuple):
    """What the search of planner flex may change about a decoding.

    The choice of a round is the index of its time limit, plus `MAX_LIMITS` times the index of its least degree.
    """

    order: np.ndarray  # int64[n]: documents in the order in which they are placed
    descending: bool  # Whether that order is by falling length
    extra_degrees: np.ndarray  # int64[n]: degrees that a document is moved up beyond the smallest that meets the target
    limit_index: np.ndarray  # int64[m]: choice of the i-th filled round (cyclically); -1: the most efficient
    growth: int  # Growth from one time limit to the next, per cent
    any_degree: bool  # Whether rounds are also tried with groups of each degree or more


class DecodedRounds(NamedTuple):
    """A decoding: which document is in which group, which group in which round, which round on which shard groups."""

    group_of: np.ndarray  # int64[n]: group of each document; -1: not placed
    group_shape: np.ndarray  # int64[n]: index of each group's shape
    group_start: np.ndarray  # int64[n]: first rank of each group, counted from the first rank of its round
    group_round: np.ndarray  # int64[n]: round of each group
    round_shard_group: np.ndarray  # int64[n]: first shard group of each round
    round_width: np.ndarray  # int64[n]: shard groups of each round
    count: np.ndarray  # int64[2]: groups, rounds
    limit_index: np.ndarray  # int64[n]: limit of the i-th round that filled a single shard group, see `DecodeParams`
    load: np.ndarray  # int64[I]: when each shard group is done

    @classmethod
    def empty(cls, documents: int, shard_groups: int) -> DecodedRounds:
        """Allocate a decoding of that many documents on that many shard groups."""
        sizes = {"count": 2, "load": shard_groups}
        return cls(**{name: np.zeros(sizes.get(name, documents), np.int64) for name in cls._fields})


def decode(t: BatchTables, target: int, params: DecodeParams, rounds: DecodedRounds) -> int:
    """Fill ``rounds`` with a plan that ends within ``target`` ns.

    Documents that no single shard group can finish in time go first. Then shard groups are filled one after another,
    round by round; for every round several time limits are tried and the most efficient one is kept. Long documents ask
    for long rounds, in which ranks with short documents run out of memory long before they run out of time: where to
    set the limit is the heart of the matter, and `flex.search` perturbs exactly these choices.

    Returns the value of the documents that were not placed: 0 means that the target is met.
    """
    rounds.group_of[:] = -1
    rounds.count[:] = 0
    rounds.load[:] = 0
    if not place_wide_documents(t, target, params, rounds):
        return t.value.sum()
    waiting = params.order[rounds.group_of[params.order] < 0]
    done = np.zeros(rounds.load.shape[0], np.int64)
    filled = 0
    for _ in range(rounds.load.shape[0]):
        if waiting.shape[0] == 0:
            break
        shard_group = -1  # the shard group with the least time left: long documents still find room on the others
        for candidate in range(rounds.load.shape[0]):
            if not done[candidate] and (shard_group < 0 or rounds.load[candidate] > rounds.load[shard_group]):
                shard_group = candidate
        done[shard_group] = 1
        waiting, filled = fill_shard_group(t, target, shard_group, waiting, params, filled, rounds)
    return t.value[waiting].sum()


def place_wide_documents(t: BatchTables, target: int, params: DecodeParams, rounds: DecodedRounds) -> bool:
    """Place the documents that need several shard groups; False if one cannot be placed in time."""
    n = t.tokens.shape[0]
    needed = np.full(n, -1, np.int64)  # index of the smallest degree that meets the target
    for k in range(n):
        for d in range(t.degrees.shape[0]):
            if t.solo_ns[d, k] <= target:
                needed[k] = d
                break
        if needed[k] < 0:
            return False
        for _ in range(params.extra_degrees[k]):
            wider = np.searchsorted(t.degrees, t.degrees[needed[k]], "right")
            if wider < t.degrees.shape[0] and t.solo_ns[wider, k] <= target:
                needed[k] = wider
        needed[k] = np.searchsorted(t.degrees, t.degrees[needed[k]])
    shard_groups = rounds.load.shape[0]
    for d in range(t.degrees.shape[0] - 1, -1, -1):
        if t.degrees[d] <= t.shard_group:
            break
        last_group = np.full(shard_groups, -1, np.int64)
        tokens_left = np.zeros(shard_groups, np.int64)
        load = np.zeros((shard_groups, t.cost.shape[0]), np.int64)
        begin = np.zeros(shard_groups, np.int64)
        for k in params.order:
            if needed[k] == d and not place_wide_document(
                t, k, d, target, last_group, tokens_left, load, begin, rounds
            ):
                return False
    return True


def place_wide_document(
    t: BatchTables,
    k: int,
    d: int,
    target: int,
    last_group: np.ndarray,
    tokens_left: np.ndarray,
    load: np.ndarray,
    begin: np.ndarray,
    rounds: DecodedRounds,
) -> bool:
    """Put document ``k`` on the block of degree ``t.degrees[d]`` where it ends first; False: nowhere in time.

    ``d`` is the first index of that degree, of the fastest class of its blocks.
    It joins that block's last group if memory allows, or opens a group as a round of its own. `last_group`, int64[I],
    is known by the block's first shard group (-1: none); the arrays behind it are that group's.
    """
    width = t.degrees[d] // t.shard_group
    best, best_end, joins, own = -1, target + 1, False, d
    for index in range(block_count(t.degrees[d], t.ranks, t.node)):
        block = block_start(index, t.degrees[d], t.node) // t.shard_group
        at = d
        if t.block_class[t.block_class.shape[0] - 1] > 0:
            at += class_of_block(block * t.shard_group, t.degrees[d], t.rank_class)
        group = last_group[block]
        if group >= 0 and tokens_left[block] >= t.tokens[k]:
            spent = 0
            for stream in range(t.cost.shape[0]):
                spent = max(spent, load[block, stream] + t.cost[stream, rounds.group_shape[group], k])
            if begin[block] + spent < best_end:
                best, best_end, joins = block, begin[block] + spent, True
        end = rounds.load[block : block + width].max() + t.solo_ns[at, k]
        if end < best_end:
            best, best_end, joins, own = block, end, False, at
    if best < 0:
        return False
    if not joins:
        group, index = rounds.count[0], rounds.count[1]
        rounds.group_shape[group] = t.solo_shape[own, k]
        rounds.group_start[group] = 0
        rounds.group_round[group] = index
        rounds.round_shard_group[index] = best
        rounds.round_width[index] = width
        rounds.count[0] += 1
        rounds.count[1] += 1
        last_group[best] = group
        tokens_left[best] = t.degrees[d] * t.capacity
        load[best] = t.fixed[:, t.solo_shape[own, k]]
        begin[best] = rounds.load[best : best + width].max()
    group = last_group[best]
    rounds.group_of[k] = group
    tokens_left[best] -= t.tokens[k]
    load[best] += t.cost[:, rounds.group_shape[group], k]
    rounds.load[best : best + width] = best_end
    return True


def fill_shard_group(
    t: BatchTables,
    target: int,
    shard_group: int,
    waiting: np.ndarray,
    params: DecodeParams,
    filled: int,
    rounds: DecodedRounds,
) -> tuple[np.ndarray, int]:
    """Fill one shard group up to the target, round by round; returns who still waits and how many rounds are filled."""
    groups = no_groups(t, t.shard_group)
    limits = np.empty(MAX_LIMITS + 2, np.int64)
    base = shard_group * t.shard_group
    rank_class = t.rank_class[base : base + t.shard_group]
    here = blocks_here(t, rank_class)
    while waiting.shape[0] > 0:
        budget = target - rounds.load[shard_group]
        count = 0
        for k in waiting:  # the longest document that this shard group can still finish in time sets the limits
            count = time_limits(t, k, budget, params.growth, limits, here)
            if count > 0:
                break
        if count == 0:
            break
        shortest = t.tokens[waiting].min()
        joined = np.empty(waiting.shape[0], np.int64)
        chosen = params.limit_index[filled % params.limit_index.shape[0]]
        if chosen < 0:
            chosen = best_limit(t, budget, waiting, shortest, params, limits[:count], joined, groups, rank_class)
        joined[:] = -1
        limit = limits[min(chosen % MAX_LIMITS, count - 1)]
        least_degree = chosen // MAX_LIMITS % np.searchsorted(t.degrees, t.shard_group, "right")
        opened, longest, _ = fill_round(
            t, limit, least_degree, waiting, shortest, params.descending, joined, groups, rank_class
        )
        rounds.limit_index[filled] = chosen
        if opened == 0:
            break
        store_round(shard_group, waiting, opened, joined, groups, rounds)
        rounds.load[shard_group] += longest
        filled += 1
        waiting = waiting[joined < 0]
    return waiting, filled


def blocks_here(t: BatchTables, rank_class: np.ndarray) -> np.ndarray:
    """int64[D]: whether the ranks of these classes, a shard group, have blocks of each degree and class."""
    nobody, here = np.zeros(rank_class.shape[0], np.int64), np.zeros(t.degrees.shape[0], np.int64)
    for d in range(t.degrees.shape[0]):
        if t.degrees[d] <= t.shard_group:
            first = lowest_free_block(t.degrees[d], 0, nobody, t.node, t.block_class[d], rank_class)
            here[d] = first < block_count(t.degrees[d], rank_class.shape[0], t.node)
    return here


def time_limits(t: BatchTables, k: int, budget: int, growth: int, limits: np.ndarray, here: np.ndarray) -> int:
    """Write the time limits worth trying for a round that starts with document ``k``, ascending; returns how many.

    ``here`` are the blocks that its ranks have, see `blocks_here`.
    """
    lowest = NEVER
    count = 0
    for d in range(t.degrees.shape[0]):
        if t.degrees[d] > t.shard_group:
            break
        if here[d] and t.solo_ns[d, k] <= budget and count < MAX_LIMITS // 2:
            lowest = min(lowest, t.solo_ns[d, k])
            limits[count] = t.solo_ns[d, k]
            count += 1
    if count == 0:
        return 0
    limit = lowest
    while count < MAX_LIMITS - 1 and limit < budget and limit < 5 * lowest:
        limit = limit * (100 + growth) // 100
        if limit < budget:
            limits[count] = limit
            count += 1
    limits[count] = budget
    count += 1
    limits[:count].sort()
    spaced = 1
    for index in range(1, count):
        if limits[index] * 100 > limits[spaced - 1] * LIMIT_SPACING_PERCENT:
            limits[spaced] = limits[index]
            spaced += 1
    return spaced


def best_limit(
    t: BatchTables,
    budget: int,
    waiting: np.ndarray,
    shortest: int,
    params: DecodeParams,
    limits: np.ndarray,
    joined: np.ndarray,
    groups: OpenGroups,
    rank_class: np.ndarray,
) -> int:
    """Index (see `DecodeParams`) of the limit that fills a round most efficiently: most value per rank-ns spent.

    Every limit is tried with groups of any size, and the longest one with groups of each size or more: where memory is
    tight, larger groups pack better. The other arguments are those of `fill_round`.
    """
    useful = t.fixed.max() * 6 // 5 + 1  # less time than this left over is as good as lost
    last = limits.shape[0] - 1
    best, best_gain = last, -1.0
    tried = last + np.searchsorted(t.degrees, t.shard_group, "right") if params.any_degree else last + 1
    for index in range(tried):
        chosen, least_degree = min(index, last), max(0, index - last)
        if t.shard_group % t.degrees[least_degree]:
            continue  # groups all of a size that does not tile the shard group leave ranks idle
        if index > last and t.block_class[least_degree] > 0:
            continue  # so do groups on slow blocks only
        opened, longest, value = fill_round(
            t, limits[chosen], least_degree, waiting, shortest, params.descending, joined, groups, rank_class
        )
        spent = longest if budget - longest >= useful else budget
        gain = value / (max(spent, 1) * t.shard_group)
        if opened > 0 and gain > best_gain:
            best, best_gain = chosen + least_degree * MAX_LIMITS, gain
    return best


def store_round(
    shard_group: int,
    waiting: np.ndarray,
    opened: int,
    joined: np.ndarray,
    groups: OpenGroups,
    rounds: DecodedRounds,
) -> None:
    """Append a filled round to the decoding."""
    first, index = rounds.count[0], rounds.count[1]
    rounds.group_shape[first : first + opened] = groups.shape[:opened]
    rounds.group_start[first : first + opened] = groups.start[:opened]
    rounds.group_round[first : first + opened] = index
    for place in range(waiting.shape[0]):
        if joined[place] >= 0:
            rounds.group_of[waiting[place]] = first + joined[place]
    rounds.round_shard_group[index] = shard_group
    rounds.round_width[index] = 1
    rounds.count[0] += opened
    rounds.count[1] += 1


# Ranks: a batch may be decoded with virtual shard groups, wider than the real ones, which packs tight memory better.
# The real shard groups then run on without waiting for the others of their round. (Planner flex.)


class RankAssignment(NamedTuple):
    """The ranks of every group of a decoding, and when each real shard group is done."""

    start: np.ndarray  # int64[n]: first rank of each group
    round_of: np.ndarray  # int64[n]: round of each group; rounds are numbered in the order in which they run
    time: np.ndarray  # int64[n]: ns of each group
    load: np.ndarray  # int64[ranks // shard group]: when each real shard group is done

    @classmethod
    def empty(cls, documents: int, shard_groups: int) -> RankAssignment:
        """Allocate the groups of that many documents on that many real shard groups."""
        sizes = {"load": shard_groups}
        return cls(**{name: np.zeros(sizes.get(name, documents), np.int64) for name in cls._fields})


def assign_ranks(t: BatchTables, rounds: DecodedRounds, shard_group: int, ranks: RankAssignment) -> int:
    """Give every group its ranks and its round, longer groups on the shard groups that are free earliest.

    ``shard_group`` is the real one, ``t.shard_group`` the virtual one of the decoding. Returns when the last shard
    group is done, ns; NEVER if the groups do not fit.
    """
    group_times(t, rounds, ranks.time)
    order = order_groups(t, rounds, ranks.time)
    ranks.load[:] = 0
    numbered = 0
    first = 0
    while first < order.shape[0]:
        index = rounds.group_round[order[first]]
        last = first
        while last < order.shape[0] and rounds.group_round[order[last]] == index:
            last += 1
        base = rounds.round_shard_group[index] * t.shard_group
        width = rounds.round_width[index] * t.shard_group
        if width == shard_group or rounds.round_width[index] > 1:  # all groups on the blocks they were opened on
            ranks.start[order[first:last]] = base + rounds.group_start[order[first:last]]
            numbered = close_round(shard_group, base, width, order[first:last], numbered, ranks)
        else:
            numbered = split_round(t, rounds, shard_group, base, width, order[first:last], numbered, ranks)
        first = last
    return ranks.load.max()


def group_times(t: BatchTables, rounds: DecodedRounds, time: np.ndarray) -> None:
    """Write the time of every group of the decoding, ns."""
    groups = rounds.count[0]
    load = np.zeros((t.cost.shape[0], groups), np.int64)
    for group in range(groups):
        load[:, group] = t.fixed[:, rounds.group_shape[group]]
    for k in range(t.tokens.shape[0]):
        group = rounds.group_of[k]
        if group >= 0:
            load[:, group] += t.cost[:, rounds.group_shape[group], k]
    for group in range(groups):
        time[group] = load[:, group].max()


def order_groups(t: BatchTables, rounds: DecodedRounds, time: np.ndarray) -> np.ndarray:
    """Sort groups by round, then falling degree, then falling time; ties by number."""
    groups = rounds.count[0]
    order = np.argsort(-time[:groups], kind="mergesort")  # stable sorts, the least important key first
    order = order[np.argsort(-t.shape_degree[rounds.group_shape[order]], kind="mergesort")]
    return order[np.argsort(rounds.group_round[order], kind="mergesort")]


def close_round(
    shard_group: int, base: int, width: int, groups: np.ndarray, numbered: int, ranks: RankAssignment
) -> int:
    """Run these groups as a round on ``[base, base + width)`` once its ranks are free; returns rounds numbered."""
    low, high = base // shard_group, (base + width) // shard_group
    end = ranks.load[low:high].max() + ranks.time[groups].max()
    ranks.round_of[groups] = numbered
    ranks.load[low:high] = end
    return numbered + 1


def split_round(
    t: BatchTables,
    rounds: DecodedRounds,
    shard_group: int,
    base: int,
    width: int,
    groups: np.ndarray,
    numbered: int,
    ranks: RankAssignment,
) -> int:
    """Split a virtual round into rounds of real shard groups: each group goes where it may begin first.

    Several groups smaller than a real shard group share one and run in lock step. Returns rounds numbered so far.
    """
    used = np.zeros(width // shard_group, np.int64)
    at = 0
    while at < groups.shape[0]:
        degree = t.shape_degree[rounds.group_shape[groups[at]]]
        size = max(1, degree // shard_group)
        best, best_load = -1, 0
        for index in range(block_count(size * shard_group, width, t.node)):
            block = block_start(index, size * shard_group, t.node) // shard_group
            load = ranks.load[base // shard_group + block : base // shard_group + block + size].max()
            if used[block : block + size].max() == 0 and (best < 0 or load < best_load):
                best, best_load = block, load
        if best < 0:  # blocks that do not divide each other: this decoding is worth nothing
            ranks.load[:] = NEVER
            return numbered
        used[best : best + size] = 1
        last = at + 1
        if degree < shard_group:
            filled = degree
            while last < groups.shape[0] and filled + t.shape_degree[rounds.group_shape[groups[last]]] <= shard_group:
                filled += t.shape_degree[rounds.group_shape[groups[last]]]
                last += 1
        start, length = base + best * shard_group, size * shard_group
        starts = np.empty(last - at, np.int64)
        degrees = t.shape_degree[rounds.group_shape[groups[at:last]]]
        fits = place_aligned_blocks(degrees, length, t.node, starts)
        ranks.start[groups[at:last]] = start + starts
        numbered = close_round(shard_group, start, length, groups[at:last], numbered, ranks)
        if not fits:
            ranks.load[:] = NEVER
        at = last
    return numbered


# Packing, for `planners.packing` and for the micro-batches of planner hydraulis.


def first_fit(sizes: np.ndarray, capacity: int, out: np.ndarray) -> int:
    """Write to ``out`` the first bin that each item fits into, in the order given; returns the number of bins."""
    leaves = 1
    while leaves < sizes.shape[0]:
        leaves *= 2
    most = np.full(2 * leaves, capacity, np.int64)  # a tree: most capacity left of any bin below each node
    bins = 0
    for item in range(sizes.shape[0]):
        node = 1
        while node < leaves:
            node = 2 * node if most[2 * node] >= sizes[item] else 2 * node + 1
        out[item] = node - leaves
        bins = max(bins, node - leaves + 1)
        most[node] -= sizes[item]
        while node > 1:
            node //= 2
            most[node] = max(most[2 * node], most[2 * node + 1])
    return bins


def least_loaded(sizes: np.ndarray, work: np.ndarray, capacity: int, bins: int, overflow: bool, out: np.ndarray) -> int:
    """Write to ``out`` the bin with the least work of those that each item fits into; the first of equals.

    With ``overflow``, an item that fits nowhere goes to the bin with the most capacity left. Returns the work of the
    most loaded bin; -1 if an item fits nowhere.
    """
    held = np.zeros(bins, np.int64)
    load = np.zeros(bins, np.int64)
    for i in range(sizes.shape[0]):
        open_load = np.where(held + sizes[i] <= capacity, load, NEVER)
        best = open_load.argmin()
        if open_load[best] == NEVER:
            if not overflow:
                return -1
            best = held.argmin()
        out[i] = best
        held[best] += sizes[i]
        load[best] += work[i]
    return load.max()


def longest_left(left: np.ndarray, place: int) -> int:
    """The last of the places ``0 .. place`` whose document is left; place ``k + 1`` is document ``k``, 0 is none.

    ``left``, int64[n + 1], has of every place itself, or a lower one to go on from. Paths are halved on the way.
    """
    while left[place] != place:
        left[place] = left[left[place]]
        place = left[place]
    return place


def fill_packs(
    sizes: np.ndarray,
    upto: np.ndarray,
    left: np.ndarray,
    room: int,
    low: int,
    per_step: int,
    first: int,
    out: np.ndarray,
) -> int:
    """Make packs of one level of hierarchical balance packing until none of its own documents is left.

    Each pack takes the longest document that still fits, again and again: first fit decreasing, pack by pack. Shorter
    documents, of lower levels, fill the gaps, and complete the level's last step as far as there are any.

    Args:
        sizes: int64[n] pad multiples of every document, ascending.
        upto: int64[longest + 1]: how many documents have at most so many pad multiples.
        left: int64[n + 1], see `longest_left`; what is taken is marked.
        room: pad multiples of a pack; ``per_step`` packs are a step.
        low: index of the first document of the level; those below it are of lower levels.
        first: number of the first pack; ``out``, int64[n], receives the pack of every document that is taken.

    Returns the number of packs made.
    """
    packs = 0
    while True:
        longest = longest_left(left, sizes.shape[0])
        if longest == 0 or (longest <= low and packs % per_step == 0):
            return packs
        gap = room
        while True:
            place = longest_left(left, upto[min(gap, upto.shape[0] - 1)])
            if place == 0:
                break
            out[place - 1] = first + packs
            left[place] = place - 1
            gap -= sizes[place - 1]
        packs += 1


# Pipelines side by side (planner hydraulis): which pipeline gets which documents, and their micro-batches. Times are
# those of one stage, forward and backward; stages of a pipeline take equally long.


class DispatchProblem(NamedTuple):
    """Documents, longest first, and the pipelines of one strategy."""

    tokens: np.ndarray  # int64[n] tokens, falling
    cost: np.ndarray  # int64[pipelines, n] ns that a document adds to a stage of a pipeline; falls with the tokens
    fixed: np.ndarray  # int64[pipelines] ns of a micro-batch before any document
    max_tokens: np.ndarray  # int64[pipelines] tokens that a micro-batch may hold
    max_length: np.ndarray  # int64[pipelines] tokens of the longest document that may go there; at most `max_tokens`
    stages: np.ndarray  # int64[pipelines]
    charge_largest: bool = False  # Every micro-batch costs as much as the largest of its pipeline, as published


class PipelineLoads(NamedTuple):
    """The documents of every pipeline so far, int64[pipelines] each."""

    work: np.ndarray  # ns of all its documents on a stage
    tokens: np.ndarray
    count: np.ndarray
    first: np.ndarray  # Its longest document: the lowest number; -1 without any
    second: np.ndarray  # The next one
    done: np.ndarray  # ns of `estimate_pipeline_ns`

    @classmethod
    def empty(cls, pipelines: int) -> PipelineLoads:
        """No documents anywhere."""
        none = np.full(pipelines, -1, np.int64)
        zero = np.zeros(pipelines, np.int64)
        return cls(zero, zero.copy(), zero.copy(), none, none.copy(), zero.copy())


def one_f_one_b_ns(times: np.ndarray, stages: int) -> int:
    """Makespan in ns of micro-batches through a pipeline in 1F1B order, by its recurrence; messages take no time.

    Stage s runs ``stages - 1 - s`` forwards ahead, then one forward and one backward in turn, then what is left:

        stage 0    F0 F1    B0 F2 B1    B2
        stage 1       F0 B0 F1 B1 F2 B2

    ``times``, int64[v], are ns of every micro-batch on a stage, in running order; a third of it is forward.
    """
    count = times.shape[0]
    forward = times // 3
    free = np.zeros(stages, np.int64)
    returned = np.zeros(stages + 1, np.int64)  # when the last backward of every stage has ended
    for i in range(count + stages - 1):  # forward of micro-batch i, then one backward on every stage that has begun
        arrived = np.int64(0)
        for s in range(stages):
            if i < count:
                free[s] = max(free[s], arrived) + forward[i]
                arrived = free[s]
        for s in range(stages):
            j = i - (stages - 1 - s)
            if 0 <= j < count:
                free[s] = max(free[s], returned[s + 1]) + times[j] - forward[j]
                returned[s] = free[s]
    return free.max()


def estimate_pipeline_ns(
    work: int, tokens: int, largest: int, count: int, fixed: int, max_tokens: int, stages: int, charge_largest: bool
) -> int:
    """Estimate a pipeline whose documents are not packed yet: ``sum + (stages - 1) x largest micro-batch``, ns.

    The number of micro-batches is the one at which this is least, as if documents could be levelled freely: few cost
    few constants, many make the first and the last one short. None is shorter than the largest document.

    ``work`` and ``largest`` are ns on a stage of all ``count`` documents and of the largest; the others are those of
    `DispatchProblem`.
    """
    if count == 0:
        return 0
    batches = -(-tokens // max_tokens)
    if stages > 1:
        wanted = int(np.sqrt(work * (stages - 1) / max(fixed, 1)))
        batches = max(batches, min(wanted, -(-work // max(largest, 1)), count))
    level = max(largest, -(-work // batches)) + fixed
    if charge_largest:
        return level * (stages - 1 + batches)
    return work + batches * fixed + (stages - 1) * level


def changed_pipeline_ns(p: DispatchProblem, loads: PipelineLoads, j: int, removed: int, added: int) -> int:
    """Estimate pipeline ``j`` without document ``removed`` and with document ``added``, ns; -1 stands for none."""
    work, tokens, count, first = loads.work[j], loads.tokens[j], loads.count[j], loads.first[j]
    if removed >= 0:
        work, tokens, count = work - p.cost[j, removed], tokens - p.tokens[removed], count - 1
        if first == removed:
            first = loads.second[j]
    if added >= 0:
        work, tokens, count = work + p.cost[j, added], tokens + p.tokens[added], count + 1
        if first < 0 or added < first:
            first = added
    largest = p.cost[j, first] if first >= 0 else 0
    return estimate_pipeline_ns(
        work, tokens, largest, count, p.fixed[j], p.max_tokens[j], p.stages[j], p.charge_largest
    )


def sum_pipeline(p: DispatchProblem, pipeline_of: np.ndarray, loads: PipelineLoads, j: int) -> None:
    """Write the loads of pipeline ``j`` from scratch; ``pipeline_of`` is int64[n]."""
    own = (pipeline_of == j).nonzero()[0]
    loads.work[j], loads.tokens[j], loads.count[j] = p.cost[j][own].sum(), p.tokens[own].sum(), own.shape[0]
    loads.first[j] = own[0] if own.shape[0] > 0 else -1
    loads.second[j] = own[1] if own.shape[0] > 1 else -1
    loads.done[j] = changed_pipeline_ns(p, loads, j, -1, -1)


def dispatch_longest_first(p: DispatchProblem, pipeline_of: np.ndarray, loads: PipelineLoads) -> bool:
    """Give every document, longest first, to the pipeline that is done with it earliest; False if one fits nowhere."""
    pipeline_of[:] = -1
    for j in range(p.fixed.shape[0]):
        sum_pipeline(p, pipeline_of, loads, j)
    for i in range(pipeline_of.shape[0]):
        best, soonest = -1, 0
        for j in range(p.fixed.shape[0]):
            if p.tokens[i] <= p.max_length[j] and (best < 0 or loads.done[j] + p.cost[j, i] < soonest):
                done = changed_pipeline_ns(p, loads, j, -1, i)
                if best < 0 or done < soonest:
                    best, soonest = j, done
        if best < 0:
            return False
        pipeline_of[i] = best
        loads.work[best] += p.cost[best, i]
        loads.tokens[best] += p.tokens[i]
        loads.count[best] += 1
        if loads.first[best] < 0:
            loads.first[best] = i
        loads.done[best] = soonest
    for j in range(p.fixed.shape[0]):
        sum_pipeline(p, pipeline_of, loads, j)
    return True


def swap_rebalance(p: DispatchProblem, pipeline_of: np.ndarray, loads: PipelineLoads, evaluations: int) -> int:
    """Move documents away from the slowest pipeline, or exchange them, until nothing helps; returns its time, ns.

    Every change makes the slower of two pipelines faster than the slowest was, so no assignment comes twice. At most
    ``evaluations`` changes are looked at.
    """
    while evaluations > 0:
        slow = int(loads.done.argmax())
        best, moved, returned, target = loads.done[slow], -1, -1, -1
        others = (pipeline_of != slow).nonzero()[0]  # the rest of these arrays are theirs
        place = pipeline_of[others]
        without = loads.done[place] - p.cost.ravel()[place * pipeline_of.shape[0] + others]
        for i in (pipeline_of == slow).nonzero()[0]:
            if evaluations <= 0:
                break
            evaluations -= 1 + p.fixed.shape[0]
            lighter = changed_pipeline_ns(p, loads, slow, i, -1)
            if lighter >= best:
                continue
            for j in range(p.fixed.shape[0]):
                if j != slow and p.tokens[i] <= p.max_length[j] and loads.done[j] + p.cost[j, i] < best:
                    done = max(lighter, changed_pipeline_ns(p, loads, j, -1, i))
                    if done < best:
                        best, moved, returned, target = done, i, -1, j
            first = np.searchsorted(others, i)  # for a shorter one: a longer one makes the slowest slower
            held = (p.tokens[i] <= p.max_length)[place[first:]] & (p.tokens[others[first:]] != p.tokens[i])
            evaluations -= held.sum()
            # more work takes at least so much longer: most changes need no estimate
            held &= lighter + p.cost[slow][others[first:]] < best
            held &= without[first:] + p.cost[:, i][place[first:]] < best
            for at in held.nonzero()[0]:
                k, j = others[first + at], place[first + at]
                done = max(changed_pipeline_ns(p, loads, slow, i, k), changed_pipeline_ns(p, loads, j, k, i))
                if done < best:
                    best, moved, returned, target = done, i, k, j
        if moved < 0:
            break
        pipeline_of[moved] = target
        if returned >= 0:
            pipeline_of[returned] = slow
        sum_pipeline(p, pipeline_of, loads, slow)
        sum_pipeline(p, pipeline_of, loads, target)
    return loads.done.max()


def order_micro_batches(
    cost: np.ndarray, batch: np.ndarray, count: int, fixed: int, stages: int, charge_largest: bool
) -> int:
    """Number micro-batches in running order, the largest in the middle and the smallest at both ends; returns ns.

    A pipeline fills and drains at the pace of its first and its last micro-batches. ``batch``, int64[n], the
    micro-batch of every document, is renumbered.
    """
    times = np.zeros(count, np.int64)
    for i in range(batch.shape[0]):
        times[batch[i]] += cost[i]
    rising = np.argsort(times, kind="mergesort")
    position = np.empty(count, np.int64)
    order = np.empty(count, np.int64)
    for k in range(count):
        at = k // 2 if k % 2 == 0 else count - 1 - k // 2
        order[at] = rising[k]
        position[rising[k]] = at
    for i in range(batch.shape[0]):
        batch[i] = position[batch[i]]
    if charge_largest:
        return (times.max() + fixed) * (stages - 1 + count)
    return one_f_one_b_ns(times[order] + fixed, stages)


def pack_micro_batches(
    tokens: np.ndarray,
    cost: np.ndarray,
    fixed: int,
    max_tokens: int,
    stages: int,
    charge_largest: bool,
    batch: np.ndarray,
) -> int:
    """Pack the documents of one pipeline into micro-batches, by what they cost and not by tokens.

    One stage wants as few micro-batches as hold the tokens: each costs a constant. Several stages want them equal as
    well, and more of them: the pipeline fills and drains at the pace of the largest. Every number is tried, within
    reason. The arguments are those of a `DispatchProblem` with this pipeline only; ``batch``, int64[n], receives the
    micro-batch of every document, in running order. Returns ns of the pipeline.
    """
    if tokens.shape[0] == 0:
        return 0
    fitted = first_fit(tokens, max_tokens, batch)
    best = order_micro_batches(cost, batch, fitted, fixed, stages, charge_largest)
    least = -(-tokens.sum() // max_tokens)
    tried = np.empty_like(batch)
    for count in range(least, min(tokens.shape[0], least + MAX_BATCH_COUNTS - 1) + 1):
        if stages == 1 and count > fitted:
            break
        if least_loaded(tokens, cost, max_tokens, count, False, tried) >= 0:
            time = order_micro_batches(cost, tried, count, fixed, stages, charge_largest)
            if time < best or (time == best and stages == 1):  # of one stage level ones: they need the least memory
                best = time
                batch[:] = tried
    return best
