"""The best of all planners."""

import sys

import numpy as np
import pytest

from seqloom.errors import SeqloomError
from seqloom.planners import make_plan
from seqloom.planners.auto import SOLVER_LIMIT, best_of, plan_auto
from seqloom.planners.uniform import plan_static
from seqloom.simulate import predicted_ns
from support.strategies import roomy_cost_model

COST = roomy_cost_model("1x8xA100-40G", "gpt-7b", "flexsp-a100", "full", 1)
LENGTHS = np.array([40_000, 12_000, 9_000] + [3_000] * 10 + [800] * 20)


def test_the_first_of_equals_wins():
    slow, fast = plan_static(LENGTHS, COST, degree=8), make_plan("flex", LENGTHS, COST)
    assert COST.plan_ns(fast) < COST.plan_ns(slow)
    assert best_of([slow, fast], COST) is fast and best_of([slow, slow], COST) is slow


def test_it_takes_the_best_and_says_whose_it_is():
    plan = plan_auto(LENGTHS, COST)
    others = {name: make_plan(name, LENGTHS, COST) for name in ("static", "adaptive", "flex", "zones")}
    assert COST.plan_ns(plan) <= min(map(COST.plan_ns, others.values()))
    assert plan.planner in ("static", "adaptive", "flexsp", "flex", "zones")


def test_plans_known_before_take_part():
    best = make_plan("flex", LENGTHS, COST, evaluations=200)
    plan = plan_auto(LENGTHS, COST, evaluations=0, known=[best])
    assert COST.plan_ns(plan) <= COST.plan_ns(best)


def test_it_does_without_the_solver(monkeypatch):
    few = LENGTHS[:4]
    assert len(few) * COST.ranks <= SOLVER_LIMIT
    monkeypatch.setattr("seqloom.planners.auto.find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "highspy", None)
    plan = plan_auto(few, COST)
    plan.validate()
    assert plan.planner != "flexsp"


def test_a_planner_that_refuses_does_not_stop_the_others():
    cost = roomy_cost_model("1x6xA100-40G", "gpt-7b", "flexsp-a100", "full", 0)
    lengths = np.array([4 * cost.capacity(cost.policies[0]) // 128 * 128])
    with pytest.raises(SeqloomError, match="use planner adaptive or flex"):  # it has no groups of 4 in nodes of 6
        make_plan("flexsp", lengths, cost)
    plan_auto(lengths, cost).validate()


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_it_repeats(sharding):
    cost = roomy_cost_model("2x8xA100-40G", "gpt-7b", "flexsp-a100", sharding, 2)
    first, second = (plan_auto(LENGTHS, cost, seed=4, evaluations=40) for _ in range(2))
    assert first.hash == second.hash


def test_a_pipeline_takes_part_where_stages_are_given():
    pipeline = make_plan("pipeline:2", LENGTHS, COST)
    assert predicted_ns(plan_auto(LENGTHS, COST, stages=2, evaluations=40), COST) <= predicted_ns(pipeline, COST)
    static = plan_static(LENGTHS, COST, degree=8)
    assert (best_of([static, pipeline], COST) is pipeline) == (predicted_ns(pipeline, COST) < COST.plan_ns(static))
    assert len(plan_auto(LENGTHS, COST, evaluations=0).pipelines[0].stages) == 1
