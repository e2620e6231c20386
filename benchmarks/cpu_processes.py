"""Benchmarks on CPU processes of one core each: how they start, meet and say where they are."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import progress

from seqloom.comm import Communicators, Distributed
from seqloom.plan import GroupFamily

KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}
"""glibc gives no memory back: what a step's activations cost must not depend on how many layers a process has."""

Say = Callable[[str], None]
Run = Callable[[Distributed, argparse.Namespace, Say], None]
"""What every rank does; `Say` writes a line of progress, on the first rank."""


def on_processes(run: Run, arguments: argparse.Namespace) -> None:
    """Start `arguments.ranks` processes that run a function at the top of a script, and wait for them."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank_body, (folder, run, arguments), nprocs=arguments.ranks, start_method="spawn")


def _rank_body(rank: int, folder: str, run: Run, arguments: argparse.Namespace) -> None:
    """One process on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    ranks, began = arguments.ranks, time.perf_counter()
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)

    def say(text: str) -> None:
        if rank == 0:
            progress(f"{time.perf_counter() - began:6.1f} s  {text}")

    communicators = Communicators.create(GroupFamily(ranks, ranks))
    communicators.warm_up()
    run(Distributed(communicators), arguments, say)
    dist.destroy_process_group()
