"""Rival ``llama-cp``: packed all-gather context parallelism per document, as Llama 3 was trained.

Published: every rank gathers the keys and values of all ranks before attention, and then computes its own queries
against them under a document mask; the gather is not hidden behind computing. In Zeppelin's evaluation the group is all
GPUs, so it is here.

Our reading: the pack is cut document by document (zigzag), as ``te-cp``; packs in the order of arrival. NCCL's
all-gather brings every block into a node once, over all network cards; in our words the gather is routed.
"""

from __future__ import annotations

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Method, Plan
from seqloom.planners.published.ring_cp import whole_world
from seqloom.planners.published.tuned import tuned_plan


def plan_llama_cp(lengths: np.ndarray, cost: CostModel) -> Plan:
    """Plan a batch as one all-gather group over all ranks.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
    """
    return tuned_plan(lengths, cost, "llama-cp", whole_world(cost.ranks, Method.GATHER, routed=True), halved=False)
