"""What the ranks of a plan compute with, counted: by rank, by node, and shared out over the ranks of a node.

The model is cut into units: the table of tokens, that of positions, every layer, and the end (norm and head). Tensor
ranks cut the matrices of a layer into slices, as fine as any stage of the plan does; all else is whole on every rank.
Of a stage that is gathered for every pass each rank keeps a share, which no other rank of its stage has.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.analytic import DEFAULT_CONTEXT, AnalyticEngine
from seqloom.cost.memory import GRADIENT_BYTES, PARAMETER_BYTES
from seqloom.cost.stages import StageMemory, stage_parameters
from seqloom.plan import ActionKind, LayerRange, Sharding
from seqloom.plan.pipeline import ShardCollective, reshard_after_forward_stages, shard_collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.communication import Communication
    from seqloom.cost.model import CostModel
    from seqloom.plan import Checkpoint, Pipeline, Stage


TABLE, POSITIONS, LAYERS = 0, 1, 2
"""The first units; layer k is LAYERS + k, the end comes after the last layer."""


class ResidentParameters(NamedTuple):
    """Parameters that ranks compute with."""

    rank: np.ndarray  # float64[ranks], of each rank
    others: np.ndarray  # float64[ranks], of what k ranks of its node have, 1 - 1 / k: the other ranks' shares
    node: np.ndarray  # float64[nodes], different ones of each node


def resident_parameters(
    cost: CostModel, lines: Sequence[Sequence[Stage]], shared: Sequence[frozenset[int]] = ()
) -> tuple[ResidentParameters, ResidentParameters]:
    """What ranks keep for the step; and of this, the embedding (also where it is the head) and the first layer.

    Args:
        cost: of the model and the whole cluster.
        lines: the stages of every pipeline.
        shared: of every pipeline, the numbers of the stages that are gathered for every pass; () for none at all.
    """
    passing = shared or [frozenset[int]()] * len(lines)
    held = _held(cost, lines, passing)
    whole, cut = _sizes(cost)
    early = np.arange(len(whole)) <= LAYERS
    everything = _counted(held, whole, cut, cost.node_size)
    first = _counted(held, whole * early, cut * early, cost.node_size)
    for line, numbers in zip(lines, passing, strict=True):
        for stage in (line[number] for number in sorted(numbers)):
            part = LayerRange(*stage.layers, line[-1].layers[1])
            everything = _with_shares(everything, stage, stage_parameters(cost, part, stage.tensor))
            first = _with_shares(first, stage, _early(cost, part, stage.tensor))
    return everything, first


def _early(cost: CostModel, part: LayerRange, tensor: int) -> int:
    """Parameters of a part that belong to the embedding or to the first layer."""
    if part.has_embedding:
        return stage_parameters(cost, LayerRange(0, 1, 2), tensor)
    return cost.model.head_parameters if part.has_head and cost.model.tied else 0


def _with_shares(found: ResidentParameters, stage: Stage, parameters: int) -> ResidentParameters:
    """What is found, and shares of the parameters of a stage."""
    ranks, share = np.array(stage.ranks), parameters * stage.tensor / len(stage.ranks)
    rank, node = found.rank.copy(), found.node.copy()
    rank[ranks] += share
    node += np.bincount(ranks // (len(rank) // len(node)), minlength=len(node)) * share
    return ResidentParameters(rank, found.others, node)


def _held(cost: CostModel, lines: Sequence[Sequence[Stage]], passing: Sequence[frozenset[int]]) -> np.ndarray:
    """bool[ranks, units, slices], whether a rank has a slice of a unit for the whole step."""
    model = cost.model
    slices = lcm(*(stage.tensor for line in lines for stage in line))
    held = np.zeros((cost.ranks, LAYERS + model.layers + 1, slices), dtype=bool)
    for line, numbers in zip(lines, passing, strict=True):
        last = line[-1].layers[1]
        for stage in (stage for number, stage in enumerate(line) if number not in numbers):
            first, stop = stage.layers
            units = list(range(LAYERS + first, LAYERS + stop))
            units += [TABLE, POSITIONS] if first == 0 else []
            units += [LAYERS + model.layers] + [TABLE] * model.tied if stop == last else []
            width = slices // stage.tensor
            for member in range(stage.tensor):
                places = np.ix_(stage.ranks[member :: stage.tensor], units)
                held[(*places, slice(member * width, (member + 1) * width))] = True
    return held


def _sizes(cost: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """float64[units] each: parameters of a unit that all its ranks have, and that tensor ranks cut."""
    model, context = cost.model, cost.max_length or DEFAULT_CONTEXT
    layers = np.array([model.layer_parameters(layer) for layer in range(model.layers)], dtype=np.float64)
    none = model.parameters() + 1  # cut into so many slices, no matrix has anything left in one
    vectors = np.array([model.layer_parameters(layer, none) for layer in range(model.layers)], dtype=np.float64)
    positions = context * model.hidden if model.learned_positions else 0
    end = model.parameters(context) - layers.sum() - model.head_parameters - positions  # with the head, unless tied
    whole = np.concatenate(([model.head_parameters, positions], vectors, [end]))
    return whole, np.concatenate(([0, 0], layers - vectors, [0]))


def _counted(held: np.ndarray, whole: np.ndarray, cut: np.ndarray, node_size: int) -> ResidentParameters:
    """Add up units of these sizes."""
    by_node = held.reshape(-1, node_size, *held.shape[1:])
    entire = np.asarray(by_node.any(axis=3))
    parts, wholes = (each * (1 - 1 / np.maximum(each.sum(axis=1, keepdims=True), 1)) for each in (by_node, entire))
    return ResidentParameters(
        rank=(entire @ whole + by_node.mean(axis=3) @ cut).ravel(),
        others=(wholes @ whole + parts.mean(axis=3) @ cut).ravel(),
        node=entire.any(axis=1) @ whole + by_node.any(axis=1).mean(axis=2) @ cut,
    )


# ---- merged: cost.passes
# Stages that are gathered for every pass: what the messages take, and what a rank then holds.
#
# Messages. The ranks of a stage with the same slice of its weights, ``column`` of them, have ``1 / column`` each.
# Before
# a pass every one sends its share to the others, in bf16; in a backward it sends them their shares of its
# gradients, in
# float32, as soon as a layer has them. An exchange goes straight from rank to rank, a bundle after the other, one
# for
# every layer, one for the embedding and one for norm and head. Computing waits for it, so nothing of it hides.
#
# Memory, with P parameters on a rank while it computes:
#
#     always                  (2 + 4) P / column      shares of parameters and gradients
#                             4 bytes of the head     its gradient is made in a forward and waits for the backward
#     in every pass           2 P                     the copies
#     in a backward           4 bytes of a layer      the gradients of the layer that goes backward
#     where a backward ends   4 bytes of the rest     embedding, positions and norm; the unit's activations have
# gone
#                             8 bytes of a table      packed and received, beyond a layer's, which `StageMemory` has
#     from the first W on     4 P                     gradients of weight halves, until the REDUCE
#
# A stage whose parameters stay for the step has 6 P all the time.


class UnshardTimes(NamedTuple):
    """ns of the moves of one pass of a stage."""

    gather: int  # parameters, before every pass
    sum: int  # gradients, after a backward

    def of(self, move: ShardCollective | None) -> int:
        """ns of one move; of none, nothing."""
        return 0 if move is None else self.gather if move is ShardCollective.ALL_GATHER else self.sum


def unshard_times_by_stage(cost: CostModel, pipeline: Pipeline) -> dict[int, UnshardTimes]:
    """Times of every stage that the pipeline gathers for every pass. Only free sharding does."""
    if cost.sharding != Sharding.FREE:
        return {}
    parts = pipeline.layer_ranges
    return {
        s: unshard_times(cost, pipeline.stages[s], parts[s]) for s in sorted(reshard_after_forward_stages(pipeline))
    }


def unshard_ns(cost: CostModel, pipeline: Pipeline) -> int:
    """ns of all moves of a pipeline of one stage in a step."""
    times = unshard_times_by_stage(cost, pipeline)
    return sum(times[0].of(move) for move in shard_collectives(pipeline.actions[0], frozenset(times))) if times else 0


@lru_cache(maxsize=256)
def unshard_times(cost: CostModel, stage: Stage, part: LayerRange) -> UnshardTimes:
    """What gathering a stage, and bringing its gradients back to shares, takes."""
    engine, cluster = cost.engine, cost.cluster
    column = dp_cp_size(stage)
    if column == 1 or not isinstance(engine, AnalyticEngine):
        return UnshardTimes(0, 0)
    ranks, width = np.array(stage.ranks), cluster.gpus_per_node
    node, member = ranks // width, np.arange(len(ranks)) % stage.tensor
    near = ((node[:, None] == node) & (member[:, None] == member)).sum(axis=1) - 1
    far = column - 1 - near
    card = node * cluster.nics_per_node + np.asarray(cluster.nic_of_gpu)[ranks % width]
    share = stage_parameters(cost, part, stage.tensor) / column
    latency = engine.links.latency("all_to_all", bool(far.any()), (column - 1).bit_length())
    calls = part.stop - part.first + part.has_embedding + part.has_head
    times = []
    for size in (PARAMETER_BYTES, GRADIENT_BYTES):
        link, through = engine.links.message_ns(size * share, "all_to_all")
        busiest = max(int(near.max()) * link, float(np.bincount(card, far).max()) * through)
        times.append(int(np.rint(busiest + calls * latency)))
    return UnshardTimes(*times)


def dp_cp_size(stage: Stage) -> int:
    """Ranks of a stage that have the same slice of its weights."""
    return len(stage.ranks) // stage.tensor


class UnshardMemory(NamedTuple):
    """Bytes of parameters and gradients on a rank of a stage that is gathered for every pass, see above."""

    always: int
    copies: int
    layer: int
    rest: int
    halves: int

    @classmethod
    def of(cls, cost: CostModel, part: LayerRange, column: int) -> UnshardMemory:
        """Of a part of the model, by the cost model's tensor degree, over so many ranks."""
        parameters = stage_parameters(cost, part)
        if column == 1:  # nobody to share with: they stay for the step
            return cls((PARAMETER_BYTES + GRADIENT_BYTES) * parameters, 0, 0, 0, 0)
        head = cost.model.head_parameters if part.has_head else 0
        layers = [cost.model.layer_parameters(layer, cost.tensor) for layer in range(part.first, part.stop)]
        table = cost.model.head_parameters if part.has_embedding or part.has_head else 0
        packed = 2 * max(0, table - max(layers))
        return cls(
            always=(PARAMETER_BYTES + GRADIENT_BYTES) * -(-parameters // column) + GRADIENT_BYTES * head,
            copies=PARAMETER_BYTES * parameters,
            layer=GRADIENT_BYTES * max(layers),
            rest=GRADIENT_BYTES * (parameters - sum(layers) - head + packed),
            halves=GRADIENT_BYTES * (parameters - head),
        )


def one_stage_bytes(cost: CostModel, column: int, checkpoint: Checkpoint, tokens: np.ndarray) -> np.ndarray:
    """int64[n] bytes of ranks with so many tokens in a round, of a pipeline of one stage gathered for every pass.

    Args:
        cost: prices, of the stage's tensor degree.
        column: ranks that share its parameters.
        checkpoint: of the round.
        tokens: int64[n].
    """
    part = LayerRange(0, cost.model.layers, cost.model.layers)
    stage, moved = StageMemory(cost, part), UnshardMemory.of(cost, part, column)
    held, forward, backward, *_ = stage.activation_bytes(checkpoint, offload=False)
    begins = np.maximum(tokens * (held + forward), tokens * (held + backward) + moved.layer)
    most = np.maximum(begins, tokens * backward + moved.layer + moved.rest)
    return stage.working_bytes() + moved.always + moved.copies + np.ceil(most).astype(np.int64)


def microbatch_tokens(cost: CostModel, part: LayerRange, column: int, checkpoint: Checkpoint, units: int) -> int:
    """Tokens of a unit that a rank of a stage gathered for every pass can hold, with so many units in flight."""
    stage, moved = StageMemory(cost, part), UnshardMemory.of(cost, part, column)
    room = cost.budget_bytes - stage.working_bytes() - moved.always - moved.copies
    held, forward, backward, *_ = stage.activation_bytes(checkpoint, offload=False)
    in_forward = room // (units * held + forward)
    in_backward = (room - moved.layer) // (units * held + backward)
    at_its_end = (room - moved.layer - moved.rest) // ((units - 1) * held + backward)
    fits = max(0, int(min(in_forward, in_backward, at_its_end)))
    fits = fits if cost.token_limit is None else min(fits, cost.token_limit)
    return fits - fits % cost.pad_multiple


# ---- merged: cost.relaying
# Free sharding on the links: parameters from their owners to where a plan computes, gradients back.
#
# Every rank of the cluster owns 1 / ranks of every weight. Before the step each rank gets what its stages compute
# with
# from the owners, in bf16; after it each owner gets the gradients of all copies, in float32. There are ``W`` ranks
# in
# nodes of ``G``. Rank ``r`` of node ``n`` computes with ``h(r)`` parameters, its node with ``d(n)`` different ones.
# Of
# what ``k`` ranks of the node want, ``1 / k`` lands on each: ``l(r)`` in all, which add up to ``d(n)``. In the
# first hop
#
#     rank r takes in     h(r) (G - 1) / W over the link inside its node, l(r) (W - G) / W through its card
#     and gives out       1 / W of h of the others in its node over the link, 1 / W of d of other nodes through its
# card
#
# and in the second, inside the node,
#
#     rank r takes in     (h(r) - l(r)) (W - G) / W over the link, and gives out as much
#
# and the other way round after the step: gradients are summed inside the node, then they cross. So an element
# crosses the
# network once for every node that wants it. With one node, or where no two ranks of a node want the same, the
# second hop
# has nothing, and there is only one. A hop lasts as long as its busiest link or card, and hops follow each other.
# Each
# way is cut into bundles, one for every layer, one for the embedding and one for norm and head, each with the
# latency of
# its hops.
#
# What hides. Bundles go in the order in which they are needed, and a layer waits for its own. So the embedding and
# the
# first layer hide behind nothing, and of the rest what goes beyond the first stage's computing until its last
# layer: it
# begins the step and ends it. Of the first round's time only a fifth counts as forward, the least share that any
# part of
# a round has, and of the last round's one half as backward; nothing, where weight halves come last. The shortest
# component of a round counts, although a longer one may be what the step waits for. A profile's ``overlap`` lowers
# what
# hides further.


FORWARD, BACKWARD = 1 / 5, 1 / 2
"""Shares of a round's time that are forward, and that are backward, at least."""


class ReshardTimes(NamedTuple):
    """ns of what free sharding moves in a step, whatever the documents."""

    before: float  # parameters to the plan's ranks
    after: float  # gradients to their owners
    first: float  # of the parameters, embedding and first layer
    last: float  # of the gradients, the same


def reshard_times(cost: CostModel, pipelines: Sequence[Pipeline]) -> ReshardTimes:
    """What moving parameters and gradients takes under these pipelines; nothing unless sharding is free."""
    shared = tuple(reshard_after_forward_stages(pipeline) for pipeline in pipelines)
    return _relay(cost.cluster_cost, tuple(pipeline.stages for pipeline in pipelines), shared)


def exposed_reshard_ns(cost: CostModel, pipelines: Sequence[Pipeline], shades: Sequence[tuple[int, int]]) -> int:
    """ns of that which a step does not hide.

    Args:
        cost: prices.
        pipelines: of the plan.
        shades: of every pipeline, ns of its first and of its last round on the first stage.
    """
    relay = reshard_times(cost, pipelines)
    if not relay.before or not isinstance(cost.engine, AnalyticEngine):
        return 0
    forward, backward = [], []
    for pipeline, (first, last) in zip(pipelines, shades, strict=True):
        layers = pipeline.stages[0].layers[1]
        whole = all(action.kind != ActionKind.W for action in pipeline.actions[0])
        if reshard_after_forward_stages(
            pipeline
        ):  # a pass waits for all shares of a stage, which have their gradients at the end
            first = last = 0
        forward.append(FORWARD * first * (layers - 1) / layers)
        backward.append(BACKWARD * last * (layers - 1) / layers if whole else 0.0)
    shown = 0.0
    for time, lead, shade in ((relay.before, relay.first, min(forward)), (relay.after, relay.last, min(backward))):
        bare = max(lead, time - shade)
        shown += bare + (1.0 - cost.engine.profile.overlap) * (time - bare)
    return int(np.rint(shown))


@lru_cache(maxsize=256)
def _relay(cost: CostModel, lines: tuple[tuple[Stage, ...], ...], shared: tuple[frozenset[int], ...]) -> ReshardTimes:
    engine = cost.engine
    if cost.sharding != Sharding.FREE or cost.ranks == 1 or not isinstance(engine, AnalyticEngine):
        return ReshardTimes(0.0, 0.0, 0.0, 0.0)
    held, early = resident_parameters(cost, lines, shared)
    bundles = cost.model.layers + 2
    times = [
        _way_ns(engine.links, elements, size, calls)
        for size in (PARAMETER_BYTES, GRADIENT_BYTES)
        for elements, calls in ((held, bundles), (early, 2))
    ]
    return ReshardTimes(before=times[0], after=times[2], first=times[1], last=times[3])


def _way_ns(links: Communication, held: ResidentParameters, size: int, calls: int) -> float:
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
