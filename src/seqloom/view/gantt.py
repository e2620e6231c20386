"""How busy ranks are in every cell of a Gantt chart, by the degree of the group at work."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.constrain import Constrain
from rich.text import Text

from seqloom.simulate import Simulation
from seqloom.view.numbers import duration


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """A grid of rows (ranks, nodes or runs of them) x columns (equal slices of the step)."""

    labels: tuple[str, ...]
    degrees: tuple[int, ...]
    """Ascending; 0 is the end of the step."""
    share: np.ndarray
    """float64[rows, degrees, columns]: share of the cell's rank-time."""


def occupancy(simulation: Simulation, rows: int, columns: int) -> Occupancy:
    """Count the work of every cell. Messages between stages are left out: they run beside the work.

    Args:
        simulation: whose events.
        rows: at most this many; ranks if they fit, else nodes, else runs of nodes (of ranks in one node).
        columns: slices of time.
    """
    size, labels = _rows(simulation, rows)
    events = simulation.events.where(~simulation.events.beside)
    degrees = np.unique(events.degree)
    edges = np.arange(columns + 1) * max(simulation.step_ns, 1) / columns
    share = np.zeros((len(labels), len(degrees), columns))
    row = events.rank // size
    for r in range(len(labels)):
        ranks = min(size, simulation.ranks - r * size)
        for d, degree in enumerate(degrees):
            chosen = (row == r) & (events.degree == degree)
            so_far = _elapsed(events.start[chosen], edges) - _elapsed(events.stop[chosen], edges)
            share[r, d] = np.diff(so_far) / (ranks * np.diff(edges))
    return Occupancy(labels, tuple(degrees.tolist()), share)


def card_use(simulation: Simulation, rows: int, columns: int) -> tuple[tuple[str, ...], np.ndarray]:
    """(labels, float64[rows, columns]): share of every cell in which network cards are in use.

    Rows are nodes, or runs of them if there are more than ``rows``; none where nothing leaves a node.
    """
    nodes, table = len(simulation.nic_busy_ns), simulation.nics
    if nodes == 1 or not len(table):
        return (), np.zeros((0, columns))
    size = -(-nodes // max(rows, 1))
    edges = np.arange(columns + 1) * max(simulation.step_ns, 1) / columns
    low, high = np.maximum(table.start[:, None], edges[:-1]), np.minimum(table.stop[:, None], edges[1:])
    part = np.maximum(high - low, 0.0) / (table.stop - table.start)[:, None]
    use = np.zeros((-(-nodes // size), columns))
    np.add.at(use, table.node // size, part * table.busy[:, None])
    counts = np.minimum(size, nodes - size * np.arange(len(use)))
    labels = tuple(_label("NICs", first, min(first + size, nodes)) for first in range(0, nodes, size))
    return labels, use / (counts[:, None] * np.diff(edges))


def row_labels(simulation: Simulation, rows: int) -> tuple[str, ...]:
    """Return the names of the rows of `occupancy`."""
    return _rows(simulation, rows)[1]


def _elapsed(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """float64[edges]: sum over all times t before an edge of (edge - t)."""
    ordered = np.sort(times).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    count = np.searchsorted(ordered, edges)
    return count * edges - sums[count]


def _rows(simulation: Simulation, rows: int) -> tuple[int, tuple[str, ...]]:
    """(ranks per row, labels)."""
    ranks, node = simulation.ranks, simulation.node_size
    if ranks <= rows or node >= ranks:
        size = -(-ranks // max(rows, 1))
        return size, tuple(_label("rank", first, min(first + size, ranks)) for first in range(0, ranks, size))
    nodes = -(-ranks // node)
    size = -(-nodes // max(rows, 1))
    return size * node, tuple(_label("node", first, min(first + size, nodes)) for first in range(0, nodes, size))


def _label(noun: str, first: int, stop: int) -> str:
    many = noun if noun.endswith("s") else f"{noun}s"
    return f"{noun} {first}" if stop == first + 1 else f"{many} {first}-{stop - 1}"


# ---- merged: view.gantt
# A small Gantt chart for the terminal: time to the right, ranks or nodes downwards, one mark per degree.


HEIGHTS = "▁▂▃▄▅▆▇█"
COLOURS = ("bright_blue", "cyan", "green", "yellow", "bright_red", "magenta", "red", "blue", "white")
BETWEEN = ("bright_blue", "bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_white")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
END_MARK = "="
CARDS = "grey70"
CARD_MARKS = "-#"
LEAST_USE = 0.05
"""Network cards in use for less than this share of a cell look idle; from a half on they get the second mark."""
LEAST_COLUMNS = 10


@dataclass(frozen=True, slots=True)
class Gantt:
    """A chart that draws itself in the width, colours and characters that the console has.

    With colours a cell's height is the share of its rank-time at work and its colour the degree of the group
    that has most of it. Without, a cell shows the mark of that degree if half of it or more is work.
    """

    simulation: Simulation
    width: int | None = None
    """Characters; None takes the console's."""
    rows: int = 16
    """At most this many rows of ranks or nodes."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a line per row, the time axis and the legend."""
        width = min(self.width or options.max_width, options.max_width)
        labels = row_labels(self.simulation, self.rows) + card_use(self.simulation, self.rows, 1)[0]
        margin = max(map(len, labels)) + 1
        columns = max(width - margin - 2, LEAST_COLUMNS)
        grid = occupancy(self.simulation, self.rows, columns)
        names, use = card_use(self.simulation, self.rows, columns)
        coloured = console.color_system is not None and not console.no_color
        pen = _Pen.of(grid, coloured and not options.ascii_only, options.ascii_only)
        for row, label in enumerate(grid.labels):
            yield pen.line(label.rjust(margin - 1), [pen.cell(grid, row, column) for column in range(columns)])
        for label, shares in zip(names, use.tolist(), strict=True):
            yield pen.line(label.rjust(margin - 1), [pen.card(share) for share in shares])
        yield _axis(self.simulation.step_ns, margin, columns)
        yield Constrain(pen.legend(grid), width)


def gantt(simulation: Simulation, width: int | None = None, rows: int = 16) -> Gantt:
    """Draw who works when.

    Args:
        simulation: what to draw.
        width: characters; None takes the console's.
        rows: at most this many lines; ranks are drawn one by one if they fit, else by node.
    """
    return Gantt(simulation, width, rows)


def colour(degree: int) -> str:
    """The colour of a degree, the same in every chart: one per power of two, brighter for the degrees between."""
    colours = COLOURS if degree & (degree - 1) == 0 else BETWEEN
    return colours[(degree.bit_length() - 1) % len(colours)]


def _axis(step_ns: int, margin: int, columns: int) -> Text:
    """Return the line below the chart: zero on the left, the step's time on the right."""
    return Text(" " * (margin + 1) + "0" + duration(step_ns).rjust(columns - 1), "dim", no_wrap=True)


@dataclass(frozen=True, slots=True)
class _Pen:
    """How cells look."""

    marks: tuple[str, ...]
    """A character for every degree of the grid."""
    styles: tuple[str, ...]
    coloured: bool
    idle: str
    side: str

    @classmethod
    def of(cls, grid: Occupancy, coloured: bool, ascii_only: bool) -> _Pen:
        """Choose marks: the digit for degrees below ten, letters above, in order."""
        wide = [degree for degree in grid.degrees if degree >= 10]
        letters = {degree: LETTERS[k % len(LETTERS)] for k, degree in enumerate(wide)}
        marks = tuple(END_MARK if degree == 0 else letters.get(degree, str(degree)) for degree in grid.degrees)
        styles = tuple("white" if degree == 0 else colour(degree) for degree in grid.degrees)
        return cls(marks, styles, coloured, "." if ascii_only else "·", "|" if ascii_only else "│")

    def cell(self, grid: Occupancy, row: int, column: int) -> tuple[str, str]:
        """(character, style) of one cell."""
        shares = grid.share[row, :, column]
        busy = float(shares.sum())
        most = int(shares.argmax()) if len(shares) else 0
        if self.coloured:
            height = round(busy * len(HEIGHTS))
            return (HEIGHTS[height - 1], self.styles[most]) if height > 0 else (self.idle, "dim")
        return (self.marks[most], "") if busy >= 0.5 else (self.idle, "dim")

    def card(self, share: float) -> tuple[str, str]:
        """(character, style) of one cell of a row of network cards."""
        if self.coloured:
            height = round(share * len(HEIGHTS))
            return (HEIGHTS[min(height, len(HEIGHTS)) - 1], CARDS) if height > 0 else (self.idle, "dim")
        return (CARD_MARKS[int(share >= 0.5)], "") if share >= LEAST_USE else (self.idle, "dim")

    def line(self, label: str, cells: list[tuple[str, str]]) -> Text:
        """Return a row of cells between its sides."""
        line = Text(f"{label} ", no_wrap=True, overflow="crop")
        line.append(self.side, "dim")
        for style, run in groupby(cells, key=itemgetter(1)):
            line.append("".join(mark for mark, _ in run), style)
        line.append(self.side, "dim")
        return line

    def legend(self, grid: Occupancy) -> Text:
        """Return what the colours or marks mean."""
        line = Text("degree  ")
        entries = list(zip(grid.degrees, self.marks, self.styles, strict=True))
        for degree, mark, style in sorted(entries, key=lambda entry: (entry[0] == 0, entry[0])):
            name = "end of step" if degree == 0 else str(degree)
            line.append("█" if self.coloured else mark, style if self.coloured else "")
            line.append(f" {name}  " if self.coloured or mark != name else "  ")
        line.append(self.idle, "dim")
        line.append(" idle")
        return line
