"""What `cpu_pipeline` runs beside the planner's orders: documents in chunks of equal tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Pipeline, Plan, Reduce, Round
from seqloom.planners.pipeline.long_sequences import StageGroup
from seqloom.planners.pipeline.recompute_offload import ActivationPolicy, stage_micro_batch
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.schedules import build_schedule


def fixed_chunks(lengths: np.ndarray, cost: CostModel, layout: StageLayout, limits: Any, tokens: int) -> Plan:
    """Documents of more than `tokens` in chunks of as many, the others packed up to as many; longest first, Seq1F1B."""
    shape = GroupShape(
        min(layout.ranks_per_stage, cost.model.heads), max(1, layout.ranks_per_stage // cost.model.heads)
    )
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
    order = build_schedule("seq1f1b", layout.pp_size, len(chains), [len(chain) for chain in chains], 1)
    rounds = []
    for spans in (spans for chain in chains for spans in chain):
        groups = (StageGroup(shape, 0, tuple(sorted(spans))),)
        works = [
            stage_micro_batch(cost, layout, groups, stage, ActivationPolicy(Checkpoint.NONE))
            for stage in range(len(layout.layers))
        ]
        rounds.append(Round(tuple(works)))
    pipeline = Pipeline(layout.stages, tuple(rounds), order.pipeline_actions())
    plan = Plan(limits, cost.sharding, Reduce.STEP, tuple(lengths.tolist()), (pipeline,), f"chunks of {tokens}")
    plan.validate()
    return plan
