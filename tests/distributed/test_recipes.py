"""Every recipe trains and is verified, made tiny by overrides: all that is not size stays as the file has it."""

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from seqloom.cli import app
from seqloom.train.logging import read_steps
from support.tiny_models import tiny_model
from support.tiny_specs import TINY as TINY_SPEC

pytestmark = pytest.mark.distributed
torch.set_num_threads(1)
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))
FOLDERS = [folder for folder in sorted((RECIPES[0].parent / "models").iterdir()) if folder.is_dir()]
NAMED = {Path(tomllib.loads(each.read_text())["model"].get("huggingface", "none")).name for each in RECIPES}
RUNS = {each.stem: (each, ()) for each in RECIPES} | {
    folder.name: (RECIPES[0].parent / "huggingface-cpu.toml", (f"model.huggingface={folder}",))
    for folder in FOLDERS
    if folder.name not in NAMED
}
"""Every recipe, and the one of Hugging Face models with every folder that no recipe names."""
SLOW = (
    "experts-cpu",
    "experts-tensor-cpu",
    "hydraulis-cpu",
    "hybrid-cpu",
    "latent-cpu",
    "huggingface-cpu",
    "tiny-gemma2",
    "tiny-llama4",
    "tiny-gpt2",
    "tiny-phi3",
    "tiny-bamba",
    "tiny-gemma3",
    "tiny-granite",
    "tiny-phi",
    "tiny-qwen3-next",
)
SLOW_TO_VERIFY = ("tiny-bamba", "tiny-gemma3", "tiny-granite", "tiny-phi", "tiny-qwen3-next")
FLOAT32 = ("latent-cpu", "tiny-gemma2", "tiny-gemma3", "tiny-qwen3-next")
"""With a router, or norms, that compute in float32, whatever the dtype of the model."""
TINY = (
    *("run.steps=4", "run.epochs=", "checkpoint.every=2", "checkpoint.resume=auto", "log.sinks=[]"),
    *("data.source=toy:24", "data.validation=toy:4:1", "data.sequences=4", "data.tokens="),
    *("data.max_length=96", "data.too_long=truncate", "evaluation.every=2", "evaluation.batches=1"),
    *("plan.cluster=auto", "plan.profile=", "plan.budget_gib=", "plan.capacity=128"),
    *("model.parameters=", "model.compile=false", "optimiser.lr=0.01", "schedule.warmup=1"),
)
"""Sizes, places and machines, a compiler among them; a key without value is taken out."""


def overrides(recipe: Path, folder: Path) -> list[str]:
    """Return the words that make a recipe tiny; its model becomes a tiny one of the same kind, unless it brings one."""
    content = tomllib.loads(recipe.read_text())
    words = [*TINY, f"run.output={folder / 'run'}"]
    if content.get("pipeline", {}).get("stages", 1) != 1:
        words.append("pipeline.stages=2")
    if (recipe.parent / content["model"].get("huggingface", "none")).is_dir():  # it is tiny already
        pass
    elif "huggingface" in content["model"]:
        sizes = {"vocab_size": 257, "max_position_embeddings": 128}
        tiny_model("llama", dtype=torch.float32, **sizes).save_pretrained(folder / "model")
        words.append(f"model.huggingface={folder / 'model'}")
    elif "moe" not in content["model"]["spec"]:  # experts are what the others are for
        (folder / "tiny.toml").write_text(TINY_SPEC)
        words.append(f"model.spec={folder / 'tiny.toml'}")
    if content["plan"].get("strategies", "auto") != "auto":  # of other ranks
        words.append("plan.strategies=auto")
    return [word for override in words for word in ("--set", override)]


@pytest.mark.parametrize(
    "name",  # the slow ones are trained by tests of their own, below and in `test_huggingface_matrix.py`
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in RUNS],
)
def test_it_trains(seqloom_here, name, tmp_path):
    recipe, own = RUNS[name]
    words = [*overrides(recipe, tmp_path), *(word for each in own for word in ("--set", each))]
    result = seqloom_here("train", recipe, *words, "--ranks", "2", "--json")
    assert result.returncode == 0, result.stderr
    losses = [record.loss for record in read_steps(tmp_path / "run" / "metrics.jsonl")]
    assert len(losses) == json.loads(result.stdout)["steps"] >= 4
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_TO_VERIFY else []) for name in RUNS]
)
def test_its_plans_change_nothing(name, tmp_path):
    recipe, own = RUNS[name]
    words = [*overrides(recipe, tmp_path), *(word for each in own for word in ("--set", each))]
    words += ["--ranks", "2", "--planners", "static,flex", "--json"]
    result = CliRunner().invoke(app, ["verify", str(recipe), *words])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"] and len(report["plans"]) == 2
    largest = 1e-6 if name in FLOAT32 else 1e-9
    assert max(row["max_relative_gradient_difference"] for row in report["plans"]) < largest


@pytest.mark.slow
def test_strategies_switch_by_themselves(seqloom_here, tmp_path):
    """As the recipe stands, but for its length: what the planner chooses from what was proposed."""
    few = (f"run.output={tmp_path}", "run.steps=4", "evaluation.every=0", "checkpoint.every=0")
    recipe = RECIPES[0].parent / "hydraulis-cpu.toml"
    done = seqloom_here("train", recipe, *(word for each in few for word in ("--set", each)))
    assert done.returncode == 0, done.stderr
    records = read_steps(tmp_path / "metrics.jsonl")
    shapes = [record.shape for record in records]
    assert len(set(shapes)) >= 3 and any("2x" in shape for shape in shapes), shapes
    assert not any(record.fallback for record in records) and records[-1].loss < records[0].loss


LATENT_RUNS = {
    "full": ("plan.cluster=2x1xCPU", "plan.planner=static:2"),
    "free": ("plan.cluster=2x1xCPU", "plan.planner=static:2", "plan.sharding=free"),
    "pieces": ("plan.cluster=auto", "pipeline.stages=2", "pipeline.schedule=seq1f1b-zb", "plan.capacity=64"),
    "compiled": ("plan.cluster=2x1xCPU", "plan.planner=static:2", "model.compile=true"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "full" else [pytest.mark.slow]) for name in LATENT_RUNS]
)
def test_latents_between_two_processes_change_nothing(seqloom_here, tmp_path, name):
    """Parameters sharded in every way, weight gradients that are deferred, compiled layers: losses of one process."""
    recipe = RECIPES[0].parent / "latent-cpu.toml"
    few = ("data.sequences=3", "run.steps=3", "model.dtype=float64", "evaluation.every=0", "checkpoint.every=0")
    losses = []
    for ranks, own in ((1, ("plan.cluster=auto",)), (2, LATENT_RUNS[name])):
        words = [*TINY, *few, f"run.output={tmp_path / str(ranks)}", *own]
        sets = [word for each in words for word in ("--set", each)]
        done = seqloom_here("train", recipe, *sets, "--ranks", str(ranks))
        assert done.returncode == 0, done.stderr
        losses.append([record.loss for record in read_steps(tmp_path / str(ranks) / "metrics.jsonl")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and len(losses[0]) == 3


EXPERT_RUNS = {
    "one node": ("plan.expert=4", "plan.planner=static:2"),
    "two groups": ("plan.expert=2", "plan.planner=static:4", "plan.cluster=2x2xCPU", "plan.sharding=hybrid"),
    "replicas": ("plan.expert=2", "plan.planner=flex", "plan.sharding=none"),
    "stages": ("plan.expert=2", "pipeline.stages=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERT_RUNS)
def test_divided_experts_change_nothing(seqloom_here, tmp_path, name):
    """Experts over processes, with sequences and parameters over them as well: losses of one process."""
    recipe = RECIPES[0].parent / "experts-cpu.toml"
    few = ("run.steps=3", "model.dtype=float64", "evaluation.every=0", "checkpoint.every=0", "plan.capacity=64")
    losses = []
    for ranks, own in ((1, ("plan.expert=1", "plan.capacity=512")), (4, EXPERT_RUNS[name])):
        words = [*TINY, *few, f"run.output={tmp_path / str(ranks)}", *own]
        sets = [word for each in words for word in ("--set", each)]
        done = seqloom_here("train", recipe, *sets, "--ranks", str(ranks))
        assert done.returncode == 0, done.stderr
        losses.append([record.loss for record in read_steps(tmp_path / str(ranks) / "metrics.jsonl")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and len(losses[0]) == 3


@pytest.mark.slow
def test_stages_that_share_experts_change_nothing(seqloom_here, tmp_path):
    """Two stages of two processes that have half of the heads and of the experts each: losses of one process."""
    few = ("run.steps=3", "model.dtype=float64", "evaluation.every=0", "checkpoint.every=0")
    losses, shapes = [], []
    for ranks, name, own in ((1, "experts-cpu", ("plan.expert=1", "plan.capacity=512")), (4, "experts-tensor-cpu", ())):
        words = [*TINY, *few, f"run.output={tmp_path / str(ranks)}", *own]
        sets = [word for each in words for word in ("--set", each)]
        done = seqloom_here("train", RECIPES[0].parent / f"{name}.toml", *sets, "--ranks", str(ranks))
        assert done.returncode == 0, done.stderr
        records = read_steps(tmp_path / str(ranks) / "metrics.jsonl")
        losses.append([record.loss for record in records])
        shapes.append([record.shape for record in records])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and len(losses[0]) == 3
    assert any("2x" in shape for shape in shapes[1]), shapes


def test_there_are_recipes():
    assert "tiny-cpu" in [recipe.stem for recipe in RECIPES]
