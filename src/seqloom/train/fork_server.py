"""The server that ranks are forked from, and what they inherit. It needs no torch here.

Loading torch takes seconds of a core, forking a process that has loaded it none. The server has no threads and has not
touched a GPU. A command starts it as early as it can, and it loads what ranks need while the command does the same.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import DefaultContext
from typing import cast

from seqloom.errors import SeqloomError
from seqloom.train.signals import blocked_signals

RANKS_PER_CORE = 16
"""Ranks that may share a core where they are tried out on CPUs."""

CUDA_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it `torch.cuda.is_available` asks the driver's library. Without, it begins to use CUDA, after which no fork can:
transformers calls it when it is imported and finds FlashAttention-4."""


def check_cores(local_ranks: int) -> None:
    """Refuse more ranks, processes or threads, than the cores of this machine get anywhere with."""
    cores = os.cpu_count() or 1
    if local_ranks > RANKS_PER_CORE * cores:
        raise SeqloomError(
            f"{local_ranks} ranks on a machine with {cores} cores: at most {RANKS_PER_CORE} share one; start "
            f"{RANKS_PER_CORE * cores} or fewer here, or several machines with torchrun"
        )


def start_fork_server(*modules: str) -> DefaultContext:
    """Return how processes are started: as forks of a server, where there are forks, which loads these modules.

    The server starts at the first call, without signals to leave (see `signals`); what it was not told then, forks
    load themselves.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return cast("DefaultContext", multiprocessing.get_context("spawn"))
    context = cast("DefaultContext", multiprocessing.get_context("forkserver"))
    context.set_forkserver_preload(list(modules))
    with allocator_environment(), _environment({CUDA_CHECK: "1"}), blocked_signals():
        forkserver.ensure_running()
    return context


# ---- torch's allocator on a GPU
# Plans change the sizes of buffers from step to step, which fragments fixed segments. torch reads the setting from the
# environment when a process begins to use the GPU, so processes started here get it; under a launcher the log gives
# advice. A setting of the user is never changed.

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads: the name since 2.9, and the one before."""
ALLOCATOR_SETTING = "expandable_segments:True"


def user_allocator_setting() -> str | None:
    """Return the variable that the user has set, as `NAME=value`; None: neither."""
    return next((f"{name}={os.environ[name]}" for name in ALLOCATOR_VARIABLES if os.environ.get(name)), None)


def allocator_advice(device: str) -> str | None:
    """Say what to set, for a process on this kind of device that was started without; None: nothing."""
    if device != "cuda" or user_allocator_setting() is not None:
        return None
    name = ALLOCATOR_VARIABLES[0]
    effect = "keeps GPU memory from fragmenting when sizes change every step"
    return f"{name} is not set; {name}={ALLOCATOR_SETTING} {effect}"


@contextmanager
def allocator_environment() -> Iterator[None]:
    """Give the setting to processes that are started inside, unless the user has one. This process does not use it."""
    with _environment({} if user_allocator_setting() else {ALLOCATOR_VARIABLES[0]: ALLOCATOR_SETTING}):
        yield


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for processes that are started inside, unless the user has set them."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update({name: value for name, value in variables.items() if not before[name]})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})
