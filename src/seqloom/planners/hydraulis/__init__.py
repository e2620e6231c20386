"""Planner ``hydraulis``: pipelines of different parallel configs side by side, others at every step.

Before a run, the lengths of its data give a short list of strategies (`propose_strategies`). At every step, the batch
takes one of them, in two stages: dispatch documents to pipelines, then pack micro-batches (`plan_strategies`).
"""

from seqloom.planners.hydraulis.costs import check_strategies
from seqloom.planners.hydraulis.planner import plan_strategies, propose_strategies
from seqloom.planners.hydraulis.strategy import (
    ParallelConfig,
    PipelineConfig,
    Strategy,
    strategies_from_json,
    strategies_to_json,
)

__all__ = [
    "ParallelConfig",
    "PipelineConfig",
    "Strategy",
    "check_strategies",
    "plan_strategies",
    "propose_strategies",
    "strategies_from_json",
    "strategies_to_json",
]
