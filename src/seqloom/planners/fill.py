"""Fill one round: documents, longest first, into groups that must all finish within a time limit.

This is the innermost loop of the planner. A document joins the fullest group that still has room (best fit), on the
smallest degree that can hold it, because a smaller degree wastes less time on communication; where no group has room
and ranks are free, a new group is opened at the smallest degree that finishes in time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.planners.compiled import kernel

NEVER = np.int64(1) << np.int64(60)
"""A time no step reaches: marks what cannot be done."""


class Tables(NamedTuple):
    """A batch as the hot loops see it. Times in ns; ``L`` lanes, ``S`` shapes, ``D`` degrees, ``n`` documents."""

    tokens: np.ndarray
    """int64[n]: tokens a document occupies, rounded up to the granule."""
    cost: np.ndarray
    """int64[L, S, n]: what a document adds to each lane of a group of each shape."""
    fixed: np.ndarray
    """int64[L, S]: what a group costs before its first document."""
    shape_degree: np.ndarray
    """int64[S]: ranks of a group of each shape, ascending."""
    degrees: np.ndarray
    """int64[D]: the distinct degrees, ascending."""
    alone: np.ndarray
    """int64[D, n]: time of a group of that degree holding only this document, in its best shape; NEVER if it cannot."""
    alone_shape: np.ndarray
    """int64[D, n]: that best shape."""
    value: np.ndarray
    """int64[n]: rank-ns a document is worth: its cheapest work plus its share of a round's fixed cost."""
    capacity: int
    """Tokens one rank holds in one round."""
    ranks: int
    """Ranks of the cluster."""
    shard_group: int
    """Ranks that run every round together."""
    node: int
    """Ranks of a node: where aligned blocks may not cross."""


@kernel
def block_count(degree: int, ranks: int, node: int) -> int:
    """How many aligned blocks of this degree the ranks have: whole nodes, or inside a node (or a part of one)."""
    if degree >= node or ranks < node:
        return ranks // degree
    return ranks // node * (node // degree)


@kernel
def block_start(index: int, degree: int, node: int) -> int:
    """First rank of an aligned block; ranks at the end of a node that make no whole block are left out."""
    if degree >= node:
        return index * degree
    blocks = node // degree
    return index // blocks * node + index % blocks * degree


@kernel
def arrange(degrees: np.ndarray, ranks: int, node: int, starts: np.ndarray) -> bool:
    """Place blocks of the given degrees (descending) on aligned ranks of ``[0, ranks)``; False if they do not fit.

    Args:
        degrees: int64[g], descending.
        starts: int64[g], receives the first rank of each block.
    """
    taken = np.zeros(ranks, np.int64)
    for group in range(degrees.shape[0]):
        size = degrees[group]
        found = False
        for index in range(block_count(size, ranks, node)):
            start = block_start(index, size, node)
            if taken[start : start + size].max() == 0:
                starts[group] = start
                taken[start : start + size] = 1
                found = True
                break
        if not found:
            return False
    return True


@kernel
def free_block(degree: int, d: int, ranks: int, node: int, taken: np.ndarray, cursor: np.ndarray) -> int:
    """First rank of the lowest aligned block of this degree that is still free, or -1.

    Ranks are only ever taken while a round is filled, so the search goes on from where it ended before. Taking the
    lowest block leaves holes that grow with their address: whatever powers of two sum up to the ranks also fit.
    """
    while cursor[d] < block_count(degree, ranks, node):
        start = block_start(cursor[d], degree, node)
        if taken[start : start + degree].max() == 0:
            return start
        cursor[d] += 1
    return -1


@kernel
def next_fitting(
    t: Tables,
    limit: int,
    waiting: np.ndarray,
    place: int,
    listed: np.ndarray,
    size: np.ndarray,
    load: np.ndarray,
    tokens: np.ndarray,
) -> int:
    """First position after ``place`` whose document some open group may still hold; documents fall in length."""
    best = waiting.shape[0]
    for s in range(size.shape[0]):
        if size[s] == 0:
            continue
        slack = limit - load[0, listed[s, size[s] - 1]]
        room = 0
        for at in range(size[s]):
            room = max(room, t.shape_degree[s] * t.capacity - tokens[listed[s, at]])
        low, high = place + 1, best
        while low < high:
            middle = (low + high) // 2
            k = waiting[middle]
            if t.cost[0, s, k] <= slack and t.tokens[k] <= room:
                high = middle
            else:
                low = middle + 1
        best = low
    return best


@kernel
def find_group(
    t: Tables,
    k: int,
    limit: int,
    most: int,
    listed: np.ndarray,
    size: np.ndarray,
    load: np.ndarray,
    tokens: np.ndarray,
) -> tuple[int, int]:
    """The fullest open group of the smallest shape, up to degree ``most``, that can take document ``k``.

    Returns:
        shape and position in that shape's list, or (-1, -1).
    """
    for s in range(size.shape[0]):
        if t.shape_degree[s] > most or size[s] == 0:
            continue
        room = t.shape_degree[s] * t.capacity - t.tokens[k]
        left = limit - t.cost[0, s, k]
        low, high = 0, size[s]
        while low < high:
            middle = (low + high) // 2
            if load[0, listed[s, middle]] <= left:
                high = middle
            else:
                low = middle + 1
        for at in range(low, size[s]):
            g = listed[s, at]
            fits = tokens[g] <= room
            for lane in range(1, t.cost.shape[0]):
                fits = fits and load[lane, g] + t.cost[lane, s, k] <= limit
            if fits:
                return s, at
    return -1, -1


@kernel
def smallest_opening(
    t: Tables, k: int, limit: int, floor: int, free: int, ranks: int, taken: np.ndarray, cursor: np.ndarray
) -> tuple[int, int]:
    """The smallest degree, from ``floor`` up, at which document ``k`` may open a group of its own.

    Returns:
        index of the degree and first rank of a free block, or (-1, -1).
    """
    for d in range(floor, t.degrees.shape[0]):
        if t.degrees[d] > free:
            break
        if t.alone[d, k] <= limit:
            start = free_block(t.degrees[d], d, ranks, t.node, taken, cursor)
            if start >= 0:
                return d, start
    return -1, -1


@kernel
def open_group(
    t: Tables,
    s: int,
    start: int,
    group: int,
    shapes: np.ndarray,
    starts: np.ndarray,
    load: np.ndarray,
    tokens: np.ndarray,
    taken: np.ndarray,
) -> None:
    """Open an empty group of shape ``s`` from rank ``start`` on."""
    shapes[group], starts[group], tokens[group] = s, start, 0
    load[:, group] = t.fixed[:, s]
    taken[start : start + t.shape_degree[s]] = 1


@kernel
def fill_round(
    t: Tables,
    limit: int,
    floor: int,
    ranks: int,
    waiting: np.ndarray,
    least: int,
    falling: bool,
    joined: np.ndarray,
    shapes: np.ndarray,
    starts: np.ndarray,
    load: np.ndarray,
    tokens: np.ndarray,
) -> tuple[int, int, int]:
    """Fill one round of ``ranks`` ranks up to ``limit`` ns with documents from ``waiting``.

    Args:
        floor: index of the smallest degree a group may have.
        waiting: int64[w] documents in the order in which they are tried.
        least: tokens of the smallest of them.
        falling: whether that order is by falling length, which lets runs of documents that cannot fit be skipped.
        joined: int64[w], receives the group of each document that is placed; other entries stay as they are.
        shapes, starts, tokens: int64[ranks], receive each group's shape, first rank (of the round's own) and tokens.
        load: int64[L, ranks], receives each group's lanes, ns.

    Returns:
        groups opened, time of the round (ns), total value placed.
    """
    listed = np.empty((t.shape_degree.shape[0], ranks), np.int64)  # open groups by shape, least time left first
    size = np.zeros(t.shape_degree.shape[0], np.int64)
    taken = np.zeros(ranks, np.int64)
    cursor = np.zeros(t.degrees.shape[0], np.int64)
    free, groups, longest, value = ranks, 0, 0, 0
    place = 0
    while place < waiting.shape[0]:
        k = waiting[place]
        wanted, start = smallest_opening(t, k, limit, floor, free, ranks, taken, cursor)
        most = t.degrees[wanted] if wanted >= 0 else ranks
        s, at = find_group(t, k, limit, most, listed, size, load, tokens)
        if s < 0 and wanted < 0:
            skip = falling and free == 0
            place = next_fitting(t, limit, waiting, place, listed, size, load, tokens) if skip else place + 1
            continue
        if s < 0:
            s = t.alone_shape[wanted, k]
            at = size[s]
            listed[s, at] = groups
            open_group(t, s, start, groups, shapes, starts, load, tokens, taken)
            free -= t.shape_degree[s]
            groups += 1
            size[s] += 1
        group = listed[s, at]
        joined[place] = group
        value += t.value[k]
        tokens[group] += t.tokens[k]
        for lane in range(t.cost.shape[0]):
            load[lane, group] += t.cost[lane, s, k]
            longest = max(longest, load[lane, group])
        while at > 0 and load[0, listed[s, at - 1]] < load[0, group]:
            listed[s, at] = listed[s, at - 1]
            at -= 1
        listed[s, at] = group
        if tokens[group] + least > t.shape_degree[s] * t.capacity:  # full: nobody need look at it again
            listed[s, at : size[s] - 1] = listed[s, at + 1 : size[s]]
            size[s] -= 1
        place += 1
    return groups, longest, value
