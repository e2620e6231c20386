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
    step = data.draw(pipeline_steps())
    plan = data.draw(pipeline_plans(step))
    assert Plan.from_text(plan.to_text()) == plan and Plan.from_json(plan.to_json()) == plan
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data())
def test_many_random_orders(threads, data):
    step = data.draw(pipeline_steps())
    plan = data.draw(pipeline_plans(step))
    assert max(differences(threads, step, plan, step.alone())) < 1e-9


@settings(max_examples=6)
@given(st.data())
def test_random_orders_in_float32(threads, data):
    """Against float64; a gradient that is zero but for rounding is measured against a twentieth of the largest."""
    exact = data.draw(pipeline_steps())
    plan = data.draw(pipeline_plans(exact))
    step = replace(exact, dtype=torch.float32)
    assert max(differences(threads, step, plan, exact.alone(), floor=0.05)) < 1e-5


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=2)
@given(st.data())
def test_every_schedule(threads, name, data):
    step, plan = data.draw(scheduled_steps(name))
    assert max(differences(threads, step, plan, step.alone())) < 1e-9
