"""What all views share: how numbers and bars are written, and the style of tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich import box
from rich.table import Table

EIGHTHS = " ▏▎▍▌▋▊▉█"


def milliseconds(ns: float) -> str:
    """Write a time in ms, about four digits: ``0.123``, ``12.34``, ``1,234``."""
    ms = ns / 1e6
    digits = 0 if ms >= 1000 else 1 if ms >= 100 else 2 if ms >= 10 else 3
    return f"{ms:,.{digits}f}"


def duration(ns: float) -> str:
    """Write a time with its unit: ``850 us``, ``12.3 ms``, ``4.56 s``."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if ns >= size:
            return f"{ns / size:.3g} {unit}" if ns < 1000 * size else f"{ns / size:,.0f} {unit}"
    return f"{ns:.0f} ns"


def percent(share: float) -> str:
    """Write a share in percent, one decimal, without the sign."""
    return f"{100 * share:.1f}"


def tokens(count: int) -> str:
    """Write a number of tokens: ``512``, ``1K``, ``1536``, ``128K``, ``1M``."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count // size}{unit}"
    return str(count)


def bar(share: float, cells: int, ascii_only: bool = False) -> str:
    """Draw a bar of `cells` cells, `share` of it filled; a share above zero shows at least a trace."""
    if ascii_only:
        full = max(round(share * cells), int(share > 0))
        return "#" * full + " " * (cells - full)
    eighths = max(round(share * cells * 8), int(share > 0))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(cells)


def table_of(columns: Sequence[str], left: Collection[str], folding: str | None = None) -> Table:
    """Make a table without rows: columns in `left` are aligned to the left, and only `folding` may break its lines."""
    table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
    for name in columns:
        folds = name == folding
        justify = "left" if name in left else "right"
        table.add_column(name, justify=justify, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    return table
