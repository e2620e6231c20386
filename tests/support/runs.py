"""Training runs by workers of a pool, which may not start processes: plans are made where they are needed."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from seqloom.data import Batch, StoreWriter
from seqloom.dist import Transport
from seqloom.errors import MemoryBudgetError, SeqloomError
from seqloom.params.interface import local_tensor
from seqloom.plan import Plan
from seqloom.planners.plan_ahead import PlanAhead, StepPlan
from seqloom.simulate import predicted_ns
from seqloom.train import Callback, checkpoint, step_checks
from seqloom.train import trainer as trainer_module
from seqloom.train.checkpoint import Checkpoints
from seqloom.train.config import Config
from seqloom.train.launch import RankProcess
from seqloom.train.logging import StepRecord, read_steps
from seqloom.train.setup import RunSetup
from seqloom.train.signals import LEAVE, receive_signals
from seqloom.train.trainer import Trainer
from seqloom.train.watchdog import Watchdog
from support.tiny_specs import TINY

SMALL = (
    *("run.steps=3", "schedule.warmup=1", "evaluation.every=0", "checkpoint.every=0", "model.dtype=float64"),
    *("data.source=toy:24", "data.sequences=4", "data.max_length=96", "plan.planner=flex", "plan.capacity=128"),
)
"""Settings that make recipes/tiny-cpu.toml a run of seconds."""

PlanStep = Callable[[RunSetup, int, np.ndarray], Plan]
"""plan(setup, step, lengths int64[n]): the plan of a step."""


class PlansHere:
    """What stands in for the process that plans ahead."""

    def __init__(self, plan: PlanStep, setup: RunSetup) -> None:
        """Plan by a function, for a run."""
        self._plan, self._setup = plan, setup

    def submit(self, step: int, lengths: np.ndarray) -> None:
        """Do nothing: a plan is made when it is taken."""

    def take(self, step: int, lengths: np.ndarray) -> StepPlan:
        """Make the plan of a step."""
        plan = self._plan(self._setup, step, lengths)
        return StepPlan(step, plan.to_json(), plan.hash, predicted_ns(plan, self._setup.cost))


class TrainerHere(Trainer):
    """A trainer whose first rank plans by itself; the others get its plans as ever."""

    def __init__(self, plan: PlanStep, setup: RunSetup, transport: Transport, **options: Any) -> None:
        """Plan by a function; everything else as in `Trainer`."""
        self._plan = plan
        super().__init__(setup, transport, **options)

    def _start_planner(self) -> PlanAhead | None:
        return PlansHere(self._plan, self.setup) if self.transport.rank == 0 else None  # type: ignore[return-value]


def by_the_planner(setup: RunSetup, step: int, lengths: np.ndarray) -> Plan:
    """Plan a step as the config says."""
    return setup.planners.planner.plan(lengths, setup.cost)


def train_in_process(
    transport: Transport, config: Config, plan: PlanStep = by_the_planner
) -> tuple[RunSetup, list[StepRecord]]:
    """Be one rank of a run; return what it was made of and its steps."""
    setup = RunSetup.load(config, transport.ranks)
    with TrainerHere(plan, setup, transport) as trainer:
        trainer.train()
    return setup, list(read_steps(config.metrics))


def small_run(output: Path, *changes: str) -> list[str]:
    """Return the words that make a small run of recipes/tiny-cpu.toml, into a folder."""
    return [word for each in (*SMALL, f"run.output={output}", *changes) for word in ("--set", each)]


def write_run(folder: Path, config: str, lengths: Iterable[int]) -> None:
    """Write a run's config, its model of four layers with a tied head, and a store of random documents."""
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=257) as writer:
        for length in lengths:
            writer.add(draw.integers(0, 20, length))
    (folder / "tiny.toml").write_text(TINY.replace("layers = 2", "layers = 4"))
    (folder / "run.toml").write_text(config)


def logged(folder: Path, name: str) -> list[Any]:
    """Return what a run has logged under a name, line by line: its evaluations, or its notes."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


class AskedInPhase:
    """Stands for the watchdog of a rank that is asked to leave in a phase."""

    def __init__(self, phase: str) -> None:
        """Ask at the first phase whose name begins so."""
        self._phase, self.asked_to_leave, self.calls = phase, False, []

    def enter_phase(self, phase: str, **options: Any) -> None:
        """Note the request."""
        self.asked_to_leave |= phase.startswith(self._phase)

    def begin_steps(self) -> None:
        """Note the call."""
        self.calls.append("begin_steps")

    def finish(self) -> None:
        """Note the call."""
        self.calls.append("finish")


def train_out_of_memory(transport: Transport, config: Config) -> str:
    """Be a rank of a run whose memory does not hold the second step; return what it says."""
    run_step, calls = trainer_module.run_step, []

    def fail(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
        return run_step(*args, **options)

    trainer_module.run_step = fail
    try:
        train_in_process(transport, config)
    except MemoryBudgetError as error:
        return str(error)
    finally:
        trainer_module.run_step = run_step
    return ""


class DisturbedTrainer(TrainerHere):
    """A trainer that something happens to at step 2; see `train_disturbed`."""

    disturbance = ""
    value = 0.0

    def train_step(self, step_plan: StepPlan, batch: Batch) -> StepRecord:
        """Disturb, and run the step."""
        if step_plan.step != 2:
            return super().train_step(step_plan, batch)
        shards = {name: local_tensor(each.detach()) for name, each in self.parameters.device_shards().items()}
        assert self.disturbance in {*shards, "nothing", "bit", "loss"}, self.disturbance
        replicated = self.config.plan.sharding == "none"
        if self.disturbance in shards and (replicated or self.transport.rank == 0):
            shards[self.disturbance].view(-1)[0] = self.value
        record = super().train_step(step_plan, batch)
        if self.disturbance == "bit" and self.transport.rank == self.transport.ranks - 1:
            next(each for each in shards.values() if each.numel()).view(-1)[:1].view(torch.int64)[0] ^= 1
        return record


def train_disturbed(transport: Transport, config: Config, disturbance: str, value: float = 0.0) -> str:
    """Be a rank of a run that something happens to; return what it says.

    "bit": one bit of a parameter of the last rank changes after step 2. "loss": the last rank computes another loss of
    a document alone. Else the name of a parameter: its first value is `value` before step 2.
    """
    rank_losses = step_checks.rank_losses
    if disturbance == "loss" and transport.rank == transport.ranks - 1:
        step_checks.rank_losses = lambda *arguments: rank_losses(*arguments) * torch.tensor([1.001, 1.0])
    try:
        with DisturbedTrainer(by_the_planner, RunSetup.load(config, transport.ranks), transport) as trainer:
            trainer.disturbance, trainer.value = disturbance, value
            trainer.train()
    except SeqloomError as error:
        return str(error)
    finally:
        step_checks.rank_losses = rank_losses
    return ""


def train_until_asked(transport: Transport, config: Config, phase: str) -> tuple[dict[str, Any], list[str]]:
    """Be a rank of a run whose last rank is asked to leave; return the summary and the calls of the watchdog."""
    watchdog = AskedInPhase(phase if transport.rank == transport.ranks - 1 else "never")
    with TrainerHere(by_the_planner, RunSetup.load(config, transport.ranks), transport, watchdog=watchdog) as trainer:
        return trainer.train(), watchdog.calls


def leave_when_asked_twice(process: RankProcess, folder: str) -> int:
    """Be a rank that does not hear the first request to leave; return how many have come."""
    heard: list[int] = []
    signal.signal(LEAVE, lambda *_: heard.append(1))
    (Path(folder) / str(process.job_rank.rank)).touch()
    while len(heard) < 2:
        time.sleep(0.01)
    signal.signal(LEAVE, signal.SIG_IGN)
    return len(heard)


def be_stuck(
    folder: Path, phase: str, timeout_s: float, in_steps: bool, numbers: Iterable[int], on_disk: bool = False
) -> None:
    """Be a rank under a watchdog in a call that never returns, and get signals there."""

    def report(text: str) -> None:
        (folder / "said").write_text(text)

    receive_signals()  # the server that this is a fork of may have been started without them
    with Watchdog(4, timeout_s, folder, report) as watchdog:
        watchdog.enter_phase(phase, on_disk=on_disk, details=lambda: "at action 1F3")
        if in_steps:
            watchdog.begin_steps()
        for index, number in enumerate(numbers):
            threading.Timer(0.2 * (index + 1), os.kill, (os.getpid(), number)).start()
        libc = ctypes.CDLL(None)
        while libc.sleep(60):  # signals interrupt it, and it goes on
            pass


def crash_while_saving(folder: Path, where: str) -> None:
    """Save a checkpoint, and die in the middle of the next: "writing", "renaming" it, or "deleting" the first."""
    torch.set_num_threads(1)
    state: dict[str, Any] = {"model": {"w": torch.ones(1000)}, "optimiser": {}}
    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, **state, extra={})
    checkpoints.wait()
    module, name = {
        "writing": (checkpoint.FileSystemWriter, "finish"),
        "renaming": (checkpoint, "sync_folder"),
        "deleting": (checkpoint.shutil, "rmtree"),
    }[where]
    setattr(module, name, lambda *args, **options: os._exit(9))
    checkpoints.save(2, **state, extra={})
    checkpoints.wait()


class RecordingCallback(Callback):
    """Writes what it is told to a file, line by line; asks to stop, or fails, after a step."""

    def __init__(self, file: Path, *, stops_after: int = 0, fails_after: int = 0) -> None:
        """Write to a new file."""
        self._file, self._stops_after, self._fails_after = file, stops_after, fails_after

    def _write(self, *values: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(values) + "\n")

    def on_train_begin(self, config: Mapping[str, Any], start_step: int, steps: int) -> None:
        """Note where the run begins."""
        self._write("begin", start_step, steps, config["plan"]["planner"])

    def on_step_end(self, record: StepRecord) -> bool:
        """Note step and loss."""
        self._write("step", record.step, record.loss)
        if record.step == self._fails_after:
            raise ValueError("no more")
        return record.step == self._stops_after

    def on_evaluate(self, step: int, loss: float) -> None:
        """Note the loss."""
        self._write("evaluate", step, loss)

    def on_checkpoint(self, step: int, path: Path) -> None:
        """Note whether it is complete."""
        self._write("checkpoint", step, (path / "seqloom.json").is_file())

    def on_train_end(self, summary: Mapping[str, Any]) -> None:
        """Note the last loss."""
        self._write("end", summary["final_loss"])
