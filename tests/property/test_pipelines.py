"""A pipeline never changes the result: loss, norm and every gradient of a step are those of one process."""

from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.cost import CostModel
from seqloom.cost.memory import pp_rank_bytes
from seqloom.layout import Span
from seqloom.plan import Action, Checkpoint, Group, Pipeline, Plan, Reduce, Round, Sharding, Stage, StageMicroBatch
from seqloom.planners import make_plan
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.schedules.registry import SCHEDULE_NAMES
from support.head_stages import head_stage_steps
from support.pipelines import ample, pipeline_plans, pipeline_steps
from support.scheduled import scheduled_steps
from support.side_by_side import side_by_side_plans
from support.steps import Step, tiny_spec

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("copied_offloads")


def differences(threads, step, plan, wanted, **options):
    """Return how far every rank is from what one process finds; see `Found.worst`."""
    strict = step.dtype == torch.float64
    run = threads(plan.limits.ranks).run
    results = run(lambda t: step.spread(plan, t), strict=strict, family=plan.limits.family)
    return [found.worst(wanted, **options) for found in results]


@settings(max_examples=20)
@given(st.data())
def test_random_orders_on_the_strict_transport(threads, data):
    """Any stages, pieces, groups, checkpointing, layouts and order; the plan is a value that files keep."""
    step = data.draw(pipeline_steps(chunked=True))
    plan = data.draw(pipeline_plans(step))
    assert Plan.from_text(plan.to_text()) == plan and Plan.from_json(plan.to_json()) == plan
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@settings(max_examples=10)
@given(st.data())
def test_pipelines_side_by_side(threads, data):
    """Of different stages, with different numbers of rounds, some without documents, beside ranks without a stage."""
    step = data.draw(pipeline_steps())
    plan = data.draw(side_by_side_plans(step))
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@settings(max_examples=8)
@given(st.data())
def test_random_orders_in_float8(threads, data):
    step = data.draw(pipeline_steps()).in_float8()
    plan = data.draw(pipeline_plans(step))
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_many_random_orders(threads, data):
    step = data.draw(pipeline_steps())
    plan = data.draw(pipeline_plans(step))
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


def test_a_rank_that_skips_a_split_backward_keeps_its_gradients_as_the_others_do(threads):
    """Rank 1 has no token in the second stage; it must not send gradients in a backward in which rank 0 does not."""
    ranks, spans = (0, 1), (Span(0, 0, 2),)
    groups = Group(ranks, 1, 2, spans), Group((0,), 1, 1, spans)
    works = tuple(StageMicroBatch((group,), Checkpoint.NONE) for group in groups)
    text = "0UNSHARD 1UNSHARD 0F0 1F0 1I0 1W0 0B0 0REDUCE 1REDUCE 0RESHARD 1RESHARD"
    row = tuple(Action.parse(word) for word in text.split())
    pipeline = Pipeline((Stage(ranks, (0, 2)), Stage(ranks, (2, 4))), (Round(works),), (row,))
    plan = Plan(ample(2, 2), Sharding.FREE, Reduce.STEP, (2,), (pipeline,), "drawn")
    plan.validate()
    step = Step((2,), tiny_spec(layers=4, heads=2, kv_heads=1))
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@settings(max_examples=6)
@given(st.data())
def test_random_orders_in_float32(threads, data):
    """Against float64; a gradient that is zero but for rounding is measured against a twentieth of the largest."""
    exact = data.draw(pipeline_steps())
    plan = data.draw(pipeline_plans(exact))
    step = replace(exact, dtype=torch.float32)
    assert max(differences(threads, step, plan, exact.alone(), floor=0.05)) < 1e-5


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@settings(max_examples=2)
@given(st.data())
def test_every_schedule(threads, name, data):
    step, plan = data.draw(scheduled_steps(name))
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@lru_cache
def tight(stages, room, sharding="full"):
    """A cost model of four ranks in two nodes whose fullest stage has so many bytes for tokens."""
    roomy = cost_model("2x2xH100", tiny_spec(layers=4), sharding=sharding, budget_gib=5.0)
    layout = StageLayout.of(roomy, stages)
    state = max(pp_rank_bytes(roomy, shares, layout.shard_group_size(roomy)) for shares in layout.ranges_by_pp_rank)
    budget = (state + room) / 2**30
    return CostModel(roomy.cluster, roomy.model, sharding=sharding, budget_gib=budget, stages=stages)


def test_a_tight_budget_makes_the_planner_keep_less():
    lengths = np.array([60, 20, 9, 33, 41])
    plans = [make_plan("pipeline:2", lengths, tight(2, room)) for room in (10_000, 40_000, 100_000)]
    kept = [{(work.checkpoint, work.offload) for r in p.pipelines[0].rounds for work in r.by_stage} for p in plans]
    assert len({frozenset(each) for each in kept}) == 3


@settings(max_examples=12)
@given(head_stage_steps())
def test_random_heads_on_all_stages(threads, drawn):
    """Parts of the head on ranks of every stage, in any order: no token's loss is lost, or counted twice."""
    step, plan = drawn
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@settings(max_examples=5)
@given(
    st.lists(st.integers(1, 60), min_size=3, max_size=5),
    st.sampled_from((2, 4)),
    st.sampled_from((30_000, 20_000, 100_000)),
    st.sampled_from(("full", "hybrid", "none")),
)
def test_plans_of_the_planner(threads, lengths, stages, room, sharding):
    plan = make_plan(f"pipeline:{stages}", np.array(lengths, dtype=np.int64), tight(stages, room, sharding))
    step = Step(tuple(lengths), tiny_spec(layers=4))
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@lru_cache
def tight_stage(sharding, tokens=25):
    """A cost model of four ranks in two nodes that hold `tokens` each when all activations are kept, in one stage."""
    given = {"sharding": sharding, "offload": False}
    two = [cost_model("2x2xH100", tiny_spec(layers=3), **given, budget_gib=gib) for gib in (4.0, 5.0)]
    low, high = (cost.capacity(cost.policies[0]) for cost in two)
    return cost_model("2x2xH100", two[0].model, **given, budget_gib=4.0 + (tokens + 0.5 - low) / (high - low))


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
@pytest.mark.parametrize("lengths", [(200, 40, 9), pytest.param((215, 7), marks=pytest.mark.slow)])
def test_documents_in_pieces_on_one_stage(threads, lengths, sharding):
    """The longest fits in no group whole; some of its pieces are run forward again."""
    step, cost = Step(lengths, tiny_spec(layers=3)), tight_stage(sharding)
    plan = make_plan("auto", np.array(lengths), cost)
    kinds = {current.by_stage[0].checkpoint for current in plan.pipelines[0].rounds}
    assert plan.has_pieces and kinds & {Checkpoint.FULL, Checkpoint.STAGE}
    assert max(differences(threads, step, plan, step.alone())) < 1e-9
