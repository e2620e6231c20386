"""Views of plans, simulations and batches: tables and Gantt charts in the terminal, pictures in files."""

from seqloom.view.charts import comparison_picture, plan_picture, schedule_picture
from seqloom.view.gantt import Gantt, ScheduleChart
from seqloom.view.picture import Picture, check_picture
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
    "Picture",
    "RankChart",
    "ScheduleChart",
    "balance_table",
    "bounds_lines",
    "check_picture",
    "comparison_picture",
    "comparison_table",
    "explanation_table",
    "plan_picture",
    "plan_table",
    "schedule_picture",
]
