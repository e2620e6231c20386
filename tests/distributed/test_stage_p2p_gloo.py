"""Stages as real processes: the numbers of one process."""

import pytest

from seqloom.layout import Span
from seqloom.params.fsdp import FSDPParameters
from seqloom.params.pipeline_fsdp import PipelineFSDP
from seqloom.params.placement import Placement
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.schedules import build_schedule
from support.pipelines import stages_on
from support.steps import Step, tiny_spec

STEP = Step((13, 10, 6), tiny_spec(layers=4, tied=True))


def planned(name, hosts, width, pieces, sharding):
    """A document is a sequence of the schedule; rounds keep something else in turn."""
    schedule = build_schedule(name, hosts, len(STEP.lengths), pieces)
    stages, rounds = stages_on(schedule.pp_ranks, width, STEP.spec.layers), []
    ulysses = min(width, STEP.spec.heads)
    for number, (document, piece, count) in enumerate(schedule.units):
        low, high = (STEP.lengths[document] * (piece + k) // count for k in (0, 1))
        spans, kind = (Span(document, low, high),), list(Checkpoint)[number % 4]
        rounds.append(
            Round(tuple(StageMicroBatch((Group(s.ranks, ulysses, width // ulysses, spans),), kind) for s in stages))
        )
    limits = Limits(hosts * width, 2, STEP.spec.heads, tuple((kind, 10**6) for kind in Checkpoint))
    line = Pipeline(stages, tuple(rounds), schedule.pipeline_actions())
    plan = Plan(limits, sharding, Reduce.STEP, STEP.lengths, (line,), name)
    plan.validate()
    return plan


def run(transport, plan, kind):
    placement = Placement(plan.pipelines[0].stages, plan.sharding, plan.limits.node_size)
    make = {
        "layers": lambda adapter, own: FSDPParameters(adapter, own, plan.sharding),
        "stages": lambda adapter, own: PipelineFSDP(adapter, own, placement),
    }
    return STEP.spread(plan, transport, make[kind])


@pytest.mark.parametrize(
    ("name", "hosts", "pieces", "sharding", "kind"),
    [
        ("zb-v", 2, 1, Sharding.HYBRID, "stages"),
        ("gpipe", 2, 1, Sharding.NONE, "stages"),
        ("seq1f1b-zb", 1, 2, Sharding.FULL, "layers"),  # layers sharded over all ranks: both halves at once, in I
    ],
)
def test_stages_are_one_process_however_parameters_are_kept(gloo_pool, name, hosts, pieces, sharding, kind):
    plan = planned(name, hosts, 8 // hosts, pieces, sharding)
    assert max(each.worst(STEP.alone()) for each in gloo_pool.run(run, plan, kind, ranks=8)) < 1e-9
