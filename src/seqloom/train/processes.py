"""Ranks for a measurement: processes started on this machine, or those that torchrun has started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from seqloom.errors import SeqloomError

Body = Callable[..., Any]
"""body(rank, ranks, device, *arguments) -> plain values; at the top of a module, so that other processes find it."""


def join_ranks(body: Body, *arguments: Any) -> Any:
    """Run a body as the rank that torchrun made this process, and return what it returns."""
    dist.init_process_group(backend())
    try:
        return body(dist.get_rank(), dist.get_world_size(), device_of(dist.get_rank()), *arguments)
    finally:
        dist.destroy_process_group()


def start_ranks(body: Body, ranks: int, *arguments: Any) -> Any:
    """Start `ranks` processes on this machine, wait for them, and return what the body returned on the first."""
    with tempfile.TemporaryDirectory(prefix="seqloom-") as folder:
        try:
            start_processes(_process, (ranks, folder, body, arguments), ranks, body.__module__)
        except mp.ProcessRaisedException as error:
            refusal = Path(folder) / "refusal"
            raise SeqloomError(refusal.read_text() if refusal.is_file() else str(error)) from None
        except mp.ProcessExitedException as error:
            raise SeqloomError(f"a rank has died ({error}); try fewer ranks, or a smaller model") from None
        return torch.load(Path(folder) / "result", weights_only=True)


def start_processes(
    main: Callable[..., None], arguments: tuple[Any, ...], ranks: int, *modules: str, join: bool = True
) -> mp.ProcessContext | None:
    """Start `main(rank, *arguments)` for every rank, from a process that has loaded torch and the modules once for all.

    Loading takes seconds of a core, and forking takes none; that process has no threads yet and has not touched a GPU.

    Args:
        main: at the top of a module.
        arguments: that can be pickled.
        ranks: processes.
        modules: what ranks will import.
        join: wait for the processes; otherwise return what to wait for.
    """
    method = "forkserver" if "forkserver" in mp.get_all_start_methods() else "spawn"
    if method == "forkserver":
        mp.set_forkserver_preload([main.__module__, *modules])
    return mp.start_processes(main, arguments, nprocs=ranks, join=join, start_method=method)


def _process(rank: int, ranks: int, folder: str, body: Body, arguments: tuple[Any, ...]) -> None:
    """One rank in a process of its own, with its share of the cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=ranks)
    try:
        result = body(rank, ranks, device_of(rank), *arguments)
    except SeqloomError as error:
        (Path(folder) / "refusal").write_text(str(error))
        raise
    dist.destroy_process_group()
    if rank == 0:
        torch.save(result, Path(folder) / "result")


def backend() -> str:
    """Return torch's backend for the ranks of this machine."""
    return "nccl" if torch.cuda.is_available() else "gloo"


def device_of(rank: int) -> torch.device:
    """Return the device of a rank, its own GPU where there are any, and make it the current one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    return device
