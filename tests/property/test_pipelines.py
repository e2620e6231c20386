"""A pipeline never changes the result: loss, norm and every gradient of a step are those of one process."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.comm import Ranks
from seqloom.plan import Plan
from seqloom.plan.schedules.registry import NAMES
from seqloom.testing.pipelines import pipeline_plans, pipeline_steps
from seqloom.testing.scheduled import scheduled_steps

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def threads():
    """Threads by number of ranks, kept for all examples."""
    made = {}

    def of(world):
        if world not in made:
            made[world] = Ranks(world)
        return made[world]

    yield of
    for each in made.values():
        each.close()


@given(st.data())
def test_drawn_plans_are_values(data):
    plan = data.draw(pipeline_plans(data.draw(pipeline_steps())))
    assert Plan.from_text(plan.to_text()) == plan and Plan.from_json(plan.to_json()) == plan


@settings(max_examples=40)
@given(st.data())
def test_random_orders_on_the_strict_transport(threads, data):
    step = data.draw(pipeline_steps())
    plan = data.draw(pipeline_plans(step))
    wanted, family = step.alone(), plan.limits.family
    for found in threads(plan.limits.ranks).run(lambda t: step.spread(plan, t), strict=True, family=family):
        assert found.worst(wanted) < 1e-9


@settings(max_examples=15)
@given(st.data())
def test_random_orders_in_float32(threads, data):
    """Against float64; a gradient that is zero but for rounding is measured against a twentieth of the largest."""
    exact = data.draw(pipeline_steps())
    plan = data.draw(pipeline_plans(exact))
    step, wanted, family = replace(exact, dtype=torch.float32), exact.alone(), plan.limits.family
    for found in threads(plan.limits.ranks).run(lambda t: step.spread(plan, t), family=family):
        assert found.worst(wanted, floor=0.05) < 1e-5


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=4)
@given(st.data())
def test_every_schedule(threads, name, data):
    step, plan = data.draw(scheduled_steps(name))
    wanted, family = step.alone(), plan.limits.family
    for found in threads(plan.limits.ranks).run(lambda t: step.spread(plan, t), strict=True, family=family):
        assert found.worst(wanted) < 1e-9
