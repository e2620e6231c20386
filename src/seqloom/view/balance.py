"""How evenly steps use the ranks: one row per planner."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from seqloom.view.numbers import milliseconds, percent

if TYPE_CHECKING:
    from seqloom.planners.hbp import Balance


def balance_table(rows: Mapping[str, Balance]) -> Table:
    """Draw imbalance of tokens and of attention work, padding and communication in percent, and the times of steps.

    Where planners make other steps of the same documents, the last column compares them.
    """
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in ("planner", "DBR %", "PR %", "ABR %", "CR %", "steps", "step ms", "all ms"):
        table.add_column(name, justify="left" if name == "planner" else "right", no_wrap=True)
    for name, row in rows.items():
        shares = (row.tokens, row.padding, row.attention, row.communication)
        times = (row.step_ns, row.step_ns * row.steps)
        table.add_row(name, *map(percent, shares), f"{row.steps:,}", *map(milliseconds, times))
    return table
