"""Lengths of a batch by powers of two: how many sequences, and how many of the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from seqloom.view.numbers import percent, tokens

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
