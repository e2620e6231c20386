"""Other stages in every step: whatever came before, loss, norm and every gradient are those of one process."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.engine import bind_plan, run_step
from seqloom.params import ReshardingParameters
from seqloom.plan import Sharding
from seqloom.train.model import prepare_layers
from support.pipelines import pipeline_steps
from support.side_by_side import side_by_side_plans
from support.steps import Found

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("copied_offloads")


@settings(max_examples=6)
@given(st.data())
def test_one_model_under_random_pipelines(threads, data):
    step = data.draw(pipeline_steps())
    draw = side_by_side_plans(step, tp_groups=True, sharding=Sharding.FREE)
    drawn = [data.draw(draw) for _ in range(3)]
    plans = [plan for plan in drawn if plan.limits.ranks == drawn[0].limits.ranks]

    def body(transport):
        parameters, found = ReshardingParameters(prepare_layers(step.model_adapter()), transport), []
        for plan in (*plans, plans[0]):
            result = run_step(bind_plan(plan, transport), parameters, step.rows(), step.valid)
            gradients = {name: each.clone() for name, each in parameters.full_gradients()}
            found.append(Found(result.loss, result.gradient_norm, gradients))
        return found

    ranks, wanted = threads(drawn[0].limits.ranks), step.alone()
    for found in ranks.run(body, strict=True, family=drawn[0].limits.family):
        assert max(each.worst(wanted) for each in found) < 1e-9
