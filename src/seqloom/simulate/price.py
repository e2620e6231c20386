"""From a plan to priced windows: every stage of every round, in integer nanoseconds."""

from __future__ import annotations

from collections import defaultdict
from itertools import islice
from typing import NamedTuple

from seqloom.cost import CostModel, Variant
from seqloom.cost.rounds import StageShare
from seqloom.cost.stages import stage_end_ns
from seqloom.plan import Pipeline, Plan, Work
from seqloom.simulate.window import Islands, Window, window_of


class Place(NamedTuple):
    """Where in a plan."""

    pipeline: int
    stage: int
    round: int


def price(plan: Plan, cost: CostModel) -> dict[Place, Window]:
    """Price every `Work`, and turn it into its window."""
    islands = Islands.of(plan)
    windows = {}
    for (variant, pipeline), works in _alike(plan).items():
        shares = stage_shares(plan.pipelines[pipeline])
        parts = iter(cost.groups_parts([group for _, work in works for group in work.groups], variant))
        for place, work in works:
            priced = list(islice(parts, len(work.groups)))
            times = cost.round_times(work, variant, shares[place.stage], priced)
            windows[place] = window_of(work, times, islands)
    return windows


def _alike(plan: Plan) -> dict[tuple[Variant, int], list[tuple[Place, Work]]]:
    """Return the works of every variant and pipeline: what is priced in one go."""
    works: dict[tuple[Variant, int], list[tuple[Place, Work]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        resident = len(pipeline.stages) > 1
        for r, current in enumerate(pipeline.rounds):
            for s, work in enumerate(current.work):
                works[Variant(work.checkpoint, plan.reduce, resident), p].append((Place(p, s, r), work))
    return works


def stage_shares(pipeline: Pipeline) -> list[StageShare | None]:
    """What every stage has of the model; None: all of it."""
    stages = pipeline.stages
    if len(stages) == 1:
        return [None]
    return [StageShare(*stage.layers, stages[-1].layers[1]) for stage in stages]


def overhead_ns(plan: Plan, cost: CostModel) -> tuple[int, int]:
    """What the step costs once, after its last round, and how much of that is communication: the slowest host's."""
    costs = [(0, 0)]
    for pipeline in plan.pipelines:
        if len(pipeline.stages) > 1:
            costs += [_host_end(plan, cost, pipeline, host) for host in range(len(pipeline.hosts))]
            continue
        for checkpoint in {current.work[0].checkpoint for current in pipeline.rounds}:
            variant = Variant(checkpoint, plan.reduce)
            costs.append((cost.step_overhead_ns(variant), cost.step_communication_ns(variant)))
    return max(costs)


def _host_end(plan: Plan, cost: CostModel, pipeline: Pipeline, host: int) -> tuple[int, int]:
    """The end of a step on one host: of all its stages, by the widest island that it has."""
    shares = stage_shares(pipeline)
    own = [shares[stage] for stage in pipeline.stages_of(host)]
    ranks = pipeline.hosts[host]
    islands = plan.limits.islands(plan.sharding, ranks)
    return stage_end_ns(cost, [share for share in own if share is not None], len(ranks), min(map(len, islands)))
