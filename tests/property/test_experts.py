"""Experts over any ranks never change the result: loss, norm and every gradient of a step are those of one process."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.pipelines import pipeline_plans, pipeline_steps
from support.side_by_side import side_by_side_plans
from support.steps import divided_experts, step_plans, steps, with_experts
from support.two_layouts import with_linear_layouts

torch.set_num_threads(1)


def worst(threads, step, plan):
    """Return how far the ranks of a plan are from one process; see `Found.worst`."""
    run = threads(plan.limits.ranks).run
    results = run(lambda transport: step.spread(plan, transport), strict=True, family=plan.limits.family)
    wanted = step.alone()
    return max(found.worst(wanted) for found in results)


@settings(max_examples=30)
@given(st.data())
def test_random_plans(threads, data):
    """Any groups, shardings and checkpoints; ranks without tokens compute those of others."""
    step = data.draw(steps().flatmap(with_experts))
    plan = data.draw(step_plans(step).flatmap(lambda plan: divided_experts(plan, step.spec.experts)))
    assert worst(threads, step, plan) < 1e-9


@settings(max_examples=10)
@given(st.data())
def test_random_plans_with_two_layouts(threads, data):
    """Tokens are routed from where the linear layout has them."""
    step = data.draw(steps().flatmap(with_experts))
    plans = step_plans(step).flatmap(lambda plan: divided_experts(plan, step.spec.experts))
    movable = plans.filter(lambda plan: len(plan.shard_groups[0]) > 1)
    assert worst(threads, step, data.draw(movable.flatmap(with_linear_layouts))) < 1e-9


@settings(max_examples=15)
@given(st.data())
def test_random_pipelines(threads, data):
    """Documents in pieces, split backwards, stages in any order; pipelines beside each other."""
    step = data.draw(pipeline_steps().flatmap(with_experts))
    plans = data.draw(st.sampled_from((pipeline_plans, side_by_side_plans)))(step)
    plan = data.draw(plans.flatmap(lambda plan: divided_experts(plan, step.spec.experts)))
    assert worst(threads, step, plan) < 1e-9
