"""What every benchmark shares: options, the source of lengths, targets and tables. Results are written by `record`."""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from seqloom.describe import SAMPLERS, lengths_from, read_lengths, sampler

K = 1024
Setting = tuple[str, str, str | None]
"""Cluster, model and profile; None is the profile of the cluster's device."""
A100: Setting = ("8x8xA100-40G", "gpt-7b", "flexsp-a100")
H200: Setting = ("8x8xH200", "llama3-8b", None)
WIKIPEDIA = "FlexSP release, Wikipedia lengths, 800,000 documents"
KNOWN = {"658e4138d91ef512f3217f2190e85ef2c441d6ec00df86d8fae9673b56767306": WIKIPEDIA}
"""Files that results name by their origin: SHA-256 of the lengths (int64) to name."""


@dataclass(frozen=True, slots=True)
class Check:
    """A target of the project beside what was measured."""

    what: str
    measured: float
    target: float
    at_least: bool = False
    """The target is a minimum; otherwise it is a maximum."""

    @property
    def passed(self) -> bool:
        """Whether the target is met."""
        return self.measured >= self.target if self.at_least else self.measured <= self.target


def options(description: str | None, *, lengths: bool = True) -> argparse.ArgumentParser:
    """The options that all benchmarks take; `lengths` where Wikipedia lengths are among what they draw from."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if lengths:
        parser.add_argument("--lengths", default="wikipedia", help="Wikipedia lengths: a file, or a sampler's name")
    parser.add_argument("--seed", type=int, default=0, help="of the samplers")
    parser.add_argument("--quick", action="store_true", help="the smallest run that touches everything; no evidence")
    parser.add_argument("--out", type=Path, help="write the results to this JSON file")
    parser.add_argument("--commit", help="of the sources, if git is not available")
    return parser


def batches(source: str, count: int, *, seed: int, context: int, skip: int = 0, size: int = 512) -> list[np.ndarray]:
    """Batches of a source after ``skip``, as ``seqloom compare`` cuts them: too long ones dropped, then in order."""
    lengths = _stream(source, seed, (skip + count) * size, context)
    kept = lengths[lengths <= context]
    if len(kept) < (skip + count) * size:
        raise SystemExit(f"{source_name(source)} has {len(kept):,} sequences, {(skip + count) * size:,} are needed")
    return list(kept[skip * size : (skip + count) * size].reshape(count, size))


@cache
def _stream(source: str, seed: int, count: int, context: int) -> np.ndarray:
    return lengths_from(source, seed=seed, count=count, max_length=context)


@cache
def source_name(source: str) -> str:
    """How results name a source of lengths: never by a path."""
    if source in SAMPLERS:
        return f"stand-in sampler {source}" if sampler(source).stand_in else f"sampler {source}"
    lengths = read_lengths(source)
    digest = hashlib.sha256(lengths.tobytes()).hexdigest()
    return KNOWN.get(digest, f"{Path(source).name}, {len(lengths):,} documents")


def progress(text: str) -> None:
    """One line of progress; on a terminal it overwrites the one before."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"\x1b[2K{text}" if end == "\r" else text, end=end, file=sys.stderr, flush=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """Print a table and what must be read with it."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)


def show_checks(checks: Sequence[Check]) -> None:
    """Print every target with what was measured; a miss is plain to see."""
    rows = [
        (c.what, f"{c.measured:.4g}", f"{'>=' if c.at_least else '<='} {c.target:g}", "pass" if c.passed else "FAIL")
        for c in checks
    ]
    show("targets", ("target", "measured", "wanted", ""), rows)
