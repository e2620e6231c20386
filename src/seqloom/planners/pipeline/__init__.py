"""Planner ``pipeline``: layers in stages; long sequences in pieces through them, short ones packed beside (Seq1F1B)."""

from seqloom.planners.pipeline.planner import plan_pipeline
from seqloom.planners.pipeline.stage_layout import stage_layers

__all__ = [
    "plan_pipeline",
    "stage_layers",
]
