"""Trackers that get a run's metrics when they are installed and asked for: TensorBoard, wandb, trackio."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

from seqloom.errors import SeqloomError, unknown
from seqloom.view.format import duration, percent

if TYPE_CHECKING:
    from rich.console import Console


PROJECT = "seqloom"


class Sink(Protocol):
    """Takes figures of a step."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Take the figures of a step, from 1."""
        ...

    def close(self) -> None:
        """Write out what is left."""
        ...


def open_sinks(names: Sequence[str], folder: Path, *, settings: Mapping[str, Any], done: int = 0) -> list[Sink]:
    """Open trackers by name. One that is not installed is an error here, before the first step.

    Args:
        names: of `tensorboard`, `wandb`, `trackio`.
        folder: of the run; files go there, and its name is the run's.
        settings: the config, shown beside the run.
        done: steps of the checkpoint that the run goes on from; 0: a new run.
    """
    kinds = {"tensorboard": _TensorBoard, "wandb": _Wandb, "trackio": _Trackio}
    for name in names:
        if name not in kinds:
            raise unknown("tracker", name, kinds)
    modules = [_imported(name) for name in names]  # all of them before the first one starts anything
    return [kinds[name](module, folder, settings, done) for name, module in zip(names, modules, strict=True)]


class _TensorBoard:
    """Event files in the run's folder."""

    def __init__(self, module: ModuleType, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        # After a resume TensorBoard hides what an earlier process wrote of steps that come again.
        purge = done + 1 if done else None
        self._writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
        if not done:
            flat = [(section, key, value) for section, keys in settings.items() for key, value in keys.items()]
            lines = [f"    {section}.{key} = {value}" for section, key, value in flat]
            self._writer.add_text("config", "\n".join(lines))

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Sink.close`."""
        self._writer.close()


class _Wandb:
    """A run of Weights & Biases; its id lies in the run's folder, so that a resumed run goes on in it."""

    def __init__(self, module: ModuleType, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        mark = folder / "wandb-id"
        again: dict[str, Any] = {}
        if done and mark.is_file():
            again = {"id": mark.read_text(encoding="utf-8").strip(), "resume": "must"}
        folder.mkdir(parents=True, exist_ok=True)
        self._run = module.init(project=PROJECT, name=folder.name, dir=str(folder), config=dict(settings), **again)
        mark.write_text(f"{self._run.id}\n", encoding="utf-8")

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """See `Sink.close`."""
        self._run.finish()


class _Trackio:
    """A run of trackio, known by its name."""

    def __init__(self, module: ModuleType, folder: Path, settings: Mapping[str, Any], done: int) -> None:
        resume = "allow" if done else "never"
        self._run = module.init(project=PROJECT, name=folder.name, config=dict(settings), resume=resume)

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """See `Sink.write`."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """See `Sink.close`."""
        self._run.finish()


def _imported(name: str) -> ModuleType:
    """Import what a tracker needs."""
    try:
        return importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError as error:
        raise SeqloomError(
            f"log.sinks names {name!r}, which cannot be imported ({error}); `pip install {name}`, or take it out of "
            "log.sinks: metrics.jsonl has all figures anyway"
        ) from None


# ---- merged: train.metrics
# What is known of every step: records, the .jsonl that keeps them, and the summary at the end.
#
# A line is written whole and at once, so a crash tears at most the last one, and opening the file again cuts that
# off.


_TIMES = ("predicted_ms", "measured_ms", "planner_wait_ms", "gap_to_bound")
"""What a summary gives the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimiser step. Times are those of the slowest rank, in milliseconds."""

    step: int
    """From 1."""
    loss: float
    """Sum of token losses / valid tokens of the whole step."""
    tokens: int
    """Of all documents of the step."""
    lr: float
    grad_norm: float
    """Of the whole model, before clipping."""
    measured_ms: float
    """From the plan at hand to the updated parameters."""
    predicted_ms: float | None = None
    """The same by the cost model."""
    planner_wait_ms: float = 0.0
    """Before that: waiting for the plan."""
    gap_to_bound: float | None = None
    """How far the predicted time is above the lower bound, as a share of the bound."""
    idle_share: float | None = None
    """Of the ranks' time in the step, by the simulator."""
    planner: str = ""
    """Who planned the step."""
    plan_hash: str = ""
    """Of the plan that was run."""
    shape: str = ""
    """Its pipelines side by side, each as tensor degree x stages / ranks: ``2x2/4, 1x1/2 x 2``."""
    fallback: bool = False
    """The planner was late or failed, and the static plan was taken."""

    @property
    def tokens_per_second(self) -> float:
        """Throughput, waiting included."""
        return 1e3 * self.tokens / (self.measured_ms + self.planner_wait_ms)

    def as_dict(self) -> dict[str, Any]:
        """Return all figures by name."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


class Journal:
    """The .jsonl of a run: one object per line, each with its `step`.

    Attributes:
        kept: the records that were there before and stay.
    """

    def __init__(self, path: Path, *, done: int = 0) -> None:
        """Open for writing after the records of the first `done` steps.

        What follows them is cut off: a torn last line, and steps after the checkpoint that the run goes on from, which
        will come again.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self.kept, size = _read(path, done)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._file.truncate(size)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one line. Numbers that JSON does not have (nan, inf) become null."""
        line = json.dumps({key: _finite(value) for key, value in record.items()}, allow_nan=False) + "\n"
        try:
            self._file.write(line)
        except OSError as error:
            raise SeqloomError(f"{self._path}: cannot be written ({error.strerror or error}); make room") from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Summary:
    """The figures of a run so far. Times are means of the steps of this process, without its first, which warms up."""

    def __init__(self, kept: Sequence[Mapping[str, Any]] = ()) -> None:
        """Go on from the records of earlier processes."""
        losses = [record for record in kept if "loss" in record]
        self.steps: int = losses[-1]["step"] if losses else 0
        self.first_loss: float | None = losses[0]["loss"] if losses else None
        self.final_loss: float | None = losses[-1]["loss"] if losses else None
        self._times = _Means()
        self._added = 0

    def add(self, record: StepRecord) -> None:
        """Count one more step."""
        self.steps, self.final_loss = record.step, record.loss
        if self.first_loss is None:
            self.first_loss = record.loss
        if self._added == 1:
            self._times = _Means()
        self._added += 1
        seconds = (record.measured_ms + record.planner_wait_ms) / 1e3
        self._times.add(
            tokens=record.tokens,
            seconds=seconds,
            predicted_ms=record.predicted_ms,
            measured_ms=record.measured_ms,
            planner_wait_ms=record.planner_wait_ms,
            gap_to_bound=record.gap_to_bound,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return what `seqloom train --json` prints; None where nothing was measured."""
        tokens, seconds = self._times.of("tokens"), self._times.of("seconds")
        figures = {
            "steps": self.steps,
            "first_loss": self.first_loss,
            "final_loss": self.final_loss,
            "tokens_per_second": tokens / seconds if tokens and seconds else None,
            **{name: self._times.of(name) for name in _TIMES},
        }
        return {name: _finite(value) for name, value in figures.items()}


class _Means:
    """Running means by name; values that are None do not count."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}

    def add(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = (total + value, count + 1)

    def of(self, name: str) -> float | None:
        total, count = self._sums.get(name, (0.0, 0))
        return total / count if count else None


class Metrics:
    """Where one process, the first, puts the figures of a run: the journal always, the rest as asked for."""

    def __init__(
        self,
        path: Path,
        *,
        done: int = 0,
        every: int = 1,
        sinks: Sequence[Sink] = (),
        display: Display | None = None,
    ) -> None:
        """Open the journal.

        Args:
            path: the .jsonl.
            done: steps of the checkpoint that the run goes on from.
            every: steps from one line in sinks and on the display to the next; the first is always shown.
            sinks: trackers, see `open_sinks`.
            display: what somebody looks at, see `open_display`.
        """
        self._journal = Journal(path, done=done)
        self._every, self._sinks, self._display, self._first = every, tuple(sinks), display, done + 1
        self.summary = Summary(self._journal.kept)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def step(self, record: StepRecord) -> None:
        """Put down one step."""
        self.summary.add(record)
        self._journal.write(record.as_dict())
        if record.step % self._every == 0 or record.step == self._first:
            for sink in self._sinks:
                sink.write(record.step, _numbers(record.as_dict()))
            if self._display is not None:
                self._display.step(record)

    def evaluation(self, step: int, loss: float) -> None:
        """Put down the loss on the validation documents after `step` steps."""
        figures = {"evaluation_loss": loss}
        self._journal.write({"step": step, **figures})
        for sink in self._sinks:
            sink.write(step, _numbers(figures))
        if self._display is not None:
            self._display.note(f"step {step}: loss {loss:.4f} on the validation documents")

    def note(self, step: int, text: str) -> None:
        """Put down an event: a checkpoint, a late planner."""
        self._journal.write({"step": step, "note": text})
        if self._display is not None:
            self._display.note(f"step {step}: {text}")

    def close(self) -> None:
        """Close everything that was opened here or handed over."""
        self._journal.close()
        for sink in self._sinks:
            sink.close()
        if self._display is not None:
            self._display.close()


def read_steps(path: Path) -> list[StepRecord]:
    """Read the steps of a .jsonl; a torn last line is left out."""
    names = {field.name for field in fields(StepRecord)}
    records, _ = _read(path, None)
    return [StepRecord(**{key: record[key] for key in names & set(record)}) for record in records if "loss" in record]


def _read(path: Path, done: int | None) -> tuple[list[dict[str, Any]], int]:
    """Return the records of the first `done` steps (None: all), and how many bytes they take."""
    records: list[dict[str, Any]] = []
    size = 0
    if not path.exists():
        return records, size
    lines = path.read_bytes().split(b"\n")
    whole = lines[:-1]  # after the last newline there is nothing, or half a line
    for number, line in enumerate(whole, start=1):
        record = _parsed(line)
        if record is None:
            if number == len(whole):
                break
            raise SeqloomError(f"{path}, line {number} is not a record; move the file away to begin a new one")
        if done is not None and record["step"] > done:
            break
        records.append(record)
        size += len(line) + 1
    return records, size


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return what a tracker can draw."""
    return {key: float(value) for key, value in figures.items() if isinstance(value, int | float) and key != "step"}


# ---- merged: train.display
# What somebody sees of a run: a live view in a terminal, one plain line per step elsewhere.


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
