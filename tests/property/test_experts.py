"""Experts over any ranks never change the result: loss, norm and every gradient of a step are those of one process."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from seqloom.dist import bind_single_rank
from seqloom.engine import bind_plan, run_step
from seqloom.layout import Span
from seqloom.models.layer_wrapper import recompute_layers
from seqloom.models.transformer import MixtureOfExperts
from seqloom.params.interface import ReplicatedParameters
from seqloom.plan import Checkpoint, Group, Sharding
from support.pipelines import pipeline_plans, pipeline_steps
from support.side_by_side import side_by_side_plans
from support.steps import Found, Step, divided_experts, one_stage_plan, step_plans, steps, tiny_spec, with_experts
from support.tiny_models import MIXTURES, VOCABULARY, documents, gradients, targets, tiny_model
from support.two_layouts import with_linear_layouts

torch.set_num_threads(1)
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.25}


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


def chosen_experts(step, documents):
    """By layer, how often each expert is chosen for some documents of a step, in one process."""
    model, found = step.model(), []
    for layer in model.model.layers:
        if isinstance(layer.mlp, MixtureOfExperts):
            layer.mlp.gate.register_forward_hook(lambda module, inputs, logits: found.append(logits))
    context = bind_single_rank([step.lengths[each] for each in documents])
    model(torch.cat([step.documents()[0][each] for each in documents]), context.positions, context)
    spec = step.spec
    return [torch.bincount(each.topk(spec.active_experts).indices.view(-1), minlength=spec.experts) for each in found]


@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.FULL])
def test_a_step_measures_the_busiest_rank_of_its_ep_groups_round_by_round(threads, checkpoint):
    """Two EP groups, two rounds; a round that is recomputed counts once."""
    step = Step((9, 30, 4, 17, 12), tiny_spec(layers=3, experts=4, active_experts=2, expert_ffn=6))
    rounds = [([0], [1, 2]), ([3], [4])]  # by EP group, which is a group for attention too
    groups = [
        [
            Group((2 * k, 2 * k + 1), 2, 1, tuple(Span(each, 0, step.lengths[each]) for each in own))
            for k, own in enumerate(both)
        ]
        for both in rounds
    ]
    plan = one_stage_plan(groups, ranks=4, layers=3, checkpoint=checkpoint)
    [line] = plan.pipelines
    plan = replace(plan, pipelines=(replace(line, stages=(replace(line.stages[0], expert=2),)),))
    plan.validate()

    def run(transport):
        adapter = step.model_adapter()
        recompute_layers(adapter.layers)
        parameters = ReplicatedParameters(adapter, transport)
        return run_step(bind_plan(plan, transport), parameters, step.rows(), step.valid).expert_imbalance

    results = threads(4).run(run, strict=True, family=plan.limits.family)
    parts = [[each.view(2, 2).sum(1) for each in chosen_experts(step, own)] for both in rounds for own in both]
    most, total = (sum(torch.stack([of(each) for each in own]) for own in parts) for of in (torch.max, torch.sum))
    assert set(results) == {tuple((2 * most.double() / total).tolist())}


@dataclass(frozen=True)
class PlainStep(Step):
    """A step of a tiny model of transformers, which plain transformers computes document by document."""

    name: str = "mixtral"
    routed: bool = False  # with a router loss, over all tokens of the step

    def model(self):
        return tiny_model(self.name, **(ROUTED if self.routed else {}))

    def documents(self):
        ids = documents(self.lengths)
        return ids, [targets(each) for each in ids]

    def alone(self):
        model, (ids, labels) = self.model(), self.documents()
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        outputs = [model(input_ids=each[None], use_cache=False) for each in ids]
        pairs = [(output.logits[0], own) for output, own in zip(outputs, labels, strict=True)]
        loss = sum(torch.nn.functional.cross_entropy(*each, reduction="sum", ignore_index=-100) for each in pairs)
        loss = loss / self.valid
        if self.routed:
            layers = [torch.cat(parts) for parts in zip(*(each.router_logits for each in outputs), strict=True)]
            routers = load_balancing_loss_func(tuple(layers), model.num_experts, model.num_experts_per_tok)
            loss = loss + ROUTED["router_aux_loss_coef"] * routers
        loss.backward()
        found = gradients(model)
        norm = torch.stack([each.norm() for each in found.values()]).norm()
        return Found(loss.item(), float(norm), found)

    def attached(self, plan, transport):
        from seqloom.integrations.transformers import attach, model_adapter

        adapter = model_adapter(attach(self.model()))
        recompute_layers(adapter.layers)
        parameters = ReplicatedParameters(adapter, transport)
        result = run_step(bind_plan(plan, transport), parameters, self.rows(), self.valid)
        return Found(result.loss, result.gradient_norm, {k: each.clone() for k, each in parameters.full_gradients()})


@pytest.mark.parametrize("routed", [False, True], ids=["plain", "router loss"])
@pytest.mark.parametrize("name", ["mixtral", *MIXTURES])
@settings(max_examples=6)
@given(st.data())
def test_models_of_transformers(threads, name, routed, data):
    """Shared experts, biases, routing by groups of experts; a rank without tokens computes a row that is nobody's."""
    lengths = tuple(data.draw(st.lists(st.integers(2, 20), min_size=1, max_size=4)))
    spec = tiny_spec(experts=4, active_experts=2, expert_ffn=6, vocabulary=VOCABULARY)
    step = PlainStep(lengths, spec, name=name, routed=routed)
    plans = step_plans(step).filter(lambda plan: plan.sharding != Sharding.FREE)
    plan = data.draw(plans.flatmap(lambda plan: divided_experts(plan, 4)))
    results = threads(plan.limits.ranks).run(lambda t: step.attached(plan, t), strict=True, family=plan.limits.family)
    wanted = step.alone()
    assert max(found.worst(wanted) for found in results) < 1e-6  # routers of transformers compute in float32


@settings(max_examples=max(1, settings().max_examples // 8))
@given(st.data())
def test_random_pipelines_whose_tp_groups_divide_experts(threads, data):
    """Stages of tensor degree 1 and 2 beside each other, in pieces, moved from one layout of parameters to another."""
    step = data.draw(pipeline_steps().flatmap(with_experts))
    plan = data.draw(side_by_side_plans(step, tp_groups=True, sharding=Sharding.FREE))
    assert worst(threads, step, plan) < 1e-9
