"""A schedule for the terminal: hosts downwards, time to the right; every action by its name, or one mark per moment."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from seqloom.plan.action import ActionKind
from seqloom.plan.schedules.grid import IDLE, grid
from seqloom.plan.schedules.play import Played
from seqloom.plan.schedules.schedule import Schedule

STYLES = {"F": "bright_blue", "B": "green", "I": "cyan", "W": "yellow"}
MEANINGS = {"F": "forward", "B": "backward", "I": "its input half", "W": "its weight half"}
MOST_BLOCKS = 3
"""A grid that needs more blocks of lines than this is drawn with one mark per moment instead."""

_CELL = re.compile(r"\d+([FBIW])\d+(?: +-)*")


@dataclass(frozen=True, slots=True)
class ScheduleChart:
    """What every host does when."""

    schedule: Schedule
    played: Played

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines of the chart and its legend."""
        text = grid(self.schedule.rows, self.played.start, self.played.stop, width=options.max_width)
        if text.count("\n\n") >= MOST_BLOCKS:
            text = self._marks(options.max_width)
        drawn = Text(text, no_wrap=True, overflow="crop")
        for match in _CELL.finditer(text):
            drawn.stylize(STYLES[match[1]], *match.span())
        if not _CELL.search(text):
            for kind, style in STYLES.items():
                drawn.highlight_regex(rf"{kind}+", style)
        yield drawn
        yield _legend({action.kind for row in self.schedule.rows for action in row})

    def _marks(self, width: int) -> str:
        """Draw one character per moment: what the host does for most of it."""
        rows = self.schedule.rows
        margin = len(f"host {len(rows) - 1}")
        columns = max(10, width - margin - 4)
        lines = []
        for h, row in enumerate(rows):
            spent: list[dict[str, float]] = [{} for _ in range(columns)]
            for action, start, stop in zip(row, self.played.start[h], self.played.stop[h], strict=True):
                for column, time in _columns(start, stop, self.played.makespan, columns):
                    spent[column][action.kind.value] = spent[column].get(action.kind.value, 0.0) + time
            half = self.played.makespan / columns / 2
            marks = [max(time, key=time.__getitem__) if sum(time.values()) >= half else IDLE for time in spent]
            lines.append(f"{f'host {h}':<{margin}} | {''.join(marks)}")
        return "\n".join(lines)


def schedule_chart(schedule: Schedule, played: Played) -> ScheduleChart:
    """Draw who does what when."""
    return ScheduleChart(schedule, played)


def _columns(start: int, stop: int, end: int, columns: int) -> list[tuple[int, float]]:
    """Return (column, time in it) of an action."""
    size = end / columns
    first, last = int(start / size), min(columns - 1, int(stop / size))
    return [(c, min(stop, (c + 1) * size) - max(start, c * size)) for c in range(first, last + 1)]


def _legend(kinds: set[ActionKind]) -> Text:
    line = Text()
    for mark, style in STYLES.items():
        if ActionKind(mark) in kinds:
            line.append(mark, style)
            line.append(f" {MEANINGS[mark]}  ")
    line.append(f"{IDLE} idle", "dim")
    return line
