"""Ranks as processes: started on this machine, or by torchrun, with the device each of them runs on."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from seqloom.errors import SeqloomError

DIED = 3
"""Exit code of a process whose rank failed; the reason is in a file beside the rendezvous."""

Body = Callable[..., Any]
"""body(rank, ranks, device, *arguments) -> plain values; at the top of a module, so that other processes find it."""


def under_torchrun() -> bool:
    """Say whether a launcher has started this process as one rank of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def join_ranks(body: Body, *arguments: Any) -> Any:
    """Run a body as the rank that torchrun made this process, and return what it returns."""
    dist.init_process_group(_backend())
    try:
        return body(dist.get_rank(), dist.get_world_size(), _device(dist.get_rank()), *arguments)
    finally:
        dist.destroy_process_group()


def start_ranks(body: Body, ranks: int, *arguments: Any, advice: str = "") -> Any:
    """Start `ranks` processes on this machine, wait for them, and return what the body returned on the first.

    When one fails, the others are stopped and its reason is raised.

    Args:
        advice: what the message says where a rank died without a word.
    """
    with tempfile.TemporaryDirectory(prefix="seqloom-") as folder:
        try:
            mp.start_processes(_process, (ranks, folder, body, arguments), nprocs=ranks, start_method="spawn")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise SeqloomError(_reason(Path(folder), error, advice)) from None
        return torch.load(Path(folder) / "result", weights_only=True)


def _process(rank: int, ranks: int, folder: str, body: Body, arguments: tuple[Any, ...]) -> None:
    """One rank in a process of its own."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    try:
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=ranks)
        result = body(rank, ranks, _device(rank), *arguments)
        dist.destroy_process_group()
    except SeqloomError as error:
        (Path(folder) / f"failed-{rank}").write_text(str(error))
        os._exit(DIED)  # without waiting for other ranks, which wait for this one
    except Exception:
        (Path(folder) / f"failed-{rank}").write_text(traceback.format_exc())
        os._exit(DIED)
    if rank == 0:
        torch.save(result, Path(folder) / "result")


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    return device


def _reason(folder: Path, error: Exception, advice: str) -> str:
    """Say which rank failed first and why."""
    failures = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
    if not failures:
        return f"a rank has died ({error})" + (f"; {advice}" if advice else "")
    return f"rank {failures[0].name.removeprefix('failed-')}: {failures[0].read_text().strip()}"
