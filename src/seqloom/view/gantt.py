"""Gantt charts in the terminal: ranks of a simulated step (`Gantt`), actions of a schedule (`ScheduleChart`).

Time runs to the right; every line is a rank, a node or a pp_rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
from rich.console import Console, ConsoleOptions, RenderResult
from rich.constrain import Constrain
from rich.text import Text

from seqloom.plan.action import ActionKind
from seqloom.schedules.schedule import IDLE, Schedule, grid
from seqloom.schedules.timing import ScheduleTiming
from seqloom.simulate import Simulation
from seqloom.view.format import duration

HEIGHTS = "▁▂▃▄▅▆▇█"
COLOURS = ("bright_blue", "cyan", "green", "yellow", "bright_red", "magenta", "red", "blue", "white")
BETWEEN = ("bright_blue", "bright_cyan", "bright_green", "bright_yellow", "bright_magenta", "bright_white")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
END_MARK = "="
NIC_COLOUR = "grey70"
NIC_MARKS = "-#"
LEAST_NIC_USE = 0.05
"""NICs in use for less than this share of a cell look idle; from a half on they get the second mark."""
LEAST_COLUMNS = 10


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """A grid of rows (ranks, nodes or runs of them) x columns (equal slices of the step)."""

    labels: tuple[str, ...]
    degrees: tuple[int, ...]  # ascending; 0 is the end of the step
    share: np.ndarray  # float64[rows, degrees, columns] of the cell's rank-time in which groups of a degree work


def occupancy(simulation: Simulation, rows: int, columns: int) -> Occupancy:
    """Sum the work of every cell. Messages between stages are left out: they run beside the work.

    A row is a rank if `rows` hold them all, else a node, else a run of nodes (of ranks in one node).
    """
    size, labels = _rows(simulation, rows)
    events = simulation.events.where(~simulation.events.is_message)
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


def nic_use(simulation: Simulation, rows: int, columns: int) -> tuple[tuple[str, ...], np.ndarray]:
    """Compute (labels, float64[rows, columns]): share of every cell in which NICs are in use.

    Rows are nodes, or runs of them if there are more than `rows`; none where nothing leaves a node.
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
    return _labels("NICs", nodes, size), use / (counts[:, None] * np.diff(edges))


def _elapsed(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """float64[edges]: sum over all times t before an edge of (edge - t)."""
    ordered = np.sort(times).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    count = np.searchsorted(ordered, edges)
    return count * edges - sums[count]


def _rows(simulation: Simulation, rows: int) -> tuple[int, tuple[str, ...]]:
    """(ranks per row, labels)."""
    by_rank = simulation.ranks <= max(rows, simulation.node_size)
    unit = 1 if by_rank else simulation.node_size
    count = -(-simulation.ranks // unit)
    size = -(-count // max(rows, 1))
    return size * unit, _labels("rank" if by_rank else "node", count, size)


def _labels(noun: str, count: int, size: int) -> tuple[str, ...]:
    """Name rows of `size` ranks or nodes each: ``node 3``, ``ranks 0-7``."""
    many = noun if noun.endswith("s") else f"{noun}s"
    edges = [(first, min(first + size, count) - 1) for first in range(0, count, size)]
    return tuple(f"{noun} {first}" if first == last else f"{many} {first}-{last}" for first, last in edges)


@dataclass(frozen=True, slots=True)
class Gantt:
    """Chart of a simulated step, in the width, colours and characters that the console has.

    With colours a cell's height is the share of its rank-time at work and its colour the degree of the group that has
    most of it. Without, a cell shows the mark of that degree if half of it or more is work.
    """

    simulation: Simulation
    width: int | None = None  # characters; None takes the console's
    rows: int = 16  # lines at most: ranks are drawn one by one if they fit, else by node

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a line per row, the time axis and the legend."""
        width = min(self.width or options.max_width, options.max_width)
        labels = _rows(self.simulation, self.rows)[1] + nic_use(self.simulation, self.rows, 1)[0]
        margin = max(map(len, labels)) + 1
        columns = max(width - margin - 2, LEAST_COLUMNS)
        grid = occupancy(self.simulation, self.rows, columns)
        nics, use = nic_use(self.simulation, self.rows, columns)
        coloured = console.color_system is not None and not console.no_color and not options.ascii_only
        idle, side = (".", "|") if options.ascii_only else ("·", "│")
        looks = [(_mark(grid.degrees, degree), "white" if degree == 0 else colour(degree)) for degree in grid.degrees]

        def cell(share: float, look: tuple[str, str], least: float = 0.5) -> tuple[str, str]:
            mark, style = look
            if coloured:
                height = min(round(share * len(HEIGHTS)), len(HEIGHTS))
                return (HEIGHTS[height - 1], style) if height else (idle, "dim")
            return (mark, "") if share >= least else (idle, "dim")

        def line(label: str, cells: Iterable[tuple[str, str]]) -> Text:
            drawn = Text(f"{label.rjust(margin - 1)} ", no_wrap=True, overflow="crop").append(side, "dim")
            for style, run in groupby(cells, key=itemgetter(1)):
                drawn.append("".join(mark for mark, _ in run), style)
            return drawn.append(side, "dim")

        for label, shares in zip(grid.labels, grid.share, strict=True):
            busiest = [looks[most] for most in shares.argmax(axis=0)] if looks else [("", "")] * columns
            yield line(label, map(cell, shares.sum(axis=0).tolist(), busiest))
        for label, shares in zip(nics, use.tolist(), strict=True):
            yield line(label, [cell(use, (NIC_MARKS[use >= 0.5], NIC_COLOUR), LEAST_NIC_USE) for use in shares])
        end = duration(self.simulation.step_ns).rjust(columns - 1)
        yield Text(" " * (margin + 1) + "0" + end, "dim", no_wrap=True)
        legend = Text("degree  ")
        for degree, (mark, style) in sorted(zip(grid.degrees, looks, strict=True), key=lambda one: one[0] or math.inf):
            name = "end of step" if degree == 0 else str(degree)
            legend.append("█" if coloured else mark, style if coloured else "")
            legend.append(f" {name}  " if coloured or mark != name else "  ")
        yield Constrain(legend.append(idle, "dim").append(" idle"), width)


def colour(degree: int) -> str:
    """Return the colour of a degree, the same in every chart: one per power of two, brighter for those between."""
    colours = COLOURS if degree & (degree - 1) == 0 else BETWEEN
    return colours[(degree.bit_length() - 1) % len(colours)]


def _mark(degrees: Sequence[int], degree: int) -> str:
    """Return the mark of a degree without colours: its digit below ten, a letter above, in order."""
    if degree < 10:
        return str(degree) if degree else END_MARK
    return LETTERS[sum(10 <= other < degree for other in degrees) % len(LETTERS)]


ACTION_STYLES = {"F": "bright_blue", "B": "green", "I": "cyan", "W": "yellow"}
ACTION_NAMES = {"F": "forward", "B": "backward", "I": "its input half", "W": "its weight half"}
MOST_BLOCKS = 3
"""A grid that needs more blocks of lines than this is drawn with one letter per time slice instead."""
_ACTION = re.compile(r"\d*([FBIW])\1*\d*(?: +-)*")
"""An action by name, with the time that it goes on, or a run of one letter."""


@dataclass(frozen=True, slots=True)
class ScheduleChart:
    """Chart of the actions of every pp_rank, by name, or with one letter per time slice where names do not fit."""

    schedule: Schedule
    timing: ScheduleTiming

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the chart and its legend."""
        text = grid(self.schedule.rows, self.timing.start, self.timing.stop, width=options.max_width)
        if text.count("\n\n") >= MOST_BLOCKS:
            text = self._marks(options.max_width)
        drawn = Text(text, no_wrap=True, overflow="crop")
        for match in _ACTION.finditer(text):
            drawn.stylize(ACTION_STYLES[match[1]], *match.span())
        yield drawn
        kinds = {action.kind for row in self.schedule.rows for action in row}
        legend = Text()
        for mark, style in ACTION_STYLES.items():
            if ActionKind(mark) in kinds:
                legend.append(mark, style)
                legend.append(f" {ACTION_NAMES[mark]}  ")
        yield legend.append(f"{IDLE} idle", "dim")

    def _marks(self, width: int) -> str:
        """Draw one letter per time slice: the kind of action that takes most of it."""
        rows, timing = self.schedule.rows, self.timing
        margin = len(f"pp_rank {len(rows) - 1}")
        columns = max(10, width - margin - 4)
        size = timing.makespan / columns
        lines = []
        for h, row in enumerate(rows):
            spent: list[dict[str, float]] = [{} for _ in range(columns)]
            for action, start, stop in zip(row, timing.start[h], timing.stop[h], strict=True):
                for c in range(int(start / size), min(columns - 1, int(stop / size)) + 1):
                    time = min(stop, (c + 1) * size) - max(start, c * size)
                    spent[c][action.kind.value] = spent[c].get(action.kind.value, 0.0) + time
            marks = [max(time, key=time.__getitem__) if sum(time.values()) >= size / 2 else IDLE for time in spent]
            lines.append(f"{f'pp_rank {h}':<{margin}} | {''.join(marks)}")
        return "\n".join(lines)
