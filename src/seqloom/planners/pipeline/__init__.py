"""Planner ``pipeline``: layers cut into stages, long documents in pieces through them, short ones packed beside."""

from seqloom.planners.pipeline.planner import plan_pipeline
from seqloom.planners.pipeline.stage_layout import stage_layers

__all__ = [
    "plan_pipeline",
    "stage_layers",
]
