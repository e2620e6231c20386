"""Which ranks work together under every strategy: one letter per rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

if TYPE_CHECKING:
    from seqloom.planners.strategies import Scheme, Strategy

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


def letters_of(strategies: Sequence[Strategy]) -> dict[Scheme, str]:
    """A letter for every scheme, in the order in which they come; after z they begin again."""
    schemes = dict.fromkeys(pipe.scheme for strategy in strategies for pipe in strategy.pipelines)
    return {scheme: ascii_lowercase[k % len(ascii_lowercase)] for k, scheme in enumerate(schemes)}


def rank_letters(strategy: Strategy, letters: dict[Scheme, str]) -> list[tuple[str, Scheme | None]]:
    """The letter and the scheme of every rank, ascending; a dot where a rank is in no pipeline."""
    cells: list[tuple[str, Scheme | None]] = [(".", None)] * (max(strategy.ranks) + 1)
    pipes = sorted(strategy.pipelines, key=lambda pipe: min(pipe.ranks))
    for number, pipe in enumerate(pipes):
        letter = letters[pipe.scheme]
        for rank in pipe.ranks:
            cells[rank] = (letter if number % 2 else letter.upper(), pipe.scheme)
    return cells


def legend(letters: dict[Scheme, str]) -> Iterator[Text]:
    """One line per scheme: its letter, its name, and what that means."""
    for scheme, letter in letters.items():
        words = [f"tensor {scheme.tensor}", f"{scheme.stages} stage" + "s" * (scheme.stages > 1)]
        words += [f"Ulysses {scheme.ulysses}"] * (scheme.ulysses > 1) + [f"ring {scheme.ring}"] * (scheme.ring > 1)
        words += ["gathered for every pass"] * scheme.gathered
        line = Text(letter.upper(), style=_colour(letters, scheme))
        line.append(f"  {scheme}: {', '.join(words)}", style="default")
        yield line


def _colour(letters: dict[Scheme, str], scheme: Scheme | None) -> str:
    return "dim" if scheme is None else COLOURS[list(letters).index(scheme) % len(COLOURS)]
