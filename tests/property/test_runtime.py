"""The plan never changes the result: loss, norm and every gradient of a step are those of one process."""

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.dist import SingleRankTransport
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group
from seqloom.planners import make_plan
from support.steps import Step, one_stage_plan, step_plans, steps, tiny_spec
from support.tiny_models import tiny_model
from support.two_layouts import with_linear_layouts

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("copied_offloads")


@given(st.data())
def test_random_plans_on_the_strict_transport(threads, data):
    step = data.draw(steps(chunked=True))
    plan = data.draw(step_plans(step))
    wanted = step.alone()
    results = threads(plan.limits.ranks).run(lambda transport: step.spread(plan, transport), strict=True)
    for found in results:
        assert found.worst(wanted) < 1e-9


def two_layouts(step):
    """Plans of which rounds have a linear layout of their own; shard groups of one rank have nowhere to move."""
    return step_plans(step).filter(lambda plan: len(plan.shard_groups[0]) > 1).flatmap(with_linear_layouts)


@settings(max_examples=40)
@given(st.data())
def test_random_plans_with_two_layouts(threads, data):
    """Linear layers see other tokens than attention does, or MLPs alone do; some ranks hold none in one of the two."""
    step = data.draw(steps())
    plan = data.draw(two_layouts(step))
    wanted, family = step.alone(), plan.limits.family
    results = threads(plan.limits.ranks).run(lambda t: step.spread(plan, t), strict=True, family=family)
    for found in results:
        assert found.worst(wanted) < 1e-9


@dataclass(frozen=True)
class HuggingFaceStep(Step):
    """A step of a tiny model of transformers."""

    name: str = "llama"

    def model_adapter(self):
        from seqloom.integrations.transformers import attach, model_adapter

        return model_adapter(attach(tiny_model(self.name)))

    def alone(self):
        spans = tuple(Span(document, 0, tokens) for document, tokens in enumerate(self.lengths))
        return self.spread(one_stage_plan([[Group((0,), 1, 1, spans)]], ranks=1), SingleRankTransport())


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
@settings(max_examples=8)
@given(st.data())
def test_models_of_transformers_with_two_layouts(threads, name, data):
    """A rank without tokens, in either layout, computes a row that is nobody's; experts may rest on some ranks."""
    step = HuggingFaceStep(
        tuple(data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))), tiny_spec(), name=name
    )
    plan = data.draw(two_layouts(step))
    results = threads(plan.limits.ranks).run(lambda t: step.spread(plan, t), strict=True, family=plan.limits.family)
    assert results[0].worst(step.alone()) < 1e-9


@settings(max_examples=20)
@given(st.data())
def test_random_plans_in_float8(threads, data):
    """No scale spans tokens, so float8 is a function of every token by itself."""
    step = data.draw(steps()).in_float8()
    plan = data.draw(step_plans(step))
    results = threads(plan.limits.ranks).run(lambda transport: step.spread(plan, transport))
    wanted = step.alone()
    assert wanted.loss != replace(step, float8=False).alone().loss
    assert results[0].worst(wanted) < 1e-9


@settings(max_examples=20)
@given(st.data())
def test_random_plans_in_float32(threads, data):
    """Against float64; a gradient that is zero but for rounding is measured against a twentieth of the largest."""
    exact = data.draw(steps())
    plan = data.draw(step_plans(exact))
    step, wanted = replace(exact, dtype=torch.float32), exact.alone()
    results = threads(plan.limits.ranks).run(lambda transport: step.spread(plan, transport))
    for found in results:
        assert found.worst(wanted, floor=0.05) < 1e-5


@lru_cache
def tight(sharding, tokens=25):
    """A cost model of four ranks in two nodes that hold `tokens` each when all activations are kept."""
    two = [cost_model("2x2xH100", tiny_spec(), sharding=sharding, budget_gib=gib) for gib in (4.0, 5.0)]
    low, high = (cost.capacity(cost.policies[0]) for cost in two)
    gib = 4.0 + (tokens + 0.5 - low) / (high - low)
    return cost_model("2x2xH100", tiny_spec(), sharding=sharding, budget_gib=gib)


def test_a_tight_budget_makes_planners_choose():
    cost = tight("full")
    lengths = np.random.default_rng(3).integers(1, 60, 12)
    plan = make_plan("flex", lengths, cost)
    works = [each.by_stage[0] for each in plan.pipelines[0].rounds]
    assert len(works) > 2 and len({group.degree for work in works for group in work.groups}) > 1
    assert {work.checkpoint for work in works} > {Checkpoint.NONE}


@settings(max_examples=10)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.sampled_from(("full", "hybrid", "none")))
@pytest.mark.parametrize("planner", ["static", "adaptive", "flex"])
def test_plans_of_planners(threads, planner, lengths, sharding):
    step = Step(tuple(lengths), tiny_spec())
    plan = make_plan(planner, np.array(lengths, dtype=np.int64), tight(sharding))
    results = threads(4).run(lambda transport: step.spread(plan, transport), strict=True)
    assert results[0].worst(step.alone()) < 1e-9
