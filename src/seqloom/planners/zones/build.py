"""From seated rounds to the plan everybody reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from seqloom.plan import Group, Pipeline, Plan, Round, Span, Work
from seqloom.planners.problem import CHECKPOINTS
from seqloom.planners.zones.prices import WHOLE, Prices
from seqloom.planners.zones.seating import Seating


def build_plan(prices: Prices, rounds: Sequence[Seating], lengths: np.ndarray) -> Plan:
    """Build the plan of these rounds, in this order; each keeps as much of its activations as its memory allows."""
    cost, reduce = prices.cost, prices.variant.reduce
    capacities = {v.checkpoint: cost.capacity(v) for v in cost.variants if v.reduce == reduce}
    size = lengths.tolist()
    built = []
    for seating in rounds:
        fullest = prices.capacity - min(seating.room)
        checkpoint = next(c for c in CHECKPOINTS if capacities.get(c, -1) >= fullest)
        built.append(Round((Work(groups_of(prices, seating, size), checkpoint),)))
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
