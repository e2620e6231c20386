"""Trackers that get a run's metrics when they are installed and asked for: TensorBoard, wandb, trackio."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from seqloom.errors import SeqloomError, unknown

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
