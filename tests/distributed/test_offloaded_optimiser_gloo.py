"""Master weights and moments in host memory: under every sharding the same training, bit by bit, and checkpoints."""

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from seqloom.engine.executor import evaluate, run_step
from seqloom.engine.rank_actions import bind_plan
from seqloom.layout import Span
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.params import FSDPParameters, PipelineFSDP, Placement, ReshardingParameters, host_adamw
from seqloom.params.host_masters import copy_to_shards
from seqloom.params.interface import local_tensor
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.schedules import build_schedule
from seqloom.train.checkpoint import Checkpoints
from seqloom.train.config import Optimiser
from seqloom.train.optim import make_optimiser, set_learning_rate, state_by_name
from seqloom.train.run_folder import latest_checkpoint
from support.pipelines import stages_on
from support.steps import Step, one_stage_plan, tiny_spec

torch.set_num_threads(1)
pytestmark = pytest.mark.distributed
RANKS, NODE = 8, 4
STEP = Step((20, 9, 1, 17), tiny_spec(layers=2, tied=True, hidden=12), dtype=torch.float32)
SETTINGS, LIMIT = Optimiser(lr=0.02, weight_decay=0.1), 0.5


def plan_of(kind, reduce=Reduce.ROUND):
    """Two rounds, the second without node 1; or two stages of four ranks."""
    if kind != "stages":
        rounds = [
            [Group((0, 1, 2, 3), 2, 2, (Span(0, 0, 20),)), Group((4, 5), 2, 1, (Span(1, 0, 9),))],
            [Group((0, 1), 2, 1, (Span(3, 0, 17),)), Group((2,), 1, 1, (Span(2, 0, 1),))],
        ]
        options = {"ranks": RANKS, "node_size": NODE, "checkpoint": (Checkpoint.FULL, Checkpoint.NONE)}
        return one_stage_plan(rounds, sharding=Sharding(kind), reduce=reduce, **options)
    schedule = build_schedule("1f1b", 2, len(STEP.lengths))
    stages = stages_on(schedule.pp_ranks, 4, STEP.spec.layers)
    rounds = [
        Round(tuple(StageMicroBatch((Group(s.ranks, 2, 2, (Span(k, 0, length),)),), Checkpoint.NONE) for s in stages))
        for k, length in enumerate(STEP.lengths)
    ]
    limits = Limits(RANKS, NODE, STEP.spec.heads, ((Checkpoint.NONE, 10**6),))
    line = Pipeline(stages, tuple(rounds), schedule.pipeline_actions())
    return Plan(limits, Sharding.FULL, Reduce.STEP, STEP.lengths, (line,), "drawn")


class Training:
    """Parameters of one kind, with their optimiser on the device or in host memory."""

    def __init__(self, transport, kind, compute, offload, shift=0.0, reduce=Reduce.ROUND):
        self.transport, self.plan = transport, plan_of(kind, reduce)
        adapter = STEP.model_adapter()
        recompute_layers(adapter.layers)
        with torch.no_grad():
            for each in adapter.module.parameters():
                each += shift
        options = {"param_dtype": compute, "offload_optimiser": offload}
        if kind == "free":
            self.parameters = ReshardingParameters(adapter, transport, **options)
        elif kind == "stages":
            placement = Placement(self.plan.pipelines[0].stages, Sharding.FULL, NODE)
            self.parameters = PipelineFSDP(adapter, transport, placement, **options)
        else:
            self.parameters = FSDPParameters(adapter, transport, Sharding(kind), node_size=NODE, **options)
        shards = self.parameters.device_shards() if offload else None
        self.optimiser = make_optimiser(self.parameters.master_weights(), SETTINGS, shards=shards)

    def steps(self, count, first=1):
        """Losses and norms of so many clipped steps, and the loss of an evaluation."""
        bound, found = bind_plan(self.plan, self.transport), []
        for number in range(first, first + count):
            set_learning_rate(self.optimiser, 0.02 / number)
            result = run_step(bound, self.parameters, STEP.rows(), STEP.valid, max_norm=LIMIT)
            assert result.gradient_norm > LIMIT  # so that clipping does something
            self.optimiser.step()
            self.parameters.zero_grad()
            found.append((result.loss, result.gradient_norm))
        return [*found, evaluate(bound, self.parameters, STEP.rows(), STEP.valid)]

    def state(self):
        return {"model": self.parameters.master_weights(), "optimiser": state_by_name(self.optimiser)}

    def everything(self):
        """Values of the whole model, and this rank's part of the optimiser's state."""
        values = {name: value.clone() for name, value in self.parameters.full_parameters()}
        moments = {
            (name, key): local_tensor(tensor).clone()
            for name, tensors in state_by_name(self.optimiser).items()
            for key, tensor in tensors.items()
        }
        return values, moments


def both(transport, kind, compute, reduce):
    """Three steps with the optimiser here and there; and what the device and the host have."""
    found = []
    with mock.patch.object(host_adamw, "PART", 64):  # parameters in several parts
        for offload in (False, True):
            training = Training(transport, kind, compute, offload, reduce=reduce)
            found.append((training.steps(3), *training.everything()))
    masters, shards = training.parameters.master_weights(), training.parameters.device_shards()
    assert masters.keys() == shards.keys() and not any(masters[name] is shards[name] for name in masters)
    for name, master in masters.items():
        values, own = local_tensor(master.detach()), local_tensor(shards[name].detach())
        assert values.dtype == torch.float32 and own.dtype == (compute or torch.float32)
        assert torch.equal(own, values.to(own.dtype)) and master.grad is None
    return found


CASES = [  # parameters, dtype of layers, when gradients are reduced
    ("full", torch.bfloat16, Reduce.ROUND),
    ("hybrid", torch.bfloat16, Reduce.STEP),
    ("none", torch.bfloat16, Reduce.STEP),
    ("stages", torch.bfloat16, Reduce.STEP),
    ("free", torch.bfloat16, Reduce.STEP),
    ("hybrid", None, Reduce.ROUND),
    pytest.param("full", None, Reduce.STEP, marks=pytest.mark.slow),
    pytest.param("full", torch.bfloat16, Reduce.STEP, marks=pytest.mark.slow),
    pytest.param("none", None, Reduce.STEP, marks=pytest.mark.slow),
    pytest.param("stages", None, Reduce.STEP, marks=pytest.mark.slow),
    pytest.param("free", None, Reduce.STEP, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kind", "compute", "reduce"), CASES)
def test_training_is_the_same_bit_by_bit(gloo_pool, kind, compute, reduce):
    for here, there in gloo_pool.run(both, kind, compute, reduce, ranks=RANKS):
        assert here[0] == there[0]
        for mine, other in zip(here[1:], there[1:], strict=True):
            assert mine.keys() == other.keys()
            assert all(torch.equal(each, other[name]) for name, each in mine.items())


def handed_on(transport, kinds, folder, compute):
    """A step of each kind, from a checkpoint of the one before; and the same steps without a stop."""
    whole = Training(transport, kinds[0][0], compute, False)
    wanted, found, values = whole.steps(len(kinds))[:-1], [], []
    for number, (kind, offload) in enumerate(kinds):
        training = Training(transport, kind, compute, offload, shift=number)  # others: a checkpoint must bring them
        with Checkpoints(Path(folder) / str(number)) as checkpoints:
            if number:
                checkpoints.load(latest_checkpoint(Path(folder) / str(number - 1)), **training.state())
                copy_to_shards(training.parameters.master_weights(), training.parameters.device_shards())
            found += training.steps(1, 1 + number)[:-1]
            checkpoints.save(1 + number, **training.state(), extra={})
            values = training.everything()[0]
            training.steps(1, 99)  # while it is written
    return wanted, found, whole.everything()[0], values


def test_checkpoints_go_from_the_device_to_the_host_and_back_exactly(gloo_pool, tmp_path):
    kinds = [("full", False), ("full", True), ("full", False)]
    for wanted, found, whole, values in gloo_pool.run(handed_on, kinds, str(tmp_path), None, ranks=RANKS):
        assert found == wanted and all(torch.equal(each, values[name]) for name, each in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_checkpoints_go_through_every_kind(gloo_pool, tmp_path, compute):
    kinds = [("free", True), ("stages", True), ("hybrid", False), ("none", True), ("stages", False), ("free", True)]
    tolerance = 1e-4 if compute is None else 0.05  # plans sum in other orders
    for wanted, found, _, _ in gloo_pool.run(handed_on, kinds, str(tmp_path), compute, ranks=RANKS):
        for mine, other in zip(found, wanted, strict=True):
            assert mine == pytest.approx(other, rel=tolerance)


def frozen(transport):
    """A model some of whose parameters are not trained keeps their exact values."""
    adapter = STEP.model_adapter()
    recompute_layers(adapter.layers)
    adapter.module.model.norm.weight.requires_grad_(False)
    before = {name: each.detach().clone() for name, each in adapter.module.named_parameters()}
    parameters = FSDPParameters(adapter, transport, Sharding.FULL, param_dtype=torch.bfloat16, offload_optimiser=True)
    run_step(bind_plan(plan_of("full"), transport), parameters, STEP.rows(), STEP.valid)
    return before, {name: value.clone() for name, value in parameters.full_parameters()}


def test_values_that_nobody_updates_stay_exact(gloo_pool):
    for before, after in gloo_pool.run(frozen, ranks=RANKS):
        assert all(torch.equal(each, after[name]) for name, each in before.items())


@pytest.mark.slow
def test_masters_in_float64(gloo_pool):
    for here, there in gloo_pool.run(both64, ranks=RANKS):
        assert here == there


def both64(transport):
    found = []
    for offload in (False, True):
        step = replace(STEP, dtype=torch.float64)
        adapter = step.model_adapter()
        recompute_layers(adapter.layers)
        parameters = FSDPParameters(adapter, transport, Sharding.FULL, offload_optimiser=offload)
        shards = parameters.device_shards() if offload else None
        optimiser, losses = make_optimiser(parameters.master_weights(), SETTINGS, shards=shards), []
        for _ in range(3):
            losses.append(run_step(bind_plan(plan_of("full"), transport), parameters, step.rows(), step.valid).loss)
            optimiser.step()
            parameters.zero_grad()
        found.append(losses)
    return found
