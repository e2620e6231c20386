"""Runs with a pipeline: the same losses and the same model as without, and checkpoints that go on either way."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from seqloom.data import StoreWriter
from seqloom.planners.ahead import StepPlan
from seqloom.testing.tiny_specs import TINY
from seqloom.train.config import Config
from seqloom.train.loop import Trainer
from seqloom.train.metrics import read_steps
from seqloom.train.setup import Setup

torch.set_num_threads(1)
RANKS, STEPS = 8, 4
CONFIG = f"""
[run]
steps = {STEPS}
output = "run"
[model]
spec = "tiny.toml"
dtype = "float64"
[data]
source = "store"
validation = "store"
sequences = 6
max_length = 96
[plan]
cluster = "1x{RANKS}xCPU"
planner = "auto"
[optimiser]
lr = 1e-2
clip = 0.5
[evaluation]
every = 2
batches = 1
[checkpoint]
every = 2
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A config, a tiny model of four layers with a tied head, and documents of which one is long."""
    folder = tmp_path_factory.mktemp("stages")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=257) as writer:
        for length in (96, *draw.integers(2, 20, 29)):
            writer.add(draw.integers(0, 20, length))
    (folder / "tiny.toml").write_text(TINY.replace("layers = 2", "layers = 4"))
    (folder / "run.toml").write_text(CONFIG)
    return folder


class Now:
    """Plans at once, in this process: workers of a pool may not start others."""

    def __init__(self, setup):
        self._setup = setup

    def submit(self, step, lengths):
        pass

    def take(self, step, lengths):
        return StepPlan(step, self._setup.planners.planner.plan(lengths, self._setup.cost), 0, 0)


class NowTrainer(Trainer):
    def _planner(self):
        return Now(self.setup) if self.transport.rank == 0 else None


def train(transport, config: Config):
    """One rank of a run; returns the number of its stages and the loss of every step."""
    setup = Setup.of(config, transport.ranks)
    with NowTrainer(setup.config, setup, transport) as trainer:
        trainer.run()
    return len(setup.planners.stages), [record.loss for record in read_steps(config.metrics)]


def run(gloo_pool, place: Path, name: str, *settings: str) -> tuple[int, list[float]]:
    config = Config.load(place / "run.toml", [f"run.output={place / name}", *settings])
    return gloo_pool.run(train, config, ranks=RANKS, timeout_s=150)[0]


@pytest.fixture(scope="module")
def whole(gloo_pool, place):
    """A run without a pipeline."""
    stages, losses = run(gloo_pool, place, "whole", "plan.planner=static")
    assert stages == 1 and len(losses) == STEPS
    return losses


@pytest.fixture(scope="module")
def piped(gloo_pool, place):
    """A run with four stages of two ranks each."""
    stages, losses = run(gloo_pool, place, "piped", "pipeline.stages=4")
    assert stages == 4
    return losses


def evaluations(place: Path, name: str) -> list[str]:
    lines = (place / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in lines if "validation" in line]


def test_a_pipeline_trains_the_same_model(place, whole, piped):
    assert np.allclose(piped, whole, rtol=1e-9, atol=0)
    mine, theirs = (load_file(place / name / "model" / "model.safetensors") for name in ("piped", "whole"))
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], theirs[name], rtol=1e-7, atol=1e-10) for name in mine)
    metrics = [(place / name / "metrics.jsonl").read_text() for name in ("piped", "whole")]
    assert metrics[0].count('"evaluation"') == metrics[1].count('"evaluation"')


@pytest.mark.parametrize(
    ("begun", "settings"),
    [
        ("piped", ("pipeline.stages=2", "pipeline.chunks=2")),
        ("piped", ("plan.planner=static",)),
        ("whole", ("pipeline.stages=2", "plan.sharding=none")),
    ],
    ids=["fewer stages", "none", "from none"],
)
def test_checkpoints_go_on_with_other_stages(gloo_pool, place, whole, piped, begun, settings):
    begin = place / begun / "checkpoints" / "step-00000002"
    name = "-".join((begun, *settings))
    _, losses = run(gloo_pool, place, name, f"checkpoint.resume={begin}", "checkpoint.every=0", *settings)
    assert np.allclose(losses, whole[2:], rtol=1e-9, atol=0)
