"""Rival ``te-cp``: packed ring context parallelism over everything, as Transformer Engine runs it.

Published: all ranks form one ring; a pack of documents is cut so that of every document each rank holds one early and
one late chunk (zigzag); keys and values travel around the ring behind attention. It is the baseline of Zeppelin's
evaluation, where the ring spans all GPUs.

Our reading: documents are packed in the order in which they came, one pack of at most all ranks' memory after the
other. Documents are not padded to a multiple of twice the ranks, which favours the rival a little.
"""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Method, Plan
from seqloom.planners.packing import next_fit
from seqloom.planners.published.tuned import Place, Rounds, tuned_plan


def plan_te_cp(lengths: np.ndarray, cost: CostModel, *, routed: bool = False) -> Plan:
    """Plan a batch as one ring over all ranks.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
        routed: Zeppelin's routing layer under the same ring: the first row of its ablation.
    """
    return tuned_plan(lengths, cost, "te-cp", whole_world(cost.ranks, Method.RING, routed), halved=False)


def whole_world(ranks: int, method: Method, routed: bool):
    """The placement of packs in arrival order, each over all ranks."""

    def placement(tokens: np.ndarray, capacity: int) -> Rounds:
        everyone = tuple(range(ranks))
        return [[Place(everyone, pack, method, routed)] for pack in next_fit(tokens, ranks * capacity)]

    return placement
