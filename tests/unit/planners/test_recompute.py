"""How many layers of a round recompute less: as many as memory holds, and never at a loss."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.plan import Checkpoint, Round
from seqloom.planners.bounds import lower_bound
from seqloom.planners.recompute import with_lighter_layers, without_lighter_layers
from seqloom.planners.registry import make_plan
from seqloom.simulate import simulate

CASES = {
    "a document between two checkpoints": ("1x1xH200", "llama-3b", [60_000]),
    "rounds of both kinds": ("1x8xH200", "llama3-8b", [131_072] * 3 + [600_000]),
    "nearly nothing fits": ("1x8xH200", "llama3-8b", [1_200_000]),
}


def lighter_of(plan):
    return [current.by_stage[0].lighter_layers for current in plan.pipelines[0].rounds]


def with_counts(plan, counts):
    [line] = plan.pipelines
    works = [replace(each.by_stage[0], lighter_layers=n) for each, n in zip(line.rounds, counts, strict=True)]
    return replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in works)),))


@pytest.mark.parametrize("name", CASES)
def test_as_many_layers_as_memory_holds(name):
    cluster, model, lengths = CASES[name]
    cost, lengths = cost_model(cluster, model), np.array(lengths)
    plan = make_plan("flex", lengths, cost)
    counts, alike = lighter_of(plan), without_lighter_layers(plan)
    assert any(counts) and set(lighter_of(alike)) == {0}
    assert with_lighter_layers(alike, cost) == plan == with_lighter_layers(plan, cost)
    assert lower_bound(lengths, cost) <= cost.plan_ns(plan) < cost.plan_ns(alike)
    assert simulate(plan, cost).peak_memory.max() <= cost.budget_bytes
    for number, count in enumerate(counts):
        if count:
            more = with_counts(plan, [n + (k == number) for k, n in enumerate(counts)])
            assert simulate(more, cost).peak_memory.max() > cost.budget_bytes


def test_rounds_that_keep_everything_stay_as_they_are():
    cost = cost_model("1x8xH200", "llama3-8b")
    plan = make_plan("flex", np.array([9_000, 500, 700]), cost)
    assert {current.by_stage[0].checkpoint for current in plan.pipelines[0].rounds} == {Checkpoint.NONE}
    assert with_lighter_layers(plan, cost) is plan


def test_auto_is_not_slower_than_any_planner_with_lighter_layers():
    cost, lengths = cost_model("1x8xH200", "llama3-8b"), np.array([131_072] * 3 + [600_000, 5_000, 300])
    times = {name: cost.plan_ns(make_plan(name, lengths, cost)) for name in ("static", "adaptive", "flex", "zones")}
    assert cost.plan_ns(make_plan("auto", lengths, cost)) <= min(times.values())
