"""Prices of a model of which adapters alone are trained, beside those of the same model trained whole."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.cost import CostModel
from seqloom.cost.memory import stage_parameters
from seqloom.describe import Adapters, Cluster, ModelSpec
from seqloom.errors import MemoryBudgetError, SeqloomError
from seqloom.plan import Checkpoint, LayerRange, Reduce
from seqloom.planners import make_plan
from seqloom.planners.bounds import plan_bound
from seqloom.simulate import simulate

SPEC = ModelSpec("wide", 8, 4096, 32, 8, 128, 14336, True, 32000, False)
OWN = Adapters(16, 7, 6 * 4096 + 14336, 2 * 4096 + 2 * 1024 + 2 * 14336 + 4096)
ADAPTED = replace(SPEC, name="adapted", adapters=(OWN,) * 8)
LENGTHS = np.array([900, 20_000, 3_000, 700, 64, 5_000, 12_000, 300])


def both(cluster="2x4xH200", **options):
    return [CostModel(Cluster.parse(cluster), spec, **options) for spec in (SPEC, ADAPTED)]


def test_only_gradients_of_adapters_are_reduced():
    whole, adapted = both()
    every = LayerRange(0, 8, 8)
    assert adapted.memory.parameters == whole.memory.parameters + 8 * OWN.parameters
    assert adapted.memory.trained == 8 * OWN.parameters == stage_parameters(adapted, every, trained=True)
    assert whole.memory.trained == whole.memory.parameters
    shape = whole.shapes[0]
    policy = next(policy for policy in whole.policies if policy.reduce == Reduce.ROUND)
    fixed = [cost.engine.fixed_ns(shape, policy, cost.aligned_traffic(shape)) for cost in (whole, adapted)]
    wanted = adapted.links.collective(4 * 8 * OWN.parameters, 8, 8)
    assert fixed[1]["reduce"] == wanted < fixed[0]["reduce"] / 5
    assert fixed[1]["gather"] > fixed[0]["gather"]  # frozen parameters are gathered as ever, and adapters with them


@pytest.mark.parametrize("layers", [(0,), (0, 7)])
def test_layers_without_adapters_reduce_nothing(layers):
    some = replace(ADAPTED, adapters=tuple(OWN if layer in layers else Adapters() for layer in range(8)))
    cost = CostModel(Cluster.parse("2x4xH200"), some)
    shape, policy = cost.shapes[0], next(each for each in cost.policies if each.reduce == Reduce.ROUND)
    reduce = cost.engine.fixed_ns(shape, policy, cost.aligned_traffic(shape))["reduce"]
    assert reduce == cost.links.collective(4 * len(layers) * OWN.parameters, 8, len(layers))
    middle = cost.engine.stage_overhead([LayerRange(2, 5, 8)], 4, 4)[1]
    assert middle == cost.links.collective(2 * stage_parameters(cost, LayerRange(2, 5, 8)), 4, 3)


@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL])
def test_forward_takes_as_long_as_without_adapters_and_theirs(checkpoint):
    """Forward computes the same whatever is trained: that of the whole model, and of the adapters."""
    whole, adapted = (cost.engine.compute for cost in both())
    passes = 3 if checkpoint == Checkpoint.NONE else 4
    own = 2 * 8 * OWN.parameters / (whole.matmul_tflops * 1e3) + 2 * 8 * OWN.touched / whole.memory_gb_s
    shares = adapted.forward_shares(checkpoint)
    assert shares["linear"] * adapted.linear(checkpoint) == pytest.approx(whole.linear(checkpoint) / passes + own)
    assert shares["head"] * adapted.head() == pytest.approx(whole.head() / 3)
    assert whole.forward_shares(checkpoint) == {}
    assert adapted.head() < whole.head()


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
@pytest.mark.parametrize("planner", ["static", "flex"])
def test_steps_are_shorter_and_hold_more_and_the_bound_holds(sharding, planner):
    found = []
    for cost in both(sharding=sharding):
        plan = make_plan(planner, LENGTHS, cost)
        result = simulate(plan, cost)
        assert plan_bound(plan, cost) <= cost.plan_ns(plan) == result.step_ns
        found.append((result.step_ns, max(map(cost.capacity, cost.policies))))
    (whole_ns, whole_tokens), (ns, tokens) = found
    assert ns < whole_ns and tokens > whole_tokens


@pytest.mark.parametrize("sharding", ["full", "free"])
def test_stages_are_simulated(sharding):
    times = []
    for cost in both(sharding=sharding, stages=2):
        plan = make_plan("pipeline", LENGTHS, cost, stages=2)
        plan.validate()
        result = simulate(plan, cost)
        assert (plan_bound(plan, cost) or 0) <= result.step_ns
        times.append((result.step_ns, int(result.peak_memory.max())))
    (whole_ns, whole_bytes), (ns, size) = times
    assert ns < whole_ns and size < whole_bytes


def test_a_model_that_is_too_large_to_train_whole_may_fit():
    model = ModelSpec.load("llama3-8b")
    adapters = (Adapters(16, 4, 4 * 4096, 2 * 4096 + 2 * 1024),) * 32
    with pytest.raises(MemoryBudgetError, match="does not fit"):
        CostModel(Cluster.parse("1x1xH200"), model)
    cost = CostModel(Cluster.parse("1x1xH200"), replace(model, adapters=adapters))
    assert cost.holds([8192])


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        ((OWN,), "one entry for each of 8 layers"),
        ((Adapters(),) * 8, "nothing is trained"),
        ((Adapters(-1),) * 8, "of 0"),
    ],
)
def test_adapters_that_are_none_are_refused(adapters, words):
    with pytest.raises(SeqloomError, match=words):
        replace(SPEC, adapters=adapters)


def test_adapters_are_not_cut():
    with pytest.raises(SeqloomError, match="adapters are not cut; use 1"):
        CostModel(Cluster.parse("1x4xH200"), ADAPTED, tensor=2)


def test_published_constants_are_refused():
    model = ModelSpec.load("gpt-7b")
    adapted = replace(model, adapters=(OWN,) * model.layers)
    with pytest.raises(SeqloomError, match="training all parameters; leave the profile out"):
        CostModel(Cluster.parse("1x8xA100-40G"), adapted, "flexsp-a100")
