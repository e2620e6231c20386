"""Plans of side-by-side pipelines by their shapes, and twenty strategies for eight ranks: one a step of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from seqloom.layout import Span
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, Sharding, StageMicroBatch
from seqloom.plan.pipeline import Stage, with_reshard_after_forward
from seqloom.schedules.registry import build_schedule
from support.pipelines import ample
from support.scheduled import unit_spans
from support.side_by_side import renamed
from support.steps import one_stage_plan

UNITS = 3
"""Documents of a pipeline that have a micro-batch of their own, or several; all others are beside the last."""
KINDS = (Checkpoint.NONE, Checkpoint.SELECTIVE, Checkpoint.FULL, Checkpoint.STAGE)


class Shape(NamedTuple):
    """A pipeline: stages of `tensor x ulysses x ring` ranks each, the pieces of its first document, and its order."""

    stages: int = 1
    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    pieces: int = 1
    schedule: str = "seq1f1b"

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return self.tensor * self.ulysses * self.ring


def shaped_plan(lengths: Sequence[int], shapes: Sequence[Shape], *, ranks: int, layers: int, heads: int) -> Plan:
    """Return a plan with free sharding: pipelines of these shapes one after the other, documents dealt in turn.

    Args:
        lengths: of the documents; each pipeline gets at least one.
        shapes: of the pipelines; the last ranks may be left over.
        ranks: of the world.
        layers: of the model, at least as many as stages.
        heads: of the model.
    """
    lines, first = [], 0
    for number, shape in enumerate(shapes):
        documents = range(number, len(lengths), len(shapes))
        lines.append(_line(shape, first, [lengths[k] for k in documents], documents, layers))
        first += shape.stages * shape.width
    plan = Plan(ample(ranks, heads), Sharding.FREE, Reduce.STEP, tuple(lengths), tuple(lines), "shaped")
    plan.validate()
    return plan


def _line(shape: Shape, first: int, lengths: Sequence[int], documents: Sequence[int], layers: int) -> Pipeline:
    apart = lengths[:UNITS]
    schedule = build_schedule(shape.schedule, shape.stages, len(apart), [shape.pieces, *[1] * (len(apart) - 1)])
    cuts = [s * layers // len(schedule.pp_ranks) for s in range(len(schedule.pp_ranks) + 1)]
    stages = []
    for place, host in enumerate(schedule.pp_ranks):
        begin = first + host * shape.width
        stages.append(Stage(tuple(range(begin, begin + shape.width)), (cuts[place], cuts[place + 1]), shape.tensor))
    placements = unit_spans(schedule, apart, (), 0)
    placements[-1] += [Span(number, 0, length) for number, length in enumerate(lengths)][UNITS:]
    rounds = [
        Round(
            tuple(
                StageMicroBatch(
                    (Group(stage.ranks, shape.tensor * shape.ulysses, shape.ring, tuple(spans)),),
                    KINDS[(unit + place) % len(KINDS)],
                )
                for place, stage in enumerate(stages)
            )
        )
        for unit, spans in enumerate(placements)
    ]
    return Pipeline(tuple(stages), renamed(rounds, documents), schedule.pipeline_actions())


def in_nodes_of(size: int, plan: Plan) -> Plan:
    """Return a plan on nodes of so many ranks."""
    changed = replace(plan, limits=replace(plan.limits, node_size=size))
    changed.validate()
    return changed


def gathered_per_pass(plan: Plan, stages: Sequence[int]) -> Plan:
    """Return a plan in which stages of these numbers, in every pipeline, are gathered for each of their passes."""
    changed = replace(plan, pipelines=tuple(with_reshard_after_forward(line, stages) for line in plan.pipelines))
    changed.validate()
    return changed


STRATEGIES: tuple[tuple[Shape, ...], ...] = (
    (Shape(2, 2, 1, 1, 3), Shape(1, 1, 2, 2)),  # differ in stages, tensor and SP degree; a document in pieces
    (Shape(1, 1, 2, 4),),
    (Shape(),) * 8,
    (Shape(4, 1, 2, 1, 3),),
    (Shape(1, 4, 2, 1),),
    (Shape(2, 1, 4, 1, 2),),
    (Shape(1, 1, 4, 1), Shape(3, 1, 1, 1, 2)),  # the last rank is idle
    (Shape(2, 4, 1, 1),),
    (Shape(4, 1, 1, 1, 2), Shape(1, 4, 1, 1)),
    (Shape(1, 1, 1, 8),),
    (Shape(4, 2, 1, 1, 3, "seq1f1b-zb"),),
    (Shape(1, 2, 1, 1), Shape(1, 1, 1, 2), Shape(2, 1, 2, 1, 2)),
    (Shape(2, 2, 2, 1, 2),),
    (Shape(2, 1, 1, 2, 3, "seq1f1b-i"), Shape(2, 2, 1, 1)),
    (Shape(1, 2, 2, 2),),
    (Shape(1, 1, 2, 1),) * 3,  # two ranks are idle
    (Shape(2, 2, 1, 2, 1, "zb-v"),),
    (Shape(1, 4, 1, 1), Shape(), Shape(3, 1, 1, 1, 2)),
    (Shape(4, 1, 1, 2, 2),),
)
"""All but one of the strategies of `twenty_plans`: four layers, eight heads, four of keys and values."""


def twenty_plans(batches: Sequence[Sequence[int]], *, layers: int = 4, heads: int = 8) -> list[Plan]:
    """Return a plan for each of twenty steps on eight ranks, each with another strategy.

    Args:
        batches: lengths of the documents of every step, at least eight.
        layers, heads: of the model.
    """
    shaped = [
        shaped_plan(lengths, shapes, ranks=8, layers=layers, heads=heads)
        for lengths, shapes in zip([*batches[:10], *batches[11:]], STRATEGIES, strict=True)
    ]
    return [*shaped[:10], _mixed(batches[10], layers, heads), *shaped[10:]]


def _mixed(lengths: Sequence[int], layers: int, heads: int) -> Plan:
    """Return a plan of one stage with groups of different degrees, and ranks without tokens."""
    spans, half = [Span(number, 0, length) for number, length in enumerate(lengths)], len(lengths) // 2
    rounds = [
        [Group((0, 1, 2, 3), 2, 2, tuple(spans[:half])), Group((4, 5), 2, 1, (spans[half],))],
        [Group((6,), 1, 1, tuple(spans[half + 1 :]))],
    ]
    return one_stage_plan(rounds, ranks=8, layers=layers, heads=heads, sharding=Sharding.FREE, checkpoint=KINDS[:2])
