"""Runs with a pipeline: the same losses and the same model as without, and checkpoints that go on either way."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from seqloom.train.config import Config
from support.runs import logged, train_in_process, write_run

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
    """A config, a tiny model, and documents of which one is long."""
    folder = tmp_path_factory.mktemp("stages")
    write_run(folder, CONFIG, (96, *np.random.default_rng(1).integers(2, 20, 29)))
    return folder


def train(transport, config: Config):
    """One rank of a run; returns the number of its stages and the loss of every step."""
    setup, records = train_in_process(transport, config)
    return setup.config.pipeline.stages, [record.loss for record in records]


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
    """A run with four stages of two ranks each, which all have the head."""
    stages, losses = run(gloo_pool, place, "piped", "pipeline.stages=4", "pipeline.head=all")
    assert stages == 4
    return losses


def test_a_pipeline_trains_the_same_model(place, whole, piped):
    assert np.allclose(piped, whole, rtol=1e-9, atol=0)
    mine, theirs = (load_file(place / name / "model" / "model.safetensors") for name in ("piped", "whole"))
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], theirs[name], rtol=1e-7, atol=1e-10) for name in mine)
    mine, theirs = (logged(place / name, "evaluation_loss") for name in ("piped", "whole"))
    assert len(mine) == 2 and np.allclose(mine, theirs, rtol=1e-9, atol=0)


@pytest.mark.slow
def test_a_document_in_pieces_on_one_stage_trains_the_same_model(gloo_pool, place, whole):
    """Ranks hold 8 tokens of a round, eight of them 64 of the 96 of the longest document."""
    stages, losses = run(gloo_pool, place, "in pieces", "plan.capacity=8")
    assert stages == 1 and "pieces" in logged(place / "in pieces", "planner")
    assert np.allclose(losses, whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("begun", "settings"),
    [
        pytest.param("piped", ("pipeline.stages=2", "pipeline.chunks=2"), id="fewer stages"),
        pytest.param("piped", ("pipeline.stages=2", "pipeline.chunks=auto"), id="chosen", marks=pytest.mark.slow),
        pytest.param("piped", ("plan.planner=static",), id="none", marks=pytest.mark.slow),
        pytest.param("whole", ("pipeline.stages=2", "plan.sharding=none"), id="from none", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_go_on_with_other_stages(gloo_pool, place, whole, piped, begun, settings):
    begin = place / begun / "checkpoints" / "step-00000002"
    name = "-".join((begun, *settings))
    _, losses = run(gloo_pool, place, name, f"checkpoint.resume={begin}", "checkpoint.every=0", *settings)
    assert np.allclose(losses, whole[2:], rtol=1e-9, atol=0)
