"""Plans and simulations to look at: tables, a Gantt chart, a histogram of lengths; in the terminal or as a picture."""

from __future__ import annotations

from seqloom.view.balance import balance_table
from seqloom.view.explanation import bounds_lines, explanation_table
from seqloom.view.picture import save_picture
from seqloom.view.ranks import rank_chart
from seqloom.view.schedule import schedule_chart
from seqloom.view.terminal import comparison_table, gantt, length_histogram, plan_table

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
