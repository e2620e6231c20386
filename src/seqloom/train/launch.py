"""Starting the ranks of a run: processes on this machine, or those that torchrun has started."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from seqloom.comm import Communicators, Distributed
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily
from seqloom.train.allocator import advice, for_new_processes
from seqloom.train.compilers import check_compilers
from seqloom.train.config import Config
from seqloom.train.kinds import REFERENCE, Kind, dtypes
from seqloom.train.loop import Trainer
from seqloom.train.model import require_parts
from seqloom.train.processes import backend, device_of, start_processes
from seqloom.train.setup import Setup
from seqloom.train.strategies import kept
from seqloom.train.watch import FAILED, START_S, Watch

GRACE_S = 2.0
"""Seconds that ranks have to report for themselves after one of them has ended."""


def under_torchrun() -> bool:
    """Say whether a launcher has started this process as one rank of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def train_here(config: Config, *, kind: Kind = REFERENCE, show: bool = True) -> dict[str, Any]:
    """Run as the rank that torchrun made this process; return the summary on the first rank, {} on others.

    A rank that cannot go on says why on stderr and ends the process.
    """
    _check_machine(config)
    dist.init_process_group(backend(), timeout=_torch_timeout(config))
    rank = dist.get_rank()

    def tell(text: str) -> None:
        print(f"seqloom: rank {rank}: {text}", file=sys.stderr, flush=True)

    summary = _watched(config, kind, rank, dist.get_world_size(), show, tell)
    dist.destroy_process_group()
    return summary


def train_on_processes(config: Config, ranks: int, *, kind: Kind = REFERENCE, show: bool = True) -> dict[str, Any]:
    """Start `ranks` processes on this machine, wait for them, and return the summary.

    When one fails, the others are stopped and its reason is raised.
    """
    _check_machine(config)
    setup = Setup.of(config, ranks)  # refuse here, once, what every process would refuse
    config = kept(setup.config, setup.planners.strategies)
    built = kind.build(config, torch.device("meta"), dtypes(config)[0])
    if setup.planners.cut:
        require_parts(built, setup.planners.tensor_degrees)
    with tempfile.TemporaryDirectory(prefix="seqloom-") as folder:
        arguments = (ranks, config, kind, folder, show)
        with for_new_processes():
            started = start_processes(_process, arguments, ranks, kind.build.__module__, join=False)
        assert started is not None
        try:
            while not started.join(grace_period=GRACE_S):
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            codes = [process.exitcode for process in started.processes]
            raise SeqloomError(_reason(Path(folder), codes, error)) from None
        return torch.load(Path(folder) / "summary", weights_only=True)


def _process(rank: int, ranks: int, config: Config, kind: Kind, folder: str, show: bool) -> None:
    """One rank in a process of its own."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))

    def tell(text: str) -> None:
        (Path(folder) / f"failed-{rank}").write_text(text)

    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group(backend(), store=store, rank=rank, world_size=ranks, timeout=_torch_timeout(config))
    summary = _watched(config, kind, rank, ranks, show, tell)
    dist.destroy_process_group()
    if rank == 0:
        torch.save(summary, Path(folder) / "summary")


def _watched(
    config: Config, kind: Kind, rank: int, ranks: int, show: bool, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Train; or tell why not, and end the process without waiting for other ranks, which wait for this one."""
    try:
        with Watch(ranks, config.run.timeout_s, config.checkpoints, tell) as watch:
            return _run(config, kind, rank, ranks, show, watch)
    except SeqloomError as error:
        tell(str(error))
    except Exception:
        tell(traceback.format_exc())
    os._exit(FAILED)


def _run(config: Config, kind: Kind, rank: int, ranks: int, show: bool, watch: Watch) -> dict[str, Any]:
    """Connect to the other ranks and train."""
    setup = Setup.of(config, ranks)
    communicators = Communicators.create(GroupFamily(ranks, setup.cost.node_size))
    communicators.warm_up()
    device = device_of(rank)
    stream = sys.stderr if show and rank == 0 else None
    with Trainer(setup.config, setup, Distributed(communicators), kind=kind, device=device, watch=watch) as trainer:
        summary = trainer.run(stream, notes=[text for text in (advice(device.type),) if text])
    communicators.close()
    return summary


def _check_machine(config: Config) -> None:
    """Refuse what the config asks for and this machine lacks, before anyone waits for another rank."""
    if config.model.compile:
        check_compilers("cuda" if torch.cuda.is_available() else "cpu")


def _torch_timeout(config: Config) -> timedelta:
    """How long torch's own messages wait: at least as long as `Watch`, which knows more to say."""
    return timedelta(seconds=max(config.run.timeout_s, START_S))


def _reason(folder: Path, codes: Sequence[int | None], error: Exception) -> str:
    """Say which rank died or failed first, and what the first one that could speak had to say.

    Args:
        folder: where ranks put their last words.
        codes: exit codes of the ranks; -9: killed by signal 9.
        error: what torch says of the first process that ended.
    """
    told = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
    words = [f"rank {path.name.removeprefix('failed-')}: {path.read_text().strip()}" for path in told]
    if not words:
        words = [f"{error}; the last checkpoint is intact: run the same command to go on from it"]
    killed = [(rank, -code) for rank, code in enumerate(codes) if code is not None and code < 0]
    dead = [f"rank {rank} has died ({signal.Signals(by).name})" for rank, by in killed if by != signal.SIGTERM]
    return "; ".join([*dead, words[0]])
