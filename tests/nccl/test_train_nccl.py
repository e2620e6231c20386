"""`seqloom train` over NCCL: recipes train, are killed or asked to leave, go on, and end as if nothing had happened."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from seqloom.data import StoreWriter
from seqloom.train.logging import read_steps
from seqloom.train.run_folder import complete_checkpoints
from support.processes import ranks_of
from support.tiny_models import tiny_model

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
PYTHON_TRACEBACK = "Traceback (most recent call last)"  # torch logs stacks of its own when a peer is gone
VOCABULARY, STEPS, LIMIT_S = 257, 20, 300
USUAL = {"run.steps": STEPS, "run.timeout_s": 200, "schedule.warmup": 2, "checkpoint.every": 5, "evaluation.every": 0}
RECIPES = {
    # recipe, ranks, overrides; then ranks and overrides of the run that goes on
    "qwen3-8xh200": (8, {}, 4, {"plan.cluster": "1x4xH200"}),
    "tiny-cpu": (4, {}, 2, {}),
    "pipeline-cpu": (4, {}, 4, {"pipeline.stages": 2}),
    "hydraulis-cpu": (8, {"plan.cluster": "1x8xCPU"}, 4, {"plan.cluster": "1x4xCPU", "plan.budget_gib": 0.5}),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of very unequal length, in which tokens follow from others, and a small Qwen3 in a folder."""
    folder, draw = tmp_path_factory.mktemp("corpus"), np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=VOCABULARY) as writer:
        for length in np.clip(draw.lognormal(6, 1.5, 400).astype(int), 2, 8000):
            writer.add((draw.integers(VOCABULARY) + np.arange(length) * draw.integers(1, 4)) % VOCABULARY)
    sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 131072, "hidden_size": 64, "head_dim": 64}
    tiny_model("qwen3", dtype=torch.float32, **sizes).save_pretrained(folder / "model")
    return folder


def command(device, corpus, name, output, ranks, changes):
    settings = {**USUAL, "run.output": output, **changes}
    if name == "qwen3-8xh200":
        settings |= {"model.huggingface": corpus / "model", "data.source": corpus / "store", "data.tokens": 32_768}
        settings |= {"data.max_length": 8_192} | ({"model.compile": "false"} if device == "cpu" else {})
    elif device == "cpu":
        settings |= {"data.max_length": 256, "plan.capacity": 256}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    share = ["--share-gpu"] if device == "cuda" else []
    recipe = str(ROOT / "recipes" / f"{name}.toml")
    return [sys.executable, "-m", "seqloom", "train", recipe, *words, "--ranks", str(ranks), *share]


def train(*arguments):
    """Run to the end; return the losses."""
    done = subprocess.run(command(*arguments), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    return [record.loss for record in read_steps(arguments[3] / "metrics.jsonl")]


def train_until(*arguments, after, ask=False):
    """Kill a rank once a checkpoint is there, or ask the launcher to leave; return the exit code and what was said."""
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True) as launcher:
        try:
            until, folder = time.monotonic() + LIMIT_S, arguments[3] / "checkpoints"
            while not any(step >= after for step, _ in complete_checkpoints(folder)):
                assert launcher.poll() is None and time.monotonic() < until
                time.sleep(0.05)
            if ask:
                launcher.send_signal(signal.SIGTERM)
            else:
                os.kill(ranks_of(launcher.pid)[-1], signal.SIGKILL)
            _, said = launcher.communicate(timeout=LIMIT_S)
        finally:
            launcher.kill()
    return launcher.returncode, said


@pytest.mark.parametrize("name", RECIPES)
def test_killed_and_resumed_is_undisturbed(device, corpus, tmp_path, name):
    ranks, changes, other_ranks, other_changes = RECIPES[name]
    whole = train(device, corpus, name, tmp_path / "whole", ranks, {**changes, "checkpoint.every": 0})
    assert len(whole) == STEPS and whole[-1] < whole[0]
    code, said = train_until(device, corpus, name, tmp_path / "killed", ranks, changes, after=5)
    assert code == 2 and "has died (SIGKILL)" in said and PYTHON_TRACEBACK not in said, said[-4000:]
    resumed = train(device, corpus, name, tmp_path / "killed", other_ranks, {**changes, **other_changes})
    half = name == "qwen3-8xh200"
    np.testing.assert_allclose(resumed, whole, rtol=0.01 if half else 1e-4)


def test_asked_to_leave_and_resumed_is_undisturbed(device, corpus, tmp_path):
    steps = {"run.steps": 100_000, "schedule.kind": "constant"}
    code, said = train_until(device, corpus, "tiny-cpu", tmp_path / "left", 4, steps, after=5, ask=True)
    assert code == 75 and said.count("left after step") == 1 and PYTHON_TRACEBACK not in said, said[-4000:]
    done = complete_checkpoints(tmp_path / "left" / "checkpoints")[-1][0]
    steps["run.steps"] = done + 2
    resumed = train(device, corpus, "tiny-cpu", tmp_path / "left", 4, steps)
    whole = train(device, corpus, "tiny-cpu", tmp_path / "whole", 4, {**steps, "checkpoint.every": 0})
    assert len(resumed) == done + 2
    np.testing.assert_allclose(resumed, whole, rtol=1e-4)
