"""A pipeline never changes the result: loss, norm and every gradient of a step are those of one process."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from seqloom.plan import Plan
from seqloom.testing.pipelines import pipeline_plans, pipeline_steps

torch.set_num_threads(1)


@given(st.data())
def test_drawn_plans_are_values(data):
    plan = data.draw(pipeline_plans(data.draw(pipeline_steps())))
    assert Plan.from_text(plan.to_text()) == plan and Plan.from_json(plan.to_json()) == plan
