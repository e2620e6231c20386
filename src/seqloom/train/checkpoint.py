"""Folders that are there completely or not at all: written beside, synced, then renamed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from seqloom.errors import SeqloomError
from seqloom.reader import build, read_mapping

MANIFEST = "seqloom.json"
_NEEDED = (MANIFEST, ".metadata")
_NAME = re.compile(r"step-(\d{8,})")


def folder_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies."""
    return folder / f"step-{step:08d}"


def complete(folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of all complete checkpoints, ascending."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and all((path / name).is_file() for name in _NEEDED):
            found.append((int(match[1]), path))
    return sorted(found)


def partials(folder: Path) -> list[Path]:
    """Return the folders of checkpoints that were not finished, or not deleted to the end."""
    return sorted(folder.glob(".step-*.partial-*"))


class AtomicWriter(FileSystemWriter):
    """torch's writer, which ends by giving the folder its name. Then older checkpoints are deleted.

    `finish` runs on the first rank after all have written, and inside torch's own agreement of ranks: what fails here
    fails on all of them.
    """

    def __init__(self, partial: Path, final: Path, manifest: str, keep: int) -> None:
        """Write to `partial`, and at the end rename it to `final`.

        Args:
            partial: a folder that does not exist.
            final: the same, beside it.
            manifest: content of seqloom.json.
            keep: complete checkpoints that stay, this one included.
        """
        super().__init__(partial, overwrite=False, sync_files=True)
        self._partial, self._final, self._manifest, self._keep = partial, final, manifest, keep

    def finish(self, metadata: Any, results: Any) -> None:
        """Write the list of contents, rename, delete older ones."""
        super().finish(metadata, results)
        self._check_shared({written.storage_data.relative_path for rank in results for written in rank})
        with (self._partial / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(self._manifest)
            file.flush()
            os.fsync(file.fileno())
        _sync(self._partial)
        if self._final.exists():  # not complete: a copy that was broken off
            _delete(self._final)
        self._partial.rename(self._final)
        _sync(self._final.parent)
        for _, old in complete(self._final.parent)[: -self._keep]:
            _delete(old)

    def _check_shared(self, files: set[str]) -> None:
        """Refuse a folder that is another one on another node."""
        unseen = sorted(name for name in files if not (self._partial / name).is_file())
        if unseen:
            raise SeqloomError(
                f"{unseen[0]} was written by a rank but is not here; choose a folder that all nodes share"
            )


@contextmanager
def replaced(final: Path, *failures: type[Exception]) -> Iterator[Path]:
    """Yield where to write a folder, which then takes the place of `final`: complete or not at all.

    Args:
        final: is made, or replaced.
        failures: what writing may raise besides OSError; then `final` is what it was.
    """
    partial, old = (final.with_name(f".{final.name}.{word}") for word in ("partial", "old"))
    try:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, *failures) as error:
        raise SeqloomError(
            f"{final} was not written ({error}); the last checkpoint has the parameters: make room and run the same "
            "command again"
        ) from error


def _delete(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that half of one is never taken for a whole one."""
    dying = folder.rename(folder.with_name(f".{folder.name}.partial-0"))
    shutil.rmtree(dying, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- merged: train.manifest
# What a checkpoint says of itself in plain JSON: step, names and shapes, and the state that is not tensors.


FORMAT, VERSION = "seqloom checkpoint", 1
Described = Mapping[str, str]
"""See `described`."""
_SHOWN = 4
"""Differences of each kind that a message lists."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of seqloom.json.

    Attributes:
        step: steps that were done.
        model, optimiser: for every tensor its dtype and global shape, `float32[4, 8]`.
        extra: what the run put in.
        torch: the version that wrote the tensors.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    step: int
    model: dict[str, str]
    optimiser: dict[str, str]
    extra: dict[str, Any]
    torch: str
    format: str = FORMAT
    version: int = VERSION

    @classmethod
    def of(cls, step: int, model: Described, optimiser: Described, extra: Mapping[str, Any]) -> Manifest:
        """Say what is about to be written, by all ranks."""
        return cls(step, dict(model), dict(optimiser), dict(extra), str(torch.__version__))

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read the manifest of a checkpoint's folder."""
        file = path / MANIFEST
        if not file.is_file():
            raise SeqloomError(f"{str(path)!r} is not a checkpoint: it has no {MANIFEST}; name a folder step-...")
        content = read_mapping(file)
        if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
            raise SeqloomError(
                f"{file}: format {content.get('format')!r}, version {content.get('version')!r}; this release reads "
                f"{FORMAT!r}, version {VERSION}"
            )
        return build(cls, content, str(file))

    def to_json(self) -> str:
        """Return the text of the file; what JSON cannot hold is refused."""
        try:
            return json.dumps(asdict(self), indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SeqloomError(
                f"the extra state of a checkpoint cannot be written as JSON ({error}); give numbers, texts, lists and "
                "dictionaries, and RNG states by rng_state()"
            ) from None

    def check(self, path: Path, model: Described, optimiser: Described) -> None:
        """Refuse a checkpoint whose tensors are not those that all ranks want to load, and list the differences."""
        for what, saved, wanted in (("model", self.model, model), ("optimiser", self.optimiser, optimiser)):
            differences = _differences(saved, wanted)
            if differences:
                raise SeqloomError(
                    f"{path} is a checkpoint of another {what}: {'; '.join(differences)}. Take the config that it was "
                    "made with, or begin anew (checkpoint.resume = 'never') in another folder"
                )


def rng_state() -> dict[str, str]:
    """Return torch's random states of this process, as JSON can hold them."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def set_rng_state(states: Mapping[str, str]) -> None:
    """Go on from random states that `rng_state` returned; one of a device that is not here is left out."""
    tensors = {name: torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8) for name, text in states.items()}
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def described(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return the dtype and the global shape of every tensor, `float32[4, 8]`."""
    return {name: f"{str(each.dtype).removeprefix('torch.')}{list(each.shape)}" for name, each in tensors.items()}


def _differences(saved: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """Say in what two lists of tensors differ."""
    kinds = {
        "only in the checkpoint": [f"{name} {shape}" for name, shape in saved.items() if name not in wanted],
        "not in the checkpoint": [f"{name} {shape}" for name, shape in wanted.items() if name not in saved],
        "different": [
            f"{name} is {shape} there and {wanted[name]} here"
            for name, shape in saved.items()
            if name in wanted and wanted[name] != shape
        ],
    }
    return [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]


def _some(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest


# ---- merged: train.checkpoints
# Checkpoints of a run: written in the background, complete or not there at all, loadable on any number of ranks.
#
#     FOLDER/
#       step-00000040/            complete: it got this name when all of it was on disk
#         seqloom.json            step, names and shapes, and the extra state
#         .metadata, *.distcp     torch.distributed.checkpoint
#       .step-00000060.partial-2/ being written, or left by a crash: nobody reads it, the next run removes it
#
# Tensors are whole ones or shards (DTensor); torch's format keeps their global shapes, so another number of ranks
# reads
# what it needs. Ranks may hold different tensors, as the stages of a pipeline do; what several hold is written
# once.


Tensors = Mapping[str, torch.Tensor]
States = Mapping[str, Tensors]
"""Several tensors for each parameter, see `named_state`."""


class Checkpoints:
    """The checkpoints of one run. All ranks make one, and call `save`, `load` and `close` together.

    Its messages run on a communicator of their own, beside those of training.
    """

    def __init__(self, folder: Path, *, keep: int = 3, group: dist.ProcessGroup | None = None) -> None:
        """Look what is there, and remove what a crash has left.

        Args:
            folder: on a file system that all ranks share; made when it does not exist.
            keep: complete checkpoints that stay, at least 1.
            group: a gloo group of the ranks that take part, which nothing else uses; None: one is made of all processes
                of torch.distributed. Where that is not initialised, this process is the only one.
        """
        if keep < 1:
            raise SeqloomError(f"keep = {keep}; the newest checkpoint always stays, so keep 1 or more")
        self._folder, self._keep = folder, keep
        self._group, self._owned = group, False
        self._pending: tuple[int, Path, Future[Any]] | None = None
        self._saves = 0
        if not dist.is_initialized():  # torch says at every call that it works alone; that is no news
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
        elif group is None:
            self._group, self._owned = cast("dist.ProcessGroup", dist.new_group(backend="gloo")), True
        self._leads = self._group is None or dist.get_rank(self._group) == 0
        self._newest = self._begin()
        self._own: int | None = None

    def _begin(self) -> int:
        """Clean up on the first rank, and return the newest complete step of all ranks; 0: there is none."""
        newest = 0
        if self._leads:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in partials(self._folder):
                shutil.rmtree(left)
            found = complete(self._folder)
            newest = found[-1][0] if found else 0
        told = [newest]
        if self._group is not None:
            dist.broadcast_object_list(told, group_src=0, group=self._group)
        return told[0]

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close, unless something failed: other ranks may never answer then."""
        if kind is None:
            self.close()

    @property
    def latest(self) -> Path | None:
        """The newest complete checkpoint; None: there is none."""
        return folder_of(self._folder, self._newest) if self._newest else None

    def save(self, step: int, *, model: Tensors, optimiser: States, extra: Mapping[str, Any]) -> None:
        """Copy the state, begin to write it and return. First waits for the checkpoint before, if that is not done.

        Saving a step again that this run has just saved or loaded does nothing.

        Args:
            step: steps that are done, more than those of any checkpoint in the folder.
            model: parameters by canonical name, on this rank.
            optimiser: see `named_state`.
            extra: what else a run goes on from (sampler, RNG, plan settings), as JSON can hold it. The first rank's
                is written.
        """
        self.wait()
        if step == self._own:
            return
        if step <= self._newest:
            raise SeqloomError(
                f"{self._folder} has a checkpoint of step {self._newest}, so step {step} would not be the latest; "
                "resume from it, or choose another run.output"
            )
        self._saves += 1
        text = Manifest.of(step, *self._of_all_ranks(model, optimiser), extra).to_json()
        partial = self._folder / f".{folder_of(self._folder, step).name}.partial-{self._saves}"
        writer = AtomicWriter(partial, folder_of(self._folder, step), text, self._keep)
        state = _state(model, optimiser)
        group = self._group
        started = dcp.async_save(state, storage_writer=writer, process_group=group, no_dist=group is None)
        self._pending = (step, partial, cast("Future[Any]", started))

    def poll(self) -> None:
        """Raise the error of a checkpoint that could not be written; returns at once. Call it every step."""
        if self._pending is not None and self._pending[2].done():
            self.wait()

    def wait(self) -> None:
        """Wait for the checkpoint that is being written, if any, and raise its error."""
        if self._pending is None:
            return
        step, partial, future = self._pending
        error = future.exception()
        self._pending = None
        if error is None:
            self._newest = self._own = step
            return
        if self._leads:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
        intact = f"the one of step {self._newest} is intact" if self._newest else "there is none before it"
        raise SeqloomError(
            f"{self._folder}: the checkpoint of step {step} was not written ({_reasons(error)}); {intact}. Make room "
            "or choose another run.output, and resume"
        ) from error

    def load(self, path: Path, *, model: Tensors, optimiser: States) -> Manifest:
        """Copy a checkpoint into the tensors of this rank, and return its step and extra state.

        Args:
            path: folder of a complete checkpoint, of this run or another.
            model: parameters by canonical name. Names, shapes and dtypes must, over all ranks, be those of the
                checkpoint.
            optimiser: see `named_state`, the same way.

        Raises:
            SeqloomError: another model, or files that cannot be read.
        """
        self.wait()
        manifest = Manifest.read(path)
        manifest.check(path, *self._of_all_ranks(model, optimiser))
        state = _state(model, optimiser)
        group = self._group
        try:
            with torch.no_grad():
                dcp.load(state, checkpoint_id=path, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            raise SeqloomError(
                f"{path}: the checkpoint cannot be read ({_reasons(error)}); take another: "
                f"{', '.join(folder.name for _, folder in complete(path.parent) if folder != path) or 'there is none'}"
            ) from error
        if path == self.latest:
            self._own = manifest.step
        return manifest

    def _of_all_ranks(self, model: Tensors, optimiser: States) -> tuple[dict[str, str], dict[str, str]]:
        """Describe the tensors of all ranks. Ranks that hold the same say it only once: compared are hashes."""
        mine = (described(model), described(_flat(optimiser)))
        if self._group is None:
            return mine
        digests = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(digests, hashlib.sha256(repr(mine).encode()).hexdigest(), group=self._group)
        sources = sorted({digests.index(digest) for digest in digests})
        if len(sources) == 1:
            return mine
        found: tuple[dict[str, str], dict[str, str]] = ({}, {})
        for source in sources:
            told = [mine]
            dist.broadcast_object_list(told, group_src=source, group=self._group)
            for known, new in zip(found, told[0], strict=True):
                known.update(new)
        return found

    def close(self) -> None:
        """Wait for what is being written, raise its error, and give the communicator back."""
        try:
            self.wait()
        finally:
            if self._owned:
                dist.destroy_process_group(self._group)


def latest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint of a folder; None: there is none."""
    found = complete(folder)
    return found[-1][1] if found else None


def _flat(states: States) -> dict[str, torch.Tensor]:
    """Return an optimiser's state with one name for each tensor."""
    return {f"{name}.{key}": tensor for name, tensors in states.items() for key, tensor in tensors.items()}


def _state(model: Tensors, optimiser: States) -> dict[str, dict[str, torch.Tensor]]:
    """Return what torch reads and writes: the same memory, but without gradients, which it would copy too."""
    parts = {"model": model, "optimiser": _flat(optimiser)}
    return {part: {name: tensor.detach() for name, tensor in tensors.items()} for part, tensors in parts.items()}


def _reasons(error: BaseException) -> str:
    """Say what went wrong on which ranks, without tracebacks."""
    return "; ".join(_reason(error))


def _reason(error: BaseException) -> Iterator[str]:
    failures = error.failures if isinstance(error, CheckpointException) else {}
    for rank, (cause, _) in sorted(failures.items()):
        yield f"rank {rank}: {cause or type(cause).__name__}"
    if not failures:
        yield str(error) or type(error).__name__
