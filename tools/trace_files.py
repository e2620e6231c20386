"""List the source files that one call passes through: what a reader has to open to follow it.

    python tools/trace_files.py plan     `seqloom plan --planner auto` on a batch of 64 sequences and 16 GPUs
    python tools/trace_files.py step     one step of `seqloom train recipes/tiny-cpu.toml` on 2 processes, as rank 0

A file counts when at least one of its functions runs. Importing a module does not count.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = str(ROOT / "src" / "seqloom")
STEP = "train_step"
"""Method of the trainer that is one step."""
TRACED_STEP = 3
"""The first steps also build what later ones reuse."""


class Trace:
    """Counts calls by source file while `recording` is True."""

    def __init__(self, *, recording: bool) -> None:
        self.recording = recording
        self.calls: Counter[str] = Counter()
        self._steps = 0
        self._frame: FrameType | None = None

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Be the profile function of a thread."""
        code = frame.f_code
        if event == "return" and frame is self._frame:
            self.recording, self._frame = False, None
        if event != "call" or not code.co_filename.startswith(SOURCE):
            return
        if code.co_name == STEP:
            self._steps += 1
            if self._steps == TRACED_STEP:
                self.recording, self._frame = True, frame
        if self.recording and code.co_name != "<module>":
            self.calls[code.co_filename.removeprefix(SOURCE + "/")] += 1


@contextmanager
def tracing(trace: Trace) -> Iterator[None]:
    """Trace this thread and those that start inside."""
    threading.setprofile(trace)
    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def trace_plan() -> Counter[str]:
    """Trace the planning verb; the first call, which imports and compiles, is not traced."""
    from seqloom.cli import main

    batch = "--lengths wikipedia --batch-size 64 --max-length 65536"
    command = f"plan {batch} --cluster 2x8xH100 --model llama3-8b --planner auto"
    for trace in (Trace(recording=False), Trace(recording=True)):
        with _quiet(), tracing(trace):
            _run(main, command.split())
    return trace.calls


def trace_step() -> Counter[str]:
    """Trace one step of a training run as its first rank; the other rank is a process of its own."""
    from seqloom.cli import main

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with tempfile.TemporaryDirectory() as folder:
        changes = [f"run.output={folder}", "run.steps=4", "schedule.warmup=1"]
        overrides = [part for change in changes for part in ("--set", change)]
        arguments = ["train", str(ROOT / "recipes" / "tiny-cpu.toml"), *overrides]
        rank_1 = {**os.environ, **shared, "RANK": "1", "LOCAL_RANK": "1"}
        other = subprocess.Popen([sys.executable, "-m", "seqloom", *arguments], env=rank_1, stderr=subprocess.DEVNULL)
        os.environ.update(shared, RANK="0", LOCAL_RANK="0")
        trace = Trace(recording=False)
        with _quiet(), tracing(trace):
            _run(main, arguments)
        other.wait(timeout=60)
    return trace.calls


def _run(main: Callable[[], Any], arguments: list[str]) -> None:
    sys.argv = ["seqloom", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


@contextmanager
def _quiet() -> Iterator[None]:
    before = sys.stdout
    with open(os.devnull, "w") as sys.stdout:
        try:
            yield
        finally:
            sys.stdout = before


if __name__ == "__main__":
    calls = {"plan": trace_plan, "step": trace_step}[sys.argv[1]]()
    for file in sorted(calls):
        print(f"{calls[file]:9} {file}")
    print(f"{len(calls)} files")
