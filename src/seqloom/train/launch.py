"""Starting the ranks of a run or a measurement, and ending all of them when one dies or the run is asked to leave.

Ranks are processes that `run_on_processes` starts on this machine, those that a launcher has started
(`run_as_launched_rank`), or those of another library that has connected them (`train_in_process_group`). Every training
rank runs under a `Watchdog`, so that no rank waits for ever.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from math import inf
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from seqloom.cost import Profile
from seqloom.cost.engines import DEVICE_SHARE
from seqloom.describe.cluster import DEVICES, Cluster, is_device
from seqloom.dist import (
    Channel,
    Communicators,
    JobRank,
    TorchTransport,
    init_process_group,
    joined_rank,
    launched_rank,
)
from seqloom.dist.process_group import check_gpus, node_size, ranks_per_gpu, shares_gpu
from seqloom.errors import LeftEarly, SeqloomError
from seqloom.models import use_float8
from seqloom.plan import GroupFamily, Sharding
from seqloom.planners.hydraulis import strategies_from_json, strategies_to_json
from seqloom.planners.plan_ahead import end_with_parent
from seqloom.train.config import MEASURED, Config
from seqloom.train.fork_server import allocator_advice, allocator_environment, check_cores, start_fork_server
from seqloom.train.logging import Callback, StartUp, load_callbacks
from seqloom.train.model import REFERENCE, ModelFamily, check_splits, parameter_dtypes
from seqloom.train.run_folder import RunLock
from seqloom.train.setup import RunSetup, write_strategies
from seqloom.train.signals import END, LEAVE, LEAVE_SIGNALS, URGENT, SignalPipe, blocked_signals, receive_signals
from seqloom.train.trainer import Trainer
from seqloom.train.watchdog import EXIT_FAILED, START_S, Watchdog, left_before_steps
from seqloom.version import __version__

GRACE_S = 2.0
"""Seconds that ranks have to report by themselves after one of them has ended."""
TORCHRUN = "TORCHELASTIC_RUN_ID"
"""What torchrun's agent tells every process that it starts."""
REPEAT_S = 1.0
"""Seconds after which ranks that have not left are asked to leave again."""
WATCHED_NCCL = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
"""torch's own watchdogs abort a process whose NCCL peer is gone, or that hangs for 8 minutes, without a word about step
and plan. Ranks that are started here have a `Watchdog` and a launcher for it; under another launcher torch's defaults
are the quickest way out. A setting of the user is never changed."""


LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
"""Ranks of one machine talk to each other over its loopback interface; gloo would take the one of the host's name."""


PROGRESS_S = 5.0
"""Seconds from one sign of rank 0 that it prepares documents to the next."""


class Preparing(NamedTuple):
    """What rank 0 tells the others while it prepares documents."""

    text: str


class RankProcess(NamedTuple):
    """One of the processes that run a body together."""

    job_rank: JobRank
    device: torch.device
    report: Callable[[str], None]
    """Says why this rank cannot continue; callable from any thread, also just before the process ends."""


Body = Callable[..., Any]
"""body(process, *arguments) -> plain values; at the top of a module, so that other processes find it."""


# ---- Training


def train_as_launched_rank(
    config: Config,
    *,
    model_family: ModelFamily = REFERENCE,
    share_gpu: bool = False,
    show: bool = True,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train as the rank that a launcher made this process; return the summary on rank 0, {} on others.

    A run that was asked to leave raises `LeftEarly` on rank 0 and ends the other processes with the same exit code.
    """
    _check_compilers_if_needed(config)
    arguments = (_train, config, model_family, show, callbacks)
    summary = run_as_launched_rank(*arguments, share_gpu=share_gpu, timeout=_torch_timeout(config))
    if "left" not in summary:
        return summary
    job_rank = launched_rank()
    if job_rank is not None and job_rank.rank:
        raise SystemExit(LeftEarly.exit_code)
    raise LeftEarly(summary["left"])


def train_in_process_group(
    config: Config,
    *,
    model_family: ModelFamily = REFERENCE,
    show: bool = True,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Train as a rank of the process group that the caller has made; return the summary on rank 0, {} on others.

    For libraries that start processes themselves, such as Ray Train. They have set the environment as torchrun does,
    the GPU, and a process group with gloo and, on GPUs, NCCL; all of it stays theirs. Any thread may call this. Errors
    are raised, so that the library can end the other ranks; only a rank in which nothing moves ends its process.
    """
    _check_compilers_if_needed(config)
    job_rank, device = joined_rank()
    return _train(RankProcess(job_rank, device, _stderr_report(job_rank)), config, model_family, show, callbacks)


def train_on_processes(
    config: Config,
    ranks: int,
    *,
    model_family: ModelFamily = REFERENCE,
    share_gpu: bool = False,
    show: bool = True,
    ends_process: bool = False,
    callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
    """Start `ranks` processes on this machine, wait for them, and return the summary.

    A run that was asked to leave, by a signal to this process or to one of its ranks, raises `LeftEarly`. With
    `ends_process` the caller then ends this process, and further signals do not end it before with a code of theirs.
    """
    _check_compilers_if_needed(config)
    check_cores(ranks)
    check_gpus(ranks, share_gpu=share_gpu)
    RunLock(config.run.output).check()  # before anything is written there; rank 0 acquires it for the run
    start_fork_server(__name__, model_family.build.__module__)  # it loads torch while this process looks at the run
    config = for_launched_ranks(config, [JobRank(rank, ranks, rank, ranks) for rank in range(ranks)], share_gpu)
    # refuse here, once, what every process would refuse
    load_callbacks(config.run.callbacks)
    start = StartUp(sys.stderr if show else None)
    if needs_profile(config) and not profile_file(config).is_file():
        module, setup = machine_measurement(config, model_family)
        found = module.find_stored(setup, ranks, threads_of_rank(ranks))
        if found is None:
            start.show("measuring this machine, of which no profile is stored")
            found = run_on_processes(module.measure_stored, ranks, setup, share_gpu=share_gpu)
        start.show(save_profile(config, *found))
    config = with_machine_profile(config)
    setup = RunSetup.load(config, ranks, describe=model_family.describe, show=start.show)
    config = write_strategies(setup.config, setup.planners.strategies)
    model = model_family.build(config, torch.device("meta"), parameter_dtypes(config)[0])
    if setup.planners.multi_stage:
        check_splits(model, setup.planners.tensor_degrees)
    model.check_tp_degree(setup.cost.tensor)
    if config.model.float8:
        use_float8(model.layers)
    summary = run_on_processes(
        *(_train, ranks, config, model_family, show, callbacks),
        preload=model_family.build.__module__,
        share_gpu=share_gpu,
        timeout=_torch_timeout(config),
        way_out="the last checkpoint is intact: run the same command to go on from it",
        watched=True,
        ends_process=ends_process,
    )
    if "left" in summary:
        raise LeftEarly(summary["left"])
    return summary


def _train(
    process: RankProcess, config: Config, model_family: ModelFamily, show: bool, callbacks: Sequence[Callback]
) -> dict[str, Any]:
    """Connect to the other ranks and train, watched."""
    job_rank, device, report = process
    rank, ranks = job_rank.rank, job_rank.ranks
    lock = RunLock(config.run.output)
    with lock, Watchdog(ranks, config.run.timeout_s, config.checkpoints, report) as watchdog:
        stream = sys.stderr if show and rank == 0 else None
        start = StartUp(stream)
        config = profile_alike(config, process, model_family, start.show)
        start.enter("reading config and corpus")

        def report_start(text: str) -> None:
            start.show(text)
            watchdog.enter_phase(text, on_disk=True)

        setup = load_alike(config, job_rank, model_family, lock, report_start)
        start.enter("connecting")
        communicators = Communicators(GroupFamily(ranks, setup.cost.node_size), channels_of(setup))
        communicators.warm_up()
        advice = allocator_advice(device.type), kernel_advice(device), node_note(job_rank, setup)
        notes = [text for text in (*advice, shared_gpu_note(ranks), communicators.note) if text]
        notes += model_family.notes(config)
        parts = {"model_family": model_family, "device": device, "watchdog": watchdog, "start": start}
        parts["callbacks"] = callbacks
        with Trainer(setup, TorchTransport(communicators), **parts) as trainer:
            summary = trainer.train(stream, notes=notes)
        communicators.close()
    return summary


def load_alike(
    config: Config,
    job_rank: JobRank,
    model_family: ModelFamily = REFERENCE,
    lock: RunLock | None = None,
    show: Callable[[str], None] | None = None,
) -> RunSetup:
    """Load the setup of a run with the choices of rank 0; refuse ranks that differ, all together. All ranks call it.

    Rank 0 acquires `lock`, if there is one, and prepares documents. `show` is told on every rank how far that has come,
    so that none takes it for a rank that hangs.
    """
    rank, ranks = job_rank.rank, job_rank.ranks
    job_ranks = gather_job_ranks(job_rank)
    told: list[Any] = [None]
    setup, told_at = None, time.monotonic()
    load = partial(RunSetup.load, ranks=ranks, describe=model_family.describe)

    def tell(text: str) -> None:
        nonlocal told_at
        if show is not None:
            show(text)
        if time.monotonic() - told_at > PROGRESS_S:
            told_at = time.monotonic()
            dist.broadcast_object_list([Preparing(text)], src=0, device=torch.device("cpu"))

    if rank == 0:
        try:
            if lock is not None:
                lock.acquire()
            setup = load(for_launched_ranks(config, job_ranks, shares_gpu()), show=tell)
            strategies = strategies_to_json(setup.choices.strategies) if setup.choices.strategies else None
            told = [(replace(setup.choices, strategies=()), strategies, _identity(setup, config))]
        except SeqloomError as error:  # all ranks refuse together and none waits
            told = [str(error)]
    dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    while isinstance(told[0], Preparing):
        if show is not None:
            show(told[0].text)
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    if isinstance(told[0], str):
        raise SeqloomError(told[0])
    choices, strategies, first = told[0]
    if setup is None:
        choices = replace(choices, strategies=strategies_from_json(strategies) if strategies else ())
        setup = load(for_launched_ranks(config, job_ranks, shares_gpu()), choices=choices)
    mine, differences = _identity(setup, config), [None] * ranks
    other = next((name for name in first if mine.get(name) != first[name]), None)
    dist.all_gather_object(differences, None if other is None else f"{other} = {mine.get(other)}, not {first[other]}")
    for number, difference in enumerate(differences):
        if difference is not None:
            raise SeqloomError(
                f"rank {number} differs from rank 0: {difference}; start all ranks with one config, one corpus and one "
                "environment"
            )
    return setup


def gather_job_ranks(job_rank: JobRank) -> list[JobRank]:
    """Return all ranks of the job. All of them call it."""
    job_ranks = [job_rank] * job_rank.ranks
    dist.all_gather_object(job_ranks, job_rank)
    return job_ranks


def spell_nodes(job_ranks: Sequence[JobRank]) -> str:
    """Spell the cluster that ranks were started on, such as 2x4xCPU or 1x8xH200."""
    size = node_size(job_ranks)
    return f"{len(job_ranks) // size}x{size}x{described_device()}"


def described_device() -> str:
    """Return the name by which clusters describe the GPUs of this machine; CPU where there is none."""
    if not torch.cuda.is_available():
        return "CPU"
    gpu = gpu_name()
    described = next((name for name in DEVICES if is_device(name, gpu)), None)
    if described is None:
        raise SeqloomError(
            f"plan.cluster = 'auto', and the GPU {gpu!r} is none of those described ({', '.join(DEVICES)}); name the "
            "cluster to plan for in plan.cluster, such as 1x8xH200, or a file that describes it"
        )
    return described


def gpu_name() -> str:
    """Return the name of the first GPU; asked of the driver, since asking torch takes memory on it."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", path.read_text(), re.MULTILINE)
        if model is not None:
            return model[1].strip()
    return torch.cuda.get_device_name(0)


def for_launched_ranks(config: Config, job_ranks: Sequence[JobRank], share_gpu: bool) -> Config:
    """Put what ranks were started on into a config: their nodes for plan.cluster = "auto", their part of a GPU."""
    plan = config.plan
    if plan.cluster == "auto":
        plan = replace(plan, cluster=spell_nodes(job_ranks))
    sharing = ranks_per_gpu(job_ranks[0].local_ranks) if share_gpu else 1
    if sharing > 1 and plan.budget_gib is None:
        device = Cluster.parse(plan.cluster).device
        if device.name != "CPU":
            plan = replace(plan, budget_gib=DEVICE_SHARE * device.memory_gib / sharing)
    return replace(config, plan=plan)


def _identity(setup: RunSetup, config: Config) -> dict[str, str]:
    """What a rank brings along, by name; of its config's data what was given, and not what rank 0 has made of it."""
    data = {f"data.{key}": str(value) for key, value in config.as_dict()["data"].items()}
    return {"Seqloom's version": __version__, "torch's version": torch.__version__} | setup.fingerprint() | data


def channels_of(setup: RunSetup) -> set[Channel]:
    """Return the channels that the plans of a run use."""
    stages = {*Channel} - {Channel.LAYERS, Channel.PARAMETERS} if setup.planners.multi_stage else set[Channel]()
    return stages | ({Channel.PARAMETERS} if setup.cost.sharding == Sharding.FREE else set())


def node_note(job_rank: JobRank, setup: RunSetup) -> str | None:
    """Say that plans take other nodes than those that ranks were started on; None: the same."""
    if job_rank.local_ranks == setup.cost.node_size:
        return None
    named = f"plan.cluster = {setup.config.plan.cluster!r} has {setup.cost.node_size} ranks in a node"
    return f"{named}, {job_rank.local_ranks} were started in this one"


def shared_gpu_note(ranks: int) -> str | None:
    """Say that ranks of this node share its GPUs; None: they do not."""
    if not shares_gpu():
        return None
    return f"{ranks} ranks share {torch.cuda.device_count()} GPU: results are exact, speed means nothing"


def kernel_advice(device: torch.device) -> str | None:
    """Say that the fastest attention of this GPU is not installed; None: it is, or the GPU has no such."""
    from seqloom.attention.kernels.dispatch import unavailable_kernels  # loads every kernel

    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return None
    if "fa4" not in unavailable_kernels(device):
        return None
    return "flash-attn-4 is not installed: attention may take twice as long on this GPU; pip install 'seqloom[gpu]'"


def _torch_timeout(config: Config) -> timedelta:
    """How long torch's own messages wait: at least as long as the watchdog, which has more to report."""
    return timedelta(seconds=max(config.run.timeout_s, START_S))


# ---- The profile of a run's machine
# Measuring needs ranks, and a run's plans need what they measure. So a run whose profile is measured has that in its
# folder, as a file, before anything is planned: a run that goes on reads the same.

PROFILE_FILE = "profile.json"
"""In `run.output`: the profile of the machine, where the run has measured it."""
MACHINE_PROFILES = "seqloom.profiling.stored"
"""The module that measures: it runs training steps, as this one does, and is loaded by name."""


def needs_profile(config: Config) -> bool:
    """Whether a run's profile is that of its machine: asked for, or no profile is shipped for its device."""
    if config.plan.profile is not None:
        return config.plan.profile == MEASURED
    return not Profile.knows(Cluster.parse(config.plan.cluster).device.name)


def profile_file(config: Config) -> Path:
    """Return where a run has the profile of its machine."""
    return config.run.output / PROFILE_FILE


def with_machine_profile(config: Config) -> Config:
    """Return a config that names the profile of its machine, if the run has that."""
    if not needs_profile(config):
        return config
    return replace(config, plan=replace(config.plan, profile=str(profile_file(config))))


def machine_measurement(config: Config, model_family: ModelFamily) -> tuple[ModuleType, Any]:
    """Return the module that measures the machine of a run, `profiling.stored`, and its `MachineSetup`."""
    module, dtypes = import_module(MACHINE_PROFILES), parameter_dtypes(config)
    dtype = str(dtypes[1] or dtypes[0]).removeprefix("torch.")
    return module, module.MachineSetup.of_run(config, model_family.describe(config), dtype)


def save_profile(config: Config, text: str, note: str) -> str:
    """Write the profile of a run's machine into its folder; return the note."""
    path = profile_file(config)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise SeqloomError(f"{path}: cannot be written ({reason}); choose another run.output") from None
    return note


def profile_alike(config: Config, process: RankProcess, family: ModelFamily, show: Callable[[str], None]) -> Config:
    """Return a config with the profile of its machine, which the ranks measure if the run lacks it. All ranks call it.

    Where processes were started by `train_on_processes`, that has done it.
    """
    job_rank = process.job_rank
    placed = for_launched_ranks(config, gather_job_ranks(job_rank), shares_gpu())
    if not needs_profile(placed):
        return config
    there = [profile_file(config).is_file()]
    dist.broadcast_object_list(there, src=0, device=torch.device("cpu"))
    if not there[0]:
        show("looking for the profile of this machine, which is measured if none is stored")
        module, setup = machine_measurement(placed, family)
        found = module.measure_stored(process, setup)
        if job_rank.rank == 0:
            show(save_profile(config, *found))
        dist.broadcast_object_list(there, src=0, device=torch.device("cpu"))  # the file is there for all
    return replace(config, plan=replace(config.plan, profile=str(profile_file(config))))


# ---- Processes and devices


def run_as_launched_rank(body: Body, *arguments: Any, share_gpu: bool = False, timeout: timedelta | None = None) -> Any:
    """Run a body as the rank that a launcher made this process, and return its result.

    A rank that cannot continue prints the reason to stderr and ends the process. Ranks of torchrun end with its agent,
    too: they would train on, in a folder that the next run takes.
    """
    job_rank = launched_rank()
    assert job_rank is not None
    if TORCHRUN in os.environ:
        end_with_parent(EXIT_FAILED)
    connect = partial(init_process_group, job_rank, share_gpu=share_gpu, timeout=timeout)
    return _run_body(body, arguments, job_rank, connect, _stderr_report(job_rank))


def _stderr_report(job_rank: JobRank) -> Callable[[str], None]:
    return lambda text: print(f"seqloom: rank {job_rank.rank}: {text}", file=sys.stderr, flush=True)


def run_on_processes(
    body: Body,
    ranks: int,
    *arguments: Any,
    preload: str | None = None,
    share_gpu: bool = False,
    on_cpu: bool = False,
    timeout: timedelta | None = None,
    way_out: str = "try fewer ranks, or a smaller model",
    watched: bool = False,
    ends_process: bool = False,
) -> Any:
    """Start `ranks` processes on this machine, wait for them, and return the body's result on rank 0.

    When one fails, the others are stopped and its reason is raised; where a rank died without a report, `way_out` ends
    the message. When this process dies, they end. Processes are forks of a server that has loaded torch, the body's
    module and `preload` once: loading takes seconds of a core, forking none; the server has no threads yet and has not
    touched a GPU.

    A body that is `watched` runs under a `Watchdog`: signals to leave that reach this process, if it calls from its
    main thread, are passed on to it, and torch leaves it to the watchdog to end a rank (`WATCHED_NCCL`).
    With `ends_process` the caller ends this process next: once asked to leave, it ignores such signals from then on.
    """
    check_cores(ranks)
    check_gpus(ranks, share_gpu=share_gpu or on_cpu)
    context = start_fork_server(__name__, body.__module__, *filter(None, [preload]))
    forwards = watched and threading.current_thread() is threading.main_thread() and sys.platform != "win32"
    signals = SignalPipe(LEAVE_SIGNALS) if forwards else None
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="seqloom-") as folder:
        options = {"share_gpu": share_gpu, "on_cpu": on_cpu, "timeout": timeout}
        process_arguments = (ranks, folder, watched, options, body, arguments)
        try:
            with allocator_environment(), blocked_signals():
                for rank in range(ranks):
                    process = context.Process(target=_process_main, args=(rank, *process_arguments))
                    process.start()
                    processes.append(process)
            codes = _wait_for_ranks(processes, signals, way_out)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            if signals is not None:
                signals.close(restore=not (ends_process and signals.received))
        if codes != [0] * ranks:
            raise _failure(Path(folder), codes, way_out, watched=watched)
        return torch.load(Path(folder) / "result", weights_only=True)


def _wait_for_ranks(processes: Sequence[BaseProcess], signals: SignalPipe | None, way_out: str) -> list[int | None]:
    """Wait until all have ended, and pass signals on; return exit codes, None of those that this function has ended.

    `LEAVE` is repeated, since a rank that compiles may lose it (`SignalPipe.install_handlers`). After a failure the
    others have `GRACE_S` to end by themselves, as long again after `END`, and are then killed; a second urgent signal
    is an `END` at once.
    """
    urgent, asked, ending, deadline = 0, False, False, inf
    codes: list[int | None] = []
    while running := [process for process in processes if process.is_alive()]:
        files = [process.sentinel for process in running] + ([] if signals is None else [signals.fileno()])
        limit = min(deadline, time.monotonic() + REPEAT_S) if asked else deadline
        wait(files, timeout=None if limit == inf else max(0.0, limit - time.monotonic()))
        numbers = signals.read(0) if signals is not None else b""
        urgent += sum(number in URGENT for number in numbers)
        asked = asked or bool(numbers)
        if asked:
            _send(running, LEAVE)
        if not ending:
            codes = [process.exitcode for process in processes]
            grace_s = 0.0 if urgent > 1 else GRACE_S if any(codes) else inf
            deadline = min(deadline, time.monotonic() + grace_s)
        if time.monotonic() >= deadline:
            _send(running, signal.SIGKILL if ending else END)
            ending, deadline = True, time.monotonic() + GRACE_S
    if ending and urgent > 1:
        raise SeqloomError(f"ended at once by a second signal; {way_out}")
    return codes if ending else [process.exitcode for process in processes]


def _send(processes: Sequence[BaseProcess], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(cast("int", process.pid), number)


def threads_of_rank(ranks: int) -> int:
    """Return the threads that torch gets in each of so many processes on this machine."""
    return max(1, (os.cpu_count() or 1) // ranks)


def _process_main(
    rank: int,
    ranks: int,
    folder: str,
    watched: bool,
    options: dict[str, Any],
    body: Body,
    arguments: tuple[Any, ...],
) -> None:
    """Take this rank's share of the cores, connect through a file in `folder`, run the body, leave rank 0's result.

    `options` are those of `init_process_group`.
    """

    def report(text: str) -> None:
        (Path(folder) / f"failed-{rank}").write_text(text)

    end_with_parent(EXIT_FAILED)
    receive_signals()
    for name, value in (LOOPBACK | (WATCHED_NCCL if watched else {})).items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(threads_of_rank(ranks))
    job_rank, store = JobRank(rank, ranks, rank, ranks), dist.FileStore(str(Path(folder) / "store"), ranks)
    connect = partial(init_process_group, job_rank, store=store, **options)
    result = _run_body(body, arguments, job_rank, connect, report)
    if rank == 0:
        torch.save(result, Path(folder) / "result")


def _run_body(
    body: Body,
    arguments: tuple[Any, ...],
    job_rank: JobRank,
    connect: Callable[[], torch.device],
    report: Callable[[str], None],
) -> Any:
    """Run a body; or report why not, and end the process without waiting for other ranks, which wait for this one."""
    try:
        device = connect()
        result = body(RankProcess(job_rank, device, report), *arguments)
    except SeqloomError as error:
        report(str(error))
    except Exception:
        report(traceback.format_exc())
    else:
        dist.destroy_process_group()
        return result
    os._exit(EXIT_FAILED)


def _failure(folder: Path, codes: Sequence[int | None], way_out: str, *, watched: bool) -> SeqloomError:
    """Say which ranks died by their exit codes (-9: killed by signal 9), and what the first rank wrote into `folder`.

    None are ranks that others have ended. Watched ranks leave by themselves, one by one, before the first step.
    """
    files = sorted(folder.glob("failed-*"), key=lambda path: path.stat().st_mtime_ns)
    reports = [(path.name.removeprefix("failed-"), path.read_text().strip()) for path in files]
    by_signal = {-code for code in codes if code is not None and code < 0} & LEAVE_SIGNALS
    if watched and LeftEarly.exit_code in codes:
        return LeftEarly(reports[0][1])
    if watched and by_signal:
        return LeftEarly(left_before_steps(None))
    ended = [(rank, code) for rank, code in enumerate(codes) if code]
    dead = [f"rank {rank} has died ({signal.Signals(-code).name})" for rank, code in ended if code < 0]
    if reports:
        return SeqloomError("; ".join([*dead, f"rank {reports[0][0]}: {reports[0][1]}"]))
    silent = [f"rank {rank} has ended with exit code {code}" for rank, code in ended if code > 0]
    return SeqloomError("; ".join([*dead, *silent, way_out]))


# ---- Compilers

CPP_COMPILERS = {"darwin": "clang++", "win32": "cl"}
"""The C++ compiler that torch calls on a platform; g++ on others. The variable CXX names another."""


def _check_compilers_if_needed(config: Config) -> None:
    if config.model.compile:
        check_compilers("cuda" if torch.cuda.is_available() else "cpu")


def check_compilers(device: str) -> None:
    """Refuse `model.compile` on a machine where torch.compile would fail in the first step.

    On "cpu" torch writes C++, on "cuda" Triton, which builds its launchers in C.
    """
    missing = []
    if device == "cuda":
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
        missing += [] if find_spec("triton") else ["triton"]
        missing += [] if any(map(shutil.which, names)) else [f"a C compiler ({' or '.join(map(repr, names))})"]
    else:
        name = os.environ.get("CXX", CPP_COMPILERS.get(sys.platform, "g++"))
        missing += [] if shutil.which(name) else [f"the C++ compiler {name!r}"]
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        missing.append("Python.h (the development files of this Python)")
    if missing:
        raise SeqloomError(
            f"model.compile = true, and torch.compile needs what is not here: {', '.join(missing)}; install it, or "
            "set model.compile = false"
        )
