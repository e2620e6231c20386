"""Free sharding on the links: parameters from their owners to where a plan computes, gradients back.

Every rank of the cluster owns 1 / ranks of every weight. Before the step each rank gets what its stages compute with
from the owners, in bf16; after it each owner gets the gradients of all copies, in float32. So with ``h(r)`` parameters
on rank ``r`` of ``W`` ranks in nodes of ``G``

    rank r takes in     h(r) (G - 1) / W   over the link inside its node, h(r) (W - G) / W through its card
    and gives out       1 / W of what the others hold: of its node over the link, of other nodes through its card

and the other way round after the step. An element goes once to every rank that wants it, also where several ranks of a
node do. Each way lasts as long as the busiest link or card; it is cut into bundles, one for every layer, one for the
embedding and one for norm and head, each with its latency.

What hides. Bundles go in the order in which they are needed, and a layer waits for its own. So the embedding and the
first layer hide behind nothing, and of the rest what goes beyond the first stage's computing until its last layer: it
begins the step and ends it. Of the first round's time only a fifth counts as forward, the least share that any part of
a round has, and of the last round's one half as backward; nothing, where weight halves come last. The shortest
component of a round counts, although a longer one may be what the step waits for. A profile's ``overlap`` lowers what
hides further.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.analytic import AnalyticEngine
from seqloom.cost.memory import GRADIENT_BYTES, PARAMETER_BYTES
from seqloom.cost.stages import stage_parameters
from seqloom.plan import ActionKind, Part, Sharding
from seqloom.plan.per_pass import stages_per_pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.communication import Communication
    from seqloom.cost.model import CostModel
    from seqloom.plan import Pipeline, Stage

FORWARD, BACKWARD = 1 / 5, 1 / 2
"""Shares of a round's time that are forward, and that are backward, at least."""
FIRST = Part(0, 1, 2)
"""Embedding and first layer, and nothing of the other end."""


class Relay(NamedTuple):
    """ns of what free sharding moves in a step, whatever the documents."""

    before: float  # parameters to the plan's ranks
    after: float  # gradients to their owners
    first: float  # of the parameters, embedding and first layer
    last: float  # of the gradients, the same


def relay_times(cost: CostModel, pipelines: Sequence[Pipeline]) -> Relay:
    """What moving parameters and gradients takes under these pipelines; nothing unless sharding is free."""
    shared = tuple(stages_per_pass(pipeline) for pipeline in pipelines)
    return _relay(cost.whole, tuple(pipeline.stages for pipeline in pipelines), shared)


def relay_ns(cost: CostModel, pipelines: Sequence[Pipeline], shades: Sequence[tuple[int, int]]) -> int:
    """ns of that which a step does not hide.

    Args:
        cost: prices.
        pipelines: of the plan.
        shades: of every pipeline, ns of its first and of its last round on the first stage.
    """
    relay = relay_times(cost, pipelines)
    if not relay.before or not isinstance(cost.engine, AnalyticEngine):
        return 0
    forward, backward = [], []
    for pipeline, (first, last) in zip(pipelines, shades, strict=True):
        layers = pipeline.stages[0].layers[1]
        whole = all(action.kind != ActionKind.W for action in pipeline.actions[0])
        if stages_per_pass(pipeline):  # a pass waits for all shares of a stage, which have their gradients at the end
            first = last = 0
        forward.append(FORWARD * first * (layers - 1) / layers)
        backward.append(BACKWARD * last * (layers - 1) / layers if whole else 0.0)
    shown = 0.0
    for time, lead, shade in ((relay.before, relay.first, min(forward)), (relay.after, relay.last, min(backward))):
        bare = max(lead, time - shade)
        shown += bare + (1.0 - cost.engine.profile.overlap) * (time - bare)
    return int(np.rint(shown))


def held_parameters(
    cost: CostModel, lines: Sequence[Sequence[Stage]], shared: Sequence[frozenset[int]] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """float64[ranks] each: parameters that a rank keeps for the step; of these, those of embedding and first layer.

    A tied table that a rank needs at both ends is there once. Of stages that are gathered for every pass, by their
    numbers in each line, a rank keeps a share.
    """
    held, early = np.zeros((2, cost.whole.ranks))
    model = cost.model
    for line, passing in zip(lines, shared or [frozenset()] * len(lines), strict=True):
        for number, stage in enumerate(line):
            ranks, part = list(stage.ranks), Part(*stage.layers, line[-1].layers[1])
            share = stage.tensor / len(ranks) if number in passing else 1
            held[ranks] += share * stage_parameters(cost, part, stage.tensor)
            if part.begins:
                early[ranks] += share * stage_parameters(cost, FIRST, stage.tensor)
            elif part.ends and model.tied:
                early[ranks] += share * model.head_parameters  # the table moves with the embedding
        if model.tied and len(line) > 1 and line[0].ranks == line[-1].ranks:
            ranks = list(line[0].ranks)
            share = min(line[s].tensor / len(ranks) if s in passing else 1 for s in (0, len(line) - 1))
            held[ranks] -= share * model.head_parameters
            early[ranks] -= share * model.head_parameters
    return held, early


@lru_cache(maxsize=256)
def _relay(cost: CostModel, lines: tuple[tuple[Stage, ...], ...], shared: tuple[frozenset[int], ...]) -> Relay:
    engine = cost.engine
    if cost.sharding != Sharding.FREE or cost.ranks == 1 or not isinstance(engine, AnalyticEngine):
        return Relay(0.0, 0.0, 0.0, 0.0)
    held, early = held_parameters(cost, lines, shared)
    bundles = cost.model.layers + 2
    times = [
        _way_ns(engine.links, elements, size, calls)
        for size in (PARAMETER_BYTES, GRADIENT_BYTES)
        for elements, calls in ((held, bundles), (early, 2))
    ]
    return Relay(before=times[0], after=times[2], first=times[1], last=times[3])


def _way_ns(links: Communication, held: np.ndarray, size: int, calls: int) -> float:
    """ns of one way, of elements of so many bytes, in so many bundles."""
    cluster = links.cluster
    ranks, width = cluster.ranks, cluster.gpus_per_node
    node = np.repeat(held.reshape(-1, width).sum(axis=1), width)
    near = max(float(held.max()) * (width - 1), float((node - held).max())) / ranks
    place = np.arange(ranks)
    card = place // width * cluster.nics_per_node + np.asarray(cluster.nic_of_gpu)[place % width]
    taken, given = (np.bincount(card, weights) for weights in (held * (ranks - width), held.sum() - node))
    far = max(float(taken.max()), float(given.max())) / ranks
    link, through = links.message_ns(size, "all_to_all")
    latency = links.latency("all_to_all", cluster.nodes > 1, (ranks - 1).bit_length())
    return max(near * link, far * through) + calls * latency
