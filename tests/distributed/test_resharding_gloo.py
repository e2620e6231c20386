"""Steps of AdamW with another strategy each equal one process, with a resume in between: twenty, or some of them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from seqloom.dist import bind_single_rank
from seqloom.engine import bind_plan, run_step
from seqloom.models.loss import IGNORED
from seqloom.params import FSDPParameters, PipelineFSDP, Placement, ReshardingParameters
from seqloom.plan import Sharding, Stage
from seqloom.train.checkpoint import Checkpoints
from seqloom.train.config import Optimiser
from seqloom.train.model import prepare_layers
from seqloom.train.optim import make_optimiser, state_by_name
from seqloom.train.run_folder import latest_checkpoint
from support.shapes import STRATEGIES, in_nodes_of, twenty_plans
from support.steps import Step, tiny_spec

torch.set_num_threads(1)
RANKS, LIMIT = 8, 1.0
SPEC = tiny_spec(layers=4, heads=8, kv_heads=4, tied=True)
LENGTHS = (9, 2, 17, 3, 30, 5, 8, 4)
STEPS = [Step((12 + k, *LENGTHS[k % 8 :], *LENGTHS[: k % 8]), SPEC) for k in range(20)]
SETTINGS = Optimiser(lr=0.01, weight_decay=0.1)


def alone(dtype, numbers, *, one_by_one=False):
    """Losses and norms of some steps in one process, then the model's values and moments."""
    model = replace(STEPS[0], dtype=dtype).model()
    optimiser, curve = make_optimiser(dict(model.named_parameters()), SETTINGS), []
    for step in (STEPS[number] for number in numbers):
        documents, total = list(zip(*step.documents(), strict=True)), 0.0
        for pack in [[each] for each in documents] if one_by_one else [documents]:
            ids, labels = (torch.cat(each) for each in zip(*pack, strict=True))
            context = bind_single_rank([len(each) for each, _ in pack])
            logits = model(ids, context.positions, context)
            loss = cross_entropy(logits, labels, reduction="sum", ignore_index=IGNORED) / step.valid
            loss.backward()
            total += loss.item()
        gradients = [each.grad for each in model.parameters()]
        norm = torch.stack([each.norm() for each in gradients]).norm().item()
        torch._foreach_mul_(gradients, min(1.0, LIMIT / norm))
        optimiser.step()
        optimiser.zero_grad()
        curve.append((total, norm))
    return curve, {name: each.detach() for name, each in model.named_parameters()}, state_by_name(optimiser)


def kept(transport, dtype, kind, shift):
    """Parameters and their optimiser; `shift` is added to all values, which a checkpoint must bring."""
    adapter = prepare_layers(replace(STEPS[0], dtype=dtype).model_adapter())
    with torch.no_grad():
        for each in adapter.module.parameters():
            each += shift
    if kind == "free":
        parameters = ReshardingParameters(adapter, transport)
    elif kind == "full":
        parameters = FSDPParameters(adapter, transport, Sharding.FULL)
    else:
        stages = (Stage((0, 1, 2, 3), (0, 1)), Stage((4, 5, 6, 7), (1, 4)))
        parameters = PipelineFSDP(adapter, transport, Placement(stages, Sharding.FULL, RANKS))
    return parameters, make_optimiser(parameters.master_weights(), SETTINGS)


def everything(parameters, optimiser):
    """Whole values, and the whole moments of what this rank holds; a clone of each."""
    moments = {
        f"{name} {key}": state[key].full_tensor()
        for name, state in state_by_name(optimiser).items()
        for key in ("exp_avg", "exp_avg_sq")
    }
    return {name: value.clone() for name, value in parameters.full_parameters()}, moments


def train(transport, dtype, plans, folder, hops=()):
    """Steps by number; half-way the state goes through checkpoints, in other layouts, to new parameters."""
    parameters, optimiser = kept(transport, dtype, "free", 0)
    curve, between = [], []
    for done, (number, plan) in enumerate(plans.items()):
        step = STEPS[number]
        if hops and done == len(plans) // 2:
            between.append(everything(parameters, optimiser))
            for hop, kind in enumerate(hops):
                with Checkpoints(Path(folder) / str(hop)) as checkpoints:
                    checkpoints.save(1, model=parameters.master_weights(), optimiser=state_by_name(optimiser), extra={})
                parameters, optimiser = kept(transport, dtype, kind, 1 + hop)
                with Checkpoints(Path(folder) / str(hop)) as checkpoints:
                    path = latest_checkpoint(Path(folder) / str(hop))
                    checkpoints.load(path, model=parameters.master_weights(), optimiser=state_by_name(optimiser))
                between.append(everything(parameters, optimiser))
        rows = replace(step, dtype=dtype).rows()
        result = run_step(bind_plan(plan, transport), parameters, rows, step.valid, max_norm=LIMIT)
        optimiser.step()
        curve.append((result.loss, result.gradient_norm))
    return curve, everything(parameters, optimiser), between


def furthest(curve, other):
    """The largest relative difference of losses and norms."""
    return max(abs(a / b - 1) for one, two in zip(curve, other, strict=True) for a, b in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def plans():
    """The plan of every step, by number; every other one in nodes of 2 or 4, whose ranks then share what crosses."""
    assert len(set(STRATEGIES)) == len(STEPS) - 1
    made = twenty_plans([step.lengths for step in STEPS])
    sizes = [(RANKS, 4, RANKS, 2)[number % 4] for number in range(len(made))]
    return {k: in_nodes_of(size, plan) for k, (plan, size) in enumerate(zip(made, sizes, strict=True))}


RUNS = {
    "a fifth of them": (range(0, 20, 5), ("free",)),
    "all, through FSDP2 and stages": (range(20), ("full", "stages", "free")),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in RUNS]  # test_train_strategies has some of it


@pytest.mark.parametrize("name", SLOW)
def test_twenty_strategies_and_a_resume_equal_one_process(gloo_pool, plans, tmp_path, name):
    """Checkpoints are bit for bit what they came from, and the last one is resumed with another strategy."""
    numbers, hops = RUNS[name]
    curve, values, states = alone(torch.float64, numbers)
    chosen = {number: plans[number] for number in numbers}
    results = gloo_pool.run(train, torch.float64, chosen, str(tmp_path), hops, ranks=RANKS, timeout_s=300)
    wanted = values | {f"{n} {key}": s[key] for n, s in states.items() for key in ("exp_avg", "exp_avg_sq")}
    assert max(norm for _, norm in curve) > LIMIT, "some gradients are clipped"
    for found, (whole, moments), (before, *after) in results:
        assert furthest(found, curve) < 1e-9
        assert (whole | moments).keys() == wanted.keys()
        for name, each in (whole | moments).items():
            assert float((each - wanted[name]).norm() / wanted[name].norm()) < 1e-9, name
        for now in after:
            assert all(torch.equal(now[0][name], each) for name, each in before[0].items())
            assert all(torch.equal(each, before[1][name]) for name, each in now[1].items())


@pytest.mark.slow
def test_twenty_strategies_in_float32(gloo_pool, plans, tmp_path):
    """As close to float64 as twice what one process is, with the documents in one pack or one by one."""
    exact = alone(torch.float64, plans)[0]
    drift = max(furthest(alone(torch.float32, plans, one_by_one=each)[0], exact) for each in (False, True))
    found = gloo_pool.run(train, torch.float32, plans, str(tmp_path), ranks=RANKS, timeout_s=300)[0][0]
    assert 0 < drift < 1e-3
    assert furthest(found, exact) <= 2 * drift
