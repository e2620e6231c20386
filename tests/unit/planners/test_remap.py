"""A second layout where it pays, and only there."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.cost import GroupShape, MemoryPolicy
from seqloom.cost.plan_cost import round_times
from seqloom.layout import Span
from seqloom.plan import Pipeline, Round, StageMicroBatch
from seqloom.planners.remap import with_remapping
from seqloom.planners.uniform import plan_static


def by_hand(cost, documents):
    """A plan of one round: the documents of list i whole on rank i."""
    numbers = itertools.count()
    spans = [[Span(next(numbers), 0, length) for length in row] for row in documents]
    groups = tuple(cost.group(GroupShape(1, 1), (rank,), row) for rank, row in enumerate(spans) if row)
    plan = plan_static(np.array([length for row in documents for length in row]), cost)
    work = StageMicroBatch(groups, plan.limits.capacity[0][0])
    line = Pipeline.single(range(cost.ranks), cost.model.layers, [Round((work,))], plan.reduce)
    return replace(plan, pipelines=(line,))


def test_uneven_tokens_are_levelled_for_linear_layers():
    cost = cost_model("1x4xH200", "llama3-8b")
    plan = by_hand(cost, [[16_000], [2_000], [2_000], [2_000]])
    better = with_remapping(plan, cost)
    better.validate()
    [work] = better.pipelines[0].rounds[0].by_stage
    assert work.linear is not None
    assert cost.plan_ns(better) < 0.8 * cost.plan_ns(plan)
    policy = MemoryPolicy(work.checkpoint, better.reduce)
    before = round_times(cost, plan.pipelines[0].rounds[0].by_stage[0], policy).rank_ns
    after = round_times(cost, work, policy).rank_ns
    assert after.max() - after.min() < (before.max() - before.min()) // 4


def test_level_rounds_stay_as_they_are():
    cost = cost_model("1x4xH200", "llama3-8b")
    plan = by_hand(cost, [[6_000]] * 4)
    assert with_remapping(plan, cost) is plan


@pytest.mark.parametrize("sharding", ["none", "hybrid"])
def test_tokens_stay_in_their_island(sharding):
    cost = cost_model("2x2xH200", "qwen3-0.6b", sharding=sharding)
    plan = by_hand(cost, [[20_000], [1_000], [9_000], [9_000]])
    better = with_remapping(plan, cost)
    better.validate()
    if sharding == "none":
        assert better is plan
    else:
        [work] = better.pipelines[0].rounds[0].by_stage
        assert work.linear is not None
        held = np.bincount(work.linear.rank, work.linear.sizes, 4)
        assert held[0] + held[1] == 21_000 and held[2] + held[3] == 18_000


def test_memory_is_kept():
    """Rank 1 has time to spare but hardly any room: it may not take all that would level it."""
    cost = cost_model("1x4xH200", "llama3-8b", capacity=10_000)
    plan = by_hand(cost, [[10_000], [100] * 98, [10_000], [10_000]])
    better = with_remapping(plan, cost)
    better.validate()
    assert cost.plan_ns(better) <= cost.plan_ns(plan)


def test_published_constants_have_no_price_for_it():
    cost = cost_model("1x8xA100-40G", "gpt-7b", profile="flexsp-a100")
    plan = plan_static(np.array([3_000, 500]), cost)
    assert with_remapping(plan, cost) is plan
