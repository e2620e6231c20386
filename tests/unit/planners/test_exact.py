"""The mixed-integer programme against the dynamic programme over sets of documents."""

import sys

import numpy as np
import pytest
from brute_force import shortest_step

from seqloom.errors import SeqloomError
from seqloom.planners import make_plan
from seqloom.planners.bounds import policies_bound
from seqloom.planners.exact import MAX_DOCUMENTS, plan_exact
from support.strategies import roomy_cost_model


def published(sharding, cluster="1x4xA100-40G", tier=1):
    return roomy_cost_model(cluster, "gpt-7b", "flexsp-a100", sharding, tier)


def batch(cost, count, seed):
    random = np.random.default_rng(seed)
    most = 2 * cost.capacity(cost.policies[0])
    return np.minimum(random.lognormal(np.log(most / 8), 1.0, count).astype(np.int64) + 1, most)


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_it_equals_brute_force(sharding, seed):
    cost = published(sharding)
    lengths = batch(cost, 5, seed)
    plan = plan_exact(lengths, cost)
    plan.validate()
    assert plan.planner == "exact"
    assert cost.plan_ns(plan) == shortest_step(lengths, cost, cost.policies[0])
    assert cost.plan_ns(make_plan("flex", lengths, cost)) >= cost.plan_ns(plan)
    assert policies_bound(lengths, cost, cost.policies) <= cost.plan_ns(plan)


def test_it_proves_every_variant_though_rounds_may_keep_more():
    cost = roomy_cost_model("1x2xH100", "qwen3-0.6b", None, "full", 0)
    lengths = np.array([20_000, 3_000, 900])
    plan = plan_exact(lengths, cost)
    plan.validate()
    alone = [shortest_step(lengths, cost, v) + cost.step_overhead_ns(v) for v in cost.policies]
    assert cost.plan_ns(plan) <= min(alone)


def test_rounds_may_differ_in_what_they_keep():
    cost = roomy_cost_model("1x2xH100", "qwen3-0.6b", None, "none", 0)
    lengths = np.array([19_707, 24_721, 23_294, 14_728])
    plan = plan_exact(lengths, cost)
    assert cost.plan_ns(plan) <= cost.plan_ns(make_plan("flex", lengths, cost))
    assert len({current.by_stage[0].checkpoint for current in plan.pipelines[0].rounds}) > 1


@pytest.mark.parametrize(("count", "cluster"), [(MAX_DOCUMENTS + 1, "1x4xA100-40G"), (2, "3x8xA100-40G")])
def test_too_large_is_refused(count, cluster):
    with pytest.raises(SeqloomError, match=r"exact takes at most.*use flex"):
        plan_exact(np.full(count, 100), published("full", cluster))


def test_without_proof_there_is_no_plan():
    cost = published("full")
    with pytest.raises(SeqloomError, match="no proof of optimality within 1 nodes"):
        plan_exact(batch(cost, 9, 1), cost, nodes=1)


@pytest.mark.parametrize("name", ["exact", "flexsp"])
def test_without_the_solver_the_extra_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(SeqloomError, match=r"seqloom\[exact\]"):
        make_plan(name, np.array([500, 600]), published("full"))
