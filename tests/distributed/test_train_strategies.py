"""Runs that change their strategy from step to step: the same losses and the same model as static, and checkpoints."""

import json
from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from seqloom.data import StoreWriter
from seqloom.planners.ahead import StepPlan
from seqloom.planners.strategies import Pipe, Scheme, Strategy, strategies_to_json
from seqloom.planners.strategies.assign import Assignment
from seqloom.planners.strategies.planner import build
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
sequences = 8
max_length = 96
[plan]
cluster = "1x{RANKS}xCPU"
[optimiser]
lr = 1e-2
clip = 0.5
[evaluation]
every = 2
batches = 1
[checkpoint]
every = 2
"""


def strategy(*schemes: tuple[int, ...]) -> Strategy:
    """Pipelines of these schemes, one beside the other."""
    shapes = [Scheme(*each) for each in schemes]
    ends = accumulate(each.ranks for each in shapes)
    return Strategy(tuple(Pipe(s, tuple(range(end - s.ranks, end)), 96) for s, end in zip(shapes, ends, strict=True)))


STRATEGIES = (
    strategy((2, 2), (1, 1, 1, 2), (2, 1)),  # stages, tensor and SP degree all differ
    strategy((4, 1, 2)),
    strategy((1, 2, 2), (1, 2), (1, 1), (1, 1)),
    strategy((1, 1, 4, 2)),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A config, a tiny model of four layers with a tied head, documents of which one is long, and lists."""
    folder = tmp_path_factory.mktemp("strategies")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=257) as writer:
        for length in (96, *draw.integers(2, 30, 39)):
            writer.add(draw.integers(0, 20, length))
    (folder / "tiny.toml").write_text(TINY.replace("layers = 2", "layers = 4"))
    (folder / "run.toml").write_text(CONFIG)
    (folder / "all.json").write_text(strategies_to_json(STRATEGIES))
    (folder / "others.json").write_text(strategies_to_json(STRATEGIES[1:3]))
    return folder


class InTurn:
    """Plans at once, in this process; every step has another strategy, all of whose pipelines get documents."""

    def __init__(self, setup):
        self._setup = setup

    def submit(self, step, lengths):
        pass

    def take(self, step, lengths):
        chosen, cost = self._setup.planners, self._setup.cost
        if not chosen.strategies:
            return StepPlan(step, chosen.planner.plan(lengths, cost), 0, 0)
        strategy = chosen.strategies[step % len(chosen.strategies)]
        count = len(strategy.pipelines)
        order = np.argsort(-lengths, kind="stable").tolist()
        dealt = tuple(tuple((document,) for document in order[k::count]) for k in range(count))
        plan = build(lengths, strategy, Assignment(0, dealt, (0,) * count), cost, seed=0).plan
        plan.validate()
        return StepPlan(step, plan, 0, 0)


class InTurnTrainer(Trainer):
    def _planner(self):
        return InTurn(self.setup) if self.transport.rank == 0 else None


def train(transport, config: Config):
    """One rank of a run; returns the shape and the loss of every step."""
    setup = Setup.of(config, transport.ranks)
    with InTurnTrainer(setup.config, setup, transport) as trainer:
        trainer.run()
    return [(record.shape, record.loss) for record in read_steps(config.metrics)]


def run(gloo_pool, place: Path, name: str, *settings: str) -> tuple[list[str], list[float]]:
    config = Config.load(place / "run.toml", [f"run.output={place / name}", *settings])
    shapes, losses = zip(*gloo_pool.run(train, config, ranks=RANKS, timeout_s=150)[0], strict=True)
    return list(shapes), list(losses)


def chosen_from(place: Path, name: str) -> tuple[str, ...]:
    return "plan.planner=strategies", "plan.sharding=free", f"plan.strategies={place / name}.json"


@pytest.fixture(scope="module")
def static(gloo_pool, place):
    """The losses of a run that keeps one strategy, all ranks side by side."""
    return run(gloo_pool, place, "static", "plan.planner=static")[1]


@pytest.fixture(scope="module")
def switching(gloo_pool, place):
    """Shapes and losses of a run with another strategy in every step."""
    return run(gloo_pool, place, "switching", *chosen_from(place, "all"))


def notes(place: Path, name: str) -> list[str]:
    lines = map(json.loads, (place / name / "metrics.jsonl").read_text().splitlines())
    return [line["note"] for line in lines if "note" in line]


def evaluations(place: Path, name: str) -> list[float]:
    lines = map(json.loads, (place / name / "metrics.jsonl").read_text().splitlines())
    return [line["evaluation_loss"] for line in lines if "evaluation_loss" in line]


def test_changing_the_strategy_trains_the_same_model(place, static, switching):
    shapes, losses = switching
    assert len(set(shapes)) == STEPS and any("2x2/4" in shape and "1x2/2" in shape for shape in shapes)
    assert np.allclose(losses, static, rtol=1e-9, atol=0)
    mine, theirs = (load_file(place / name / "model" / "model.safetensors") for name in ("switching", "static"))
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], theirs[name], rtol=1e-7, atol=1e-10) for name in mine)
    mine, theirs = (evaluations(place, name) for name in ("switching", "static"))
    assert len(mine) == 2 and np.allclose(mine, theirs, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("begun", "name", "settings"),
    [
        ("switching", "others", ()),
        ("switching", "", ("plan.planner=static",)),
        ("switching", "", ("pipeline.stages=2", "plan.sharding=free")),
        ("static", "auto", ("plan.planner=strategies", "plan.sharding=free")),
    ],
    ids=["another list", "another sharding", "one pipeline", "from another sharding to what is proposed"],
)
def test_checkpoints_go_on_with_another_list_and_another_sharding(
    gloo_pool, place, static, switching, begun, name, settings
):
    begin, run_name = place / begun / "checkpoints" / "step-00000002", "-".join((begun, name, *settings))
    given = chosen_from(place, name) if name == "others" else settings
    never = ("checkpoint.every=0", "evaluation.every=0")
    _, losses = run(gloo_pool, place, run_name, f"checkpoint.resume={begin}", *given, *never)
    assert np.allclose(losses, static[2:], rtol=1e-9, atol=0)
    told = " ".join(notes(place, run_name))
    assert ("nothing in it depends on them" in told) and (("strategies to choose from" in told) == bool(name))
    assert (place / run_name / "strategies.json").exists() == (name == "auto")
