"""The least time that any order of given units can take, whatever the memory: what an order is measured against."""

from __future__ import annotations

from collections.abc import Sequence

from seqloom.schedules.timing import Times


def least_makespan(pp_ranks: Sequence[int], times: Times) -> int:
    """Return a lower bound on the makespan of every schedule of these units, in the unit of `times`.

    A pp_rank cannot begin before the first unit has come through the stages before its own, nor be done before it has
    done all its work. And when its last backward is done, those of that unit on the stages before are still to come;
    its weight halves may run meanwhile.

    Args:
        pp_ranks: the pp_rank of every stage.
        times: int64[stages, units] each; the first unit is forwarded first.
    """
    best = 0
    for pp_rank in range(max(pp_ranks) + 1):
        own = [stage for stage, other in enumerate(pp_ranks) if other == pp_rank]
        forward, backward, weights = (int(column[own].sum()) for column in times[:3])
        head = int(times.forward[: own[0], 0].sum())
        tail = int((times.backward_input[: own[0]].sum(axis=0) + times.backward_weight[0] * (own[0] > 0)).min())
        best = max(best, head + forward + backward + max(weights, tail))
    return best
