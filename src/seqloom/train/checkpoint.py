"""Checkpoints of a run: written in the background, complete or not there at all, loadable on any number of ranks.

    FOLDER/
      step-00000040/            complete: it was renamed to this when all of it was on disk
        seqloom.json            the manifest: step, names and shapes of tensors, sampler state, config, strategies
        .metadata, *.distcp     parameters and optimiser state, by torch.distributed.checkpoint
      .step-00000060.partial-2/ being written, or left by a crash: never read, and removed by the next run

Tensors are full ones or shards (DTensor). torch's format stores their global shapes, so a run resumed on another
number of ranks, or with other plans, reads what each rank needs. Ranks may hold different tensors, as the stages of a
pipeline do; a tensor that several ranks hold is written once.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from seqloom.data.store import sync_folder
from seqloom.errors import SeqloomError
from seqloom.train.run_folder import (
    MANIFEST,
    METADATA,
    DamagedCheckpointError,
    FileDigest,
    Manifest,
    checkpoint_folder,
    complete_checkpoints,
    shape_name,
)

DIGEST = ".digest"
"""Ending of the file that has the digest of another, while a checkpoint is written."""
_METADATA_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata"),
        *("StorageMeta", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, each in vars(torch).items() if isinstance(each, torch.dtype))},
    "pathlib": {"PosixPath", "WindowsPath"},
}
"""Of what torch's metadata of tensors consists, module by module."""

Tensors = Mapping[str, torch.Tensor]
States = Mapping[str, Tensors]
"""Several tensors for each parameter, see `optim.state_by_name`."""


class Checkpoints(AbstractContextManager):
    """The checkpoints of one run. All ranks make one, and call `save`, `load` and `close` together.

    Its messages use a communicator of their own, beside those of training.
    """

    def __init__(self, folder: Path, *, keep: int = 3, group: dist.ProcessGroup | None = None) -> None:
        """Find the newest checkpoint in a folder that all ranks share, and remove what a crash has left.

        `keep` complete checkpoints stay. `group` is a gloo group of the ranks that take part, which nothing else uses;
        None: one is made of all processes of torch.distributed, or this process is the only one.
        """
        if keep < 1:
            raise SeqloomError(f"keep = {keep}; the newest checkpoint always stays, so keep 1 or more")
        self._folder, self._keep = folder, keep
        self._group, self._owns_group = group, False
        self._pending: tuple[int, Path, Future[Any]] | None = None
        self._saves = 0
        if not dist.is_initialized():
            _expect_one_process()
        elif group is None:
            self._group, self._owns_group = cast("dist.ProcessGroup", dist.new_group(backend="gloo")), True
        self._leads = self._group is None or dist.get_rank(self._group) == 0
        self._newest = self._find_newest()
        self._saved_or_loaded: int | None = None

    def _find_newest(self) -> int:
        """Clean up on the first rank, and return the newest complete step on all; 0: there is none."""
        newest = [0]
        if self._leads:
            self._folder.mkdir(parents=True, exist_ok=True)
            for left in self._folder.glob(".step-*.partial-*"):  # not finished, or not deleted to the end
                shutil.rmtree(left)
            checkpoints = complete_checkpoints(self._folder)
            newest = [checkpoints[-1][0] if checkpoints else 0]
        if self._group is not None:
            dist.broadcast_object_list(newest, group_src=0, group=self._group)
        return newest[0]

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close, unless something failed: other ranks may never answer then."""
        if kind is None:
            self.close()

    @property
    def leads(self) -> bool:
        """Whether this is the first rank."""
        return self._leads

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The communicator; None: this process is the only one."""
        return self._group

    @property
    def latest(self) -> Path | None:
        """The newest complete checkpoint; None: there is none."""
        return checkpoint_folder(self._folder, self._newest) if self._newest else None

    def save(
        self, step: int, *, model: Tensors, optimiser: States, extra: Mapping[str, Any], best: int | None = None
    ) -> None:
        """Copy the state, start to write it and return. Waits first for the checkpoint before, if that is not done.

        Saving a step again that this run has just saved or loaded does nothing.

        Args:
            step: steps that are done, more than those of any checkpoint in the folder.
            model: parameters of this rank by canonical name.
            optimiser: see `optim.state_by_name`.
            extra: other state of the run, as JSON can hold it; the first rank's is written.
            best: step of a checkpoint that stays beside the newest ones; None: no other does.
        """
        self.wait()
        if step == self._saved_or_loaded:
            return
        if step <= self._newest:
            raise SeqloomError(
                f"{self._folder} has a checkpoint of step {self._newest}, so step {step} would not be the latest; "
                "resume from it, or choose another run.output"
            )
        self._saves += 1
        state = _dcp_state(model, optimiser)
        shapes = self._gather_shapes(state)
        manifest = Manifest(step, shapes["model"], shapes["optimiser"], dict(extra), str(torch.__version__))
        manifest.to_json()  # refuse now what could not be written
        final = checkpoint_folder(self._folder, step)
        partial = self._folder / f".{final.name}.partial-{self._saves}"
        future = dcp.async_save(
            state,
            storage_writer=AtomicWriter(partial, final, manifest, self._keep, best),
            process_group=self._group,
            no_dist=self._group is None,
        )
        self._pending = (step, partial, cast("Future[Any]", future))

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
            self._newest = self._saved_or_loaded = step
            return
        if self._leads:
            shutil.rmtree(partial, ignore_errors=True)  # it may be what fills the disk
        intact = f"the one of step {self._newest} is intact" if self._newest else "there is none before it"
        raise SeqloomError(
            f"{self._folder}: the checkpoint of step {step} was not written ({_reasons(error)}); {intact}. Make room "
            "or choose another run.output, and resume"
        ) from error

    def load(self, path: Path, *, model: Tensors, optimiser: States) -> Manifest:
        """Copy a checkpoint, of this run or another, into the tensors of this rank; return its step and extra state.

        Names, shapes and dtypes of all ranks' tensors together must be those of the checkpoint. One that is damaged is
        refused on all ranks, before anything is copied.
        """
        self.wait()
        manifest, state = Manifest.read(path), _dcp_state(model, optimiser)
        manifest.check(path, self._gather_shapes(state))
        self._check_files(path, manifest)
        _read_tensors(path, state, self._group)
        if path == self.latest:
            self._saved_or_loaded = manifest.step
        return manifest

    def _check_files(self, path: Path, manifest: Manifest) -> None:
        """Compare all files with what was written; every rank reads a share of them."""
        if self._group is None:
            found = [manifest.damage(path)]
        else:
            found = [None] * dist.get_world_size(self._group)
            share = slice(dist.get_rank(self._group), None, len(found))
            dist.all_gather_object(found, manifest.damage(path, share), group=self._group)
        damage = next((each for each in found if each is not None), None)
        if damage is not None:
            raise DamagedCheckpointError(f"{path} is damaged ({damage}); {_take_another(path)}")

    def set_aside(self) -> Path:
        """Rename the newest checkpoint, which is damaged, so that the one before is the newest; return its new name.

        All ranks call it.
        """
        assert self.latest is not None
        aside = self.latest.with_name(f"damaged-{self.latest.name}")
        if self._leads:
            shutil.rmtree(aside, ignore_errors=True)
            self.latest.rename(aside)
        self._newest = self._find_newest()
        return aside

    def _gather_shapes(self, state: States) -> dict[str, dict[str, str]]:
        """Shapes of the tensors of all ranks. Ranks compare hashes first: equal shapes are sent only once."""
        mine = {part: {name: shape_name(each) for name, each in tensors.items()} for part, tensors in state.items()}
        if self._group is None:
            return mine
        digests = [""] * dist.get_world_size(self._group)
        dist.all_gather_object(digests, hashlib.sha256(repr(mine).encode()).hexdigest(), group=self._group)
        sources = sorted({digests.index(digest) for digest in digests})
        if len(sources) == 1:
            return mine
        union: dict[str, dict[str, str]] = {part: {} for part in mine}
        for source in sources:
            received = [mine]
            dist.broadcast_object_list(received, group_src=source, group=self._group)
            for part, shapes in received[0].items():
                union[part].update(shapes)
        return union

    def close(self) -> None:
        """Wait for what is being written, raise its error, and destroy the communicator."""
        try:
            self.wait()
        finally:
            if self._owns_group:
                dist.destroy_process_group(self._group)


def load_alone(path: Path, model: Tensors) -> Manifest:
    """Copy the model of a checkpoint into tensors of this process alone; return its manifest."""
    _expect_one_process()
    manifest = Manifest.read(path)
    manifest.check(path, {"model": {name: shape_name(tensor) for name, tensor in model.items()}})
    damage = manifest.damage(path)
    if damage is not None:
        raise DamagedCheckpointError(f"{path} is damaged ({damage}); {_take_another(path)}")
    _read_tensors(path, _dcp_state(model, {}), None)
    return manifest


def _read_tensors(path: Path, state: dict[str, dict[str, torch.Tensor]], group: dist.ProcessGroup | None) -> None:
    try:
        with torch.no_grad():
            dcp.load(state, storage_reader=TensorReader(path), process_group=group, no_dist=group is None)
    except (CheckpointException, UnreadableMetadata) as error:
        raise SeqloomError(
            f"{path}: the checkpoint cannot be read ({_reasons(error)}); {_take_another(path)}"
        ) from error


def _take_another(path: Path) -> str:
    """Name the other complete checkpoints beside one."""
    others = [folder.name for _, folder in complete_checkpoints(path.parent) if folder != path]
    return f"take another: {', '.join(others) or 'there is none'}"


def _expect_one_process() -> None:
    """Have torch not warn at every call that it runs in one process, which is meant."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


class AtomicWriter(FileSystemWriter):
    """torch's writer, which at the end renames the folder to its final name and deletes older checkpoints.

    Every rank leaves the digest of each of its files in a file beside it; the manifest then has all of them. `finish`
    runs on the first rank after all have written, and inside torch's own agreement of ranks: what fails here fails on
    all of them.
    """

    def __init__(self, partial: Path, final: Path, manifest: Manifest, keep: int, best: int | None) -> None:
        """Write to the new folder `partial` with this manifest and rename it to `final`.

        `keep` checkpoints stay, and that of step `best`.
        """
        super().__init__(partial, overwrite=False, sync_files=True)
        self._partial, self._final, self._manifest, self._keep, self._best = partial, final, manifest, keep, best

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write the tensors of this rank, and the digests of its files."""
        written = super().write_data(plan, planner)
        for name in {result.storage_data.relative_path for result in written.wait()}:
            digest = FileDigest.of(self._partial / name)
            (self._partial / f"{name}{DIGEST}").write_text(json.dumps(asdict(digest)), encoding="utf-8")
        return written

    def finish(self, metadata: Any, results: Any) -> None:
        """Write torch's metadata and the manifest, sync, rename, delete older checkpoints."""
        super().finish(metadata, results)
        files = {written.storage_data.relative_path for rank in results for written in rank}
        missing = sorted(name for name in files if not (self._partial / name).is_file())
        if missing:
            raise SeqloomError(
                f"{missing[0]} was written by a rank but is not here; choose a folder that all nodes share"
            )
        digests = {METADATA: FileDigest.of(self._partial / METADATA)}
        for name in files:
            beside = self._partial / f"{name}{DIGEST}"
            digests[name] = FileDigest(**json.loads(beside.read_text(encoding="utf-8")))
            beside.unlink()
        with (self._partial / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(replace(self._manifest, files=digests).to_json())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._partial)
        if self._final.exists():  # incomplete: a copy that was interrupted
            _delete(self._final)
        self._partial.rename(self._final)
        sync_folder(self._final.parent)
        for step, old in complete_checkpoints(self._final.parent)[: -self._keep]:
            if step != self._best:
                _delete(old)


class UnreadableMetadata(Exception):  # noqa: N818 - becomes part of a SeqloomError
    """Why torch's metadata of a checkpoint cannot be used."""


class TensorReader(FileSystemReader):
    """torch's reader, which takes tensors from the checkpoint's own files and runs nothing that they name.

    torch would unpickle the metadata, and whatever the metadata does not call a tensor.
    """

    def __init__(self, path: Path) -> None:
        """Read which tensors are where; refuse anything else."""
        super().__init__(path)
        try:
            with (path / METADATA).open("rb") as file:
                self._metadata: Metadata = _MetadataUnpickler(file).load()
            tensors = self._metadata.state_dict_metadata.items()
            files = [str(each.relative_path) for each in self._metadata.storage_data.values()]
        except UnreadableMetadata:
            raise
        except Exception as error:  # whatever bytes that are no metadata lead to
            raise UnreadableMetadata(f"its {METADATA} is damaged: {error}") from error
        strange = [name for name, each in tensors if not isinstance(each, TensorStorageMetadata)]
        outside = [each for each in files if Path(each).name != each]
        if strange or outside:
            what = f"{strange[0]!r}, which is no tensor" if strange else f"a file elsewhere, {outside[0]!r}"
            raise UnreadableMetadata(f"its {METADATA} names {what}")

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Return what was read."""
        self._metadata.storage_meta = self._metadata.storage_meta or StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes of which torch's metadata of tensors consists, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _METADATA_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise UnreadableMetadata(f"its {METADATA} names {module}.{name}, which no checkpoint of tensors has")


def _delete(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first, so that half of one never looks complete."""
    partial = folder.rename(folder.with_name(f".{folder.name}.partial-0"))
    shutil.rmtree(partial, ignore_errors=True)


def _dcp_state(model: Tensors, optimiser: States) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state that torch reads and writes: the same memory, but without gradients, which it would copy too."""
    moments = {f"{name}.{key}": tensor for name, tensors in optimiser.items() for key, tensor in tensors.items()}
    parts = {"model": model, "optimiser": moments}
    return {part: {name: tensor.detach() for name, tensor in tensors.items()} for part, tensors in parts.items()}


def _reasons(error: BaseException) -> str:
    """Say what went wrong on which ranks, without tracebacks."""
    failures = error.failures if isinstance(error, CheckpointException) else {}
    if not failures:
        return str(error) or type(error).__name__
    return "; ".join(f"rank {rank}: {cause or type(cause).__name__}" for rank, (cause, _) in sorted(failures.items()))
