"""From seated rounds to the plan everybody reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappush, heapreplace
from itertools import repeat

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import Group, Pipeline, Plan, Round, StageMicroBatch
from seqloom.planners.problem import CHECKPOINTS, Problem
from seqloom.planners.remap import with_remapping
from seqloom.planners.zones.fill import Seating
from seqloom.planners.zones.prices import WHOLE, Alone, Prices
from seqloom.planners.zones.search import best_filling


def build_plan(prices: Prices, rounds: Sequence[Seating], lengths: np.ndarray) -> Plan:
    """Build the plan of these rounds, in this order; each keeps as much of its activations as its memory allows."""
    cost, reduce = prices.cost, prices.policy.reduce
    capacities = {v.checkpoint: cost.capacity(v) for v in cost.policies if v.reduce == reduce}
    size = lengths.tolist()
    built = []
    for seating in rounds:
        fullest = prices.capacity - min(seating.room)
        checkpoint = next(c for c in CHECKPOINTS if capacities.get(c, -1) >= fullest)
        built.append(Round((StageMicroBatch(groups_of(prices, seating, size), checkpoint),)))
    return Plan(
        limits=cost.limits(reduce),
        sharding=cost.sharding,
        reduce=reduce,
        documents=tuple(size),
        pipelines=(Pipeline.single(range(cost.ranks), cost.model.layers, built, reduce),),
        planner="zones",
    )


def groups_of(prices: Prices, seating: Seating, lengths: Sequence[int]) -> tuple[Group, ...]:
    """The groups of a round, slow links first: those that cross nodes, then the wider ones, then whole documents."""
    node = prices.cost.node_size
    cuts = sorted(
        seating.cut.items(),
        key=lambda item: (item[0][0][0] // node == item[0][0][-1] // node, -len(item[0][0]), item[0]),
    )
    cost = prices.cost
    groups = [cost.group(prices.shapes[s], ranks, _spans(members, lengths)) for (ranks, s), members in cuts]
    for rank, members in enumerate(seating.whole):
        if members:
            groups.append(cost.group(WHOLE, (rank,), _spans(members, lengths)))
    return tuple(groups)


def _spans(documents: Sequence[int], lengths: Sequence[int]) -> tuple[Span, ...]:
    ordered = sorted(documents)
    return tuple(map(Span._make, zip(ordered, repeat(0), map(lengths.__getitem__, ordered), strict=False)))


# ---- merged: planners.zones.deal
# Deal a batch into rounds, in two ways: long documents apart, or long documents together.


FILLER = 40
"""Per cent of the tokens, in the shortest documents, that level the ranks of every round alike."""


def deal_apart(prices: Prices, rounds: int) -> list[list[int]]:
    """Give every document to the round with the least work that has room; the documents of a round by falling time.

    All rounds take about as long. A document that no round has room for goes to the one with most room; what its ranks
    cannot hold is left over there.
    """
    order = prices.order.tolist()
    if rounds == 1:
        return [order]
    tokens, whole = prices.listed
    room = [prices.capacity * prices.cost.ranks] * rounds
    work = [(0, r) for r in range(rounds)]
    dealt: list[list[int]] = [[] for _ in range(rounds)]
    for k in order:
        size, chosen = tokens[k], work[0]
        if room[chosen[1]] < size:
            chosen = min((one for one in work if room[one[1]] >= size), default=max(work, key=lambda one: room[one[1]]))
            work.remove(chosen)
            heapify(work)
            heappush(work, (chosen[0] + whole[k], chosen[1]))
        else:
            heapreplace(work, (chosen[0] + whole[k], chosen[1]))
        room[chosen[1]] -= size
        dealt[chosen[1]].append(k)
    return dealt


def deal_together(prices: Prices, rounds: int) -> list[list[int]]:
    """Cut the long documents, by falling time, into runs of equal tokens, a run per round; deal the short ones in turn.

    The first round takes longest: there is more time for the longest documents, which are cut less finely.
    """
    order = prices.order
    if rounds == 1:
        return [order.tolist()]
    tokens = prices.tokens[order]
    upto = np.cumsum(tokens)
    long = upto * 100 <= int(upto[-1]) * (100 - FILLER)
    runs = np.minimum((upto - tokens) * rounds // max(1, int(tokens[long].sum())), rounds - 1)
    chosen = np.where(long, runs, (np.cumsum(~long) - 1) % rounds)
    return [order[chosen == r].tolist() for r in range(rounds)]


# ---- merged: planners.zones.planner
# Planner ``zones``: deal the batch into rounds, fill each in overlapping groups, keep the best policy.


EVALUATIONS = 1_200
"""Documents seated, over all fillings of the batch, where no budget is given."""
LEAST, MOST = 2, 128
"""Fillings of each round then, at least and at most."""
ONCE_FROM = 4_096
"""Documents from which on every round is filled once: a second filling gains less than one part in 300 there."""
QUICK_FROM = 512
"""Documents from which on, where no budget is given, one number of rounds is tried."""
SPARE = 16
"""One part in this many of a round's memory is room to place documents."""
WORTH = 200
"""What can gain less than one part in this many is not tried."""


@dataclass(frozen=True, eq=False)
class Answer:
    """A partition of the batch under one policy, and the step it leads to."""

    ns: int
    prices: Prices
    rounds: list[Seating]


def plan_zones(
    lengths: np.ndarray, cost: CostModel, *, evaluations: int | None = None, only: MemoryPolicy | None = None
) -> Plan:
    """Plan a batch with groups that may share ranks.

    Args:
        lengths: int64[n] tokens.
        evaluations: fillings of each round; None chooses by size.
        only: the one policy to plan for; None tries all that can still win.
    """
    if cost.tensor > 1:
        raise SeqloomError(
            f"planner zones keeps short sequences on single ranks, tensor degree {cost.tensor} on none; "
            "use planner flex, static or pipeline"
        )
    array = Batch.of(lengths).lengths
    policies = [policy for policy in cost.policies if only in (None, policy)]
    holding = [Alone.of(array, cost, policy) for policy in policies if holds(array, cost, policy)]
    if not holding:
        widest = max(policies, key=cost.capacity)
        raise Problem(array, cost, widest, cost.tables(array, widest)).too_long()
    best: Answer | None = None
    quick = evaluations is None and len(array) >= QUICK_FROM
    least = 1 if len(array) >= ONCE_FROM else LEAST
    fillings = max(least, min(MOST, EVALUATIONS // len(array))) if evaluations is None else max(1, evaluations)
    for alone in sorted(holding, key=lambda alone: alone.least_ns(alone.rounds)):
        if best is not None and not _worth(alone.least_ns(alone.rounds), best.ns):
            break
        prices = Prices.of(alone)
        for rounds in rounds_to_try(alone, quick):
            for deal in (deal_together,) if quick or rounds == 1 else (deal_together, deal_apart):
                if best is None or _worth(alone.least_ns(rounds), best.ns):
                    answer = partition(prices, deal(prices, rounds), fillings)
                    best = answer if best is None or answer.ns < best.ns else best
    assert best is not None
    plan = build_plan(best.prices, best.rounds, array)
    return plan if quick else with_remapping(plan, cost)


def holds(lengths: np.ndarray, cost: CostModel, policy: MemoryPolicy) -> bool:
    """Whether the largest group holds the longest document."""
    most = max(shape.degree for shape in cost.shapes) * cost.capacity(policy)
    return int(cost.padded_lengths(lengths.max(keepdims=True))[0]) <= most


def rounds_to_try(alone: Alone, quick: bool) -> list[int]:
    """Numbers of rounds: as few as leave some room to place documents, which is quickly filled; and those around it."""
    tokens, room = int(alone.tables.tokens.sum()), alone.tables.capacity * alone.cost.ranks
    roomy = max(1, -(-tokens * SPARE // (room * (SPARE - 1))))
    return [roomy] if quick else sorted({alone.rounds, alone.rounds + 1, roomy})


def _worth(least: int, best: int) -> bool:
    """Whether a step that takes at least this long may still be noticeably faster than the best one."""
    return least + least // WORTH < best


def partition(prices: Prices, dealt: list[list[int]], evaluations: int) -> Answer:
    """Fill rounds one after another; what finds no room goes to the next one, or makes further rounds.

    Args:
        dealt: the documents of every round, each by falling time.
        evaluations: fillings of each round.
    """
    ready = np.zeros(prices.cost.ranks // prices.cost.shard_group_size, np.int64)
    seated: list[Seating] = []
    waiting = list(dealt)
    while waiting:
        documents = waiting.pop(0)
        if not documents:
            continue
        seating, ready = best_filling(prices, documents, ready, evaluations)
        seated.append(seating)
        if seating.left:
            if waiting:
                waiting[0] = sorted([*waiting[0], *seating.left], key=lambda k: (-int(prices.whole[k]), k))
            else:
                waiting.append(seating.left)
    return Answer(int(ready.max()) + prices.cost.step_overhead_ns(prices.policy), prices, seated)
