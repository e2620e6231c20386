"""A schedule as text: one line per host, time to the right.

host 0 | 0F0 0F1  .   .  0B0 0B1
host 1 |  .  1F0 1B0 1F1 1B1  .
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from seqloom.plan.action import Action

IDLE, GOES_ON = ".", "-"
MARK = (">", "<")
WIDTH = 118
MOST_SLOTS = 4096

Cells = list[list[str]]


def grid(
    rows: Sequence[Sequence[Action]],
    start: Sequence[Sequence[int]] | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    mark: tuple[int, int] | None = None,
    width: int = WIDTH,
) -> str:
    """Draw rows of actions, cut into blocks of lines that fit.

    Args:
        rows: actions per host.
        start: when each action starts; without it every action takes one column, in the order of its row.
        stop: when each action stops, in the same shape.
        mark: (host, number of the action) to point at; then only the block around it is drawn.
        width: characters of a line.
    """
    cells, marked = _cells(rows, start, stop, mark)
    size = max((len(cell) for row in cells for cell in row), default=1)
    labels = [f"host {h}" for h in range(len(cells))]
    margin = max(map(len, labels), default=0)
    columns = max(1, (width - margin - 3) // (size + 1))
    slots = max(map(len, cells), default=0)
    first = 0 if marked is None else max(0, min(marked - columns // 2, slots - columns))
    blocks = []
    while first < max(slots, 1):
        shown = [" ".join(cell.center(size) for cell in row[first : first + columns]) for row in cells]
        lines = [f"{label:<{margin}} | {line}".rstrip() for label, line in zip(labels, shown, strict=True)]
        blocks.append("\n".join(lines))
        first = slots if marked is not None else first + columns
    return "\n\n".join(blocks)


def _cells(
    rows: Sequence[Sequence[Action]],
    start: Sequence[Sequence[int]] | None,
    stop: Sequence[Sequence[int]] | None,
    mark: tuple[int, int] | None,
) -> tuple[Cells, int | None]:
    """Return the cells of every host, and the column of the mark."""
    if start is None or stop is None:
        return _in_order(rows, mark)
    moments = [moment for part in (*start, *stop) for moment in part]
    slot = math.gcd(*moments) or 1
    end = max(moments, default=0) // slot
    if end > MOST_SLOTS:
        return _in_order(rows, mark)
    cells: Cells = []
    marked = None
    for h, row in enumerate(rows):
        line = [IDLE] * end
        for k, (action, begins, stops) in enumerate(zip(row, start[h], stop[h], strict=True)):
            first, last = begins // slot, stops // slot
            line[first:last] = [GOES_ON] * (last - first)
            if last > first:
                line[first] = _name(action, (h, k) == mark)
            if (h, k) == mark:
                marked = first
        cells.append(line)
    return cells, marked


def _in_order(rows: Sequence[Sequence[Action]], mark: tuple[int, int] | None) -> tuple[Cells, int | None]:
    cells = [[_name(action, (h, k) == mark) for k, action in enumerate(row)] for h, row in enumerate(rows)]
    return cells, None if mark is None else mark[1]


def _name(action: Action, marked: bool) -> str:
    return f"{MARK[0]}{action}{MARK[1]}" if marked else str(action)
