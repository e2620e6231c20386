"""Planner ``pipeline``: stages, pieces, packs and their order, by the same prices as everything else."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from seqloom.cost import CostModel
from seqloom.cost.stages import pipeline_limits
from seqloom.describe import Batch
from seqloom.errors import SeqloomError
from seqloom.plan import Pipeline, Plan, Reduce, Round
from seqloom.planners.pipeline.placement import work_of
from seqloom.planners.pipeline.search import (
    FOLDED,
    NEAR_PERCENT,
    Answer,
    Search,
    longest_document,
    names_of,
    require_order,
    too_long,
)
from seqloom.planners.pipeline.stage_layout import check_stages, line_of, shard_group_of
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
        schedule: name of the order, or ``auto`` for the best of several.
        layers: of every stage; None levels the stages' times, see `stage_layers`.
    """
    array = Batch.of(lengths).lengths
    given = {"chunks": chunks, "pieces": pieces, "schedule": schedule, "layers": layers}
    if stages is None:
        return _best_of(lambda n: plan_pipeline(array, cost, stages=n, **given), _usual(cost, chunks), cost)
    check_stages(cost, stages, chunks)
    names = names_of(schedule, chunks)
    require_order(schedule, stages, chunks)
    if pieces is not None and not 1 <= pieces <= int(array.max()):
        raise SeqloomError(
            f"{pieces} pieces of a longest sequence of {array.max()} tokens; give 1 to {array.max()}, or leave it out"
        )
    line = line_of(cost, stages, chunks, layers, folded=schedule in FOLDED)
    limits = pipeline_limits(cost, line.of_hosts, shard_group_of(cost, line))
    search = Search(cost, line, limits, array, names, pieces)
    answers = search.answers() if int(array.max()) <= longest_document(search) else []
    if not answers:
        raise too_long(search)
    near = [answer for answer in answers if answer.makespan * 100 <= answers[0].makespan * NEAR_PERCENT]
    plans = [build(search, answer) for answer in near]
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: predicted_ns(plan, cost))


def _best_of(make: Callable[[int], Plan], options: Sequence[int], cost: CostModel) -> Plan:
    """The fastest plan over numbers of stages; the last refusal where all are refused."""
    plans: list[Plan] = []
    for stages in options:
        try:
            plans.append(make(stages))
        except SeqloomError:
            if not plans and stages == options[-1]:
                raise
    return min(plans, key=lambda plan: predicted_ns(plan, cost))


def _usual(cost: CostModel, chunks: int) -> list[int]:
    """Numbers of stages to choose from."""
    options = [n for n in USUAL_STAGES if cost.ranks % (n * cost.tensor) == 0 and n * chunks <= cost.model.layers]
    if not options:
        raise SeqloomError(
            f"{cost.ranks} ranks and {cost.model.layers} layers cannot be cut into 2, 4 or 8 stages; "
            "say how many there shall be (pipeline:3), or plan without a pipeline (auto)"
        )
    return options


def build(search: Search, answer: Answer) -> Plan:
    """The plan of an answer."""
    cost, line = search.cost, search.line
    rounds = []
    for unit, seats in enumerate(answer.draft.seats):
        levels = [search.levels[k] for k in answer.choice[:, unit].tolist()]
        works = [work_of(cost, line, seats, host, level) for host, level in zip(line.places, levels, strict=True)]
        rounds.append(Round(tuple(works)))
    return Plan(
        limits=search.limits,
        sharding=cost.sharding,
        reduce=Reduce.STEP,
        documents=tuple(search.lengths.tolist()),
        pipelines=(Pipeline(line.stages, tuple(rounds), answer.order.pipeline_actions()),),
        planner="pipeline",
    )
