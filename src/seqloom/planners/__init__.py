"""Planners: lengths + cost model -> Plan. Each fills in the same value; ``auto`` returns the best of all."""

from seqloom.planners.registry import PLANNERS, RIVALS, Planned, make_plan, plan_batches, stages_asked

__all__ = [
    "PLANNERS",
    "RIVALS",
    "Planned",
    "make_plan",
    "plan_batches",
    "stages_asked",
]
