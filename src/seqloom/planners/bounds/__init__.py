"""A proven lower bound on the time of a step: one number for all planners, and one for each cut into stages."""

from seqloom.planners.bounds.step import lower_bound, plan_bound, policies_bound, stages_bound

__all__ = [
    "lower_bound",
    "plan_bound",
    "policies_bound",
    "stages_bound",
]
