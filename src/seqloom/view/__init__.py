"""Plans and simulations to look at: tables, a Gantt chart, a histogram of lengths; in the terminal or as a picture."""

from seqloom.view.charts import length_histogram, rank_chart, schedule_chart
from seqloom.view.gantt import gantt
from seqloom.view.picture import save_picture
from seqloom.view.tables import balance_table, bounds_lines, comparison_table, explanation_table, plan_table

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
