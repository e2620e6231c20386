"""Planners: lengths + cost model -> Plan. Each fills in the same value; ``auto`` returns the best of all."""

from seqloom.planners.registry import PLANNERS, RIVALS, TimedPlan, make_plan, plan_batches, requested_stages

__all__ = [
    "PLANNERS",
    "RIVALS",
    "TimedPlan",
    "make_plan",
    "plan_batches",
    "requested_stages",
]
