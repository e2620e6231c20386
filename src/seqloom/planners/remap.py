"""Remapping as a choice: where a round gets faster by it, linear layers have tokens in a layout of their own.

Groups balance a rank's attention and linear work together as far as whole documents and hard memory allow. Moving
tokens inside shard groups, before linear layers and back after them, may balance the rest, if that costs less than it
gains. `with_remapping` decides for every round by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.plan_cost import round_times
from seqloom.cost.shapes import BY_SPEED, STREAMS
from seqloom.layout import balanced_token_counts, rebalance_layout
from seqloom.plan import Plan, Remap, Round, StageMicroBatch

WORTH = 100
"""A round whose ranks wait less than one part in this many stays as it is."""
QUARTERS = (4, 2)
"""Parts of the way to equal ranks to try, in quarters: half of it moves half of the tokens."""


def with_remapping(plan: Plan, cost: CostModel) -> Plan:
    """Give every round that gets faster by it a second layout; returns the same plan if none does.

    A plan with several stages stays as it is.
    """
    staged = any(len(pipeline.stages) > 1 for pipeline in plan.pipelines)
    if staged or cost.shard_group_size == 1 or cost.tensor > 1 or cost.engine.links is None:
        return plan  # nothing can move, or nothing says what that costs
    pipelines = []
    for pipeline in plan.pipelines:
        rounds = [Round((_faster(current.by_stage[0], plan, cost),)) for current in pipeline.rounds]
        pipelines.append(replace(pipeline, rounds=tuple(rounds)))
    remapped = replace(plan, pipelines=tuple(pipelines))
    return plan if remapped == plan or cost.plan_ns(remapped) >= cost.plan_ns(plan) else remapped


def _faster(work: StageMicroBatch, plan: Plan, cost: CostModel) -> StageMicroBatch:
    """The work with the best second layout, or as it is."""
    policy = MemoryPolicy(work.checkpoint, plan.reduce)
    best, times = work, round_times(cost, work, policy)
    busy = times.rank_ns[times.rank_ns > 0]
    shortest = int(times.busy_ns.max())
    if work.linear is not None or (int(busy.max()) - int(busy.mean())) * WORTH < int(busy.max()):
        return work
    for candidate in _layouts(work, policy, times.rank_ns, plan, cost):
        ns = int(round_times(cost, candidate, policy).busy_ns.max())
        if ns < shortest:
            best, shortest = candidate, ns
    return best


def _token_ns(rates: Mapping[str, float], cost: CostModel) -> np.ndarray:
    """int64[ranks] ns that a token in the linear layout takes, from ns by part."""
    slowness = cost.speeds.slowness if cost.speeds else np.ones(cost.ranks)
    computed = (*BY_SPEED, "routed")
    parts = (ns * (slowness if name in computed else 1.0) for name, ns in rates.items() if name in STREAMS[0])
    return np.maximum(1, np.rint(sum(parts))).astype(np.int64)


def _layouts(
    work: StageMicroBatch, policy: MemoryPolicy, rank_ns: np.ndarray, plan: Plan, cost: CostModel
) -> Iterator[StageMicroBatch]:
    """The work with tokens moved around attention, or around the feed-forward, all the way or half of it."""
    layout = work.attention_layout()
    held = np.zeros(cost.ranks, np.int64)
    np.add.at(held, layout.rank, layout.sizes)
    asleep = rank_ns == 0
    shard_groups = [shard_group for shard_group in plan.shard_groups if not asleep[list(shard_group)].all()]
    for remap in Remap:
        rates = cost.engine.layout_token_ns(policy, remap)
        token_ns = _token_ns({name: linear for name, (linear, _) in rates.items()}, cost)
        level = int(rank_ns.max())
        stays = np.where(asleep, 0, rank_ns - token_ns * held)
        for quarters in QUARTERS:
            work_ns = (quarters * stays + (4 - quarters) * (level - token_ns * held)) // 4
            targets = balanced_token_counts(work_ns, token_ns, held, shard_groups)
            if int(targets.max()) <= cost.capacity(policy) and not np.array_equal(targets, held):
                yield replace(work, linear=rebalance_layout(layout, targets, cost.node_size, shard_groups), remap=remap)
