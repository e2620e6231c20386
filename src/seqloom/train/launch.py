"""Starting the ranks of a run: processes on this machine, or those that torchrun has started."""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from seqloom.comm import Communicators, Distributed
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily
from seqloom.train.compilers import check_compilers
from seqloom.train.config import Config
from seqloom.train.kinds import REFERENCE, Kind, dtypes
from seqloom.train.loop import Trainer
from seqloom.train.setup import Setup

DIED = 3
"""Exit code of a process whose rank failed; the reason is in a file beside the rendezvous."""


def under_torchrun() -> bool:
    """Say whether a launcher has started this process as one rank of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def train_here(config: Config, *, kind: Kind = REFERENCE, show: bool = True) -> dict[str, Any]:
    """Run as the rank that torchrun made this process; return the summary on the first rank, {} on others."""
    _check_machine(config)
    dist.init_process_group(_backend())
    try:
        return _run(config, kind, dist.get_rank(), dist.get_world_size(), show)
    finally:
        dist.destroy_process_group()


def train_on_processes(config: Config, ranks: int, *, kind: Kind = REFERENCE, show: bool = True) -> dict[str, Any]:
    """Start `ranks` processes on this machine, wait for them, and return the summary.

    When one fails, the others are stopped and its reason is raised.
    """
    _check_machine(config)
    Setup.of(config, ranks)  # refuse here, once, what every process would refuse
    kind.build(config, torch.device("meta"), dtypes(config)[0])
    with tempfile.TemporaryDirectory(prefix="seqloom-") as folder:
        arguments = (ranks, config, kind, folder, show)
        try:
            mp.start_processes(_process, arguments, nprocs=ranks, start_method="spawn")
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            raise SeqloomError(_reason(Path(folder), error)) from None
        return torch.load(Path(folder) / "summary", weights_only=True)


def _process(rank: int, ranks: int, config: Config, kind: Kind, folder: str, show: bool) -> None:
    """One rank in a process of its own."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    try:
        dist.init_process_group(_backend(), store=store, rank=rank, world_size=ranks)
        summary = _run(config, kind, rank, ranks, show)
        dist.destroy_process_group()
    except SeqloomError as error:
        (Path(folder) / f"failed-{rank}").write_text(str(error))
        os._exit(DIED)  # without waiting for other ranks, which wait for this one
    except Exception:
        (Path(folder) / f"failed-{rank}").write_text(traceback.format_exc())
        os._exit(DIED)
    if rank == 0:
        torch.save(summary, Path(folder) / "summary")


def _run(config: Config, kind: Kind, rank: int, ranks: int, show: bool) -> dict[str, Any]:
    """Connect to the other ranks and train."""
    setup = Setup.of(config, ranks)
    communicators = Communicators.create(GroupFamily(ranks, setup.cost.node_size))
    communicators.warm_up()
    device = _device(rank)
    stream = sys.stderr if show and rank == 0 else None
    with Trainer(config, setup, Distributed(communicators), kind=kind, device=device) as trainer:
        summary = trainer.run(stream)
    communicators.close()
    return summary


def _check_machine(config: Config) -> None:
    """Refuse what the config asks for and this machine lacks, before anyone waits for another rank."""
    if config.model.compile:
        check_compilers("cuda" if torch.cuda.is_available() else "cpu")


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _device(rank: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
    torch.cuda.set_device(device)
    return device


def _reason(folder: Path, error: Exception) -> str:
    """Say which rank failed first and why."""
    failures = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
    if not failures:
        return f"a rank has died ({error}); the last checkpoint is intact, run the same command to go on from it"
    return f"rank {failures[0].name.removeprefix('failed-')}: {failures[0].read_text().strip()}"
