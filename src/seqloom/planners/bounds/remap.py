"""How much of a token's linear time a second layout can take off the rank that has it in attention."""

from __future__ import annotations

from seqloom.cost import CostModel, Variant
from seqloom.cost.analytic import AnalyticEngine
from seqloom.cost.communication import ACTIVATION_BYTES, Communication
from seqloom.cost.remapping import exchanges
from seqloom.plan import Remap


def movable_ns(cost: CostModel, variant: Variant) -> float:
    """ns per token that leave a rank at best: what a token's own journey costs stays with it.

    0 where nothing can move: islands of one rank, and profiles that have no price for it.
    """
    if cost.island_size == 1 or cost.tensor > 1 or not isinstance(cost.engine, AnalyticEngine):
        return 0.0
    most = 0.0
    for remap in Remap:
        moved = sum(linear for linear, _ in cost.engine.layout_rates(variant, remap).values())
        most = max(most, moved - journey_ns(cost, cost.engine.links, variant, remap))
    return most


def journey_ns(cost: CostModel, links: Communication, variant: Variant, remap: Remap) -> float:
    """Least ns of a remap's exchanges per token that leaves a rank, in all layers, forward and backward.

    Where an island has several nodes, part of a rank's tokens may use the network beside the rest on NVLink.
    """
    values, _ = exchanges(cost.model, remap, variant.checkpoint)
    near, far = links.message_ns(values * cost.model.layers * ACTIVATION_BYTES, "all_to_all")
    return near if cost.island_size <= cost.node_size else near * far / (near + far)
