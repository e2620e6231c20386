"""Views of plans, simulations and batches with rich: tables and Gantt charts in the terminal, or as an SVG file."""

from seqloom.view.format import save_picture
from seqloom.view.gantt import Gantt, ScheduleChart
from seqloom.view.tables import (
    LengthHistogram,
    RankChart,
    balance_table,
    bounds_lines,
    comparison_table,
    explanation_table,
    plan_table,
)

__all__ = [
    "Gantt",
    "LengthHistogram",
    "RankChart",
    "ScheduleChart",
    "balance_table",
    "bounds_lines",
    "comparison_table",
    "explanation_table",
    "plan_table",
    "save_picture",
]
