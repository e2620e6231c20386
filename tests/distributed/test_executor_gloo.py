"""Pipelines on gloo processes: a few plans with the parameters of every stage on its own ranks equal one process."""

from dataclasses import replace

import pytest
import torch

from seqloom.layout import Span
from seqloom.params import PipelineFSDP, Placement
from seqloom.plan import Checkpoint, Group, Pipeline, Round, StageMicroBatch
from support.pipelines import ample
from support.scheduled import fixed_step

torch.set_num_threads(1)

CASES = {
    "pieces through eight stages": fixed_step("seq1f1b", 8, 1, (3, 1, 2)),
    "two chunks in a V, split backward": fixed_step("zb-v", 4, 2, (1, 1, 1, 1)),
    "two chunks in turn, with rings": fixed_step("seq1f1b-i", 2, 4, (2, 2, 3), ring=True),
    "split backward, head apart": fixed_step("seq1f1b-zb", 4, 2, (2, 1, 3), tied=False),
}


def spread(transport, step, plan):
    """The step, with every stage's parameters in shards over its ranks."""
    return step.spread(
        plan,
        transport,
        lambda adapter, t: PipelineFSDP(
            adapter, t, Placement(plan.pipelines[0].stages, plan.sharding, plan.limits.node_size)
        ),
    )


@pytest.mark.parametrize("name", CASES)
def test_a_pipeline_equals_one_process(gloo_pool, name):
    step, plan = CASES[name]
    found, wanted = gloo_pool.run(spread, step, plan, ranks=8), step.alone()
    assert max(each.worst(wanted) for each in found) < 1e-9
    assert len({each.loss for each in found}) == len({each.norm for each in found}) == 1


def replicated(transport, step, plan):
    """The step, with the whole model everywhere."""
    return step.spread(plan, transport)


def test_replicated_parameters_on_some_of_the_processes(gloo_pool):
    step, plan = fixed_step("seq1f1b", 2, 2, (3, 1, 2), ring=True)
    found = gloo_pool.run(replicated, step, plan, ranks=4)
    assert max(each.worst(step.alone()) for each in found) < 1e-9


def test_two_pipelines_beside_ranks_that_do_nothing(gloo_pool):
    """Two stages of two ranks with pieces; one stage of two ranks, one round; and the last two ranks."""
    step, plan = fixed_step("seq1f1b", 2, 2, (3, 1, 2), ring=True)
    first = len(step.lengths)
    work = StageMicroBatch((Group((4, 5), 2, 1, (Span(first + 1, 0, 9), Span(first, 0, 5))),), Checkpoint.FULL)
    beside = Pipeline.single((4, 5), step.spec.layers, (Round((work,)),), plan.reduce)
    step = replace(step, lengths=(*step.lengths, 5, 9))
    limits = ample(8, step.spec.heads)
    plan = replace(plan, limits=limits, documents=step.lengths, pipelines=(beside, *plan.pipelines))
    plan.validate()
    found = gloo_pool.run(replicated, step, plan, ranks=8)
    assert max(each.worst(step.alone()) for each in found) < 1e-9
