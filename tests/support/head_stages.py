"""Plans whose head is dealt to all stages, in the order of a schedule."""

import numpy as np

from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, Stage, StageMicroBatch
from seqloom.plan.pipeline import deal_head
from seqloom.schedules import Times, build_schedule
from seqloom.schedules.head import schedule_head
from support.pipelines import stages_on
from support.steps import Step, tiny_spec

STEP = Step((11, 8, 5, 4, 2), tiny_spec(layers=4))


def plan_with_head_stages(
    name,
    pp_size,
    *,
    pieces=1,
    width=1,
    lead=1,
    shape=None,
    kind=Checkpoint.NONE,
    step=STEP,
    sharding=Sharding.FULL,
    node_size=None,
):
    """A plan with head stages, its other stages in the order of a schedule; a sequence is a document.

    Args:
        shape: ulysses x ring of the groups with layers.
    """
    order = build_schedule(name, pp_size + lead, len(step.lengths), pieces)
    row = np.full((pp_size, len(order.units)), 6)
    times = Times(*(np.concatenate([row * each, row // 6]) for each in (1, 1, 1)))
    schedule = schedule_head(name, order.rows[:pp_size], order.units, times, message=1)
    stages = stages_on(schedule.pp_ranks[:pp_size], width, step.spec.layers)
    blocks, ulysses, ring = [stage.ranks for stage in stages], *(shape or (width, 1))
    rounds = []
    for document, piece, count in schedule.units:
        low, high = (step.lengths[document] * (piece + k) // count for k in (0, 1))
        groups = [(Group(ranks, ulysses, ring, (Span(document, low, high),)),) for ranks in blocks]
        works = [StageMicroBatch(each, kind) for each in groups]
        rounds.append(Round((*works, *deal_head(works[-1], blocks))))
    heads = tuple(Stage(ranks, (step.spec.layers,) * 2) for ranks in blocks)
    limits = Limits(
        pp_size * width, node_size or pp_size * width, step.spec.heads, tuple((each, 10**6) for each in Checkpoint)
    )
    line = Pipeline((*stages, *heads), tuple(rounds), schedule.pipeline_actions())
    plan = Plan(limits, sharding, Reduce.STEP, step.lengths, (line,), name)
    plan.validate()
    return plan
