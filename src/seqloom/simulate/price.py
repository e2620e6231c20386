"""From a plan to priced windows: every stage of every round, in integer nanoseconds."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel, Variant
from seqloom.plan import Checkpoint, Plan, Work
from seqloom.simulate.split import NAMES, computing_ns, forward_ns, table, total_ns, weights_ns
from seqloom.simulate.window import GroupTimes, Islands, Window, window_of


class Place(NamedTuple):
    """Where in a plan."""

    pipeline: int
    stage: int
    round: int


def price(plan: Plan, cost: CostModel) -> dict[Place, Window]:
    """Price every group once, and turn every `Work` into its window."""
    islands = Islands.of(plan)
    windows = {}
    for checkpoint, works in _by_checkpoint(plan).items():
        groups = [group for _, work in works for group in work.groups]
        parts = table(cost.groups_parts(groups, Variant(checkpoint, plan.reduce)))
        first = 0
        for place, work in works:
            own = _stage_share(parts[first : first + len(work.groups)], plan, place)
            first += len(work.groups)
            total = total_ns(own)
            times = GroupTimes(
                total=total,
                comm=total - computing_ns(own),
                forward=forward_ns(own, checkpoint),
                weights=weights_ns(own, checkpoint),
            )
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


def _stage_share(parts: np.ndarray, plan: Plan, place: Place) -> np.ndarray:
    """Return the parts of a stage: by its layers; the vocabulary projection is the last stage's alone.

    What a round costs without tokens is shared like the rest: a profile does not say which of it is per
    layer.
    """
    stages = plan.pipelines[place.pipeline].stages
    if len(stages) == 1:
        return parts
    first, stop = stages[place.stage].layers
    own = parts * (stop - first) // stages[-1].layers[1]
    head = NAMES.index("head")
    own[:, head] = parts[:, head] if place.stage == len(stages) - 1 else 0
    return own
