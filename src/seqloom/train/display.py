"""What somebody sees of a run: a live view in a terminal, one plain line per step elsewhere."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Protocol

from seqloom.view.numbers import duration, percent

if TYPE_CHECKING:
    from rich.console import Console

    from seqloom.train.metrics import StepRecord

MS = 1e6
"""Nanoseconds of a millisecond."""


class Display(Protocol):
    """Shows steps and events as they come."""

    def step(self, record: StepRecord) -> None:
        """Show a step."""
        ...

    def note(self, text: str) -> None:
        """Show an event; it stays readable."""
        ...

    def close(self) -> None:
        """Leave the terminal as it was."""
        ...


def open_display(stream: IO[str], steps: int, done: int = 0) -> Display:
    """Open the live view where `stream` is a terminal, else plain lines.

    Args:
        stream: usually stderr, since stdout is for results.
        steps: of the whole run.
        done: steps before the first one that is shown.
    """
    if not stream.isatty():
        return Lines(stream, steps)
    from rich.console import Console

    return Live(Console(file=stream), steps, done)


def figures(record: StepRecord) -> list[str]:
    """Say a step in short phrases: loss and speed first, then the times, then how good the plan was."""
    time = f"{duration(record.measured_ms * MS)}"
    if record.predicted_ms is not None:
        time += f" (predicted {duration(record.predicted_ms * MS)})"
    phrases = [
        f"loss {record.loss:.4f}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"lr {record.lr:.2e}",
        f"norm {record.grad_norm:.3g}",
        time,
        f"wait {duration(record.planner_wait_ms * MS)}",
    ]
    if record.gap_to_bound is not None:
        phrases.append(f"gap {percent(record.gap_to_bound)} %")
    if record.idle_share is not None:
        phrases.append(f"idle {percent(record.idle_share)} %")
    if record.shape:
        phrases.append(record.shape)
    if record.planner:
        phrases.append(f"{record.planner}, planner late" if record.fallback else record.planner)
    return phrases


class Lines:
    """One line per step: for files, pipes and continuous integration."""

    def __init__(self, stream: IO[str], steps: int) -> None:
        """Write to `stream`."""
        self._stream, self._steps = stream, steps

    def step(self, record: StepRecord) -> None:
        """See `Display.step`."""
        width = len(str(self._steps))
        self.note(f"step {record.step:>{width}}/{self._steps}  {'  '.join(figures(record))}")

    def note(self, text: str) -> None:
        """See `Display.note`."""
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        """See `Display.close`."""
        self._stream.flush()


class Live:
    """A bar and the latest step's figures, redrawn in place; events scroll above them."""

    def __init__(self, console: Console, steps: int, done: int = 0) -> None:
        """Begin to draw."""
        from rich.live import Live as Redrawn
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._live = Redrawn(self._bar, console=console, refresh_per_second=4)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        """See `Display.step`."""
        from rich.console import Group
        from rich.text import Text

        self._bar.update(self._task, completed=record.step)
        self._live.update(Group(self._bar, Text("  ".join(figures(record)))))

    def note(self, text: str) -> None:
        """See `Display.note`."""
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """See `Display.close`."""
        self._live.stop()
