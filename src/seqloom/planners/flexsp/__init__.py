"""FlexSP as published: blaster, buckets, bucketed mixed-integer programme with warm starts."""

from __future__ import annotations

from seqloom.planners.flexsp.planner import plan_flexsp

__all__ = ["plan_flexsp"]
