"""Metrics of a run: one record per step, written to metrics.jsonl, to trackers and the terminal, and for callbacks.

`Metrics` on rank 0 writes every `StepRecord` to the file, and passes it on to trackers (TensorBoard, wandb, trackio,
where installed and configured) and to a display (a live view in a terminal, one plain line per step elsewhere).
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import math
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import MISSING, Field, asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from seqloom.errors import SeqloomError
from seqloom.view.format import duration, percent

if TYPE_CHECKING:
    from rich.console import Console

MS = 1e6
"""Nanoseconds of a millisecond."""
GIB = 1 << 30
PROJECT = "seqloom"
"""Project name in trackers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Metrics of one optimiser step. Times are in milliseconds.

    Ranks end a step together, so `measured_ms` of the slowest rank is close to that of any other. Its phases are means
    over ranks: they add up to about `measured_ms`, and say where the ranks' time goes. Those of the slowest rank would
    be those of another rank in every step, and the longest of every phase would add up to more than the step.
    """

    step: int  # from 1
    loss: float  # sum of token losses / valid tokens of the whole step
    tokens: int  # of all documents of the step
    lr: float
    grad_norm: float  # of the whole model, before clipping
    measured_ms: float  # from the plan being there to the updated parameters, on the slowest rank
    predicted_ms: float | None = None  # the same by the cost model
    planner_wait_ms: float = 0.0  # waiting for the plan, before that
    gap_to_bound: float | None = None  # how far the predicted time is above the lower bound, as a share of the bound
    idle_share: float | None = None  # share of the ranks' time in the step that they wait, by the simulator
    planner: str = ""
    plan_hash: str = ""
    shape: str = ""  # the plan's pipelines, each tensor degree, stages, ranks: ``t2p2 on 4, 2 of t1p1 on 2``
    fallback: bool = False  # the planner was late or failed, so that the fallback planner made the plan
    factors: str = ""  # `Factors.digest` of the factors by which the plan was made; "": the profile as it is
    slowest: float | None = None  # learned speed of the slowest rank, relative to the median rank; None: all are alike
    expert_imbalance: list[float] | None = None  # by layer: tokens at the busiest rank of an EP group over the mean
    mfu: float | None = None  # model FLOPs / (measured_ms x ranks x peak of the device); None: the peak is not known
    memory_allocated_gib: float | None = None  # peak of the fullest rank in the step; None on a CPU
    memory_reserved_gib: float | None = None  # the same with what the allocator holds in reserve
    bind_ms: float | None = None  # index work of the plan
    rows_ms: float | None = None  # waiting for ids and labels
    forward_ms: float | None = None  # with exchanges of attention, and parameters that layers gather themselves
    backward_ms: float | None = None  # the same, with recomputation
    messages_ms: float | None = None  # starting messages to other stages, waiting for theirs
    parameters_ms: float | None = None  # gathering and moving parameters, reducing gradients, norm and loss
    optimiser_ms: float | None = None  # clipping and update
    attention_ms: float | None = None  # part of forward and backward: calls of attention without messages
    exchange_ms: float | None = None  # part of them: messages inside layers, with waiting for their other side

    @property
    def tokens_per_second(self) -> float:
        """Throughput, waiting included."""
        return 1e3 * self.tokens / (self.measured_ms + self.planner_wait_ms)

    def as_dict(self) -> dict[str, Any]:
        """Return all metrics by name."""
        return asdict(self) | {"tokens_per_second": self.tokens_per_second}


class StartUp:
    """The phases of a rank before its first step: shown when they begin, timed, and summed up in one sentence."""

    def __init__(self, stream: IO[str] | None = None) -> None:
        """Begin now; phases are shown on `stream`, None: nowhere."""
        self._stream, self._phases = stream, list[tuple[str, float]]()
        self._begin = time.monotonic()

    def enter(self, phase: str) -> None:
        """Begin a phase, which ends the one before."""
        self._phases.append((phase, time.monotonic()))
        self.show(phase)

    def show(self, text: str) -> None:
        """Show how far the phase has come."""
        if self._stream is not None:
            self._stream.write(f"start: {text}\n")
            self._stream.flush()

    def summary(self) -> str:
        """Return how long the start took, by phase; the last one ends now."""
        end = time.monotonic()
        ends = [*(begin for _, begin in self._phases[1:]), end]
        parts = [f"{name} {stop - begin:.1f}" for (name, begin), stop in zip(self._phases, ends, strict=True)]
        return f"first step done {end - self._begin:.1f} s after the rank's start: {', '.join(parts)}"


class RankMeasurement(NamedTuple):
    """What one rank measured in a step: seconds, and bytes of GPU memory (0 on a CPU). See `StepRecord`."""

    step_s: float
    bind_s: float
    rows_s: float
    forward_s: float
    backward_s: float
    messages_s: float
    parameters_s: float
    optimiser_s: float
    allocated: float
    reserved: float
    busy_s: float = 0.0  # computing the loss, in which no rank waits for another
    busy_tokens: float = 0.0  # of the loss
    attention_s: float = 0.0  # calls of attention in forward and backward, without messages
    exchange_s: float = 0.0  # messages of layers that nothing hides, with the wait for their other side
    layers_measured: float = False  # whether the last two were

    @property
    def computing_s(self) -> float:
        """Forward and backward without messages of layers."""
        return self.forward_s + self.backward_s - self.exchange_s


PHASES = tuple(name.removesuffix("_s") + "_ms" for name in RankMeasurement._fields[1:8])
"""Fields of a `StepRecord` that are phases of `measured_ms`."""
IN_LAYERS = ("attention_ms", "exchange_ms")
"""Fields of a `StepRecord` that are parts of forward and backward."""
RANK_MEMORY = ("allocated", "reserved")


def summarize_ranks(ranks: Sequence[RankMeasurement], flops: float, peak_flops: float | None) -> dict[str, Any]:
    """Return what the ranks measured as fields of a `StepRecord`.

    Args:
        flops: of the model in the whole step, forward and backward.
        peak_flops: FLOP/s of a device; None: not known.
    """
    means = {name: 1e3 * fmean(getattr(rank, f"{name[:-3]}_s") for rank in ranks) for name in PHASES}
    seconds, allocated, reserved = ([getattr(rank, name) for rank in ranks] for name in ("step_s", *RANK_MEMORY))
    if all(rank.layers_measured for rank in ranks):
        means |= {name: 1e3 * fmean(getattr(rank, f"{name[:-3]}_s") for rank in ranks) for name in IN_LAYERS}
    return means | {
        "measured_ms": 1e3 * max(seconds),
        "mfu": None if peak_flops is None else flops / (max(seconds) * len(ranks) * peak_flops),
        "memory_allocated_gib": max(allocated) / GIB or None,
        "memory_reserved_gib": max(reserved) / GIB or None,
    }


class Metrics(AbstractContextManager):
    """Writes the metrics of a run, on rank 0: to the file always, to trackers and the display as configured.

    The file is a .jsonl: one object per line, each with its `step`. A line is written at once, so a crash tears at most
    the last one, and opening the file again cuts that off.
    """

    def __init__(
        self,
        path: Path,
        *,
        done: int = 0,
        every: int = 1,
        trackers: Sequence[Tracker] = (),
        display: _Display | None = None,
    ) -> None:
        """Open the file after the records of the first `done` steps.

        The rest is cut off: a torn last line, and steps after the checkpoint that the run resumes from, which will
        come again. Trackers and display get every `every`-th step, and the first.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        _, size = _read_records(path, done)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._file.truncate(size)
        self._path, self._done, self._every = path, done, every
        self._trackers, self._display = tuple(trackers), display

    def step(self, record: StepRecord) -> None:
        """Write one step."""
        shown = record.step % self._every == 0 or record.step == self._done + 1
        self._write(record.step, record.as_dict(), tracked=shown)
        if shown and self._display is not None:
            self._display.step(record)

    def evaluation(self, step: int, loss: float) -> None:
        """Write the loss on the validation documents after `step` steps."""
        self._write(step, {"step": step, "evaluation_loss": loss}, tracked=True)
        self._show(f"step {step}: loss {loss:.4f} on the validation documents")

    def note(self, step: int, text: str) -> None:
        """Write an event, such as a late planner."""
        self._write(step, {"step": step, "note": text})
        self._show(f"step {step}: {text}")

    def summary(self) -> dict[str, Any]:
        """Return the totals of the run so far, earlier processes included."""
        return summarize(read_steps(self._path), self._done)

    def __exit__(self, *error: object) -> None:
        for each in (self._file, *self._trackers, *filter(None, [self._display])):
            each.close()

    def _write(self, step: int, record: Mapping[str, Any], *, tracked: bool = False) -> None:
        """Append a line. Numbers that JSON does not have (nan, inf) become null; trackers get what they can draw."""
        infinite = {key: None for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
        try:
            self._file.write(json.dumps({**record, **infinite}, allow_nan=False) + "\n")
        except OSError as error:
            raise SeqloomError(f"{self._path}: cannot be written ({error.strerror or error}); make room") from error
        numbers = {key: float(value) for key, value in record.items() if isinstance(value, int | float)}
        numbers.pop("step")
        for tracker in self._trackers if tracked else ():
            tracker.write(step, numbers)

    def _show(self, text: str) -> None:
        if self._display is not None:
            self._display.note(text)


# ---- metrics.jsonl


def read_steps(path: Path) -> list[StepRecord]:
    """Read the steps of a .jsonl; a torn last line is left out."""
    known, needed = ({each.name for each in fields(StepRecord) if wanted(each)} for wanted in (bool, _is_required))
    steps = [record for record in _read_records(path, None)[0] if "loss" in record]
    for record in steps:
        if needed - set(record):
            missing = sorted(needed - set(record))[0]
            raise SeqloomError(f"{path}: the record of step {record['step']} lacks {missing!r}; it is no file of a run")
    return [StepRecord(**{key: record[key] for key in known & set(record)}) for record in steps]


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING


def _read_records(path: Path, done: int | None) -> tuple[list[dict[str, Any]], int]:
    """Return the records of the first `done` steps (None: all), and how many bytes they take."""
    records: list[dict[str, Any]] = []
    size = 0
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []  # after the last newline: half a line at most
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            if number == len(lines):
                break
            raise SeqloomError(f"{path}, line {number} is not a record; move the file away to begin a new one")
        if done is not None and record["step"] > done:
            break
        records.append(record)
        size += len(line) + 1
    return records, size


def summarize(records: Sequence[StepRecord], done: int = 0) -> dict[str, Any]:
    """Return the totals of a run, which `seqloom train --json` prints; None where nothing was measured.

    Times and MFU are means of the steps after step `done`, those of this process, without the first, which warms up;
    memory is the peak of the same steps.
    """
    timed = [record for record in records if record.step > done]
    timed = timed[1:] or timed

    def over_steps(combine: Callable[[list[float]], float], *names: str) -> dict[str, float | None]:
        known = {name: [value for record in timed if (value := getattr(record, name)) is not None] for name in names}
        return {name: combine(values) if values else None for name, values in known.items()}

    seconds = sum(record.measured_ms + record.planner_wait_ms for record in timed) / 1e3
    return {
        "steps": records[-1].step if records else 0,
        "first_loss": records[0].loss if records else None,
        "final_loss": records[-1].loss if records else None,
        "tokens_per_second": sum(record.tokens for record in timed) / seconds if seconds else None,
        **over_steps(fmean, "predicted_ms", "measured_ms", "planner_wait_ms", "gap_to_bound", "mfu", *PHASES),
        **over_steps(max, "memory_allocated_gib", "memory_reserved_gib"),
    }


# ---- Trackers


class Tracker(NamedTuple):
    """An open tracker: `write(step, metrics)` takes the metrics of a step, from 1."""

    write: Callable[[int, Mapping[str, float]], None]
    close: Callable[[], None]


def open_trackers(names: Sequence[str], folder: Path, *, settings: Mapping[str, Any], done: int = 0) -> list[Tracker]:
    """Open trackers by name. One that is not installed is an error here, before the first step.

    `folder` is the run's, and gives it its name; `settings` is the config, shown beside the run; `done` is the step of
    the checkpoint that the run resumes from, 0 for a new run.
    """
    modules = import_trackers(names)
    return [_TRACKERS[name](module, folder, settings, done) for name, module in zip(names, modules, strict=True)]


def import_trackers(names: Sequence[str]) -> list[ModuleType]:
    """Import the packages of trackers, all of them before the first one starts anything."""
    modules = []
    for name in names:
        try:
            modules.append(importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name))
        except ImportError as error:
            raise SeqloomError(
                f"log.sinks names {name!r}, which cannot be imported ({error}); `pip install {name}`, or take it out "
                "of log.sinks: metrics.jsonl has all figures anyway"
            ) from None
    return modules


def _open_tensorboard(module: Any, folder: Path, settings: Mapping[str, Any], done: int) -> Tracker:
    """Event files in the run's folder."""
    purge = done + 1 if done else None  # hides what an earlier process wrote of steps that come again
    writer = module.SummaryWriter(str(folder / "tensorboard"), purge_step=purge)
    if not done:
        flat = [(section, key, value) for section, keys in settings.items() for key, value in keys.items()]
        writer.add_text("config", "\n".join(f"    {section}.{key} = {value}" for section, key, value in flat))

    def write(step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    return Tracker(write, writer.close)


def _open_trackio(module: Any, folder: Path, settings: Mapping[str, Any], done: int) -> Tracker:
    """A run of trackio, known by its name."""
    resume = "allow" if done else "never"
    run = module.init(project=PROJECT, name=folder.name, config=dict(settings), resume=resume)
    return Tracker(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)


def _open_wandb(module: Any, folder: Path, settings: Mapping[str, Any], done: int) -> Tracker:
    """A run of Weights & Biases; its id is stored in the run's folder, so that a resumed run continues it."""
    id_file = folder / "wandb-id"
    resume = {}
    if done and id_file.is_file():
        resume = {"id": id_file.read_text(encoding="utf-8").strip(), "resume": "must"}
    folder.mkdir(parents=True, exist_ok=True)
    run = module.init(project=PROJECT, name=folder.name, dir=str(folder), config=dict(settings), **resume)
    id_file.write_text(f"{run.id}\n", encoding="utf-8")
    return Tracker(lambda step, metrics: run.log(dict(metrics), step=step), run.finish)


_TRACKERS = {"tensorboard": _open_tensorboard, "wandb": _open_wandb, "trackio": _open_trackio}


# ---- Callbacks


class Callback:
    """What your own code does while a run goes on: methods of a subclass, which rank 0 calls; others do nothing.

    A run gets callbacks from `seqloom.train.train(config, callbacks=[...])`, pickled to its first rank, or by name from
    `run.callbacks`. A step waits for them. One that fails ends the run. Called again when a run resumes.
    """

    def on_train_begin(self, config: Mapping[str, Any], start_step: int, steps: int) -> None:
        """Begin: `config` by sections and keys, steps that are done, and steps of the whole run."""

    def on_step_end(self, record: StepRecord) -> bool | None:
        """Note the metrics of a step. True: end the run after it, as if it were the last."""

    def on_evaluate(self, step: int, loss: float) -> bool | None:
        """Note the loss on the validation documents after `step` steps. True: end the run after it."""

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Note a checkpoint that is complete on disk; it is written while later steps run."""

    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        """Note the totals of the run, whose model is written; not called for a run that was asked to leave."""


class Callbacks:
    """The callbacks of a run on one rank; on others than the first they are known by name alone.

    Attributes:
        names: of their classes.
        told: the checkpoint that they know.
    """

    def __init__(self, given: Sequence[Callback], named: Sequence[str], *, leads: bool) -> None:
        """Take callbacks, and load those that `run.callbacks` names, on the rank that leads."""
        self.names = (*(type(each).__name__ for each in given), *named)
        self.told: Path | None = None
        self._each = [*given, *(each() for each in load_callbacks(named))] if leads else []
        self._asked = -1

    def train_begin(self, config: Mapping[str, Any], start_step: int, steps: int) -> None:
        """Call `on_train_begin` of all."""
        self._call("on_train_begin", config, start_step, steps)

    def step_end(self, record: StepRecord) -> None:
        """Call `on_step_end` of all, and note who asks to stop."""
        self._call("on_step_end", record)

    def evaluate(self, step: int, loss: float) -> None:
        """Call `on_evaluate` of all, and note who asks to stop."""
        self._call("on_evaluate", step, loss)

    def checkpoint(self, latest: Path | None) -> None:
        """Call `on_checkpoint` of all if the latest complete checkpoint is another than they know."""
        if latest is not None and latest != self.told:
            self.told = latest
            self._call("on_checkpoint", int(latest.name.rpartition("-")[2]), latest)

    def train_end(self, summary: Mapping[str, Any]) -> None:
        """Call `on_train_end` of all."""
        self._call("on_train_end", summary)

    def take_request(self) -> int:
        """Return the number of the first callback that has asked to stop since the last call; -1: none has."""
        asked, self._asked = self._asked, -1
        return asked

    def _call(self, method: str, *arguments: Any) -> None:
        for number, each in enumerate(self._each):
            try:
                asks = getattr(each, method)(*arguments)
            except Exception as error:
                place = traceback.extract_tb(error.__traceback__)[-1]
                raise SeqloomError(
                    f"callback {self.names[number]}.{method} failed ({type(error).__name__}: {error}, line "
                    f"{place.lineno} of {place.filename}); correct it, and run the same command again"
                ) from error
            if asks and self._asked < 0:
                self._asked = number


def load_callbacks(names: Sequence[str]) -> list[type[Callback]]:
    """Import the classes that `run.callbacks` names, your own code: `module:Class` or `file.py:Class`."""
    found = []
    for name in names:
        place, _, attribute = name.rpartition(":")
        try:
            module = _load_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
            kind = getattr(module, attribute)
            inspect.signature(kind).bind()
        except Exception as error:
            raise SeqloomError(
                f"run.callbacks: {name!r} cannot be made ({type(error).__name__}: {error}); name a class without "
                "arguments, as module:Class or file.py:Class"
            ) from error
        if not (isinstance(kind, type) and issubclass(kind, Callback)):
            raise SeqloomError(f"run.callbacks: {name!r} is no subclass of seqloom.train.Callback; make it one")
        found.append(kind)
    return found


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- Displays


class _Display(Protocol):
    """Shows steps, and events, which stay readable; after `close` the terminal is as it was."""

    def step(self, record: StepRecord) -> None: ...
    def note(self, text: str) -> None: ...
    def close(self) -> None: ...


def open_display(stream: IO[str], steps: int, done: int = 0) -> _Display:
    """Open the live view where `stream` is a terminal, else plain lines, for the steps from `done` to `steps`."""
    if not stream.isatty():
        return _LineDisplay(stream, steps)
    from rich.console import Console

    return _LiveDisplay(Console(file=stream), steps, done)


SHAPE_LEGEND = "t2p2 on 4: a pipeline with tensor degree 2 and 2 stages on 4 ranks; 3 of them: 3 of t2p2 on 4"
_PLAIN_SHAPE = re.compile(r"t1p1 on \d+")
"""One pipeline of one stage with whole weights: all ranks, as anybody expects."""


def _shown_shape(record: StepRecord) -> str:
    return "" if _PLAIN_SHAPE.fullmatch(record.shape) else record.shape


def format_step(record: StepRecord) -> str:
    """Describe a step in one line: loss and throughput first, then the times, then how good the plan was."""
    predicted = "" if record.predicted_ms is None else f" (predicted {duration(record.predicted_ms * MS)})"
    allocated, reserved = record.memory_allocated_gib, record.memory_reserved_gib
    phrases = [
        f"loss {record.loss:.4f}",
        f"{record.tokens_per_second:,.0f} tokens/s",
        f"lr {record.lr:.2e}",
        f"norm {record.grad_norm:.3g}",
        f"{duration(record.measured_ms * MS)}{predicted}",
        f"wait {duration(record.planner_wait_ms * MS)}",
        "" if record.mfu is None else f"mfu {percent(record.mfu)} %",
        "" if allocated is None or reserved is None else f"memory {allocated:.1f}/{reserved:.1f} GiB",
        "" if record.gap_to_bound is None else f"gap {percent(record.gap_to_bound)} %",
        "" if record.idle_share is None else f"idle {percent(record.idle_share)} %",
        _shown_shape(record),
        f"{record.planner}, planner late" if record.planner and record.fallback else record.planner,
    ]
    return "  ".join(filter(None, phrases))


class _LineDisplay:
    """One line per step: for files, pipes and continuous integration."""

    def __init__(self, stream: IO[str], steps: int) -> None:
        self._stream, self._steps, self._legend = stream, steps, SHAPE_LEGEND

    def step(self, record: StepRecord) -> None:
        if self._legend and _shown_shape(record):
            self.note(self._legend)
            self._legend = ""
        self.note(f"step {record.step:>{len(str(self._steps))}}/{self._steps}  {format_step(record)}")

    def note(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


class _LiveDisplay:
    """A progress bar and the latest step's line, redrawn in place; events scroll above them."""

    def __init__(self, console: Console, steps: int, done: int = 0) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("", total=steps, completed=done)
        self._live = Live(self._bar, console=console, refresh_per_second=4)
        self._live.start()

    def step(self, record: StepRecord) -> None:
        from rich.console import Group
        from rich.text import Text

        self._bar.update(self._task, completed=record.step)
        self._live.update(Group(self._bar, Text(format_step(record))))

    def note(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()
