"""Plans whose head is dealt to all stages: values that files keep, level, bounded, priced as they are simulated."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.cost.plan_cost import tokens_on_ranks
from seqloom.errors import PlanError, SeqloomError
from seqloom.plan import Plan, StageMicroBatch
from seqloom.plan.pipeline import deal_head
from seqloom.planners.bounds import plan_bound
from seqloom.planners.pipeline import plan_pipeline
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.schedules import Times, build_schedule, simulate_schedule
from seqloom.schedules.head import LEADS, schedule_head
from seqloom.simulate import simulate
from support.refusals import refused


def busiest_over_mean(plan, cost):
    """Of the ranks' work in a step, by pipeline rank, without the step's end."""
    found = simulate(plan, cost)
    work = found.busy_ns + found.comm_ns - found.end_ns
    by_pp_rank = [work[list(ranks)].mean() for ranks in plan.pipelines[0].ranks_by_pp_rank]
    return max(by_pp_rank) / np.mean(by_pp_rank)


@pytest.mark.parametrize(("length", "count"), [(8192, 24), pytest.param(65536, 2, marks=pytest.mark.slow)])
def test_eight_stages_of_llama_are_level_and_faster(length, count):
    cost = cost_model("1x8xH100", "llama3-8b", stages=8)
    plans = {
        head: plan_pipeline(
            np.full(count, length), cost, stages=8, schedule="1f1b" if length < 1e4 else "seq1f1b", head=head
        )
        for head in ("last", "all")
    }
    steps = {head: simulate(plan, cost) for head, plan in plans.items()}
    assert busiest_over_mean(plans["all"], cost) < 1.04 < 1.15 < busiest_over_mean(plans["last"], cost)
    assert steps["all"].step_ns < steps["last"].step_ns
    assert steps["all"].peak_memory.max() < cost.budget_bytes


@settings(max_examples=6)
@given(
    st.lists(st.integers(1, 3_000), min_size=1, max_size=6),
    st.sampled_from((2, 4)),
    st.sampled_from(("1f1b", "seq1f1b-zb", "balanced", "gpipe")),
)
def test_plans_are_values_that_hold_their_bound(lengths, stages, schedule):
    cost = cost_model("1x8xH100", "gpt-7b", stages=stages)
    plan = plan_pipeline(np.array(lengths), cost, stages=stages, schedule=schedule, head="all")
    plan.validate()
    assert Plan.from_text(plan.to_text()) == plan and Plan.from_json(plan.to_json()) == plan
    found, bound = simulate(plan, cost), plan_bound(plan, cost)
    assert bound is not None and bound <= found.step_ns
    assert found.peak_memory.max() <= cost.budget_bytes


@settings(max_examples=12)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.integers(2, 5),
    st.sampled_from(("1f1b", "gpipe", "zb-h1", "seq1f1b-zb")),
    st.sampled_from(LEADS),
    st.integers(0, 3),
    st.randoms(use_true_random=False),
)
def test_orders_with_heads_end_whatever_the_times(pieces, stages, name, lead, message, random):
    order = build_schedule(name, stages + lead, len(pieces), pieces)
    units = range(len(order.units))
    columns = [[[random.randint(0, 9) for _ in units] for _ in range(stages)] for _ in range(3)]
    heads = [[random.randint(0, 4) for _ in units] for _ in range(stages)]
    times = Times(*(np.array([*column, *heads]) for column in columns))
    schedule = schedule_head(name, order.rows[:stages], order.units, times, message)
    schedule.validate()
    simulate_schedule(schedule, times, message)
    assert all(len(row) == len(own) + 2 * len(units) for row, own in zip(schedule.rows, order.rows, strict=False))


def test_the_deal_gives_every_rank_as_many_tokens_within_one():
    cost = cost_model("1x8xH100", "gpt-7b", stages=4)
    plan = plan_pipeline(np.array([5000, 300, 77]), cost, stages=4, head="all")
    blocks = plan.pipelines[0].ranks_by_pp_rank
    for current in plan.pipelines[0].rounds:
        dealt = deal_head(current.by_stage[3], blocks)
        assert dealt == current.by_stage[4:]
        tokens = np.concatenate(
            [tokens_on_ranks(cost, work)[list(ranks)] for work, ranks in zip(dealt, blocks, strict=True)]
        )
        assert tokens.max() - tokens.min() <= 1 and tokens.sum() == sum(
            each.tokens for each in current.by_stage[0].spans()
        )


def test_a_head_is_refused_where_it_cannot_be_dealt_out():
    cost = cost_model("1x8xH100", "gpt-7b", stages=4)
    for options in ({"chunks": 2}, {"schedule": "zb-v", "chunks": 2}):
        with pytest.raises(SeqloomError, match="one chunk each; leave the head on the last stage"):
            plan_pipeline(np.array([100]), cost, stages=4, head="all", **options)
    with pytest.raises(SeqloomError, match="'al'"):
        plan_pipeline(np.array([100]), cost, stages=4, head="al")
    free = cost_model("1x8xH100", "gpt-7b", stages=4, sharding="free")
    with pytest.raises(SeqloomError, match="sharding free"):
        StageLayout.of(free, 4, head_stages=True)


def test_broken_head_stages_are_refused():
    cost = cost_model("1x8xH100", "gpt-7b", stages=4)
    plan = plan_pipeline(np.array([5000, 300]), cost, stages=4, schedule="1f1b", head="all")

    def changed(old, new):
        assert old in plan.to_text()
        return Plan.from_text(plan.to_text().replace(old, new))

    for old, new, rule, text in (
        ("stage 5 ranks 2-3 layers 32-32", "stage 5 ranks 0-1 layers 32-32", "layers", "one on every pipeline rank"),
        ("stage 5 ranks 2-3 layers 32-32", "stage 5 ranks 2-3 layers 31-31", "layers", r"use \[32:32\)"),
        (" 4F0 4B0", " 4B0 4F0", "order", "4F0"),
        (" 4SEND_B0", "", "messages", "SEND_B"),
    ):
        refused(changed(old, new), rule, text)
    current = plan.pipelines[0].rounds[0]
    assert isinstance(current.by_stage[4], StageMicroBatch)
    with pytest.raises(PlanError, match="every token of the round once"):
        changed("group ranks 0 ulysses 1 ring 1: 0[0:625)", "group ranks 0 ulysses 1 ring 1: 0[0:624)").validate()
