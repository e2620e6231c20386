"""The shortest schedule of rounds on shard groups, when every round has several ways to run: exact, for tiny cases."""

from __future__ import annotations

import numpy as np

Ways = tuple[np.ndarray, np.ndarray]
"""float64[X, I] ns of every shard group, bool[X, I, I] which shard groups a way joins; an idle one is not
joined to itself.
"""


def shortest_schedule(rounds: list[Ways], shard_groups: int) -> float:
    """ns until the last shard group is done, over all ways to deal the documents into rounds, and all orders of these.

    Args:
        rounds: the ways to run a round with exactly the documents of each bit set, empty set first.
        shard groups: I.
    """
    ways = [_useful(*way) if len(way[0]) else way for way in rounds]
    ends = [np.zeros((1, shard_groups))]  # of every set: when its shard groups are free, none better than another
    for documents in range(1, len(rounds)):
        found = []
        last = documents  # the documents of the last round
        while last:
            ready, (times, joined) = ends[documents ^ last], ways[last]
            if len(ready) and len(times):
                begin = np.where(joined[None, :], ready[:, None, None, :], 0.0).max(axis=3)  # [E, X, I]
                active: np.ndarray = np.any(joined, axis=2)
                after = np.where(active[None, :], begin + times[None, :], ready[:, None, :])
                found.append(after.reshape(-1, shard_groups))
            last = (last - 1) & documents
        ends.append(_best(np.concatenate(found)) if found else np.zeros((0, shard_groups)))
    return float(ends[-1].max(axis=1).min()) if len(ends[-1]) else np.inf


def _useful(times: np.ndarray, joined: np.ndarray) -> Ways:
    """The ways that no other one beats; shard groups that are joined through others are joined, and end together."""
    shard_groups = times.shape[1]
    for _ in range(shard_groups.bit_length()):
        joined = (joined.astype(np.int64) @ joined.astype(np.int64)) > 0
    times = np.where(joined, times[:, None, :], 0.0).max(axis=2)
    pattern = joined.reshape(len(joined), -1) @ (2.0 ** np.arange(shard_groups * shard_groups))
    kept_times, kept_joined = [], []
    for one in np.unique(pattern):
        best = _best(times[pattern == one])
        kept_times.append(best)
        kept_joined.append(np.repeat(joined[pattern == one][:1], len(best), axis=0))
    return np.concatenate(kept_times), np.concatenate(kept_joined)


def _best(vectors: np.ndarray) -> np.ndarray:
    """The vectors that no other one is below in every place."""
    kept: list[np.ndarray] = []
    for vector in np.unique(np.round(vectors, 3), axis=0):
        if not any((other <= vector).all() for other in kept):
            kept = [other for other in kept if not (vector <= other).all()] + [vector]
    return np.array(kept).reshape(-1, vectors.shape[1])
