"""Views of plans, simulations and batches with rich: tables and Gantt charts in the terminal, or as an SVG file."""

from seqloom.view.format import save_picture
from seqloom.view.gantt import gantt, schedule_chart
from seqloom.view.tables import (
    balance_table,
    bounds_lines,
    comparison_table,
    explanation_table,
    length_histogram,
    plan_table,
    rank_chart,
)

__all__ = [
    "balance_table",
    "bounds_lines",
    "comparison_table",
    "explanation_table",
    "gantt",
    "length_histogram",
    "plan_table",
    "rank_chart",
    "save_picture",
    "schedule_chart",
]
