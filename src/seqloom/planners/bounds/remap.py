"""How much of a token's linear time a second layout can take off the rank that has it in attention."""

from __future__ import annotations

from seqloom.cost import CostModel, Variant
from seqloom.cost.profile import AdditiveProfile


def movable_share(cost: CostModel, variant: Variant, linear: float) -> float:
    """Share of ``linear`` ns per token that leaves a rank at best: what a token's own journey costs stays with it.

    0 where nothing can move: islands of one rank, and profiles that have no price for it.
    """
    if cost.island_size == 1 or isinstance(cost.profile, AdditiveProfile):
        return 0.0
    model = cost.model
    width = min(model.hidden, (model.heads + model.kv_heads) * model.head_dim)
    journey = 4 * 2 * width * model.layers / cost.cluster.intra.gb_s  # there and back, forward and backward, bf16
    return max(0.0, 1.0 - journey / linear)
