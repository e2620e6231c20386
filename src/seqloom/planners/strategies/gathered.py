"""A pipeline whose parameters are gathered for every pass: what it holds, what that costs, and its plan.

All ranks of a stage meet in every pass, so every round is one group as wide as the stage: the micro-batches of the
assignment, in 1F1B order where there are several stages.

    0UNSHARD0 0F0 0RESHARD0   0UNSHARD0 0B0 0RESHARD0   0UNSHARD1 0F1 0RESHARD1 ..
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from seqloom.cost import CostModel, Shape, Variant
from seqloom.cost.passes import pass_times, tokens_in_passes
from seqloom.cost.stage_limits import pipeline_checkpoints
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Group, Limits, Pipeline, Plan, Reduce, Round, Span, Stage, Work
from seqloom.plan.per_pass import gathered_for_passes
from seqloom.plan.schedules import schedule_of
from seqloom.planners.pipelines.line import line_of
from seqloom.planners.strategies.values import Scheme


def gathered_holdings(inside: CostModel, stages: int) -> dict[Variant, int]:
    """Tokens of a micro-batch that a rank can hold, by what is kept; as many are in flight as 1F1B has."""
    line = line_of(inside, stages)
    column = line.width // line.tensor
    holding = {}
    for checkpoint in pipeline_checkpoints(inside):
        if checkpoint != Checkpoint.STAGE:  # no faster than running its layers again
            rooms = [
                tokens_in_passes(inside, part, column, checkpoint, stages - host)
                for host, part in enumerate(line.shares)
            ]
            holding[Variant(checkpoint, Reduce.STEP, resident=True)] = min(rooms)
    return holding


def unit_passes_ns(inside: CostModel, scheme: Scheme) -> int:
    """ns that gathering for every pass adds to a micro-batch on the slowest stage; nothing where parameters stay."""
    if not scheme.gathered:
        return 0
    line = line_of(inside, scheme.stages)
    times = [pass_times(inside, *each) for each in zip(line.stages, line.shares, strict=True)]
    return max(2 * each.gather + each.sum for each in times)


def plan_gathered(lengths: np.ndarray, batches: Sequence[Sequence[int]], cost: CostModel, scheme: Scheme) -> Plan:
    """Plan micro-batches of documents for a pipeline that is gathered for every pass.

    Args:
        lengths: int64[n] tokens.
        batches: documents of every micro-batch, in running order.
        cost: prices of the pipeline's ranks.
        scheme: of the pipeline.
    """
    holding = {variant: tokens for variant, tokens in gathered_holdings(cost, scheme.stages).items() if tokens > 0}
    needs = [-(-int(cost.tokens(lengths[list(batch)]).sum()) // scheme.width) for batch in batches]
    if scheme.stages > 1:  # several are in flight, and each may have as much of the memory as the largest
        needs = [max(needs)] * len(needs)
    stages = line_of(cost, scheme.stages).stages
    rounds = []
    for batch, need in zip(batches, needs, strict=True):
        fitting = [variant for variant, tokens in holding.items() if tokens >= need]
        if not fitting:
            raise SeqloomError(
                f"a micro-batch of {need * scheme.width} tokens for pipeline {scheme}, which holds "
                f"{max(holding.values(), default=0) * scheme.width}; raise the memory budget or use more GPUs"
            )
        shape = _fastest(lengths[list(batch)], cost, scheme, fitting[0])
        spans = tuple(Span(document, 0, int(lengths[document])) for document in batch)
        rounds.append(Round(tuple(_work(stage, shape, spans, fitting[0].checkpoint) for stage in stages)))
    rows = schedule_of("1f1b", scheme.stages, len(batches)).rows_of_plan()
    capacity = tuple((variant.checkpoint, tokens) for variant, tokens in holding.items())
    return Plan(
        limits=Limits(cost.ranks, cost.node_size, cost.model.heads, capacity, cost.granule),
        sharding=cost.sharding,
        reduce=Reduce.STEP,
        documents=tuple(lengths.tolist()),
        pipelines=(gathered_for_passes(Pipeline(stages, tuple(rounds), rows)),),
        planner="strategies",
    )


def _fastest(lengths: np.ndarray, cost: CostModel, scheme: Scheme, variant: Variant) -> Shape:
    """The scheme's groups, with the way of sharing keys and values that is fastest for these documents."""
    wanted = (scheme.tensor * scheme.ulysses, scheme.ring, False)
    shapes = [shape for shape in cost.engine.shapes if (shape.ulysses, shape.ring, shape.routed) == wanted]
    tables = cost.tables(lengths, variant, shapes)
    everything = np.arange(len(lengths))
    return min(shapes, key=lambda shape: tables.group_ns(shapes.index(shape), everything))


def _work(stage: Stage, shape: Shape, spans: tuple[Span, ...], checkpoint: Checkpoint) -> Work:
    return Work((Group(stage.ranks, shape.ulysses, shape.ring, spans, shape.method),), checkpoint)
