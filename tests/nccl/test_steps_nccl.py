"""Whole steps over NCCL, loss and every gradient against one process: random plans, all shardings, all schedules."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from seqloom.engine import bind_plan, evaluate, run_step
from seqloom.errors import PlanError
from seqloom.layout import Route, Span
from seqloom.models import ModelAdapter, recompute_layers
from seqloom.params import FSDPParameters, PipelineFSDP, Placement, ReshardingParameters
from seqloom.plan import Checkpoint, Group, Reduce, Remap, Sharding
from seqloom.plan.rules.structure import stage_groups
from seqloom.schedules.registry import SCHEDULE_NAMES
from support.head_stages import head_stage_steps
from support.pipelines import pipeline_plans, pipeline_steps
from support.scheduled import fixed_step, scheduled_steps
from support.side_by_side import side_by_side_plans
from support.steps import (
    Step,
    divided_experts,
    in_tp_groups,
    one_stage_plan,
    step_plans,
    steps,
    tensor_plans,
    tiny_spec,
    wide_steps,
    with_experts,
)
from support.two_layouts import shifted
from support.workers import family_of

WORLDS = (2, 4, 8)
"""Worlds of their own have communicators of their own, so there are few."""
STEP = Step((16, 9, 5, 13, 3, 24), tiny_spec())
KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)


def spread(transport, step, plan, device, backend=None):
    """The step with replicated parameters, or under free sharding."""
    return step.spread(plan, transport, device=device, backend=backend)


def check(pool, step, plan, device, body=spread):
    found, wanted = pool.run(body, step, plan, device, ranks=plan.limits.ranks), step.alone()
    assert max(each.worst(wanted) for each in found) < 1e-9
    assert len({each.loss for each in found}) == 1


def draw_plan(data, plans):
    """Draw a plan for a world that there is; free sharding needs the whole job."""
    plan = data.draw(plans)
    assume(plan.limits.ranks in (WORLDS[-1:] if plan.sharding == Sharding.FREE else WORLDS))
    return with_communicators(plan)


def with_communicators(plan):
    """Refuse a plan with Ulysses blocks that the pool, whose ranks are one node, has no communicator for."""
    family = family_of(plan.limits.ranks)
    blocks = [block for _, _, group in stage_groups(plan) for block in group.ulysses_groups()]
    assume(all(family.contains(block[0], len(block)) for block in blocks))
    return plan


def whole_job(plan):
    """The plan on eight ranks, of which some have no tokens: parameters are sharded over all ranks of a job."""
    (line,), limits = plan.pipelines, plan.limits
    limits = replace(limits, ranks=8, node_size=limits.node_size if 8 % limits.node_size == 0 else 8)
    stage = replace(line.stages[0], ranks=tuple(range(8)))
    plan = replace(plan, limits=limits, pipelines=(replace(line, stages=(stage,)),))
    try:
        plan.validate()
    except PlanError:  # routes of other nodes, or EP groups that do not divide them
        reject()
    return with_communicators(plan)


# ---- Random plans


@settings(max_examples=50, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_random_plans_of_one_stage(nccl_pool, device, data):
    """Ulysses, ring, gather, routes, zones, any sharding's rounds, checkpointing; free sharding moves parameters."""
    step = data.draw(steps())
    check(nccl_pool, step, draw_plan(data, step_plans(step, max_ranks=8)), device)


@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_random_pipelines(nccl_pool, device, data):
    """Stages, pieces with carried keys, V and interleaved, split backwards, offload, in any order that ends."""
    step = data.draw(pipeline_steps())
    check(nccl_pool, step, draw_plan(data, pipeline_plans(step)), device)


@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_random_pipelines_side_by_side(nccl_pool, device, data):
    """Pipelines of different shape, with TP groups, under free sharding: every step has other strategies."""
    step = data.draw(pipeline_steps())
    plan = draw_plan(data, side_by_side_plans(step, tp_groups=True, sharding=Sharding.FREE))
    check(nccl_pool, step, plan, device)


@settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_random_plans_of_tp_groups(nccl_pool, device, data):
    """Any groups and checkpoints under sharding full, hybrid and none; TP groups divide experts and vocabulary."""
    step = data.draw(wide_steps())
    plan = data.draw(tensor_plans(step, max_ranks=8).filter(lambda plan: plan.pipelines[0].stages[0].tensor != 3))
    check(nccl_pool, step, whole_job(plan), device, body=sharded)


@settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_random_plans_of_ep_groups(nccl_pool, device, data):
    """Ranks without tokens compute those of others."""
    step = data.draw(steps().flatmap(with_experts))
    plans = step_plans(step, max_ranks=8).filter(lambda plan: plan.sharding != Sharding.FREE)
    plans = plans.flatmap(lambda plan: divided_experts(plan, step.spec.experts))
    check(nccl_pool, step, whole_job(data.draw(plans)), device, body=sharded)


@settings(max_examples=30, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_random_heads_on_all_stages(nccl_pool, device, data):
    step, plan = data.draw(head_stage_steps(ranks=8))
    check(nccl_pool, step, plan, device, body=in_stages)


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@settings(max_examples=3, suppress_health_check=[HealthCheck.filter_too_much])
@given(st.data())
def test_every_schedule(nccl_pool, device, name, data):
    step, plan = data.draw(scheduled_steps(name).filter(lambda drawn: drawn[1].limits.ranks in WORLDS))
    check(nccl_pool, step, plan, device)


# ---- Shardings


def planned(**options):
    """Three rounds on eight ranks in nodes of four: Ulysses, a routed ring over both nodes, single ranks."""
    rounds = [
        [Group((0, 1, 2, 3), 4, 1, (Span(0, 0, 16), Span(4, 0, 3))), Group((4, 5), 1, 2, (Span(1, 0, 9),))],
        [Group((0, 1, 4, 5), 2, 2, (Span(5, 0, 24),), route=Route((0, 1, 4, 5), 2))],
        [Group((3,), 1, 1, (Span(2, 0, 5),)), Group((6, 7), 1, 2, (Span(3, 0, 13),))],
    ]
    return one_stage_plan(rounds, ranks=8, node_size=4, **options)


def sharded(transport, step, plan, device, compute=None, backend=None):
    """The step with the parameters that its sharding asks for."""
    if plan.sharding == Sharding.FREE:
        return step.spread(plan, transport, device=device, backend=backend)
    stage = plan.pipelines[0].stages[0]
    options = {"node_size": plan.limits.node_size, "param_dtype": compute}
    options |= {"tensor": stage.tensor, "expert": stage.expert}
    return step.spread(
        plan,
        transport,
        lambda adapter, own: FSDPParameters(adapter, own, plan.sharding, **options),
        device=device,
        backend=backend,
    )


@pytest.mark.parametrize("remap", [None, *Remap])
@pytest.mark.parametrize("sharding", Sharding)
def test_every_sharding(nccl_pool, device, sharding, remap):
    plan = planned(sharding=sharding, checkpoint=KINDS)
    if remap is not None and sharding != Sharding.FREE:
        plan = shifted(plan, remap)
    check(nccl_pool, STEP, plan, device, body=sharded)


@pytest.mark.parametrize("sharding", [Sharding.FULL, Sharding.FREE])
def test_compiled_layers(nccl_pool, device, sharding):
    plan = planned(sharding=sharding, checkpoint=KINDS)
    found = nccl_pool.run(sharded, STEP, plan, device, None, "aot_eager", ranks=8)
    assert max(each.worst(STEP.alone()) for each in found) < 1e-9


def in_stages(transport, step, plan, device):
    """The step with the parameters of every stage in shards over its ranks."""
    placement = Placement(plan.pipelines[0].stages, plan.sharding, plan.limits.node_size)
    return step.spread(plan, transport, lambda adapter, own: PipelineFSDP(adapter, own, placement), device=device)


PIPELINES = {
    "pieces through eight stages": fixed_step("seq1f1b", 8, 1, (3, 1, 2)),
    "two chunks in a V, split backward": fixed_step("zb-v", 4, 2, (1, 1, 1, 1)),
    "two chunks in turn, with rings": fixed_step("seq1f1b-i", 2, 4, (2, 2, 3), ring=True),
    "split backward, head apart": fixed_step("seq1f1b-zb", 4, 2, (2, 1, 3), tied=False),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_sharded_stages(nccl_pool, device, name):
    check(nccl_pool, *PIPELINES[name], device, body=in_stages)


@pytest.mark.parametrize("sharding", [Sharding.FULL, Sharding.HYBRID, Sharding.NONE])
def test_experts_in_tp_groups_of_sharded_stages(nccl_pool, device, sharding):
    step, plan = fixed_step("seq1f1b-zb", 2, 2, (2, 1, 3))
    spec = replace(step.spec, heads=step.spec.heads * 2, kv_heads=step.spec.kv_heads * 2, vocabulary=24)
    step = replace(step, spec=replace(spec, experts=8, active_experts=3, expert_ffn=6, moe_layers=(0, 2)))
    plan = in_tp_groups(replace(plan, sharding=sharding), 2)
    check(nccl_pool, step, plan, device, body=in_stages)


# ---- Training


def trained(transport, step, plans, device, compute):
    """Losses of clipped AdamW steps, each under another plan, and of an evaluation; free sharding moves parameters."""
    adapter = ModelAdapter.of(step.model().to(device))
    recompute_layers(adapter.layers)
    sharding = plans[0].sharding
    if sharding == Sharding.FREE:
        parameters = ReshardingParameters(adapter, transport, param_dtype=compute)
    else:
        parameters = FSDPParameters(adapter, transport, sharding, node_size=4, param_dtype=compute)
    optimiser = torch.optim.AdamW(parameters.master_weights().values(), lr=0.02)
    read, losses = step.rows(), []

    def rows(context):
        return tuple(each.to(device) for each in read(context))

    for plan in plans:
        result = run_step(bind_plan(plan, transport, device=device), parameters, rows, step.valid)
        for parameter in parameters.master_weights().values():
            parameter.grad *= min(1.0, 1.0 / result.gradient_norm)
        optimiser.step()
        losses.append(result.loss)
    losses.append(evaluate(bind_plan(plans[0], transport, device=device), parameters, rows, step.valid))
    return losses


def other_plan(**options):
    """The same documents, all on one ring of eight ranks."""
    spans = tuple(Span(document, 0, length) for document, length in enumerate(STEP.lengths))
    return one_stage_plan([[Group(tuple(range(8)), 2, 4, spans)]], ranks=8, node_size=4, **options)


@pytest.mark.parametrize("compute", [None, torch.bfloat16])
def test_training_is_the_same_under_every_sharding(nccl_pool, device, compute):
    curves = {}
    step = replace(STEP, dtype=torch.float64 if compute is None else torch.float32)
    for sharding in Sharding:
        plans = [planned(sharding=sharding, reduce=Reduce.STEP), other_plan(sharding=sharding, reduce=Reduce.STEP)] * 2
        found = nccl_pool.run(trained, step, plans, device, compute, ranks=8)
        assert all(each == found[0] for each in found)
        curves[sharding] = found[0]
    exact = curves[Sharding.NONE]
    assert exact[-1] < exact[0]
    for curve in curves.values():
        assert curve == pytest.approx(exact, rel=1e-9 if compute is None else 0.02)
