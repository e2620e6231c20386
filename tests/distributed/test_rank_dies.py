"""A rank dies or hangs: the others stop and name step, plan and limit; the run goes on from its checkpoint."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from seqloom.train.logging import read_steps
from seqloom.train.run_folder import complete_checkpoints
from support.processes import ranks_of

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
TINY = """
layers = 1
hidden = 8
heads = 4
kv_heads = 2
head_dim = 2
ffn = 8
gated = true
vocabulary = 257
tied = true
"""
RANKS, STEPS, BOUND_S = 3, 100_000, 120
SAID = r"step \d+, .*plan [0-9a-f]{12}\)?: one of 3 ranks has died or hangs \(.+\); ranks wait at most run.timeout_s = "


def words(place: Path, *, limit: int, steps: int = STEPS) -> list[str]:
    settings = {
        "data.source": "toy:64",
        "data.sequences": 4,
        "data.max_length": 32,
        "model.spec": place / "tiny.toml",
        "plan.planner": "static",
        "plan.capacity": 64,
        "run.steps": steps,
        "run.output": place / "run",
        "run.timeout_s": limit,
        "schedule.kind": "constant",
        "evaluation.every": 0,
        "checkpoint.every": 5,
    }
    return ["train", str(RECIPE), *(w for key, value in settings.items() for w in ("--set", f"{key}={value}"))]


LAUNCHERS = {
    "processes": lambda arguments: [sys.executable, "-m", "seqloom", *arguments, "--ranks", str(RANKS)],
    "torchrun": lambda arguments: [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)),
        *("-m", "seqloom", *arguments),
    ],
}


def interrupted(place: Path, how: str, rank: int, by: signal.Signals, limit: int) -> tuple[int, str]:
    """Train until the first checkpoint, send a rank a signal, and return the exit code and stderr."""
    (place / "tiny.toml").write_text(TINY)
    command = LAUNCHERS[how](words(place, limit=limit))
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            while not list((place / "run" / "checkpoints").glob("step-*")):
                assert launcher.poll() is None, launcher.stderr.read()
                time.sleep(0.05)
            pids = ranks_of(launcher.pid)
            assert len(pids) == RANKS
            os.kill(pids[rank], by)
            _, said = launcher.communicate(timeout=BOUND_S)
        finally:
            launcher.kill()
    return launcher.returncode, said


@pytest.mark.parametrize(("how", "rank"), [("processes", 0), pytest.param("torchrun", 1, marks=pytest.mark.slow)])
def test_the_others_stop_with_step_plan_and_limit_and_the_run_goes_on(tmp_path, how, rank):
    code, said = interrupted(tmp_path, how, rank, signal.SIGKILL, limit=600)
    assert code != 0
    assert re.search(f"{SAID}600 s", said), said
    assert re.search(r"checkpoints/step-\d+ is intact: run the same command to go on", said)
    if how == "torchrun":
        assert "seqloom: rank 0: step" in said and "seqloom: rank 2: step" in said, "all survivors speak"
        return
    assert code == 2 and f"rank {rank} has died (SIGKILL)" in said and "Traceback" not in said
    before = read_steps(tmp_path / "run" / "metrics.jsonl")
    done = complete_checkpoints(tmp_path / "run" / "checkpoints")[-1][0]
    again = LAUNCHERS["processes"](words(tmp_path, limit=600, steps=done + 3))
    result = subprocess.run([*again, "--json"], capture_output=True, text=True, timeout=BOUND_S)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == done + 3
    after = read_steps(tmp_path / "run" / "metrics.jsonl")
    assert [each.loss for each in after[:done]] == [each.loss for each in before[:done]]


@pytest.mark.slow
def test_a_rank_that_hangs_is_noticed_within_the_limit(tmp_path):
    code, said = interrupted(tmp_path, "processes", 1, signal.SIGSTOP, limit=12)
    assert code == 2
    assert re.search(f"{SAID}12 s", said), said
    assert "nothing has moved for 12 s" in said
