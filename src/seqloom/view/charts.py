"""Lengths of a batch by powers of two: how many sequences, and how many of the tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from seqloom.plan.action import ActionKind
from seqloom.schedules.schedule import IDLE, Schedule, grid
from seqloom.schedules.timing import ScheduleTiming
from seqloom.view.numbers import percent, tokens

if TYPE_CHECKING:
    from seqloom.planners.hydraulis import ParallelConfig, Strategy


EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR = 20
"""Cells of a full bar, where there is room."""
BESIDE = 44
"""Characters of a row that are not bars: label, two numbers, what stands between."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of `low` to `2 * low - 1` tokens."""

    low: int
    sequences: float
    """Share of all sequences."""
    tokens: float
    """Share of all tokens."""


def buckets(lengths: Sequence[int] | np.ndarray) -> list[Bucket]:
    """Return the powers of two from the shortest to the longest length, empty ones between included."""
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) == 0:
        return []
    powers = np.array([int(size).bit_length() - 1 for size in sizes])
    found = []
    for power in range(int(powers.min()), int(powers.max()) + 1):
        inside = sizes[powers == power]
        found.append(Bucket(1 << power, len(inside) / len(sizes), float(inside.sum() / sizes.sum())))
    return found


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """A chart that draws itself: one row per power of two."""

    buckets: list[Bucket]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw bars of the full scale, so that both columns can be compared."""
        table = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False, collapse_padding=True)
        for name in ("length", "sequences %", "", "tokens %", ""):
            table.add_column(name, justify="left" if not name else "right", no_wrap=True)
        most = max((max(bucket.sequences, bucket.tokens) for bucket in self.buckets), default=1.0)
        cells = max(4, min(BAR, (options.max_width - BESIDE) // 2))
        for bucket in self.buckets:
            bars = [bar(x / most, cells, options.ascii_only) for x in (bucket.sequences, bucket.tokens)]
            label = f"{tokens(bucket.low)}-{tokens(2 * bucket.low)}"
            shares = percent(bucket.sequences), percent(bucket.tokens)
            table.add_row(label, shares[0], f"[cyan]{bars[0]}", shares[1], f"[magenta]{bars[1]}")
        yield table


def length_histogram(lengths: Sequence[int] | np.ndarray) -> LengthHistogram:
    """Draw the lengths of a batch: share of sequences and share of tokens per power of two."""
    return LengthHistogram(buckets(lengths))


def bar(share: float, cells: int, ascii_only: bool = False) -> str:
    """Return a bar of `cells` cells, `share` of it filled; what is not zero shows at least a trace."""
    if ascii_only:
        full = max(round(share * cells), int(share > 0))
        return "#" * full + " " * (cells - full)
    eighths = max(round(share * cells * 8), int(share > 0))
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(cells)


# ---- merged: view.ranks
# Which ranks work together under every strategy: one letter per rank.


COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "red")


@dataclass(frozen=True, slots=True)
class RankChart:
    """A chart that draws itself: a line per strategy, nodes apart, a legend of the schemes below."""

    strategies: tuple[Strategy, ...]
    node_size: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw as many whole nodes in a line as there is room for."""
        letters = letters_of(self.strategies)
        margin = len(str(len(self.strategies) - 1)) + 2
        nodes = max(1, (options.max_width - margin) // (self.node_size + 1))
        for k, strategy in enumerate(self.strategies):
            row = rank_letters(strategy, letters)
            per_line = nodes * self.node_size
            for first in range(0, len(row), per_line):
                line = Text(f"{k if first == 0 else '':>{margin - 2}}  ")
                for place, (letter, scheme) in enumerate(row[first : first + per_line]):
                    line.append(" " if place and place % self.node_size == 0 else "")
                    line.append(letter, style=_colour(letters, scheme))
                yield line
        yield Text("")
        for line in legend(letters):
            yield line


def rank_chart(strategies: Sequence[Strategy], node_size: int) -> RankChart:
    """Draw the ranks of every strategy: a letter per scheme, capital and small from one pipeline to the next."""
    return RankChart(tuple(strategies), node_size)


def letters_of(strategies: Sequence[Strategy]) -> dict[ParallelConfig, str]:
    """A letter for every scheme, in the order in which they come; after z they begin again."""
    schemes = dict.fromkeys(pipe.scheme for strategy in strategies for pipe in strategy.pipelines)
    return {scheme: ascii_lowercase[k % len(ascii_lowercase)] for k, scheme in enumerate(schemes)}


def rank_letters(strategy: Strategy, letters: dict[ParallelConfig, str]) -> list[tuple[str, ParallelConfig | None]]:
    """The letter and the scheme of every rank, ascending; a dot where a rank is in no pipeline."""
    cells: list[tuple[str, ParallelConfig | None]] = [(".", None)] * (max(strategy.ranks) + 1)
    pipes = sorted(strategy.pipelines, key=lambda pipe: min(pipe.ranks))
    for number, pipe in enumerate(pipes):
        letter = letters[pipe.scheme]
        for rank in pipe.ranks:
            cells[rank] = (letter if number % 2 else letter.upper(), pipe.scheme)
    return cells


def legend(letters: dict[ParallelConfig, str]) -> Iterator[Text]:
    """One line per scheme: its letter, its name, and what that means."""
    for scheme, letter in letters.items():
        words = [f"tensor {scheme.tensor}", f"{scheme.stages} stage" + "s" * (scheme.stages > 1)]
        words += [f"Ulysses {scheme.ulysses}"] * (scheme.ulysses > 1) + [f"ring {scheme.ring}"] * (scheme.ring > 1)
        words += ["gathered for every pass"] * scheme.gathered
        line = Text(letter.upper(), style=_colour(letters, scheme))
        line.append(f"  {scheme}: {', '.join(words)}", style="default")
        yield line


def _colour(letters: dict[ParallelConfig, str], scheme: ParallelConfig | None) -> str:
    return "dim" if scheme is None else COLOURS[list(letters).index(scheme) % len(COLOURS)]


# ---- merged: view.schedule
# A schedule for the terminal: hosts downwards, time to the right; every action by its name, or one mark per moment.


STYLES = {"F": "bright_blue", "B": "green", "I": "cyan", "W": "yellow"}
MEANINGS = {"F": "forward", "B": "backward", "I": "its input half", "W": "its weight half"}
MOST_BLOCKS = 3
"""A grid that needs more blocks of lines than this is drawn with one mark per moment instead."""

_CELL = re.compile(r"\d+([FBIW])\d+(?: +-)*")


@dataclass(frozen=True, slots=True)
class ScheduleChart:
    """What every host does when."""

    schedule: Schedule
    played: ScheduleTiming

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


def schedule_chart(schedule: Schedule, played: ScheduleTiming) -> ScheduleChart:
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
