"""Two runs that differ only in planner have one loss curve, step by step, and that of one process."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from seqloom.data import StoreWriter
from seqloom.dist import bind_single_rank
from seqloom.engine import RankPlan
from seqloom.models import summed_loss
from seqloom.plan import Plan
from seqloom.planners import make_plan
from seqloom.planners.plan_ahead import PlanAhead, StepPlan
from seqloom.train.config import Config
from seqloom.train.logging import read_steps
from seqloom.train.model import build_reference
from seqloom.train.optim import learning_rate, make_optimiser, set_learning_rate
from seqloom.train.setup import RunSetup
from seqloom.train.trainer import Trainer
from support.tiny_specs import TINY

torch.set_num_threads(1)
RANKS, STEPS, SOME = 8, 50, 16
MODEL = TINY.replace("vocabulary = 257", "vocabulary = 64")
CONFIG = f"""
[run]
steps = {STEPS}
output = "run"
[model]
spec = "tiny.toml"
[data]
source = "store"
sequences = 8
max_length = 64
[plan]
cluster = "2x4xCPU"
sharding = "hybrid"
capacity = 32
[optimiser]
lr = 1e-2
[schedule]
warmup = 5
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A config, a tiny model, and documents in which some tokens follow from others."""
    folder = tmp_path_factory.mktemp("curves")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=64) as writer:
        for length in np.clip(draw.lognormal(2.5, 1.0, 100).astype(int), 2, 64):
            writer.add((draw.integers(0, 64) + np.arange(length) * draw.integers(1, 4)) % 64)
    (folder / "tiny.toml").write_text(MODEL)
    (folder / "run.toml").write_text(CONFIG)
    return folder


def configured(place: Path, dtype: str, name: str = "run", steps: int = STEPS) -> Config:
    settings = (f"model.dtype={dtype}", f"run.output={place / name}", f"run.steps={steps}")
    return Config.load(place / "run.toml", settings)


def planned(place: Path, planner: str) -> list[Plan]:
    """The plans of all steps."""
    setup = RunSetup.load(configured(place, "float64"), RANKS)
    return [make_plan(planner, batch.lengths, setup.cost) for batch in setup.sampler.peek(STEPS)]


class Given:
    """Plans that are there already, in place of the processes that share them."""

    def __init__(self, plans: list[Plan]) -> None:
        self._plans = plans

    def submit(self, step, lengths):
        pass

    def take(self, step, lengths):
        plan = self._plans[step - 1]
        return StepPlan(step, plan.to_json(), plan.hash, 0)


class GivenTrainer(Trainer):
    """The trainer without a planner: workers of a pool may not start processes."""

    def _start_planner(self) -> PlanAhead | None:
        return None

    def bind(self, plan: Plan, **options: Any) -> RankPlan:
        self.last = super().bind(plan, **options)
        assert self.prepared() == {1}, "index work is done before the step"
        return self.last

    def prepared(self) -> set[int]:
        return {len(each.context._cache) for each in self.last.rounds if each.context is not None} or {1}


def train(transport, config: Config, plans: list[Plan]) -> list[float]:
    """One rank of a run; returns the loss of every step."""
    with GivenTrainer(RunSetup.load(config, transport.ranks), transport) as trainer:
        trainer.plans = Given(plans)
        trainer.train(notes=["something to know"])
        assert trainer.prepared() == {1}, "and no layer needed more"
    return [record.loss for record in read_steps(config.metrics)]


def train_alone(config: Config, steps: int = STEPS, *, backwards: bool = False) -> list[float]:
    """The same run in this process, without plans: a step is one pack of its documents, in their order or the other."""
    setup = RunSetup.load(config, RANKS)
    source, device = setup.source, torch.device("cpu")
    adapter = build_reference(config, device, getattr(torch, config.model.dtype))
    adapter.materialize()
    parameters = dict(adapter.module.named_parameters())
    optimiser, losses = make_optimiser(parameters, config.optimiser), []
    for step, batch in enumerate(setup.sampler.peek(steps), 1):
        documents = [(n, 0, source.lengths[n]) for n in (batch.documents[::-1] if backwards else batch.documents)]
        context = bind_single_rank([int(stop) for _, _, stop in documents])
        ids, labels = (
            torch.from_numpy(np.concatenate([f(*d) for d in documents])) for f in (source.tokens, source.labels)
        )
        loss = summed_loss(adapter.hidden(ids, context), adapter.head.weight, labels) / batch.valid_tokens
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), config.optimiser.clip)
        rate = learning_rate(step, steps=steps, peak=config.optimiser.lr, schedule=config.schedule)
        set_learning_rate(optimiser, rate)
        optimiser.step()
        losses.append(loss.item())
    return losses


def furthest(one: list[float], other: list[float]) -> float:
    """The largest relative difference of two curves."""
    return float(np.max(np.abs(np.array(one) / np.array(other) - 1)))


@pytest.fixture(scope="module")
def plans(place):
    """The plans of all steps by two planners, no two alike."""
    found = {name: planned(place, name) for name in ("static", "flex")}
    assert all(one.hash != other.hash for one, other in zip(*found.values(), strict=True))
    return found


def curves(gloo_pool, place: Path, dtype: str, plans: dict[str, list[Plan]], steps: int = STEPS) -> list[list[float]]:
    """The losses under each planner."""
    runs = {name: configured(place, dtype, f"{name}-{dtype}-{steps}", steps) for name in plans}
    return [gloo_pool.run(train, runs[name], plans[name], ranks=RANKS, timeout_s=150)[0] for name in plans]


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "learnt"), [(SOME, 0.85), (STEPS, 0.6)])
def test_in_float64_the_planner_does_not_show(gloo_pool, place, plans, steps, learnt):
    static, flex = curves(gloo_pool, place, "float64", plans, steps)
    assert len(static) == steps and static[-1] < learnt * static[0], "something was learnt"
    notes = (place / f"flex-float64-{steps}" / "metrics.jsonl").read_text()
    assert notes.count('"note": "something to know"') == 1
    assert furthest(static, flex) < 1e-9
    assert furthest(flex, train_alone(configured(place, "float64", steps=steps), steps)) < 1e-9


@pytest.mark.slow
def test_in_float32_it_shows_less_than_twice_what_the_order_of_documents_does(gloo_pool, place, plans):
    static, flex = curves(gloo_pool, place, "float32", plans)
    config = configured(place, "float32")
    drift = furthest(train_alone(config), train_alone(config, backwards=True))
    assert 0 < drift < 1e-4
    assert furthest(static, flex) <= 2 * drift
