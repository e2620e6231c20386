"""Runs that change their strategy from step to step: the same losses and the same model as static, and checkpoints."""

from itertools import accumulate
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from seqloom.plan import Plan
from seqloom.plan.pipeline import reshard_after_forward_stages
from seqloom.planners.hydraulis import ParallelConfig, PipelineConfig, Strategy, strategies_to_json
from seqloom.planners.hydraulis.dispatch import Assignment
from seqloom.planners.hydraulis.planner import plan_assignment
from seqloom.train.config import Config
from seqloom.train.setup import RunSetup
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


def strategy(*configs: tuple[int, ...]) -> Strategy:
    """Pipelines of these configs, one beside the other."""
    shapes = [ParallelConfig(*each) for each in configs]
    ends = accumulate(each.ranks for each in shapes)
    return Strategy(
        tuple(PipelineConfig(s, tuple(range(end - s.ranks, end)), 96) for s, end in zip(shapes, ends, strict=True))
    )


STRATEGIES = (
    strategy((2, 2), (1, 1, 1, 2), (2, 1)),  # stages, tensor and SP degree all differ
    strategy((4, 1, 2)),
    strategy((1, 2, 2), (1, 2), (1, 1), (1, 1)),
    strategy((1, 1, 2, 2, True), (1, 1, 2, 2)),  # one gathers its parameters for every pass
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A config, a tiny model, documents of which one is long, and lists of strategies."""
    folder = tmp_path_factory.mktemp("strategies")
    write_run(folder, CONFIG, (96, *np.random.default_rng(1).integers(2, 30, 39)))
    (folder / "all.json").write_text(strategies_to_json(STRATEGIES))
    (folder / "others.json").write_text(strategies_to_json(STRATEGIES[1:3]))
    return folder


def in_turn(setup: RunSetup, step: int, lengths: np.ndarray) -> Plan:
    """Every step has another strategy, all of whose pipelines get documents."""
    chosen, cost = setup.planners, setup.cost
    if not chosen.strategies:
        return chosen.planner.plan(lengths, cost)
    strategy = chosen.strategies[step % len(chosen.strategies)]
    count = len(strategy.pipelines)
    order = np.argsort(-lengths, kind="stable").tolist()
    dealt = tuple(tuple((document,) for document in order[k::count]) for k in range(count))
    plan = plan_assignment(lengths, strategy, Assignment(0, dealt, (0,) * count), cost)
    plan.validate()
    gathers = {each.ranks for each in plan.pipelines if reshard_after_forward_stages(each)}
    assert gathers == {pipe.ranks for pipe in strategy.pipelines if pipe.parallel.reshard_after_forward}
    return plan


def train(transport, config: Config):
    """One rank of a run; returns the shape and the loss of every step."""
    _, records = train_in_process(transport, config, in_turn)
    return [(record.shape, record.loss) for record in records]


def run(gloo_pool, place: Path, name: str, *settings: str) -> tuple[list[str], list[float]]:
    config = Config.load(place / "run.toml", [f"run.output={place / name}", *settings])
    shapes, losses = zip(*gloo_pool.run(train, config, ranks=RANKS, timeout_s=150)[0], strict=True)
    return list(shapes), list(losses)


def chosen_from(place: Path, name: str) -> tuple[str, ...]:
    return "plan.planner=hydraulis", "plan.sharding=free", f"plan.strategies={place / name}.json"


@pytest.fixture(scope="module")
def static(gloo_pool, place):
    """The losses of a run that keeps one strategy, all ranks side by side."""
    return run(gloo_pool, place, "static", "plan.planner=static")[1]


@pytest.fixture(scope="module")
def switching(gloo_pool, place):
    """Shapes and losses of a run with another strategy in every step."""
    return run(gloo_pool, place, "switching", *chosen_from(place, "all"))


def test_changing_the_strategy_trains_the_same_model(place, static, switching):
    shapes, losses = switching
    assert len(set(shapes)) == STEPS and any("t2p2 on 4" in shape and "t1p2 on 2" in shape for shape in shapes)
    assert np.allclose(losses, static, rtol=1e-9, atol=0)
    mine, theirs = (load_file(place / name / "model" / "model.safetensors") for name in ("switching", "static"))
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[name], theirs[name], rtol=1e-7, atol=1e-10) for name in mine)
    mine, theirs = (logged(place / name, "evaluation_loss") for name in ("switching", "static"))
    assert len(mine) == 2 and np.allclose(mine, theirs, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("begun", "name", "settings"),
    [
        pytest.param("switching", "others", (), id="another list"),
        pytest.param("switching", "", ("plan.planner=static",), id="another sharding", marks=pytest.mark.slow),
        pytest.param(
            "switching", "", ("pipeline.stages=2", "plan.sharding=free"), id="one pipeline", marks=pytest.mark.slow
        ),
        pytest.param(
            *("static", "auto", ("plan.planner=hydraulis", "plan.sharding=free")),
            id="from another sharding to a proposal",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_checkpoints_go_on_with_another_list_and_another_sharding(
    gloo_pool, place, static, switching, begun, name, settings
):
    begin, run_name = place / begun / "checkpoints" / "step-00000002", "-".join((begun, name, *settings))
    given = chosen_from(place, name) if name == "others" else settings
    never = ("checkpoint.every=0", "evaluation.every=0")
    _, losses = run(gloo_pool, place, run_name, f"checkpoint.resume={begin}", *given, *never)
    assert np.allclose(losses, static[2:], rtol=1e-9, atol=0)
    told = " ".join(logged(place / run_name, "note"))
    assert ("nothing in it depends on them" in told) and (("strategies to choose from" in told) == bool(name))
    assert (place / run_name / "strategies.json").exists() == (name == "auto")
