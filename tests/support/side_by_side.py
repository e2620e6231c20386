"""Plans of several pipelines for tests: of different stages, with different numbers of rounds, beside idle ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
from hypothesis import strategies as st

from seqloom.layout import Layout, Span
from seqloom.plan import Group, Limits, Pipeline, Plan, Reduce, Round, Sharding, Stage, StageMicroBatch
from support.pipelines import PLACEMENTS, ample, any_order, framed, piece_rounds, stages_on
from support.steps import Step
from support.tables import rows_in_order


@st.composite
def side_by_side_plans(
    draw: st.DrawFn, step: Step, *, max_ranks: int = 8, tp_groups: bool = False, sharding: Sharding | None = None
) -> Plan:
    """Draw two or three pipelines for a step: documents dealt to them, pieces, groups and order of each by itself.

    One may be without documents, and ranks between them or behind them without a pipeline.

    Args:
        draw: given by hypothesis.
        step: its model and documents.
        max_ranks: with a third pipeline.
        tp_groups: stages may have a tensor degree of 2, where the model's kv heads allow it.
        sharding: of the plan; None: any.
    """
    lines, first = [], 0
    for number in range(3):
        stages = draw(_stages(step.spec.layers, 2 if tp_groups and step.spec.kv_heads % 2 == 0 else 1))
        width = max(max(stage.ranks) for stage in stages) + 1
        if number == 2 and (first + width > max_ranks or draw(st.booleans())):
            break
        lines.append(moved(stages, first))
        first += width + draw(st.integers(0, 1))
        first += -first % 4  # blocks of two and four are aligned
    own = ample(first, step.spec.heads, draw(st.sampled_from((first, 4))))
    sharding = draw(st.sampled_from(Sharding)) if sharding is None else sharding
    home = [draw(st.integers(0, len(lines) - 1)) for _ in step.lengths]
    pipelines = []
    for number, stages in enumerate(lines):
        mine = [document for document, chosen in enumerate(home) if chosen == number]
        pipelines.append(draw(_pipelines(step.lengths, mine, stages, own, sharding)))
    plan = Plan(own, sharding, Reduce.STEP, step.lengths, tuple(draw(st.permutations(pipelines))), "drawn")
    plan.validate()
    return plan


def moved(stages: Sequence[Stage], first: int) -> tuple[Stage, ...]:
    """Return stages with `first` added to every rank."""
    return tuple(replace(stage, ranks=tuple(first + rank for rank in stage.ranks)) for stage in stages)


def renamed(rounds: Sequence[Round], names: Sequence[int]) -> tuple[Round, ...]:
    """Return rounds, without explicit attention layouts, whose document k is `names[k]`."""

    def own(group: Group) -> Group:
        return replace(group, spans=tuple(Span(names[span.document], span.start, span.stop) for span in group.spans))

    def change(work: StageMicroBatch) -> StageMicroBatch:
        groups, linear = tuple(map(own, work.groups)), work.linear
        if linear is not None:
            linear = Layout(linear.rank, np.array(names)[linear.item], linear.start, linear.stop)
        return replace(work, groups=groups, linear=linear)

    return tuple(Round(tuple(map(change, current.by_stage))) for current in rounds)


@st.composite
def _stages(draw: st.DrawFn, layers: int, degree: int) -> tuple[Stage, ...]:
    """Draw up to four stages on one or two hosts of one or two ranks, from rank 0.

    With a tensor degree above 1 some stages have it, and a single host may have four ranks.
    """
    fits = [(h, name) for h in (1, 2) for name, place in PLACEMENTS.items() if len(place(h)) <= layers]
    hosts, name = draw(st.sampled_from(fits))
    widths = (1, 2, 4) if degree > 1 and hosts == 1 else (1, 2)
    stages = stages_on(PLACEMENTS[name](hosts), draw(st.sampled_from(widths)), layers)
    degrees = [size for size in {1, degree} if len(stages[0].ranks) % size == 0]
    return tuple(replace(stage, tensor=draw(st.sampled_from(degrees))) for stage in stages)


@st.composite
def _pipelines(
    draw: st.DrawFn,
    lengths: Sequence[int],
    documents: Sequence[int],
    stages: tuple[Stage, ...],
    own: Limits,
    sharding: Sharding,
) -> Pipeline:
    """Draw the rounds and the table of one pipeline, for some of the documents."""
    drawn = draw(piece_rounds([lengths[k] for k in documents], stages, own, sharding))
    rounds = renamed(drawn, documents)
    random = Random(draw(st.integers(0, 2**16)))
    split = [draw(st.booleans()) for _ in stages]
    table = rows_in_order(stages, any_order(len(stages), rounds, split, random))
    return Pipeline(stages, rounds, framed(stages, table))
