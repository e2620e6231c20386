"""How many layers of a round recompute less: as many as memory holds, and never at a loss."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.plan import Checkpoint, Round
from seqloom.planners.bounds import lower_bound
from seqloom.planners.recompute import with_lighter_layers, without_lighter_layers
from seqloom.planners.registry import make_plan
from seqloom.simulate import predicted_ns, simulate

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


PIPELINES = {
    "four stages": ("1x8xH200", "llama3-8b", "full", "pipeline:4", [131_072] * 6 + [300_000]),
    "two stages": ("1x8xH100", "llama3-8b", "hybrid", "pipeline:2", [65_536] * 12),
    "two chunks": ("1x4xH100", "llama-3b", "full", "pipeline:2", [65_536] * 8),
    "side by side": ("1x8xA100-40G", "llama-7b", "free", "auto", [20_000] * 6 + [60_000] * 2 + [500] * 9),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_micro_batches_of_stages_fill_what_their_neighbours_leave(name):
    """Each on each stage by itself; of what they got nobody has room for one layer more."""
    cluster, model, sharding, planner, lengths = PIPELINES[name]
    cost, lengths = cost_model(cluster, model, sharding=sharding, stages=2), np.array(lengths)
    plan = make_plan(planner, lengths, cost, **({"chunks": 2} if name == "two chunks" else {}))
    alike = without_lighter_layers(plan)
    assert with_lighter_layers(alike, cost) == plan == with_lighter_layers(plan, cost) != alike
    assert predicted_ns(plan, cost) < predicted_ns(alike, cost)
    assert simulate(plan, cost).peak_memory.max() <= cost.budget_bytes
    changed = one_layer_more(plan)
    assert changed
    for more in changed:
        assert simulate(more, cost).peak_memory.max() > cost.budget_bytes


def one_layer_more(plan, most=12):
    """Plans with one more lighter layer of one micro-batch on one stage, where it has some but not all."""
    found = []
    for p, line in enumerate(plan.pipelines):
        for r, current in enumerate(line.rounds):
            for s, work in enumerate(current.by_stage):
                if 0 < work.lighter_layers < line.stages[s].layer_count - 1:
                    works = list(current.by_stage)
                    works[s] = replace(work, lighter_layers=work.lighter_layers + 1)
                    rounds = (*line.rounds[:r], Round(tuple(works)), *line.rounds[r + 1 :])
                    lines = list(plan.pipelines)
                    lines[p] = replace(line, rounds=rounds)
                    found.append(replace(plan, pipelines=tuple(lines)))
    return found[:: max(1, len(found) // most)]


def test_auto_is_not_slower_than_any_planner_with_lighter_layers():
    cost, lengths = cost_model("1x8xH200", "llama3-8b"), np.array([131_072] * 3 + [600_000, 5_000, 300])
    times = {name: cost.plan_ns(make_plan(name, lengths, cost)) for name in ("static", "adaptive", "flex", "zones")}
    assert cost.plan_ns(make_plan("auto", lengths, cost)) <= min(times.values())
