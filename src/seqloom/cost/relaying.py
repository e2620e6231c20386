"""Free sharding on the links: parameters from their owners to where a plan computes, gradients back.

Every rank of the cluster owns 1 / ranks of every weight. Before the step each rank gets what its stages compute with
from the owners, in bf16; after it each owner gets the gradients of all copies, in float32. There are ``W`` ranks in
nodes of ``G``. Rank ``r`` of node ``n`` computes with ``h(r)`` parameters, its node with ``d(n)`` different ones. Of
what ``k`` ranks of the node want, ``1 / k`` lands on each: ``l(r)`` in all, which add up to ``d(n)``. In the first hop

    rank r takes in     h(r) (G - 1) / W over the link inside its node, l(r) (W - G) / W through its card
    and gives out       1 / W of h of the others in its node over the link, 1 / W of d of other nodes through its card

and in the second, inside the node,

    rank r takes in     (h(r) - l(r)) (W - G) / W over the link, and gives out as much

and the other way round after the step: gradients are summed inside the node, then they cross. So an element crosses the
network once for every node that wants it. With one node, or where no two ranks of a node want the same, the second hop
has nothing, and there is only one. A hop lasts as long as its busiest link or card, and hops follow each other. Each
way is cut into bundles, one for every layer, one for the embedding and one for norm and head, each with the latency of
its hops.

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
from seqloom.cost.holdings import Holdings, holdings
from seqloom.cost.memory import GRADIENT_BYTES, PARAMETER_BYTES
from seqloom.plan import ActionKind, Sharding
from seqloom.plan.per_pass import stages_per_pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.communication import Communication
    from seqloom.cost.model import CostModel
    from seqloom.plan import Pipeline, Stage

FORWARD, BACKWARD = 1 / 5, 1 / 2
"""Shares of a round's time that are forward, and that are backward, at least."""


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


@lru_cache(maxsize=256)
def _relay(cost: CostModel, lines: tuple[tuple[Stage, ...], ...], shared: tuple[frozenset[int], ...]) -> Relay:
    engine = cost.engine
    if cost.sharding != Sharding.FREE or cost.ranks == 1 or not isinstance(engine, AnalyticEngine):
        return Relay(0.0, 0.0, 0.0, 0.0)
    held, early = holdings(cost, lines, shared)
    bundles = cost.model.layers + 2
    times = [
        _way_ns(engine.links, elements, size, calls)
        for size in (PARAMETER_BYTES, GRADIENT_BYTES)
        for elements, calls in ((held, bundles), (early, 2))
    ]
    return Relay(before=times[0], after=times[2], first=times[1], last=times[3])


def _way_ns(links: Communication, held: Holdings, size: int, calls: int) -> float:
    """ns of one way, of elements of so many bytes, in so many bundles."""
    cluster = links.cluster
    ranks, width = cluster.ranks, cluster.gpus_per_node
    node = np.repeat(held.rank.reshape(-1, width).sum(axis=1), width)
    near = max(float(held.rank.max()) * (width - 1), float((node - held.rank).max())) / ranks
    place = np.arange(ranks)
    card = place // width * cluster.nics_per_node + np.asarray(cluster.nic_of_gpu)[place % width]
    given = held.node.sum() - np.repeat(held.node, width)
    taken = (held.rank - held.others) * (ranks - width)
    far = max(float(np.bincount(card, each).max()) for each in (taken, given)) / ranks
    onward = float(held.others.max()) * (ranks - width) / ranks
    link, through = links.message_ns(size, "all_to_all")
    latency = links.latency("all_to_all", cluster.nodes > 1, (ranks - 1).bit_length())
    if onward > 0:
        latency += links.latency("all_to_all", False, (width - 1).bit_length())
    return max(near * link, far * through) + onward * link + calls * latency
