"""A signal asks a run to leave: it finishes the step, writes a checkpoint, and goes on as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from seqloom.errors import LeftEarly
from seqloom.plan import Plan
from seqloom.train.config import Config
from seqloom.train.launch import run_on_processes
from seqloom.train.logging import read_steps
from seqloom.train.run_folder import complete_checkpoints
from seqloom.train.signals import LEAVE_SIGNALS
from support.processes import children_of, ranks_of
from support.runs import leave_when_asked_twice, train_out_of_memory, train_until_asked, write_run
from support.workers import Workers

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]
LIMIT_S = 60
CONFIG = """
[run]
output = "run"
steps = 6
ranks = 2
[data]
source = "store"
validation = "store"
sequences = 4
max_length = 64
[model]
spec = "tiny.toml"
dtype = "float64"
[plan]
planner = "static"
capacity = 64
[evaluation]
every = 2
batches = 3
[checkpoint]
every = 4
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("leaving")
    write_run(folder, CONFIG, [5, 30, 12, 64, 3, 22, 40, 9] * 4)
    return folder


def configured(place, run, **changes):
    dotted = {"run.output": place / run, **{key.replace("__", "."): value for key, value in changes.items()}}
    return Config.load(place / "run.toml", [f"{key}={value}" for key, value in dotted.items()])


def logged(folder):
    """Losses of all steps and evaluations, in the order of the file."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("loss"), line.get("evaluation_loss")) for line in lines if "note" not in line]


# ---- When memory does not hold a step


def test_a_step_out_of_memory_is_told_with_prediction_plan_and_way_out(place, pair):
    said = pair.run(train_out_of_memory, configured(place, "oom"))
    for rank, each in enumerate(said):
        assert each.startswith("step 2, plan ") and f": rank {rank} is out of memory (CUDA out of memory. Tried" in each
        assert "GiB of a budget of" in each and "Set plan.budget_gib to " in each
    assert Plan.from_json((place / "oom" / "out-of-memory-plan.json").read_text()).validate() is None


# ---- When all ranks leave


@pytest.fixture(scope="module")
def pair(fork_server):
    """Two processes, since parameters are sharded over a whole job."""
    with Workers(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def undisturbed(pair, place):
    pair.run(train_until_asked, configured(place, "whole"), "never")
    return logged(place / "whole")


@pytest.mark.parametrize(
    ("phase", "left_after"),
    [
        ("evaluation after step 2", 2),
        ("step 4, plan", 4),
        ("checkpoint of step 4", 5),
        pytest.param("step 3, plan", 3, marks=pytest.mark.slow),
    ],
)
def test_one_rank_is_asked_and_all_leave_after_the_same_step(pair, place, undisturbed, phase, left_after):
    """An evaluation that was left comes first when the run goes on, and so does one that was not begun."""
    run = phase.replace(" ", "-")
    found = pair.run(train_until_asked, configured(place, run), phase)
    latest = complete_checkpoints(place / run / "checkpoints")[-1]
    assert latest[0] == left_after and len(logged(place / run)) < len(undisturbed)
    for summary, calls in found:
        assert summary["left"].startswith(f"left after step {left_after} of 6, asked by a signal; {latest[1]} is")
        assert calls == ["begin_steps", "finish"]
    pair.run(train_until_asked, configured(place, run), "never")
    assert logged(place / run) == undisturbed


@pytest.mark.parametrize(
    "phase",
    [
        "evaluation after step 6",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("step 6, plan", "the end of the run")),
    ],
)
def test_after_the_last_step_a_run_ends_as_ever(pair, place, undisturbed, phase):
    run = phase.replace(" ", "-")
    found = pair.run(train_until_asked, configured(place, run), phase)
    assert found[0][0]["steps"] == 6 and found[1][0] == {}
    assert logged(place / run) == undisturbed and (place / run / "model").is_dir()


# ---- Who is asked


def words(place: Path, run: str, **changes: object) -> list[str]:
    settings = {"run.output": place / run, "evaluation.every": 0, "checkpoint.every": 3, "run.steps": 100_000}
    settings |= {"schedule.kind": "constant"}
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    return ["train", str(place / "run.toml"), *sets]


def wait_for_checkpoint(folder: Path) -> None:
    until = time.monotonic() + LIMIT_S
    while not complete_checkpoints(folder / "checkpoints"):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_launcher_is_asked_and_the_same_command_goes_on(seqloom_here, place):
    run = place / "launcher"
    asking = threading.Thread(target=lambda: (wait_for_checkpoint(run), os.kill(os.getpid(), signal.SIGTERM)))
    asking.start()
    left = seqloom_here(*words(place, "launcher"))
    asking.join()
    done = complete_checkpoints(run / "checkpoints")[-1][0]
    assert left.returncode == LeftEarly.exit_code == 75, left.stderr
    assert left.stderr.count("\n") == 1
    assert f"seqloom: left after step {done} of 100,000" in left.stderr and "goes on from it" in left.stderr
    assert len(read_steps(run / "metrics.jsonl")) == done
    again = seqloom_here(*words(place, "launcher", run__steps=done + 2))
    assert again.returncode == 0, again.stderr
    assert len(read_steps(run / "metrics.jsonl")) == done + 2


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "seqloom"]
OURS = [sys.executable, "-m", "seqloom"]


def interrupted(place: Path, run: str, command: list[str], to, number: int) -> tuple[int, str, list[int]]:
    """Train until the first checkpoint, send a signal to a process; return exit code, stderr and all processes."""
    shutil.rmtree(place / run, ignore_errors=True)
    whole = [*command, *words(place, run)]
    with subprocess.Popen(whole, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            wait_for_checkpoint(place / run)
            ranks = ranks_of(launcher.pid)
            assert len(ranks) == 2
            processes = [*ranks, *(child for rank in ranks for child in children_of(rank))]
            os.kill(to(launcher.pid, ranks), number)
            _, said = launcher.communicate(timeout=LIMIT_S)
        finally:
            launcher.kill()
    return launcher.returncode, said, processes


@pytest.mark.slow
def test_one_rank_of_torchrun_is_asked(place):
    _, said, _ = interrupted(place, "torchrun", TORCHRUN, lambda _, ranks: ranks[1], signal.SIGTERM)
    done = complete_checkpoints(place / "torchrun" / "checkpoints")[-1][0]
    assert said.count("seqloom: left after step") == 1 and f"left after step {done} of" in said, said
    assert said.count("exitcode  : 75") == 2, "all ranks have the exit code"
    assert "has died" not in said


@pytest.mark.parametrize("command", [OURS, pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["ours", "torchrun"])
def test_ranks_do_not_outlive_the_launcher(place, command):
    _, said, processes = interrupted(place, "orphans", command, lambda launcher, _: launcher, signal.SIGKILL)
    assert len(processes) == 3, "two ranks, and the process that plans"
    until = time.monotonic() + 5
    while running := [pid for pid in processes if is_running(pid)]:
        assert time.monotonic() < until, running
        time.sleep(0.05)
    assert "Traceback" not in said


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended; who adopted it may not have noticed yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "number"),
    [(OURS, signal.SIGINT), (OURS, signal.SIGUSR1), (TORCHRUN, signal.SIGTERM), (TORCHRUN, signal.SIGINT)],
)
def test_launchers_and_signals(place, command, number):
    code, said, _ = interrupted(place, "signals", command, lambda launcher, _: launcher, number)
    assert said.count("seqloom: left after step") == 1, said
    assert code == (75 if command is OURS else 1)


def test_the_launcher_repeats_what_ranks_have_lost(tmp_path):
    def ask() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=ask)
    asking.start()
    assert run_on_processes(leave_when_asked_twice, 2, str(tmp_path), on_cpu=True, watched=True) == 2
    asking.join()


@pytest.mark.parametrize("ends_process", [False, True])
def test_a_signal_after_the_ranks_have_left(tmp_path, ends_process):
    """A second one may come when the process of the command line only has its exit code left to give."""

    def ask() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    def handler(*_: object) -> None:
        pass

    before = {each: signal.signal(each, handler) for each in LEAVE_SIGNALS}
    asking = threading.Thread(target=ask)
    asking.start()
    options = {"on_cpu": True, "watched": True, "ends_process": ends_process}
    try:
        run_on_processes(leave_when_asked_twice, 2, str(tmp_path), **options)
        expected = signal.SIG_IGN if ends_process else handler
        assert {signal.getsignal(each) for each in LEAVE_SIGNALS} == {expected}
    finally:
        asking.join()
        for each, own in before.items():
            signal.signal(each, own)


@pytest.mark.slow
def test_a_signal_to_the_whole_process_group(place):
    """As from a terminal, or from Slurm: also the process that forks ranks and the one that plans get it."""
    shutil.rmtree(place / "group", ignore_errors=True)
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([*OURS, *words(place, "group")], **options) as launcher:
        try:
            wait_for_checkpoint(place / "group")
            os.killpg(launcher.pid, signal.SIGINT)
            _, said = launcher.communicate(timeout=LIMIT_S)
        finally:
            launcher.kill()
    assert launcher.returncode == 75 and "Traceback" not in said and said.count("seqloom: left after step") == 1
