"""What `cpu_pipeline` runs beside the planner's orders: documents in chunks of equal tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Pipeline, Plan, Reduce, Round
from seqloom.planners.pipeline.placement import Level, Seat, work_of
from seqloom.planners.pipeline.stage_layout import Line
from seqloom.schedules import build_schedule


def fixed_chunks(lengths: np.ndarray, cost: CostModel, line: Line, limits: Any, tokens: int) -> Plan:
    """Documents of more than `tokens` in chunks of as many, the others packed up to as many; longest first, Seq1F1B."""
    shape = GroupShape(min(line.width, cost.model.heads), max(1, line.width // cost.model.heads))
    by_length = np.argsort(-lengths, kind="stable").tolist()
    chains: list[list[tuple[Span, ...]]] = []
    packs: list[list[Span]] = []
    for k in by_length:
        length = int(lengths[k])
        if length > tokens:
            edges = [*range(0, length, tokens), length]
            chains.append([(Span(k, a, b),) for a, b in pairwise(edges)])
            continue
        room = (pack for pack in packs if sum(span.tokens for span in pack) + length <= tokens)
        pack = next(room, None)
        if pack is None:
            packs.append(pack := [])
        pack.append(Span(k, 0, length))
    chains += [[tuple(pack)] for pack in packs]
    order = build_schedule("seq1f1b", line.hosts, len(chains), [len(chain) for chain in chains], 1)
    rounds = []
    for spans in (spans for chain in chains for spans in chain):
        seats = (Seat(shape, 0, tuple(sorted(spans))),)
        works = [work_of(cost, line, seats, host, Level(Checkpoint.NONE)) for host in line.places]
        rounds.append(Round(tuple(works)))
    pipeline = Pipeline(line.stages, tuple(rounds), order.pipeline_actions())
    plan = Plan(limits, cost.sharding, Reduce.STEP, tuple(lengths.tolist()), (pipeline,), f"chunks of {tokens}")
    plan.validate()
    return plan
