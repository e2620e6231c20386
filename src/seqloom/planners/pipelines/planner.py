"""Planner ``pipeline``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.cost.stage_limits import pipeline_limits
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Pipeline, Plan, Reduce, Round
from seqloom.plan.schedules import Schedule
from seqloom.plan.schedules.strict import one_forward_one_backward
from seqloom.planners.pipelines.draft import Draft, draft
from seqloom.planners.pipelines.line import Line, island_of, line_of
from seqloom.planners.pipelines.seats import Hall, work_of
from seqloom.simulate import predicted_ns

USUAL_STAGES = (2, 4, 8)


def plan_pipeline(
    lengths: np.ndarray,
    cost: CostModel,
    *,
    stages: int | None = None,
    chunks: int = 1,
    pieces: int | None = None,
    schedule: str = "auto",
    layers: Sequence[int] | None = None,
) -> Plan:
    """Plan a batch for a pipeline.

    Args:
        lengths: int64[n] tokens.
        cost: prices.
        stages: hosts that work side by side, each with an equal part of the ranks; None takes the best of 2, 4 and 8.
        chunks: stages of every host.
        pieces: into how many pieces the longest document is cut; None tries several.
        schedule: name of the order, or ``auto``.
        layers: of every stage; None levels the stages' times, see `stage_layers`.
    """
    if stages is None:
        options = [n for n in USUAL_STAGES if cost.ranks % n == 0 and n * chunks <= cost.model.layers]
        if not options:
            raise SeqloomError(
                f"{cost.ranks} ranks and {cost.model.layers} layers cannot be cut into 2, 4 or 8 stages; "
                "say how many there shall be (pipeline:3), or plan without a pipeline (auto)"
            )
        given = {"chunks": chunks, "pieces": pieces, "schedule": schedule, "layers": layers}
        plans = [plan_pipeline(lengths, cost, stages=n, **given) for n in options]
        return min(plans, key=lambda plan: predicted_ns(plan, cost))
    array = Batch.of(lengths).lengths
    line = line_of(cost, stages, chunks, layers)
    limits = pipeline_limits(cost, line.of_hosts, island_of(cost, line))
    checkpoint, room = limits.capacity[0]
    variant = Variant(checkpoint, Reduce.STEP, resident=True)
    hall = Hall.of(array, cost, line, variant)
    longest = max(int(hall.time[hall.widest(k), k]) for k in range(len(array)))
    made = draft(hall, variant, max(1, longest // (pieces or 4)), room)
    counts = [unit.pieces for unit in made.units if unit.piece == 0]
    order = one_forward_one_backward("seq1f1b", stages, counts)
    return build(array, cost, line, made, order, [checkpoint] * len(made.units))


def build(
    lengths: np.ndarray,
    cost: CostModel,
    line: Line,
    made: Draft,
    order: Schedule,
    kept: Sequence[Checkpoint],
) -> Plan:
    """The plan of these units in this order."""
    limits = pipeline_limits(cost, line.of_hosts, island_of(cost, line))
    rounds = [
        Round(tuple(work_of(cost, line, seats, host, checkpoint) for host in line.places))
        for seats, checkpoint in zip(made.seats, kept, strict=True)
    ]
    pipeline = Pipeline(line.stages, tuple(rounds), order.rows_of_plan())
    return Plan(
        limits=limits,
        sharding=cost.sharding,
        reduce=Reduce.STEP,
        documents=tuple(lengths.tolist()),
        pipelines=(pipeline,),
        planner="pipeline",
    )
