"""torch's allocator on a GPU: plans change the sizes of buffers from step to step, which fragments fixed segments.

torch reads its setting from the environment when a process begins to use the GPU. Processes that Seqloom starts are
given one; a launcher's are not Seqloom's, so there the log gives advice. What the user has set is never changed.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from seqloom.dist import Communicators, TorchTransport
from seqloom.errors import SeqloomError
from seqloom.plan import GroupFamily
from seqloom.train.config import Config
from seqloom.train.model import REFERENCE, ModelFamily, dtypes, require_parts
from seqloom.train.setup import Setup, kept
from seqloom.train.trainer import Trainer
from seqloom.train.watch import FAILED, START_S, Watch

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that torch reads: the name since 2.9, and the one before."""
SETTING = "expandable_segments:True"


def user_setting(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return the variable that the user has set, as `NAME=value`; None: neither."""
    return next((f"{name}={environment[name]}" for name in NAMES if environment.get(name)), None)


def advice(device: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """Say what to set, for a process that runs on this kind of device and was started without; None: nothing."""
    if device != "cuda" or user_setting(environment) is not None:
        return None
    return f"{NAMES[0]} is not set; {NAMES[0]}={SETTING} keeps GPU memory from fragmenting when sizes change every step"


@contextmanager
def for_new_processes() -> Iterator[None]:
    """Hand the setting to processes that are started inside, unless the user has one. This process keeps its own."""
    if user_setting() is not None:
        yield
        return
    before = os.environ.get(NAMES[0])
    os.environ[NAMES[0]] = SETTING
    try:
        yield
    finally:
        if before is None:
            del os.environ[NAMES[0]]
        else:
            os.environ[NAMES[0]] = before


# ---- merged: train.compilers
# What torch.compile needs on a machine, looked for before a run starts. Nothing here needs torch.


CPP = {"darwin": "clang++", "win32": "cl"}
"""The C++ compiler that torch calls on a platform; g++ on others. The variable CXX names another."""


def check_compilers(device: str) -> None:
    """Refuse `model.compile` on a machine where torch.compile would fail in the first step.

    Args:
        device: "cpu", where torch writes C++, or "cuda", where it writes Triton, which builds its launchers in C.
    """
    missing = _missing_for_gpu() if device == "cuda" else _missing_for_cpu()
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("Python.h (the development files of this Python)")
    if missing:
        raise SeqloomError(
            f"model.compile = true, and torch.compile needs what is not here: {', '.join(missing)}; install it, or "
            "set model.compile = false"
        )


def _missing_for_cpu() -> list[str]:
    name = os.environ.get("CXX", CPP.get(sys.platform, "g++"))
    return [] if shutil.which(name) else [f"the C++ compiler {name!r}"]


def _missing_for_gpu() -> list[str]:
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    compiler = [] if any(map(shutil.which, names)) else [f"a C compiler ({' or '.join(map(repr, names))})"]
    return compiler if find_spec("triton") else ["triton", *compiler]


# ---- merged: train.processes
# Ranks for a measurement: processes started on this machine, or those that torchrun has started.


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
            start_processes(_measuring_process, (ranks, folder, body, arguments), ranks, body.__module__)
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


def _measuring_process(rank: int, ranks: int, folder: str, body: Body, arguments: tuple[Any, ...]) -> None:
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


# ---- merged: train.launch
# Starting the ranks of a run: processes on this machine, or those that torchrun has started.


GRACE_S = 2.0
"""Seconds that ranks have to report for themselves after one of them has ended."""


def under_torchrun() -> bool:
    """Say whether a launcher has started this process as one rank of several."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)


def train_here(config: Config, *, kind: ModelFamily = REFERENCE, show: bool = True) -> dict[str, Any]:
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


def train_on_processes(
    config: Config, ranks: int, *, kind: ModelFamily = REFERENCE, show: bool = True
) -> dict[str, Any]:
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


def _process(rank: int, ranks: int, config: Config, kind: ModelFamily, folder: str, show: bool) -> None:
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
    config: Config, kind: ModelFamily, rank: int, ranks: int, show: bool, tell: Callable[[str], None]
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


def _run(config: Config, kind: ModelFamily, rank: int, ranks: int, show: bool, watch: Watch) -> dict[str, Any]:
    """Connect to the other ranks and train."""
    setup = Setup.of(config, ranks)
    communicators = Communicators.create(GroupFamily(ranks, setup.cost.node_size))
    communicators.warm_up()
    device = device_of(rank)
    stream = sys.stderr if show and rank == 0 else None
    with Trainer(setup.config, setup, TorchTransport(communicators), kind=kind, device=device, watch=watch) as trainer:
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
