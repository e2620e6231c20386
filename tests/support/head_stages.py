"""Plans whose head is dealt to all stages, in the order of a schedule."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, Stage, StageMicroBatch
from seqloom.plan.pipeline import deal_head
from seqloom.schedules import Times, build_schedule
from seqloom.schedules.head import schedule_head
from support.pipelines import stages_on
from support.steps import Step, tiny_spec

KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL)
SHARDINGS = (Sharding.FULL, Sharding.HYBRID, Sharding.NONE)
STEP = Step((11, 8, 5, 4, 2), tiny_spec(layers=4))


ORDERS = ("gpipe", "1f1b", "zb-h1", "seq1f1b", "seq1f1b-zb")


@st.composite
def head_stage_steps(draw, *, ranks=None):
    """Draw a step, and its plan with a head on all stages: documents, pieces, widths, checkpointing, order, sharding.

    Args:
        ranks: of the plan; None: any number up to six.
    """
    name, pp_size = draw(st.sampled_from(ORDERS)), draw(st.sampled_from((2, 3, 4) if ranks is None else (2, 4)))
    widths = [size for size in (1, 2, 4) if (size * pp_size <= 6 if ranks is None else size * pp_size == ranks)]
    width = draw(st.sampled_from(widths))
    pieces = draw(st.integers(1, 3)) if name.startswith("seq") else 1
    shapes = [(ulysses, width // ulysses) for ulysses in (1, 2, 4) if width % ulysses == 0]
    lengths = draw(st.lists(st.integers(pieces, 13), min_size=1, max_size=5))
    step = replace(STEP, lengths=tuple(lengths), spec=tiny_spec(layers=4, tied=draw(st.booleans())))
    options = {"shape": draw(st.sampled_from(shapes)), "kind": draw(st.sampled_from((*KINDS, Checkpoint.STAGE)))}
    options |= {"lead": draw(st.integers(1, 2)), "sharding": draw(st.sampled_from(SHARDINGS)), "node_size": width}
    return step, plan_with_head_stages(name, pp_size, pieces=pieces, width=width, step=step, **options)


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
