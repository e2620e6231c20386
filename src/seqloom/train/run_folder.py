"""The folder of a run: who may write there, which checkpoints are complete, and which one a run resumes from.

    run.output/
      .lock                     who trains there
      checkpoints/step-00000040 see `checkpoint`
      metrics.jsonl, model/     see `logging`, `model`
      report.html               see `view.report`

Nothing here needs torch, so that `seqloom check` finds what a run would refuse.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from seqloom.errors import SeqloomError
from seqloom.reader import build, read_mapping

if TYPE_CHECKING:
    import torch

LOCK_FILE, REPORT_FILE, CHECKPOINTS = ".lock", "report.html", "checkpoints"
FORMAT, VERSION = "seqloom checkpoint", 1
MANIFEST, METADATA = "seqloom.json", ".metadata"
"""Files of a complete checkpoint: ours, and torch's."""
BLOCK = 1 << 20
"""Bytes that are read at a time."""
_NAME = re.compile(r"step-(\d{8,})")
_MOST_DIFFERENCES = 4
"""Differences of each kind that a message lists."""

Shapes = Mapping[str, str]
"""dtype and global shape of every tensor, see `shape_name`."""


class RunLock(AbstractContextManager):
    """Keeps a second run out of a run's folder, on any machine that shares its file system.

    The operating system releases it when the process ends, however that happens. It does nothing where files cannot be
    locked.
    """

    def __init__(self, folder: Path) -> None:
        """Lock nothing yet."""
        self._path = folder / LOCK_FILE
        self._file: IO[str] | None = None

    def check(self) -> None:
        """Refuse a folder that another run has, or that cannot be made or written, and leave it as it is."""
        there = next(folder for folder in (self._path.parent, *self._path.parents) if folder.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            raise self._not_writable("permission denied" if there.is_dir() else f"{there} is a file")
        if self._path.exists():
            with RunLock(self._path.parent) as lock:
                lock.acquire()

    def acquire(self) -> None:
        """Lock the folder, which is made if need be; refuse it, with the host and process that have it."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            raise self._not_writable(error.strerror) from None
        try:
            fcntl = import_module("fcntl")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "another process"
            file.close()
            raise SeqloomError(
                f"run.output = {str(self._path.parent)!r} is in use by {owner}; wait until that run has ended, end it, "
                "or choose another run.output"
            ) from None
        except (ImportError, OSError):  # Windows, and file systems without locks
            pass
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        self._file = file

    def _not_writable(self, reason: str | None) -> SeqloomError:
        return SeqloomError(
            f"run.output = {str(self._path.parent)!r} cannot be written ({reason}); choose another folder"
        )

    def __exit__(self, *error: object) -> None:
        """Release the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None


def resumed_checkpoint(latest: Path | None, resume: str) -> Path | None:
    """Return the checkpoint that a run begins from; None: it begins anew.

    Args:
        latest: complete checkpoint of the run's own folder.
        resume: `checkpoint.resume` of the config.
    """
    if resume == "never" and latest is not None:
        raise SeqloomError(
            f"checkpoint.resume = 'never', and {latest} is there, which the run could not replace; choose another "
            "run.output, or resume"
        )
    return Path(resume) if latest is None and resume not in ("auto", "never") else latest


def shape_name(tensor: torch.Tensor) -> str:
    """Spell dtype and global shape of a tensor, `float32[4, 8]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def checkpoint_folder(folder: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return folder / f"step-{step:08d}"


def latest_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; None: there is none."""
    checkpoints = complete_checkpoints(folder)
    return checkpoints[-1][1] if checkpoints else None


def complete_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Return step and folder of all complete checkpoints, ascending."""
    checkpoints = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _NAME.fullmatch(path.name)
        if match and all((path / name).is_file() for name in (MANIFEST, METADATA)):
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)


def named_checkpoint(run: Path, step: int | None = None, *, best: bool = False) -> Path:
    """Return a checkpoint of a run: of a step, the one with the lowest validation loss, or the newest.

    `run` is the folder of a run, or of one of its checkpoints.
    """
    if (run / MANIFEST).is_file() and step is None and not best:
        return run
    found = dict(complete_checkpoints(run / CHECKPOINTS))
    if not found:
        raise SeqloomError(f"{str(run)!r} has no complete checkpoint; name the output folder of a run")
    if best:
        record = Manifest.read(found[max(found)]).extra.get("best")
        if record is None or record["step"] not in found:
            raise SeqloomError(
                f"{str(run)!r} keeps no best checkpoint; train with checkpoint.best = true, or name one by its step: "
                f"{', '.join(map(str, found))}"
            )
        step = record["step"]
    if step is not None and step not in found:
        raise SeqloomError(
            f"{str(run)!r} has no complete checkpoint of step {step}; it has {', '.join(map(str, found))}"
        )
    return found[max(found) if step is None else step]


@dataclass(frozen=True, slots=True)
class FileDigest:
    """Size and CRC-32 of a file, by which damage shows."""

    bytes: int
    crc32: int

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Read a file."""
        size, crc32 = 0, 0
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                size, crc32 = size + len(block), zlib.crc32(block, crc32)
        return cls(size, crc32)


class DamagedCheckpointError(SeqloomError):
    """A checkpoint whose files are not those that were written."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """Content of seqloom.json."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012 - a plain dict is what pydantic looks for

    step: int  # steps that are done
    model: dict[str, str]  # dtype and global shape of every tensor, `float32[4, 8]`
    optimiser: dict[str, str]
    extra: dict[str, Any]  # other state of the run
    torch: str  # the version that wrote the tensors
    format: str = FORMAT
    version: int = VERSION
    files: dict[str, FileDigest] = field(default_factory=dict)  # all others by name; older releases wrote none

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

    def damage(self, path: Path, share: slice = slice(None)) -> str | None:
        """Say which of the checkpoint's files, or of a share of them, is not as it was written; None: all are."""
        for name, written in sorted(self.files.items())[share]:
            try:
                found = FileDigest.of(path / name)
            except OSError as error:
                return f"{name}: {error.strerror}"
            if found != written:
                same_size = found.bytes == written.bytes
                what = "other bytes than were written" if same_size else f"{found.bytes:,} bytes of {written.bytes:,}"
                return f"{name}: {what}"
        return None

    def to_json(self) -> str:
        """Return the text of the file; what JSON cannot hold is refused."""
        try:
            return json.dumps(asdict(self), indent=1, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise SeqloomError(
                f"the extra state of a checkpoint cannot be written as JSON ({error}); give numbers, texts, lists and "
                "dictionaries"
            ) from None

    def check(self, path: Path, wanted: Mapping[str, Shapes]) -> None:
        """Refuse a checkpoint whose tensors are not those that all ranks want to load, and list the differences."""
        for part, shapes in wanted.items():
            differences = _differences(getattr(self, part), shapes)
            if differences:
                raise SeqloomError(
                    f"{path} is a checkpoint of another {part}: {'; '.join(differences)}. Take the config that it was "
                    "made with, or begin anew (checkpoint.resume = 'never') in another folder"
                )


def _differences(saved: Shapes, wanted: Shapes) -> list[str]:
    kinds = {
        "only in the checkpoint": [f"{name} {shape}" for name, shape in saved.items() if name not in wanted],
        "not in the checkpoint": [f"{name} {shape}" for name, shape in wanted.items() if name not in saved],
        "different": [
            f"{name} is {shape} there and {wanted[name]} here"
            for name, shape in saved.items()
            if name in wanted and wanted[name] != shape
        ],
    }
    lines = []
    for kind, names in kinds.items():
        more = f" and {len(names) - _MOST_DIFFERENCES} more" if len(names) > _MOST_DIFFERENCES else ""
        lines += [f"{kind}: {', '.join(names[:_MOST_DIFFERENCES])}{more}"] if names else []
    return lines


@contextmanager
def atomic_folder(final: Path, *failures: type[Exception]) -> Iterator[Path]:
    """Yield a folder to write to, which then replaces `final`: completely, or not at all after `failures`."""
    partial, old = (final.with_name(f".{final.name}.{word}") for word in ("partial", "old"))
    try:
        for left in (partial, old):
            shutil.rmtree(left, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        mode = partial.stat().st_mode & 0o666  # of a new file, by the umask; safetensors lets nobody else read its own
        for path in partial.iterdir():
            path.chmod(mode)
        if final.exists():
            final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, *failures) as error:
        raise SeqloomError(
            f"{final} was not written ({error}); the last checkpoint has the parameters: make room and run the same "
            "command again"
        ) from error
