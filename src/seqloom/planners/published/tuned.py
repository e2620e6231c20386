"""From a rival's placement to the best plan it gives, over the settings that its user would tune.

The published planners take a token capacity per rank as a setting and know nothing of checkpointing. Here each is asked
once for what memory holds under every choice of what is kept, and for every halving of the largest, down to the mean
load of a rank; its fastest plan counts, and every round keeps as much of its activations as fits. That favours the
rival: a user tunes once per run, not per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.plan import Group, Method, Plan, Reduce, StageMicroBatch, sort_groups
from seqloom.planners.problem import (
    build_plan,
    checkpoint_capacities,
    fastest_checkpoint,
    fitting_problems,
    whole_documents,
)


class Place(NamedTuple):
    """Documents on these ranks, cut by position over all of them."""

    ranks: tuple[int, ...]
    documents: Sequence[int]
    method: Method = Method.RING
    routed: bool = False


Rounds = list[list[Place]]
Placement = Callable[[np.ndarray, int], Rounds]
"""(int64[n] tokens of every document, tokens a rank may hold) -> the places of every round."""


def tuned_plan(
    lengths: np.ndarray,
    cost: CostModel,
    name: str,
    placement: Placement,
    *,
    halved: bool = True,
    finished: Callable[[StageMicroBatch], StageMicroBatch] | None = None,
) -> Plan:
    """The fastest plan that a placement gives.

    Args:
        lengths: int64[n] tokens.
        cost: prices the plans.
        name: of the planner.
        placement: the published algorithm.
        halved: whether smaller capacities than the largest change what it answers.
        finished: adds to every round what does not change where attention runs.
    """
    tokens = fitting_problems(lengths, cost)[0].tables.tokens  # refuses what no rank can hold
    plans: list[Plan] = []
    for capacity in capacities(tokens, cost, halved):
        rounds = placement(tokens, capacity)
        for reduce in dict.fromkeys(policy.reduce for policy in cost.policies):
            plan = _plan(lengths, tokens, cost, rounds, reduce, name, finished)
            if plan is not None:
                plans.append(plan)
    return min(plans, key=cost.plan_ns)


def capacities(tokens: np.ndarray, cost: CostModel, halved: bool = True) -> list[int]:
    """Settings to try, descending: what memory holds under every policy, and halves of the largest.

    All ranks together hold the longest document under each, and the whole batch under the halves.
    """
    found = {cost.capacity(policy) for policy in cost.policies}
    half, granule = max(found), cost.pad_multiple
    least = max(-(-int(tokens.sum()) // cost.ranks), granule)
    while halved and (half := half // 2 // granule * granule) >= least:
        found.add(half)
    return sorted((room for room in found if room * cost.ranks >= tokens.max()), reverse=True)


def crosses(ranks: Sequence[int], node_size: int) -> bool:
    """Whether these ranks lie in more than one node."""
    return min(ranks) // node_size != max(ranks) // node_size


def _plan(
    lengths: np.ndarray,
    tokens: np.ndarray,
    cost: CostModel,
    rounds: Rounds,
    reduce: Reduce,
    name: str,
    finished: Callable[[StageMicroBatch], StageMicroBatch] | None,
) -> Plan | None:
    """The plan of these rounds under one way to reduce; None where its memory does not hold them."""
    capacity = checkpoint_capacities(cost, reduce)
    built = []
    for places in rounds:
        joined = _joined(places)
        checkpoint = fastest_checkpoint(capacity, fullest(joined, tokens))
        if checkpoint is None:
            return None
        work = StageMicroBatch(_groups(joined, lengths, cost), checkpoint)
        built.append(work if finished is None else finished(work))
    return build_plan(cost, lengths.tolist(), built, reduce, name)


def _joined(places: Iterable[Place]) -> list[Place]:
    """Places of equal ranks as one, documents in ascending order."""
    alike: dict[tuple[tuple[int, ...], Method, bool], list[int]] = {}
    for place in places:
        alike.setdefault((place.ranks, place.method, place.routed), []).extend(place.documents)
    return [Place(ranks, sorted(documents), method, routed) for (ranks, method, routed), documents in alike.items()]


def fullest(places: Iterable[Place], tokens: np.ndarray) -> int:
    """Tokens on the fullest rank."""
    held: dict[int, int] = {}
    for place in places:
        each = -(-int(tokens[list(place.documents)].sum()) // len(place.ranks))
        for rank in place.ranks:
            held[rank] = held.get(rank, 0) + each
    return max(held.values())


def _groups(places: Iterable[Place], lengths: np.ndarray, cost: CostModel) -> tuple[Group, ...]:
    """Groups in running order: between nodes, inside a node, on one rank."""
    groups, sizes = [], lengths.tolist()
    for place in sorted(places, key=lambda place: place.ranks):
        method = place.method if len(place.ranks) > 1 else Method.RING  # one rank has nothing to gather
        shape = GroupShape(1, len(place.ranks), method, place.routed)
        groups.append(whole_documents(cost, shape, place.ranks, place.documents, sizes))
    return sort_groups(groups, cost.node_size)
