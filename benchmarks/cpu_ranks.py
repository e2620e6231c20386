"""CPU processes that stand for GPUs: one thread each, on cores of their own, joined by gloo. Or ranks on a GPU."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import options, progress

from seqloom.dist import Communicators, TorchTransport
from seqloom.dist.process_group import JobRank, init_process_group
from seqloom.plan import GroupFamily
from seqloom.planners.compiled import compile_loops

Say = Callable[[str], None]
Run = Callable[[TorchTransport, argparse.Namespace, Say], None]
"""run(transport, arguments, say): what every process does; `say` shows a line with the time, of the first rank only."""
KEEP_MEMORY = {"MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_MMAP_MAX_": "0"}
"""glibc gives no memory back: what a step's activations cost must not depend on how many layers a process has."""


def rank_options(about: str | None, *, ranks: int, steps: int) -> argparse.ArgumentParser:
    """Return the parser of a benchmark's arguments, with the defaults of these processes."""
    parser = options(about)
    parser.add_argument("--ranks", type=int, default=ranks, help=f"processes; the evidence has {ranks}")
    parser.add_argument("--steps", type=int, default=steps, help="batches that count")
    return parser


def start(run: Run, arguments: argparse.Namespace, *, keep_memory: bool = False, share_gpu: bool = False) -> None:
    """Start `arguments.ranks` processes and wait for them.

    Args:
        run: a function of a module, so that processes can import it.
        arguments: of the command line.
        keep_memory: see `KEEP_MEMORY`.
        share_gpu: processes share the GPUs of this machine, joined by NCCL.
    """
    if keep_memory:
        os.environ |= KEEP_MEMORY  # read when the processes start
    compile_loops()  # now, and not beside the steps that are timed
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(_rank, (folder, run, arguments, share_gpu), nprocs=arguments.ranks, start_method="spawn")


def _rank(rank: int, folder: str, run: Run, arguments: argparse.Namespace, share_gpu: bool) -> None:
    ranks, began = arguments.ranks, time.perf_counter()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank * max(1, len(cores) // ranks) % len(cores)]})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    init_process_group(JobRank(rank, ranks, rank, ranks), share_gpu=share_gpu, on_cpu=not share_gpu, store=store)

    def say(text: str) -> None:
        if rank == 0:
            progress(f"{time.perf_counter() - began:6.1f} s  {text}")

    communicators = Communicators(GroupFamily(ranks, ranks))
    communicators.warm_up()
    run(TorchTransport(communicators), arguments, say)
    dist.destroy_process_group()
