"""Planner ``flex``: groups of every size for every round, on true lengths, in milliseconds."""

from seqloom.planners.flex.planner import plan_flex

__all__ = [
    "plan_flex",
]
