"""Why documents are where they are, as a table and two lines."""

from __future__ import annotations

from rich import box
from rich.table import Table

from seqloom.planners.explain import Explanation, method_name
from seqloom.view.numbers import milliseconds, percent


def explanation_table(explanation: Explanation) -> Table:
    """Draw one row per class of documents, the longest first.

    Costs are rank-milliseconds of one document (time on every rank that works on it): as placed, and in the cheapest
    other shape that memory and the round's end allow.
    """
    remapped = any(one.placement.remapped for one in explanation.classes)
    names = ["lengths", "docs", "zone", "method", "why", "rank-ms", "next best", "rank-ms"]
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in names[:4] + ["remap"] * remapped + names[4:]:
        left = name in ("zone", "method", "remap", "why", "next best")
        table.add_column(name, justify="left" if left else "right", no_wrap=name != "method", overflow="fold")
    for one in explanation.classes:
        place = one.placement
        table.add_row(
            f"{one.shortest:,}" if one.shortest == one.longest else f"{one.shortest:,}-{one.longest:,}",
            f"{one.documents:,}",
            place.zone.removesuffix("-node"),
            method_name(place.shape),
            *([place.remapped or "-"] if remapped else []),
            place.reason,
            milliseconds(one.cost_ns),
            one.next_best or "-",
            "-" if one.next_ns is None else milliseconds(one.next_ns),
        )
    return table


def bounds_lines(explanation: Explanation) -> list[str]:
    """Say in words from which lengths on documents may be, and have to be, cut."""
    bounds = explanation.bounds
    lost = percent(bounds.break_even)
    lines = [f"break-even: {lost} % of the work is lost to waiting and fixed costs; a cut may cost as much"]
    for zone, pays, forced in (
        ("inside a node", bounds.intra_pays, bounds.intra_forced),
        ("across nodes", bounds.inter_pays, bounds.inter_forced),
    ):
        may = "at no length" if pays is None else f"from {pays:,} tokens"
        must = "never" if forced is None else f"from {forced:,} tokens"
        lines.append(f"cut {zone}: pays {may}, forced by memory or time {must}")
    if any(one.placement.reason == "not cheapest" for one in explanation.classes):
        lines.append("not cheapest: the next best would cost less, but not level the ranks, or the planner has none")
    return lines
