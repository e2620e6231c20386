"""DBR, PR, ABR and CR of small plans, by hand."""

import numpy as np
import pytest

from seqloom.cost import Shape
from seqloom.planners import make_plan
from seqloom.planners.hbp import hbp, plans_balance, profiled
from seqloom.planners.hbp.balance import imbalance
from seqloom.simulate import predicted_ns
from seqloom.testing.strategies import roomy_cost_model

COST = roomy_cost_model("1x4xA100-40G", "gpt-7b", "flexsp-a100", "full", 1)


def test_imbalance_is_what_ranks_lack_beside_the_fullest():
    assert imbalance([np.array([4.0, 2.0, 2.0, 0.0])]) == 0.5
    assert imbalance([np.array([4.0, 2.0]), np.array([1.0, 1.0])]) == pytest.approx(1 - 4 / 5)
    assert imbalance([np.zeros(2)]) == 0


def test_one_document_per_rank():
    """Granule 128: lengths 128, 256, 200 and 64 occupy 128, 256, 256 and 128 tokens on four ranks."""
    level = profiled(256, np.array([256]), COST, 1024)._replace(shape=Shape(1, 1), packs=4)
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


def test_stages_are_compared_inside():
    """Every stage has all tokens of a round: stages of two ranks that share them evenly are even."""
    cost = roomy_cost_model("1x4xH100", "qwen3-0.6b", None, "full", 1)
    plan = make_plan("pipeline:4", np.array([4000, 3000, 2000]), cost)
    found = plans_balance([plan], cost)
    assert found.tokens == found.attention == found.communication == 0
