"""Plans and simulations to look at. For the terminal: tables, a Gantt chart, a histogram of lengths."""

from __future__ import annotations

from seqloom.view.terminal import comparison_table, gantt, length_histogram, plan_table

__all__ = ["comparison_table", "gantt", "length_histogram", "plan_table"]
