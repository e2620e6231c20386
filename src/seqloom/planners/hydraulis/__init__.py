"""Planner ``hydraulis``: pipelines of different shape side by side, another list of them at every step.

Before a run, the lengths of its data give a short list of strategies (`propose_strategies`). At every step, the batch
picks one of them, in two stages: documents to pipelines, then documents to micro-batches (`plan_strategies`).
"""

from seqloom.planners.hydraulis.config import (
    ConfigCost,
    ParallelConfig,
    PipelineConfig,
    SchemeCosts,
    Strategy,
    strategies_from_json,
    strategies_to_json,
)
from seqloom.planners.hydraulis.costs import check_strategies
from seqloom.planners.hydraulis.planner import plan_strategies, propose_strategies

__all__ = [
    "ConfigCost",
    "ParallelConfig",
    "PipelineConfig",
    "SchemeCosts",
    "Strategy",
    "check_strategies",
    "plan_strategies",
    "propose_strategies",
    "strategies_from_json",
    "strategies_to_json",
]
