"""FlexSP as published: blaster, buckets, bucketed mixed-integer programme with warm starts."""

from seqloom.planners.published.flexsp.planner import plan_flexsp

__all__ = [
    "plan_flexsp",
]
