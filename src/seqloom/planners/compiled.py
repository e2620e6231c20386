"""The loops of `planners.loops`, compiled by numba.

The first process of an installation finds no machine code on disk. It does not wait for it: it starts a process that
compiles, says so once on stderr, and plans with the plain loops, which give the same plans. Every process changes over
as soon as the machine code is there. Where numba is missing (the newest Python may be too new for it), or finds no
folder to write to, the loops stay plain.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from threading import Lock
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np

from seqloom.planners import loops

ANNOUNCEMENT = (
    "seqloom: compiling the planner's loops once, in the background (about 30 s); "
    "plans made meanwhile are the same, they only take longer"
)
STALE_S = 600
"""Age in seconds at which a lock file is taken to belong to a compiling process that was killed."""
_LOCK = Lock()


def kernels() -> Any:
    """Return the loops by their names: compiled if their machine code is on disk, else plain."""
    return _State.loaded or _load_or_start()


def compile_loops() -> bool:
    """Compile the loops in this process and wait for it; False where numba is missing or has no folder to write to."""
    with _LOCK:
        compiled = _dispatchers()
        if compiled is not None:
            _call_each(compiled)
            _State.loaded = compiled
    return compiled is not None


class _State:
    """State of this process: which loops it uses, and who compiles them."""

    loaded: Any = None
    """The loops that `kernels` returns from now on; None: not decided."""
    lock_file: Path | None = None
    """Lock file of the process that compiles; None: `kernels` has not looked for one."""
    compiler: subprocess.Popen[bytes] | None = None
    """That process, if this one started it: Python warns when a running child is garbage-collected."""


def _load_or_start() -> Any:
    with _LOCK:
        if _State.loaded is not None:
            return _State.loaded
        if _State.lock_file is not None and _State.lock_file.exists():
            return loops
        compiled = _dispatchers()
        if compiled is not None and _is_cached(compiled):
            _State.loaded = compiled
        elif compiled is None or _State.lock_file is not None:  # nothing to compile with, or compiling has failed
            _State.loaded = loops
        else:
            _State.lock_file = _start(Path(compiled.decode.stats.cache_path))
        return _State.loaded or loops


@cache
def _dispatchers() -> Any:
    """Wrap every loop for numba; nothing is compiled yet. None where numba is missing or finds no cache folder."""
    try:
        from numba import njit
    except ImportError:
        return None
    namespace = dict(vars(loops))  # the wrapped loops call each other here, the plain ones in their module
    for name, function in vars(loops).items():
        if isinstance(function, FunctionType):
            copy = FunctionType(function.__code__, namespace, name, function.__defaults__)
            try:
                namespace[name] = njit(cache=True, nogil=True)(copy)
            except RuntimeError:
                return None
    compiling = namespace["decode"] is not loops.decode and hasattr(namespace["decode"], "stats")
    return SimpleNamespace(**namespace) if compiling else None


class _NotCached(Exception):  # noqa: N818 - no error: it stops numba before it compiles
    pass


def _is_cached(compiled: Any) -> bool:
    """Load the machine code of all loops; False if one of them would have to be compiled."""
    from numba.core.event import Listener, install_listener

    own = set(map(id, vars(compiled).values()))

    class Refuse(Listener):
        def on_start(self, event: Any) -> None:
            if id(event.data["dispatcher"]) in own:
                raise _NotCached

        def on_end(self, event: Any) -> None:
            pass

    try:
        with install_listener("numba:compile", Refuse()):
            _call_each(compiled)
    except _NotCached:
        return False
    return True


def _start(folder: Path) -> Path:
    """Start the process that compiles into this folder, unless one is at work; returns the lock file it removes."""
    lock = folder / "seqloom-loops.compiling"
    if lock.exists() and time.time() - lock.stat().st_mtime > STALE_S:
        lock.unlink(missing_ok=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.touch(exist_ok=False)
    except OSError:
        return lock
    print(ANNOUNCEMENT, file=sys.stderr, flush=True)
    quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    command = [sys.executable, "-m", __name__, str(lock)]
    _State.compiler = subprocess.Popen(command, start_new_session=True, **quiet)
    return lock


def _call_each(compiled: Any) -> None:
    """Call every loop with the argument types of the planners, on a batch of one document."""
    one, pair = np.ones(1, np.int64), np.ones((1, 1), np.int64)
    tables = loops.BatchTables(
        one, np.ones((1, 1, 1), np.int64), pair, one, one, pair, pair * 0, one, 1, 1, 1, 1, one * 0, one * 0
    )
    rounds, ranks = loops.DecodedRounds.empty(1, 1), loops.RankAssignment.empty(1, 1)
    compiled.decode(tables, 9, loops.DecodeParams(one * 0, True, one * 0, -one, 9, True), rounds)
    compiled.assign_ranks(tables, rounds, 1, ranks)
    problem, loads = loops.DispatchProblem(one, pair, one, one, one, one), loops.PipelineLoads.empty(1)
    compiled.dispatch_longest_first(problem, one.copy(), loads)
    compiled.sum_pipeline(problem, one * 0, loads, 0)
    compiled.swap_rebalance(problem, one * 0, loads, 1)
    compiled.pack_micro_batches(one, one, 1, 1, 1, False, one.copy())
    compiled.first_fit(one, 1, one.copy())
    compiled.least_loaded(one, one, 1, 1, False, one.copy())
    compiled.fill_packs(one, np.arange(2), np.arange(2), 1, 0, 1, 0, one.copy())


if __name__ == "__main__":
    os.nice(19)  # it inherits the cores of its parent, which may be a rank that is pinned to one and training by now
    try:
        compile_loops()
    finally:
        Path(sys.argv[1]).unlink(missing_ok=True)
