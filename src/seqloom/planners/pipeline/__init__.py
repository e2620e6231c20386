"""Long sequences in pieces, short ones packed beside: through layers in stages (``pipeline``) or all (``pieces``)."""

from seqloom.planners.pipeline.pieces import plan_pieces
from seqloom.planners.pipeline.planner import plan_pipeline
from seqloom.planners.pipeline.stage_layout import stage_layers

__all__ = [
    "plan_pieces",
    "plan_pipeline",
    "stage_layers",
]
