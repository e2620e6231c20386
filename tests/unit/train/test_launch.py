"""Starting ranks: what they are told, and compilers that are missing."""

import ctypes
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from seqloom.dist import JobRank
from seqloom.errors import SeqloomError
from seqloom.train import launch
from seqloom.train.config import Config
from seqloom.train.launch import WATCHED_NCCL, check_compilers, node_note
from seqloom.train.run_folder import LOCK_FILE, RunLock
from seqloom.train.setup import RunSetup
from seqloom.train.watchdog import Watchdog
from support.runs import SMALL

STEP = "step 7, plan 0123456789ab"
RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu.toml"


def test_the_log_says_where_plans_take_other_nodes():
    setup = RunSetup.load(Config.load(RECIPE, [*SMALL, "plan.cluster=1x4xCPU"]), 4)
    said = "plan.cluster = '1x4xCPU' has 4 ranks in a node, 2 were started in this one"
    assert node_note(JobRank(0, 4, 0, 2), setup) == said
    assert node_note(JobRank(0, 4, 0, 4), setup) is None


def environment_of_rank(process):
    return {name: os.environ.get(name) for name in WATCHED_NCCL}


@pytest.mark.distributed
def test_only_watched_ranks_keep_torch_from_aborting_them(fork_server):
    assert launch.run_on_processes(environment_of_rank, 1, watched=True) == WATCHED_NCCL
    assert launch.run_on_processes(environment_of_rank, 1) == dict.fromkeys(WATCHED_NCCL)


def die_or_hang(process, folder):
    """Rank 0 dies; the others are in a call that never returns, as one that waits for a GPU."""
    with Watchdog(process.job_rank.ranks, 600, folder, process.report) as watchdog:
        watchdog.enter_phase(STEP)
        watchdog.begin_steps()
        dist.barrier()
        if process.job_rank.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while ctypes.CDLL(None).sleep(60):
            pass


@pytest.mark.distributed
def test_ranks_that_hang_are_ended_with_a_report_when_one_has_died(fork_server, tmp_path):
    with pytest.raises(SeqloomError) as found:
        launch.run_on_processes(die_or_hang, 2, tmp_path, watched=True)
    assert str(found.value).startswith(
        f"rank 0 has died (SIGKILL); rank 1: {STEP}: one of 2 ranks has died or hangs (ended"
    )


HELD = """
import sys, time
from pathlib import Path
from seqloom.train.run_folder import RunLock
lock = RunLock(Path(sys.argv[1]))
lock.acquire()
print("locked", flush=True)
time.sleep(60)
"""


def test_a_folder_has_one_run_at_a_time(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", HELD, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"locked\n"
        partial = tmp_path / "checkpoints" / ".step-00000005.partial-1"  # that the other run is writing
        partial.mkdir(parents=True)
        config = Config.load(RECIPE, [*SMALL, f"run.output={tmp_path}"])
        with pytest.raises(SeqloomError, match=rf"in use by process {other.pid} on {socket.gethostname()}, since"):
            launch.train_on_processes(config, 2)
        found = sorted(path.name for path in tmp_path.rglob("*"))
        assert found == [LOCK_FILE, partial.name, "checkpoints"], "nothing is written, and nothing removed"
    finally:
        other.kill()
        other.wait()
        other.stdout.close()
    for _ in range(2):  # a process that was killed holds nothing, nor does one that has released the folder
        with RunLock(tmp_path) as lock:
            lock.acquire()


WAY_OUT = "install it, or set model.compile = false"


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with some programs, some packages, and the development files of Python, or without."""

    def make(*programs, packages=(), headers=True):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(launch.sys, "platform", "linux")
        monkeypatch.setattr(launch.shutil, "which", lambda name: name if name in programs else None)
        monkeypatch.setattr(launch, "find_spec", lambda name: name if name in packages else None)
        monkeypatch.setattr(launch.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
        if headers:
            (tmp_path / "Python.h").touch()

    return make


@pytest.mark.parametrize(
    ("device", "programs", "packages"),
    [("cpu", ["g++"], []), ("cuda", ["gcc"], ["triton"]), ("cuda", ["clang"], ["triton"])],
)
def test_a_machine_that_has_all(machine, device, programs, packages):
    machine(*programs, packages=packages)
    check_compilers(device)


@pytest.mark.parametrize(
    ("device", "programs", "packages", "missing"),
    [
        ("cpu", ["gcc", "clang++"], ["triton"], "is not here: the C++ compiler 'g++'; "),
        ("cuda", ["g++"], ["triton"], "is not here: a C compiler ('gcc' or 'clang'); "),
        ("cuda", ["gcc"], [], "is not here: triton; "),
        ("cuda", [], [], "is not here: triton, a C compiler ('gcc' or 'clang'); "),
    ],
)
def test_what_lacks_is_named(machine, device, programs, packages, missing):
    machine(*programs, packages=packages)
    with pytest.raises(SeqloomError) as error:
        check_compilers(device)
    assert missing + WAY_OUT in str(error.value)


def test_the_variables_that_name_another_compiler_count(machine, monkeypatch):
    machine("icpx", "g++", packages=["triton"])
    monkeypatch.setenv("CXX", "icpx")
    check_compilers("cpu")
    monkeypatch.setenv("CXX", "gone++")
    with pytest.raises(SeqloomError, match=r"the C\+\+ compiler 'gone\+\+'"):
        check_compilers("cpu")
    monkeypatch.setenv("CC", "gone")
    with pytest.raises(SeqloomError, match=r"a C compiler \('gone'\)"):
        check_compilers("cuda")


def test_python_needs_its_development_files(machine):
    machine("g++", headers=False)
    with pytest.raises(SeqloomError, match=r"Python\.h \(the development files"):
        check_compilers("cpu")


@pytest.mark.parametrize(
    ("gpu", "described"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80G"),
        ("NVIDIA A100-PCIE-40GB", "A100-40G"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_the_cluster_of_a_launcher_is_made_of_its_gpus(monkeypatch, gpu, described):
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "gpu_name", lambda: gpu)
    assert launch.spell_nodes([JobRank(rank, 4, rank % 2, 2) for rank in range(4)]) == f"2x2x{described}"


def test_a_gpu_that_nobody_has_described_is_refused(monkeypatch):
    monkeypatch.setattr(launch.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(launch, "gpu_name", lambda: "NVIDIA GeForce RTX 3090")
    with pytest.raises(
        SeqloomError, match=r"'NVIDIA GeForce RTX 3090' is none of those described .*A100-40G.*name the"
    ):
        launch.spell_nodes([JobRank(0, 1, 0, 1)])


@pytest.mark.parametrize(("share", "plan", "budget"), [
    (True, {"cluster": "1x8xH200"}, 0.9 * 140 / 8),
    (True, {"cluster": "auto"}, 0.9 * 140 / 8),
    (True, {"cluster": "1x8xH200", "budget_gib": 3.0}, 3.0),
    (True, {"cluster": "1x8xCPU"}, None),
    (False, {"cluster": "1x8xH200"}, None),
])  # fmt: skip
def test_ranks_that_share_a_gpu_share_its_memory(monkeypatch, share, plan, budget):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(launch, "described_device", lambda: "H200")
    config = Config.load(RECIPE, [*SMALL, *(f"plan.{key}={value}" for key, value in plan.items())])
    found = launch.for_launched_ranks(config, [JobRank(rank, 8, rank, 8) for rank in range(8)], share).plan
    assert found.budget_gib == budget and found.cluster == plan["cluster"].replace("auto", "1x8xH200")
