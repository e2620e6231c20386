"""Rival ``zeppelin``: zones by length, all network cards, two layouts, as published (arXiv 2509.21841).

Published: documents fall into three zones, cut across nodes, cut inside a node, whole on one GPU, by two greedy
passes under a token capacity per GPU that balance squared lengths (`partition`); what is cut is a ring; ranks run
rings between nodes first, then those inside, then whole documents. Messages between nodes are spread over all network
cards of the node (routing). Linear modules see another layout, in which every GPU has the same number of tokens
(remapping).

Our reading, since only a description of the algorithms could be read: thresholds begin at what a node, and a GPU, can
hold and drop to the next length when something does not fit. A document that crosses nodes takes all GPUs of as few
nodes as hold it; inside a node a cut document gets GPUs in proportion to its squared length, two at least. Routing
and remapping are always on: no gate by cost is described. Remapping is around attention, so that projections are
balanced too. A batch beyond the memory of all GPUs is cut in its order of arrival.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Plan, Work
from seqloom.plan.balance import level_targets, rebalanced
from seqloom.planners.rivals.partition import Machine, partition
from seqloom.planners.rivals.tuned import Place, Rounds, arrival_packs, crosses, tuned_plan


def plan_zeppelin(lengths: np.ndarray, cost: CostModel, *, routing: bool = True, remapping: bool = True) -> Plan:
    """Plan a batch as Zeppelin does.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
        routing: spread messages between nodes over all network cards.
        remapping: give every GPU the same number of tokens in linear modules.
    """

    def placement(tokens: np.ndarray, capacity: int) -> Rounds:
        machine = Machine(cost.ranks // cost.node_size, cost.node_size, capacity)
        packs = arrival_packs(tokens, cost.ranks * capacity)
        return [[routed(place) for place in partition(tokens, pack, machine)] for pack in packs]

    def routed(place: Place) -> Place:
        return place._replace(routed=routing and crosses(place.ranks, cost.node_size))

    finished = (lambda work: even_tokens(work, cost)) if remapping else None
    return tuned_plan(lengths, cost, "zeppelin", placement, finished=finished)


def even_tokens(work: Work, cost: CostModel) -> Work:
    """The same round with as many tokens on every GPU of an island in linear modules."""
    layout = work.attention_layout()
    held = np.bincount(layout.rank, weights=layout.sizes, minlength=cost.ranks).astype(np.int64)
    islands = cost.limits().islands(cost.sharding, range(cost.ranks))
    targets = level_targets(np.zeros_like(held), 1, held, islands)
    if np.array_equal(targets, held):
        return work
    return replace(work, linear=rebalanced(layout, targets, cost.node_size, islands))
