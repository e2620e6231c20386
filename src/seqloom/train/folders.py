"""Folders that are there completely or not at all: written beside, synced, then renamed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

from seqloom.errors import SeqloomError

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
