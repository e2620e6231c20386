"""Plans of parts of the cluster, side by side, as one plan: ranks shifted, documents renumbered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from seqloom.cost import CostModel
from seqloom.plan import Checkpoint, Group, Pipeline, Plan, Reduce, Round, Span, Work


class Planned(NamedTuple):
    """A plan of some of the documents, made for as many ranks as its part of the cluster has."""

    plan: Plan
    start: int
    """First rank of the part."""
    documents: Sequence[int]
    """Numbers in the whole batch of the documents of `plan`, in its order."""


def merge(parts: Sequence[Planned], lengths: np.ndarray, cost: CostModel, planner: str) -> Plan:
    """One plan of several, on disjoint ranks of the cluster.

    A checkpoint's capacity becomes the largest that any part has: parts differ in what their stages leave free, and
    each was planned within its own.

    Args:
        parts: they hold every document once; parts without documents are left out before.
        lengths: int64[n] tokens of the whole batch.
        cost: of the whole cluster.
        planner: name to put on the plan.
    """
    capacity: dict[Checkpoint, int] = {}
    for part in parts:
        for checkpoint, tokens in part.plan.limits.capacity:
            capacity[checkpoint] = max(tokens, capacity.get(checkpoint, 0))
    limits = replace(
        parts[0].plan.limits,
        ranks=cost.ranks,
        node_size=cost.node_size,
        capacity=tuple((checkpoint, capacity[checkpoint]) for checkpoint in Checkpoint if checkpoint in capacity),
    )
    pipelines = [_moved(pipeline, part) for part in parts for pipeline in part.plan.pipelines]
    return Plan(limits, cost.sharding, Reduce.STEP, tuple(lengths.tolist()), tuple(pipelines), planner)


def _moved(pipeline: Pipeline, part: Planned) -> Pipeline:
    stages = tuple(replace(stage, ranks=_shifted(stage.ranks, part.start)) for stage in pipeline.stages)
    rounds = tuple(Round(tuple(_work(work, part) for work in current.work)) for current in pipeline.rounds)
    return Pipeline(stages, rounds, pipeline.actions)


def _work(work: Work, part: Planned) -> Work:
    assert work.attention is None and work.linear is None, "parts are planned without layouts of their own"
    return replace(work, groups=tuple(_group(group, part) for group in work.groups))


def _group(group: Group, part: Planned) -> Group:
    route = group.route
    return replace(
        group,
        ranks=_shifted(group.ranks, part.start),
        spans=tuple(Span(part.documents[document], first, stop) for document, first, stop in group.spans),
        route=None if route is None else replace(route, proxies=_shifted(route.proxies, part.start)),
    )


def _shifted(ranks: Sequence[int], start: int) -> tuple[int, ...]:
    return tuple(rank + start for rank in ranks)
