"""Planner ``pipeline``: layers cut into stages, long documents in pieces through them, short ones packed beside."""

from __future__ import annotations

from seqloom.planners.pipelines.line import stage_layers
from seqloom.planners.pipelines.planner import plan_pipeline

__all__ = ["plan_pipeline", "stage_layers"]
