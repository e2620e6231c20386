"""Tensor parallelism under sharding full, hybrid and none: results of one process, prices of the simulator, bounds."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel
from seqloom.cost.model import tensor_degrees
from seqloom.describe import Cluster, ModelSpec
from seqloom.planners import make_plan
from seqloom.planners.bounds import lower_bound, plan_bound
from seqloom.simulate import simulate
from support.steps import tensor_plans, wide_steps
from support.strategies import batches

torch.set_num_threads(1)


@settings(max_examples=20)
@given(st.data())
def test_random_plans_of_tp_groups_are_the_truth(threads, data):
    """Any groups, shardings and checkpoints; TP groups without tokens in a round; experts that they divide."""
    step = data.draw(wide_steps())
    plan = data.draw(tensor_plans(step))
    run = threads(plan.limits.ranks).run
    results = run(lambda transport: step.spread(plan, transport), strict=True, family=plan.limits.family)
    wanted = step.alone()
    assert max(found.worst(wanted) for found in results) < 1e-9


@st.composite
def cost_models(draw):
    """Draw a cost model with a tensor degree above 1, of any sharding."""
    cluster = Cluster.parse(draw(st.sampled_from(("1x2xH200", "1x4xH100", "2x2xH200", "2x4xA800", "1x8xH200"))))
    sharding = draw(st.sampled_from(("full", "hybrid", "none")))
    model = ModelSpec.load(draw(st.sampled_from(("qwen3-0.6b", "llama3-8b"))))
    degree = draw(st.sampled_from(tensor_degrees(cluster, model, None, sharding)[1:]))
    return CostModel(cluster, model, sharding=sharding, tensor=degree, budget_gib=250.0)


@settings(max_examples=12)
@given(cost_models(), batches(max_documents=20), st.sampled_from(("static", "adaptive", "flex", "zones", "auto")))
def test_plans_of_every_planner_are_priced_alike_and_above_the_bound(cost, lengths, planner):
    lengths = np.minimum(lengths, max(map(cost.capacity, cost.policies)))
    plan = make_plan(planner, lengths, cost)
    assert {stage.tensor for stage in plan.pipelines[0].stages} == {cost.tensor}
    step_ns = simulate(plan, cost).step_ns
    assert step_ns == cost.plan_ns(plan) and plan_bound(plan, cost) == lower_bound(lengths, cost) <= step_ns
