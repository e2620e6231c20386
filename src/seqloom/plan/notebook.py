"""Small HTML tables, with which plans, simulations and evaluations display themselves in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape


def html_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table; every text is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
