"""From a rival's rounds to the best plan it gives, over the settings that its user would tune.

The published planners take a token capacity per rank as a setting and know nothing of checkpointing. Here each answers
for every capacity that memory holds under some checkpoint, and for every halving of the largest, down to the mean load
of a rank; its fastest plan counts, and every round has the fastest checkpoint that fits. That favours the rival: a user
tunes once per run, not per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.plan import Method, Plan, Reduce, StageMicroBatch, sort_groups
from seqloom.planners.problem import (
    build_plan,
    checkpoint_capacities,
    fastest_checkpoint,
    fitting_problems,
    whole_documents,
)


class RivalGroup(NamedTuple):
    """Documents on these ranks, cut by position over all of them."""

    ranks: tuple[int, ...]
    documents: Sequence[int]
    method: Method = Method.RING
    routed: bool = False


Rounds = list[list[RivalGroup]]


def tuned_plan(
    lengths: np.ndarray,
    cost: CostModel,
    name: str,
    published: Callable[[np.ndarray, int], Rounds],
    *,
    halved: bool = True,
    finish: Callable[[StageMicroBatch], StageMicroBatch] = lambda work: work,
) -> Plan:
    """The fastest plan of a batch, int64[n] tokens, that a published algorithm gives.

    Args:
        published: the algorithm: (int64[n] tokens of every document, tokens a rank may hold) -> the groups of every
            round.
        halved: whether smaller capacities than the largest change its answer.
        finish: adds to every round what does not change where attention runs.
    """
    tokens = fitting_problems(lengths, cost)[0].tables.tokens  # refuses what no rank can hold
    plans: list[Plan] = []
    for capacity in capacities(tokens, cost, halved):
        rounds = published(tokens, capacity)
        for reduce in dict.fromkeys(policy.reduce for policy in cost.policies):
            works = _works(rounds, lengths.tolist(), tokens, cost, reduce)
            if works is not None:
                plans.append(build_plan(cost, lengths.tolist(), map(finish, works), reduce, name))
    return min(plans, key=cost.plan_ns)


def capacities(tokens: np.ndarray, cost: CostModel, halved: bool = True) -> list[int]:
    """Settings to try, descending: what memory holds under every policy, and halves of the largest.

    All ranks together hold the longest document under each, and the whole batch under the halves.
    """
    found = {cost.capacity(policy) for policy in cost.policies}
    half, multiple = max(found), cost.pad_multiple
    least = max(-(-int(tokens.sum()) // cost.ranks), multiple)
    while halved and (half := half // 2 // multiple * multiple) >= least:
        found.add(half)
    return sorted((capacity for capacity in found if capacity * cost.ranks >= tokens.max()), reverse=True)


def _works(
    rounds: Rounds, lengths: list[int], tokens: np.ndarray, cost: CostModel, reduce: Reduce
) -> list[StageMicroBatch] | None:
    """Every round with the fastest checkpoint under one way to reduce; None where its memory does not hold one."""
    limits, works = checkpoint_capacities(cost, reduce), []
    for groups in rounds:
        merged: dict[tuple[tuple[int, ...], Method, bool], list[int]] = {}  # groups of equal ranks as one
        for group in groups:
            merged.setdefault((group.ranks, group.method, group.routed), []).extend(group.documents)
        joined = [RivalGroup(ranks, held, method, routed) for (ranks, method, routed), held in merged.items()]
        checkpoint = fastest_checkpoint(limits, fullest(joined, tokens))
        if checkpoint is None:
            return None
        built = []
        for ranks, documents, method, routed in sorted(joined, key=lambda group: group.ranks):
            shape = GroupShape(1, len(ranks), method if len(ranks) > 1 else Method.RING, routed)
            built.append(whole_documents(cost, shape, ranks, documents, lengths))
        works.append(StageMicroBatch(sort_groups(built, cost.node_size), checkpoint))
    return works


def fullest(groups: Iterable[RivalGroup], tokens: np.ndarray) -> int:
    """Tokens on the fullest rank."""
    held: dict[int, int] = {}
    for group in groups:
        share = -(-int(tokens[list(group.documents)].sum()) // len(group.ranks))
        for rank in group.ranks:
            held[rank] = held.get(rank, 0) + share
    return max(held.values())
