"""A pool of processes that stays for a whole test session: real messages without a start-up per test.

    with Workers(8) as pool:
        results = pool.run(body, 1.5, ranks=4)      # body(transport, 1.5) on ranks 0 .. 3

The processes are forks of a server that has imported torch, so a pool starts in little more than one import. After
an error the next run starts new processes, since half-done messages may be left in the old ones.
"""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from seqloom.dist.process_group import JobRank, init_process_group
from seqloom.dist.torch_transport import Communicators, TorchTransport
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily
from seqloom.train.signals import receive_signals

STACK_S = 2.0  # how long a process may take to write its stack
GRACE_S = 1.0  # how long other ranks may take to report errors of their own after the first


class WorkerError(SeqloomError):
    """A body failed on a worker, or did not end in time. The message holds tracebacks of the workers."""


MOST_GROUPS = 60
"""Process groups of a worker on a GPU; those of its worlds are about 30."""


def family_of(ranks: int) -> GroupFamily:
    """Return the blocks that a pool's tasks of so many ranks may use."""
    return GroupFamily.cached(ranks, node_size=ranks)


class Workers:
    """`size` processes of one thread each on this machine, with gloo between them or NCCL. They start at the first run.

    Meshes that tasks make stay, since torch caches what it computes with them. With NCCL each of their groups takes
    tens of MiB, so a pool that has `MOST_GROUPS` ends after a run, and the next run starts it anew.

    Attributes:
        groups: process groups of the process that has most.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout_s: float = 60.0,
        enter: Callable[[int], None] | None = None,
        on_gpu: bool = False,
    ) -> None:
        """Plan a pool.

        Args:
            size: number of processes.
            timeout_s: limit of a run that names none.
            enter: called with its rank in every new process, before the first connection; picklable.
            on_gpu: processes share the GPUs of this machine, with NCCL between them.
        """
        self.size = size
        self._timeout_s = timeout_s
        self._enter, self._on_gpu = enter, on_gpu
        self.groups = 0
        self._workers: list[_Worker] = []
        self._folder = ""

    def __enter__(self) -> Self:
        """Return the pool itself."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def run(
        self, body: Callable[..., Any], *args: object, ranks: int | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Call `body(transport, *args)` on every rank and return the results in rank order.

        Args:
            body: a function at the top of a module, found in the workers by its name or else its file.
            args: picklable; every rank gets a copy.
            ranks: run on the first so many workers, as a world of their own; None: all.
            timeout_s: seconds after which the processes are ended and the error says where they were.
        """
        ranks = self.size if ranks is None else ranks
        if not 1 <= ranks <= self.size:
            raise SeqloomError(f"{ranks} ranks in a pool of {self.size}; ask for 1 .. {self.size}")
        task = pickle.dumps((_name(body), ranks, pickle.dumps(args)))
        try:
            if not self._workers:
                self._start()
            for worker in self._workers:
                worker.pipe.send_bytes(task)
            results = self._collect(ranks, self._timeout_s if timeout_s is None else timeout_s)
            if self._on_gpu and self.groups > MOST_GROUPS:
                self.close()
            return results
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the processes; a later run would start new ones."""
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
        self._workers, self.groups = [], 0
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["seqloom.dist.torch_transport"])  # all that is slow to import
        self._folder = tempfile.mkdtemp(prefix="seqloom-workers-")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            arguments = (rank, self.size, self._folder, theirs, self._enter, self._on_gpu)
            process = context.Process(target=_serve, args=arguments, name=f"worker {rank}", daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(rank, process, ours, Path(self._folder, f"{rank}.stack")))

    def _collect(self, ranks: int, timeout_s: float) -> list[Any]:
        """Gather the answers in rank order, or raise what went wrong."""
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        silent = {worker.pipe: worker for worker in self._workers}
        deadline = time.monotonic() + timeout_s
        while silent and (ready := wait(list(silent), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                worker = silent.pop(cast("Connection", pipe))
                fine, value, groups = worker.answer()
                self.groups = max(self.groups, groups)
                (results if fine else errors)[worker.rank] = value
            if errors:
                deadline = min(deadline, time.monotonic() + GRACE_S)
        if errors:
            raise WorkerError("\n".join(f"rank {rank} of {ranks}: {errors[rank]}" for rank in errors))
        if silent:
            places = "\n".join(f"rank {worker.rank} of {ranks} is at\n{worker.place()}" for worker in silent.values())
            raise WorkerError(
                f"not done after {timeout_s:g} s; give a larger timeout_s or see where ranks are\n{places}"
            )
        return [results[rank] for rank in range(ranks)]


@dataclass(frozen=True, slots=True, eq=False)
class _Worker:
    """A process, seen from the pool."""

    rank: int
    process: BaseProcess
    pipe: Connection
    stack: Path

    def answer(self) -> tuple[bool, Any, int]:
        """Return whether it succeeded, the result or the traceback, and its process groups."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except EOFError:
            self.process.join()
            return False, f"the process ended with exit code {self.process.exitcode}", 0

    def place(self) -> str:
        """Ask a process that does not answer for its stack."""
        os.kill(cast("int", self.process.pid), signal.SIGUSR1)
        deadline = time.monotonic() + STACK_S
        inner, end = self.stack.read_text(), ""
        while not end and time.monotonic() < deadline:
            time.sleep(0.01)
            inner, end, _ = self.stack.read_text().partition(f" in {_do.__name__}\n")  # what follows is this file's
        return inner


def _name(body: Callable[..., Any]) -> tuple[str, str, str]:
    """Return module, name and file of a function, from which `_find` gets it back in another process."""
    if getattr(sys.modules.get(body.__module__), body.__qualname__, None) is not body:
        raise SeqloomError(
            f"{body.__qualname__} is not at the top of a module, so workers cannot find it; move it there"
        )
    return body.__module__, body.__qualname__, inspect.getfile(body)


def _find(module: str, name: str, file: str) -> Callable[..., Any]:
    """Import a module by name, or from its file where it is on no path (as tests are), and return a function."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, something that it imports is not
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None, file
    loaded = sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def _serve(
    rank: int, size: int, folder: str, pipe: Connection, enter: Callable[[int], None] | None, on_gpu: bool
) -> None:
    """Be a worker: do tasks until the pool is gone."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    receive_signals()  # the server was started without those that ask a run to leave
    with open(Path(folder, f"{rank}.stack"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        worlds: dict[int, Communicators] = {}
        while True:
            try:
                task = pipe.recv_bytes()
            except EOFError:
                return
            try:
                if not dist.is_initialized():  # here, so that the pool hears of an error
                    if enter is not None:
                        enter(rank)
                    store = dist.FileStore(f"{folder}/store", size)
                    if on_gpu:
                        init_process_group(JobRank(rank, size, rank, size), share_gpu=True, store=store)
                    else:
                        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
                answer = pickle.dumps((True, _do(task, worlds), len(_world.pg_map)))
            except BaseException:
                answer = pickle.dumps((False, traceback.format_exc(), 0))
            pipe.send_bytes(answer)


def _end_with_parent() -> None:
    """End this process with the one that has the pool, however that ends and whatever this one waits for."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(task: bytes, worlds: dict[int, Communicators]) -> object:
    """Run one task. The communicators of a size are made when it is first used, by all workers."""
    name, ranks, args = pickle.loads(task)
    if ranks not in worlds:
        worlds[ranks] = Communicators(family_of(ranks))
    if dist.get_rank() >= ranks:
        return None
    return _find(*name)(TorchTransport(worlds[ranks]), *pickle.loads(args))
