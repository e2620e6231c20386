"""From a plan to priced windows: every stage of every round, in integer nanoseconds."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from seqloom.cost import CostModel, Variant
from seqloom.cost.rounds import StageShare
from seqloom.plan import Checkpoint, Plan, Work
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
    for checkpoint, works in _by_checkpoint(plan).items():
        variant = Variant(checkpoint, plan.reduce)
        for place, work in works:
            times = cost.round_times(work, variant, _stage_share(plan, place))
            windows[place] = window_of(work, times, islands)
    return windows


def overhead_ns(plan: Plan, cost: CostModel) -> tuple[int, int]:
    """What the step costs once, after its last round, and how much of that is communication."""
    variants = [Variant(checkpoint, plan.reduce) for checkpoint in _by_checkpoint(plan)]
    costs = [(cost.step_overhead_ns(variant), cost.step_communication_ns(variant)) for variant in variants]
    return max(costs, default=(0, 0))


def _by_checkpoint(plan: Plan) -> dict[Checkpoint, list[tuple[Place, Work]]]:
    works: dict[Checkpoint, list[tuple[Place, Work]]] = defaultdict(list)
    for p, pipeline in enumerate(plan.pipelines):
        for r, current in enumerate(pipeline.rounds):
            for s, work in enumerate(current.work):
                works[work.checkpoint].append((Place(p, s, r), work))
    return works


def _stage_share(plan: Plan, place: Place) -> StageShare | None:
    """Return what a stage has of the model: its layers; the vocabulary projection is the last stage's alone."""
    stages = plan.pipelines[place.pipeline].stages
    if len(stages) == 1:
        return None
    first, stop = stages[place.stage].layers
    return StageShare(stop - first, stages[-1].layers[1], place.stage == len(stages) - 1)
