"""Everything for the terminal. Functions return rich renderables; nothing prints."""

from __future__ import annotations

from seqloom.view.gantt import gantt
from seqloom.view.histogram import length_histogram
from seqloom.view.tables import comparison_table, plan_table

__all__ = ["comparison_table", "gantt", "length_histogram", "plan_table"]
