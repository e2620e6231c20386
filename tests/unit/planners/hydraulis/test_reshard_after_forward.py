"""Pipelines that are gathered for every pass: when they are proposed, and that their plans fit, run and are right."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from seqloom.api import cost_model
from seqloom.cost import CostModel
from seqloom.describe import Cluster
from seqloom.errors import SeqloomError
from seqloom.plan import Plan
from seqloom.plan.pipeline import reshard_after_forward_stages
from seqloom.planners.bounds import plan_bound
from seqloom.planners.hydraulis import (
    ParallelConfig,
    PipelineConfig,
    Strategy,
    check_strategies,
    plan_strategies,
    propose_strategies,
)
from seqloom.planners.hydraulis.costs import config_costs, fit_config, gains_memory, switch_ns
from seqloom.simulate import predicted_ns, simulate
from seqloom.train.setup import warm_up_plans
from support.steps import Step, tiny_spec

torch.set_num_threads(1)
COST = cost_model("1x8xH100", "llama3-8b", sharding="free")
GIB = 1024**3


def alone(config, longest):
    return Strategy((PipelineConfig(config, tuple(range(config.ranks)), longest),))


def test_a_scheme_says_so_only_where_it_is():
    gathered = PipelineConfig(ParallelConfig(2, 2, 2, reshard_after_forward=True), tuple(range(8)), 100)
    assert (
        str(gathered.parallel) == "t2p2u2 resharded"
        and PipelineConfig.from_dict(json.loads(json.dumps(gathered.as_dict()))) == gathered
    )
    plain = replace(gathered, parallel=ParallelConfig(2, 2, 2))
    assert "gathered" not in plain.as_dict() and PipelineConfig.from_dict(plain.as_dict()) == plain
    with pytest.raises(SeqloomError, match="there is nothing to gather; leave out gathered, or use Ulysses or a ring"):
        PipelineConfig(ParallelConfig(1, 2, reshard_after_forward=True), (0, 1), 100)
    with pytest.raises(SeqloomError, match="gathered is 1; give true or false"):
        PipelineConfig.from_dict(gathered.as_dict() | {"gathered": 1})


def test_it_is_looked_at_where_memory_binds():
    """Not where everything can be kept anyway, not where all ranks have different slices; and it holds more."""
    config = ParallelConfig(1, 2, 1, 4)
    assert not gains_memory(COST, config, 40_000) and gains_memory(COST, config, 55_000)
    assert not gains_memory(COST, ParallelConfig(1, 8), 200_000)
    assert not any(each.reshard_after_forward for each in config_costs(COST, 10_000))
    stays, gathered = fit_config(COST, config), fit_config(COST, config._replace(reshard_after_forward=True))
    assert gathered.max_tokens > stays.max_tokens and gathered.fixed > stays.fixed


def test_the_planner_gathers_where_that_beats_recomputing():
    """A document for which parameters that stay leave room with more tensor ranks, or recomputed in full."""
    lengths = np.array([225_000])
    plan = plan_strategies(lengths, COST)
    plan.validate()
    assert [reshard_after_forward_stages(line) for line in plan.pipelines] == [{0}]
    found = simulate(plan, COST)
    assert found.peak_memory.max() <= COST.budget_bytes
    assert plan_bound(plan, COST) <= found.step_ns == predicted_ns(plan, COST)
    assert Plan.from_json(plan.to_json()) == plan
    for config in (
        ParallelConfig(1, 2, 1, 4),
        ParallelConfig(1, 4, 1, 2),
        ParallelConfig(1, 8),
        ParallelConfig(2, 2, 2),
    ):
        stays = plan_strategies(lengths, COST, strategies=[alone(config, 225_000)])
        assert not reshard_after_forward_stages(stays.pipelines[0]) and predicted_ns(stays, COST) > found.step_ns


@pytest.mark.parametrize(
    "config",
    [ParallelConfig(1, 1, 8), ParallelConfig(2, 1, 4), ParallelConfig(2, 2, 1, 2), ParallelConfig(4, 1, 2)],
    ids=str,
)
def test_plans_of_any_scheme_fit(config):
    """In several micro-batches, and as the small plans that warm a run up."""
    config = config._replace(reshard_after_forward=True)
    lengths = np.array([10_000, 8_000, 7_000, 6_000, 3_000, 2_000, 900])
    given = alone(config, fit_config(COST, config).max_tokens)
    check_strategies([given], COST)
    plan = plan_strategies(lengths, COST, strategies=[given.as_dict()])
    plan.validate()
    found = simulate(plan, COST)
    assert found.peak_memory.max() <= COST.budget_bytes and found.step_ns == predicted_ns(plan, COST)
    assert reshard_after_forward_stages(plan.pipelines[0]) == set(range(config.stages))
    assert switch_ns(given, COST) < switch_ns(alone(config._replace(reshard_after_forward=False), 10_000), COST)
    assert reshard_after_forward_stages(warm_up_plans([given], COST)[0].pipelines[0])


SPEC = tiny_spec(layers=3, hidden=32, heads=4, kv_heads=1, head_dim=8, ffn=96)
STEP = Step((450, 60, 20), SPEC)


def tight():
    """Room for 404 tokens beside parameters that stay, on all four ranks."""
    cluster = Cluster.parse("1x4xH100")
    ample = CostModel(cluster, SPEC, sharding="free", max_length=1024)
    budget = ample.memory.fixed_bytes(ample.engine.policies[0]) + 200_000
    return CostModel(cluster, SPEC, sharding="free", max_length=1024, budget_gib=budget / GIB)


def test_a_document_that_no_other_pipeline_holds_is_one_process_result(threads):
    cost = tight()
    assert (
        max(each.max_tokens for config, each in config_costs(cost, 450).items() if not config.reshard_after_forward)
        < 450
    )
    proposed = propose_strategies(np.array(STEP.lengths), cost)
    assert any(pipe.parallel.reshard_after_forward for each in proposed for pipe in each.pipelines)
    plan = plan_strategies(np.array(STEP.lengths), cost, strategies=proposed)
    plan.validate()
    assert simulate(plan, cost).peak_memory.max() <= cost.budget_bytes
    assert any(reshard_after_forward_stages(line) for line in plan.pipelines)
    wanted = STEP.alone()
    for found in threads(4).run(lambda transport: STEP.spread(plan, transport), strict=True):
        assert found.worst(wanted) < 1e-9


LINES = {
    "stages": (ParallelConfig(2, 1, 2, reshard_after_forward=True),),
    "tp_groups": (ParallelConfig(1, 2, 2, reshard_after_forward=True),),
    "beside one that stays": (ParallelConfig(1, 1, 1, 2, reshard_after_forward=True), ParallelConfig(1, 2)),
}


@pytest.mark.parametrize("configs", LINES.values(), ids=LINES)
def test_plans_are_one_process_result(threads, configs):
    step = Step((18, 17, 14, 13, 11, 9, 9, 4), tiny_spec(layers=2))
    cost = CostModel(Cluster.parse("1x4xH100"), step.spec, sharding="free", max_length=64, capacity=10)
    starts = np.cumsum([0, *(config.ranks for config in configs)]).tolist()
    pipes = [
        PipelineConfig(each, tuple(range(a, a + each.ranks)), 40) for each, a in zip(configs, starts, strict=False)
    ]
    plan = plan_strategies(np.array(step.lengths), cost, strategies=[Strategy(tuple(pipes))])
    plan.validate()
    passing = [line for line in plan.pipelines if reshard_after_forward_stages(line)]
    assert len(passing) == 1 and len(passing[0].rounds) > 1 and len(plan.pipelines) == len(configs)
    wanted = step.alone()
    for found in threads(4).run(lambda transport: step.spread(plan, transport), strict=True):
        assert found.worst(wanted) < 1e-9
