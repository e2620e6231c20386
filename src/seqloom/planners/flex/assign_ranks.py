"""Give every group of a draft its ranks, and say when each shard group is done.

A draft may have been decoded with shard groups wider than the real ones (which packs tight memory better). The real
shard groups
then run on without waiting for the others of their round: longer groups go to the shard groups that are free earliest.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from seqloom.planners.compiled import kernel
from seqloom.planners.fill import NEVER, Tables, arrange, block_count, block_start
from seqloom.planners.flex.decode import Draft


class Seats(NamedTuple):
    """Where the groups of a draft sit."""

    start: np.ndarray
    """int64[n]: first rank of each group."""
    round_of: np.ndarray
    """int64[n]: round of each group; rounds are numbered in the order in which they run."""
    time: np.ndarray
    """int64[n]: ns of each group."""
    load: np.ndarray
    """int64[ranks // shard group]: when each real shard group is done, ns."""

    @classmethod
    def empty(cls, documents: int, shard_groups: int) -> Seats:
        """Room for the groups of that many documents on that many real shard groups."""
        sizes = {"load": shard_groups}
        return cls(**{name: np.zeros(sizes.get(name, documents), np.int64) for name in cls._fields})


@kernel
def group_times(t: Tables, draft: Draft, time: np.ndarray) -> None:
    """Write the time of every group of the draft, ns."""
    groups = draft.count[0]
    lanes = np.zeros((t.cost.shape[0], groups), np.int64)
    for group in range(groups):
        lanes[:, group] = t.fixed[:, draft.group_shape[group]]
    for k in range(t.tokens.shape[0]):
        group = draft.group_of[k]
        if group >= 0:
            lanes[:, group] += t.cost[:, draft.group_shape[group], k]
    for group in range(groups):
        time[group] = lanes[:, group].max()


@kernel
def order_groups(t: Tables, draft: Draft, time: np.ndarray) -> np.ndarray:
    """Groups by round, then falling degree, then falling time; ties by number."""
    groups = draft.count[0]
    order = np.arange(groups)
    for key in range(3):  # stable sorts, the least important key first
        weight = np.empty(groups, np.int64)
        for at in range(groups):
            group = order[at]
            degree = t.shape_degree[draft.group_shape[group]]
            weight[at] = -time[group] if key == 0 else (-degree if key == 1 else draft.group_round[group])
        order = order[np.argsort(weight, kind="mergesort")]
    return order


@kernel
def settle(t: Tables, draft: Draft, shard_group: int, seats: Seats) -> int:
    """Seat every group; ``shard_group`` is the real shard group size, ``t.shard_group`` the one the draft was decoded
    with.

    Returns:
        when the last shard group is done, ns.
    """
    group_times(t, draft, seats.time)
    order = order_groups(t, draft, seats.time)
    seats.load[:] = 0
    rounds = 0
    first = 0
    while first < order.shape[0]:
        index = draft.group_round[order[first]]
        last = first
        while last < order.shape[0] and draft.group_round[order[last]] == index:
            last += 1
        base = draft.round_shard_group[index] * t.shard_group
        ranks = draft.round_width[index] * t.shard_group
        if ranks == shard_group or draft.round_width[index] > 1:
            rounds = seat_as_filled(draft, shard_group, base, ranks, order[first:last], rounds, seats)
        else:
            rounds = seat_apart(t, draft, shard_group, base, ranks, order[first:last], rounds, seats)
        first = last
    return seats.load.max()


@kernel
def seat_as_filled(
    draft: Draft, shard_group: int, base: int, ranks: int, groups: np.ndarray, rounds: int, seats: Seats
) -> int:
    """All groups in one round, on the blocks they were opened on; returns the number of rounds so far."""
    for group in groups:
        seats.start[group] = base + draft.group_start[group]
    return close_round(shard_group, base, ranks, groups, rounds, seats)


@kernel
def close_round(shard_group: int, base: int, ranks: int, groups: np.ndarray, rounds: int, seats: Seats) -> int:
    """The round of these groups runs on ``[base, base + ranks)`` as soon as its shard groups are free."""
    low, high = base // shard_group, (base + ranks) // shard_group
    end = seats.load[low:high].max() + seats.time[groups].max()
    for group in groups:
        seats.round_of[group] = rounds
    seats.load[low:high] = end
    return rounds + 1


@kernel
def seat_together(
    t: Tables, draft: Draft, shard_group: int, base: int, ranks: int, groups: np.ndarray, rounds: int, seats: Seats
) -> int:
    """All groups in one round, on the lowest aligned blocks; returns the number of rounds so far."""
    degrees = np.empty(groups.shape[0], np.int64)
    starts = np.empty(groups.shape[0], np.int64)
    for at in range(groups.shape[0]):
        degrees[at] = t.shape_degree[draft.group_shape[groups[at]]]
    fit = arrange(degrees, ranks, t.node, starts)
    for at in range(groups.shape[0]):
        seats.start[groups[at]] = base + starts[at]
    rounds = close_round(shard_group, base, ranks, groups, rounds, seats)
    if not fit:  # blocks that do not divide each other: this draft is worth nothing
        seats.load[:] = NEVER
    return rounds


@kernel
def seat_apart(
    t: Tables, draft: Draft, shard_group: int, base: int, ranks: int, groups: np.ndarray, rounds: int, seats: Seats
) -> int:
    """Groups of a virtual round on their own real shard groups, each block a round of its own, earliest shard
    groups first.
    """
    used = np.zeros(ranks // shard_group, np.int64)
    at = 0
    while at < groups.shape[0]:
        degree = t.shape_degree[draft.group_shape[groups[at]]]
        width = max(1, degree // shard_group)
        best, best_load = -1, 0
        for index in range(block_count(width * shard_group, ranks, t.node)):
            block = block_start(index, width * shard_group, t.node) // shard_group
            load = seats.load[base // shard_group + block : base // shard_group + block + width].max()
            if used[block : block + width].max() == 0 and (best < 0 or load < best_load):
                best, best_load = block, load
        if best < 0:  # likewise
            seats.load[:] = NEVER
            return rounds
        used[best : best + width] = 1
        last = at + 1
        if degree < shard_group:  # several small groups share a real shard group and run in lock step
            filled = degree
            while last < groups.shape[0] and filled + t.shape_degree[draft.group_shape[groups[last]]] <= shard_group:
                filled += t.shape_degree[draft.group_shape[groups[last]]]
                last += 1
        rounds = seat_together(
            t, draft, shard_group, base + best * shard_group, width * shard_group, groups[at:last], rounds, seats
        )
        at = last
    return rounds
