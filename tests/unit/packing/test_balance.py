"""DBR, PR, ABR and CR of small plans, by hand."""

import numpy as np
import pytest

from seqloom.cost import GroupShape
from seqloom.layout import Span
from seqloom.packing import cheapest_level, hbp, plans_balance
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Round, StageMicroBatch
from seqloom.planners import make_plan
from seqloom.simulate import predicted_ns
from support.strategies import roomy_cost_model

COST = roomy_cost_model("1x4xA100-40G", "gpt-7b", "flexsp-a100", "full", 1)


def test_one_document_per_rank():
    """Granule 128: lengths 128, 256, 200 and 64 occupy 128, 256, 256 and 128 tokens on four ranks."""
    level = cheapest_level([256], np.array([256]), COST, 1024)._replace(shape=GroupShape(1, 1), packs=4)
    packing = hbp([128, 256, 200, 64], COST, 1024, levels=[level])
    for found in (packing.balance, plans_balance([packing.plan(0)], COST)):
        assert found.tokens == pytest.approx(1 - 192 / 256)
        assert found.attention == pytest.approx(1 - (128**2 + 256**2 + 200**2 + 64**2) / 4 / 256**2)
        assert found.padding == pytest.approx(120 / 768) and found.communication == 0
        assert (found.steps, found.step_ns) == (1, predicted_ns(packing.plan(0), COST))


def test_groups_of_several_ranks_share_evenly_and_communicate():
    wide = make_plan("static:4", np.array([900, 40]), COST)
    alone = make_plan("static:1", np.array([900]), COST)
    both = plans_balance([wide, alone], COST)
    assert plans_balance([wide], COST).tokens == plans_balance([wide], COST).attention == 0
    assert plans_balance([alone], COST).tokens == plans_balance([alone], COST).attention == 0.75
    assert both.tokens == both.attention == 0.375
    assert both.communication == pytest.approx(940 / 1840)
    assert both.as_dict().keys() == {"dbr", "pr", "abr", "cr", "steps", "mean_step_ms"}
    assert both.as_dict()["mean_step_ms"] == pytest.approx((predicted_ns(wide, COST) + predicted_ns(alone, COST)) / 2e6)


def test_rounds_that_follow_each_other_add_up_what_ranks_wait_for():
    level = cheapest_level([256], np.array([256]), COST, 2048)._replace(shape=GroupShape(1, 1), packs=8)
    packing = hbp([256, 256, 256, 128, 128, 128, 128, 128], COST, 2048, levels=[level])
    first, second = (
        sorted(group.tokens for group in current.groups) for current in packing.plan(0).pipelines[0].rounds
    )
    assert (first, second) == ([128, 256, 256, 256], [128] * 4)
    for found in (packing.balance, plans_balance([packing.plan(0)], COST)):
        assert found.tokens == pytest.approx(1 - (896 + 512) / 4 / (256 + 128))


def test_stages_count_by_their_layers():
    """Every stage has all tokens of a round, and works on them in proportion to its layers."""
    cost = roomy_cost_model("1x4xH100", "qwen3-0.6b", None, "full", 1)
    plan = make_plan("pipeline:4", np.array([4000, 3000, 2000]), cost)
    layers = [stage.layers[1] - stage.layers[0] for stage in plan.pipelines[0].stages]
    found = plans_balance([plan], cost)
    assert found.tokens == pytest.approx(1 - sum(layers) / 4 / max(layers))
    assert found.attention == pytest.approx(found.tokens) and found.communication == 0


def test_of_pipelines_side_by_side_the_slowest_counts():
    """One pipeline on two ranks has 900 tokens, another on one rank 300, a fourth rank nothing."""
    cost = roomy_cost_model("1x4xH100", "qwen3-0.6b", None, "free", 1)
    wide, alone = Group((0, 1), 2, 1, (Span(0, 0, 900),)), Group((2,), 1, 1, (Span(1, 0, 300),))
    reduce = cost.policies[0].reduce
    pipelines = tuple(
        Pipeline.single(group.ranks, cost.model.layers, [Round((StageMicroBatch((group,), Checkpoint.NONE),))], reduce)
        for group in (wide, alone)
    )
    plan = Plan(cost.limits(reduce), cost.sharding, reduce, (900, 300), pipelines)
    plan.validate()
    found = plans_balance([plan], cost)
    assert found.tokens == pytest.approx(1 - 1200 / 4 / 450)
    assert found.attention == pytest.approx(1 - (900**2 + 300**2) / 4 / (900**2 / 2))
    assert found.communication == 0.75
