"""Rival ``chunkflow``: a pipeline over chunks of equal tokens (arXiv 2503.02356; abstract and a summary were read).

Published: a document longer than the chunk size is cut into chunks of it, shorter ones are packed into as many tokens
(first fit). Chunks of one document run in order and pass keys and values on. Of its chunks only the last few, K, keep
their activations; the others are forwarded again in front of their backward, so memory grows with K chunks and not with
the longest document. 1F1B orders the chunks; chunk size and K come from a grid search.

Our reading: chunks of the longest documents come first (in the paper's example that leaves a bubble of 42.9 % in place
of its 47.8 %, which favours the rival); a stage's ranks share every chunk by Ulysses, with a ring around it where heads
or the cluster want one; chunk sizes are powers of two from 1K tokens to what a stage holds, K is all, 4, 2 or 1. The
fastest plan whose simulated memory fits counts, per batch where the authors tune once per run.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from seqloom.cost import CostModel, GroupShape
from seqloom.cost.memory import pipeline_limits
from seqloom.describe import Batch
from seqloom.errors import MemoryBudgetError, SeqloomError, how_to_drop
from seqloom.layout import Span
from seqloom.plan import Checkpoint, Limits, Pipeline, Plan, Reduce, Round
from seqloom.planners.packing import first_fit
from seqloom.planners.pipeline.long_sequences import StageGroup
from seqloom.planners.pipeline.recompute_offload import ActivationPolicy, stage_micro_batches
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.schedules import build_schedule
from seqloom.simulate import simulate

USUAL_STAGES = (2, 4, 8)
LEAST_CHUNK = 1024
"""Tokens of the smallest chunk that is tried."""
MOST_CHUNKS = 4096
"""Of a batch: smaller chunks are not tried."""
KEPT = (None, 4, 2, 1)
"""Chunks of a document that keep their activations, the fastest first; None: all."""
Chains = list[list[tuple[Span, ...]]]
"""Chunk after chunk of long documents and, one each, packs of short ones."""


def plan_chunkflow(lengths: np.ndarray, cost: CostModel, *, stages: int | None = None) -> Plan:
    """Plan a batch, int64[n] tokens, in chunks of equal tokens; without ``stages`` the best of 2, 4 and 8 counts."""
    array = Batch.of(lengths).lengths
    if not cost.model.causal:
        raise SeqloomError(
            f"planner chunkflow for {cost.model.name}, which is not causal: tokens of a chunk would see later chunks, "
            "whose keys do not exist yet; choose a planner of whole documents, for example flex"
        )
    usual = [n for n in USUAL_STAGES if cost.ranks % n == 0 and n <= cost.model.layers]
    options = usual if stages is None else [stages]
    if not options:
        raise SeqloomError(
            f"{cost.ranks} ranks and {cost.model.layers} layers cannot be cut into 2, 4 or 8 stages; give their number "
            "(chunkflow:3), or choose a planner without stages"
        )
    plans = [plan for count in options for plan in _tried(array, cost, StageLayout.of(cost, count))]
    if not plans:
        longest = int(array.max())
        raise MemoryBudgetError(
            f"planner chunkflow finds no chunks of {LEAST_CHUNK} tokens or more with which a longest sequence of "
            f"{longest} tokens fits into {cost.ranks} GPUs; {how_to_drop(longest // 2)}, "
            f"{cost.ways_out}, or choose another planner"
        )
    return min(plans, key=lambda found: found[0])[1]


def _tried(lengths: np.ndarray, cost: CostModel, layout: StageLayout) -> Iterator[tuple[int, Plan]]:
    """(ns, plan) of every chunk size, with as many kept chunks as fit."""
    try:
        limits = pipeline_limits(cost, layout.ranges_by_pp_rank, layout.shard_group_size(cost))
    except MemoryBudgetError:
        return
    most = layout.ranks_per_stage * dict(limits.capacity)[Checkpoint.NONE]
    size = LEAST_CHUNK
    while size * MOST_CHUNKS < lengths.sum():
        size *= 2
    while size <= most:
        for kept in KEPT:
            plan = chunk_plan(lengths, cost, layout, limits, size, kept)
            found = simulate(plan, cost)
            if found.peak_memory.max() <= cost.budget_bytes:
                yield found.step_ns, plan
                break
        if size >= lengths.max():
            return
        size *= 2


def chunk_plan(
    lengths: np.ndarray, cost: CostModel, layout: StageLayout, limits: Limits, tokens: int, kept: int | None = None
) -> Plan:
    """Plan chunks of so many tokens, of each document so many with their activations; None: all."""
    chains = chunked(lengths, tokens)
    shape = stage_shape(cost, layout.ranks_per_stage)
    rounds = []
    for chain in chains:
        for number, spans in enumerate(chain):
            again = kept is not None and number < len(chain) - kept
            policy = ActivationPolicy(Checkpoint.FULL if again else Checkpoint.NONE)
            groups = (StageGroup(shape, 0, tuple(sorted(spans))),)
            rounds.append(Round(stage_micro_batches(cost, layout, groups, [policy] * len(layout.layers))))
    order = build_schedule("seq1f1b", layout.pp_size, len(chains), [len(chain) for chain in chains], 1)
    pipeline = Pipeline(layout.stages, tuple(rounds), order.pipeline_actions())
    plan = Plan(limits, cost.sharding, Reduce.STEP, tuple(lengths.tolist()), (pipeline,), "chunkflow")
    plan.validate()
    return plan


def stage_shape(cost: CostModel, width: int) -> GroupShape:
    """Ulysses x ring over all ranks of a stage, with as much Ulysses as heads and the cluster's blocks allow."""

    def allowed(size: int) -> bool:
        blocks = range(0, cost.ranks, size)
        return width % size == 0 and size <= cost.model.heads and all(cost.family.contains(at, size) for at in blocks)

    ulysses = max(filter(allowed, cost.family.sizes))
    return GroupShape(ulysses, width // ulysses)


def chunked(lengths: np.ndarray, tokens: int) -> Chains:
    """Chunks of at most so many tokens, longest documents first; packs of whole documents behind them."""
    if tokens < 1:
        raise SeqloomError(f"chunks of {tokens} tokens; give 1 or more")
    order = np.argsort(-lengths, kind="stable")
    chains: Chains = []
    for document in order[lengths[order] > tokens].tolist():
        edges = [*range(0, int(lengths[document]), tokens), int(lengths[document])]
        chains.append([(Span(document, start, stop),) for start, stop in pairwise(edges)])
    short = order[lengths[order] <= tokens]
    if len(short):
        bins = first_fit(lengths[short], tokens)
        for number in range(int(bins.max()) + 1):
            chains.append([tuple(Span(k, 0, int(lengths[k])) for k in short[bins == number].tolist())])
    return chains
