"""Free sharding: what it takes to bring parameters to the ranks that compute with them, and gradients back (Hydraulis).

Every rank of the cluster owns 1 / ranks of every weight, with its optimiser state. There are two kinds of messages:

- once per step, before the first round, each rank gets the parameters of its stages from the owners, in bf16; after
  the last, each owner gets the gradients of all copies, in float32. `reshard_times` has their time,
  `exposed_reshard_ns` the part of it that computing does not hide.
- a stage may be unsharded for every pass, as FSDP with reshard_after_forward: its ranks keep shares, all-gather them
  before a pass and scatter the gradients after it. `unshard_times` and `UnshardMemory` price that.

The model is cut into units: the embedding, learned positions, every layer, and the end (norm and head). Tensor ranks
cut the matrices of a layer into slices, as fine as any stage of the plan does; all else is whole on every rank.
"""

from __future__ import annotations

from functools import lru_cache
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from seqloom.cost.communication import nodes_and_nics
from seqloom.cost.memory import GRADIENT_BYTES, PARAMETER_BYTES, stage_parameters
from seqloom.plan import ActionKind, LayerRange, Sharding
from seqloom.plan.pipeline import ShardCollective, reshard_after_forward_stages, shard_collectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from seqloom.cost.communication import Communication
    from seqloom.cost.model import CostModel
    from seqloom.plan import Checkpoint, Pipeline, Stage

FORWARD, BACKWARD = 1 / 5, 1 / 2
"""Shares of a round's time that are forward, and that are backward, at least."""
EMBEDDING, POSITIONS, LAYERS = 0, 1, 2
"""The first units; layer k is LAYERS + k, the end comes after the last layer."""


# -- once per step --------------------------------------------------------------


class ReshardTimes(NamedTuple):
    """ns of the messages of free sharding in a step, whatever the documents."""

    before: float  # parameters to the plan's ranks
    after: float  # gradients to their owners
    first: float  # of the parameters, embedding and first layer
    last: float  # of the gradients, the same


def reshard_times(cost: CostModel, pipelines: Sequence[Pipeline]) -> ReshardTimes:
    """Time of moving parameters and gradients under these pipelines; 0 unless sharding is free."""
    per_pass = tuple(reshard_after_forward_stages(pipeline) for pipeline in pipelines)
    return _reshard_times(cost.cluster_cost, tuple(pipeline.stages for pipeline in pipelines), per_pass)


def exposed_reshard_ns(
    cost: CostModel, pipelines: Sequence[Pipeline], overlap_windows: Sequence[tuple[int, int]]
) -> int:
    """Exposed resharding time of a step, ns.

    Buckets go in the order in which they are needed, and a layer waits for its own. So the embedding and the first
    layer hide behind nothing, and the rest hides behind the first stage's computing until its last layer: that stage
    begins the step and ends it. Of the first round's time only a fifth counts as forward, the least share that any part
    of a round has, and of the last round's one half as backward; nothing, where weight halves (W) come last. The
    profile's ``overlap`` lowers what hides further.

    `overlap_windows` has of every pipeline the ns of its first and of its last round on the first stage, each of the
    component that is done first, although a longer one may be what the step waits for.
    """
    times = reshard_times(cost, pipelines)
    if not times.before:
        return 0
    forward, backward = [], []
    for pipeline, (first, last) in zip(pipelines, overlap_windows, strict=True):
        layers = pipeline.stages[0].layers[1]
        whole = all(action.kind != ActionKind.W for action in pipeline.actions[0])
        if reshard_after_forward_stages(pipeline):  # a pass waits for all shares; gradients come at its end
            first = last = 0
        forward.append(FORWARD * first * (layers - 1) / layers)
        backward.append(BACKWARD * last * (layers - 1) / layers if whole else 0.0)
    exposed = 0.0
    for time, lead, window in ((times.before, times.first, min(forward)), (times.after, times.last, min(backward))):
        bare = max(lead, time - window)
        exposed += bare + (1.0 - cost.links.profile.overlap) * (time - bare)
    return int(np.rint(exposed))


@lru_cache(maxsize=256)
def _reshard_times(
    cost: CostModel, pipelines: tuple[tuple[Stage, ...], ...], per_pass: tuple[frozenset[int], ...]
) -> ReshardTimes:
    if cost.sharding != Sharding.FREE or cost.ranks == 1:
        return ReshardTimes(0.0, 0.0, 0.0, 0.0)
    before, first, after, last = (
        _two_hop_ns(cost.links, parameters, size, calls)
        for size in (PARAMETER_BYTES, GRADIENT_BYTES)
        for parameters, calls in zip(
            resident_parameters(cost, pipelines, per_pass, trained=size == GRADIENT_BYTES),
            _buckets(cost, trained=size == GRADIENT_BYTES),
            strict=True,
        )
    )
    return ReshardTimes(before, after, first, last)


def _buckets(cost: CostModel, *, trained: bool) -> tuple[int, int]:
    """Buckets of all parameters, and of embedding and first layer; or of those of them that are `trained`."""
    if not trained or not cost.model.adapters:
        return cost.model.layers + 2, 2
    each = [int(adapters.parameters > 0) for adapters in cost.model.adapters]
    return sum(each), each[0]


def _two_hop_ns(links: Communication, resident: ResidentParameters, size: int, calls: int) -> float:
    """ns of resharding elements of `size` bytes one way, in `calls` buckets: across the network, then inside a node.

    There are ``W`` ranks in nodes of ``G``. Rank ``r`` of node ``n`` computes with ``h(r)`` parameters, its node with
    ``d(n)`` different ones. Of what ``k`` ranks of the node want, ``1 / k`` lands on each: ``l(r)`` in all, which add
    up to ``d(n)``. In the first hop

        rank r receives    h(r) (G - 1) / W over NVLink, l(r) (W - G) / W through its NIC
        and sends          1 / W of h of the others in its node over NVLink, 1 / W of d of other nodes through its NIC

    and in the second, inside the node,

        rank r receives    (h(r) - l(r)) (W - G) / W over NVLink, and sends as much

    and the other way round after the step: gradients are summed inside the node, then they cross. So an element
    crosses the network once for every node that wants it. With one node, or where no two ranks of a node want the same,
    the second hop has nothing. A hop lasts as long as its busiest NVLink port or NIC, and hops follow each other. Each
    bucket (one for every layer, one for the embedding and one for norm and head) has the latency of its hops.
    """
    cluster = links.cluster
    ranks, width = cluster.ranks, cluster.gpus_per_node
    node = np.repeat(resident.rank.reshape(-1, width).sum(axis=1), width)
    near = max(float(resident.rank.max()) * (width - 1), float((node - resident.rank).max())) / ranks
    sent = resident.node.sum() - np.repeat(resident.node, width)
    received = (resident.rank - resident.others) * (ranks - width)
    nic = nodes_and_nics(range(ranks), cluster.nic_of_gpu)[1]
    far = max(float(np.bincount(nic, each).max()) for each in (received, sent)) / ranks
    onward = float(resident.others.max()) * (ranks - width) / ranks
    link_ns, nic_ns = links.message_ns(size, "all_to_all")
    latency = links.latency("all_to_all", cluster.nodes > 1, (ranks - 1).bit_length())
    if onward > 0:
        latency += links.latency("all_to_all", False, (width - 1).bit_length())
    return max(near * link_ns, far * nic_ns) + onward * link_ns + calls * latency


class ResidentParameters(NamedTuple):
    """Parameters that ranks compute with, counted."""

    rank: np.ndarray  # float64[ranks], of each rank
    others: np.ndarray  # float64[ranks], of what k ranks of its node have, 1 - 1 / k: the other ranks' shares
    node: np.ndarray  # float64[nodes], different ones of each node


def resident_parameters(
    cost: CostModel, pipelines: Sequence[Sequence[Stage]], per_pass: Sequence[frozenset[int]], *, trained: bool = False
) -> tuple[ResidentParameters, ResidentParameters]:
    """Count what ranks keep for the step; and of this, the embedding (also where it is the head) and the first layer.

    All parameters, or those that are `trained`.

    Of a stage that is unsharded for every pass (their numbers are in `per_pass`, by pipeline) each rank keeps a share,
    which no other rank of its stage has.
    """
    held = _held_slices(cost, pipelines, per_pass)
    whole, cut = _unit_sizes(cost, trained=trained)
    early = np.arange(len(whole)) <= LAYERS
    everything = _count(held, whole, cut, cost.node_size)
    first = _count(held, whole * early, cut * early, cost.node_size)
    for stages, numbers in zip(pipelines, per_pass, strict=True):
        for stage in (stages[number] for number in sorted(numbers)):
            layers = LayerRange(*stage.layers, stages[-1].layers[1])
            own = stage_parameters(cost, layers, stage.tensor, trained=trained)
            everything = _with_shares(everything, stage, own)
            frozen = trained and bool(cost.model.adapters)
            own_early = cost.model.head_parameters if layers.has_head and cost.model.tied and not frozen else 0
            if layers.has_embedding:
                own_early = stage_parameters(cost, LayerRange(0, 1, 2), stage.tensor, trained=trained)
            first = _with_shares(first, stage, own_early)
    return everything, first


def _held_slices(
    cost: CostModel, pipelines: Sequence[Sequence[Stage]], per_pass: Sequence[frozenset[int]]
) -> np.ndarray:
    """bool[ranks, units, slices], whether a rank has a slice of a unit for the whole step."""
    model, end = cost.model, LAYERS + cost.model.layers
    slices = lcm(*(stage.tensor for stages in pipelines for stage in stages))
    held = np.zeros((cost.ranks, end + 1, slices), dtype=bool)
    for stages, numbers in zip(pipelines, per_pass, strict=True):
        for stage in (stage for number, stage in enumerate(stages) if number not in numbers):
            first, stop = stage.layers
            units = list(range(LAYERS + first, LAYERS + stop))
            units += [EMBEDDING, POSITIONS] if first == 0 else []
            units += [end] + [EMBEDDING] * model.tied if stop == stages[-1].layers[1] else []
            width = slices // stage.tensor
            for index in range(stage.tensor):
                places = np.ix_(stage.ranks[index :: stage.tensor], units)
                held[(*places, slice(index * width, (index + 1) * width))] = True
    return held


def _unit_sizes(cost: CostModel, *, trained: bool) -> tuple[np.ndarray, np.ndarray]:
    """float64[units] each: parameters of a unit that all its ranks have, and that tensor ranks cut."""
    model, context = cost.model, cost.context
    if trained and model.adapters:
        adapters = np.array([0, 0, *(each.parameters for each in model.adapters), 0], dtype=np.float64)
        return adapters, np.zeros_like(adapters)
    layers = np.array([model.layer_parameters(layer) for layer in range(model.layers)], dtype=np.float64)
    none = model.parameters() + 1  # cut into so many slices, no matrix has anything left in one
    vectors = np.array([model.layer_parameters(layer, none) for layer in range(model.layers)], dtype=np.float64)
    positions = context * model.hidden if model.learned_positions else 0
    end = model.parameters(context) - layers.sum() - model.head_parameters - positions  # with the head, unless tied
    whole = np.concatenate(([model.head_parameters, positions], vectors, [end]))
    return whole, np.concatenate(([0, 0], layers - vectors, [0]))


def _count(held: np.ndarray, whole: np.ndarray, cut: np.ndarray, node_size: int) -> ResidentParameters:
    by_node = held.reshape(-1, node_size, *held.shape[1:])
    entire = np.asarray(by_node.any(axis=3))
    parts, wholes = (each * (1 - 1 / np.maximum(each.sum(axis=1, keepdims=True), 1)) for each in (by_node, entire))
    return ResidentParameters(
        rank=(entire @ whole + by_node.mean(axis=3) @ cut).ravel(),
        others=(wholes @ whole + parts.mean(axis=3) @ cut).ravel(),
        node=entire.any(axis=1) @ whole + by_node.any(axis=1).mean(axis=2) @ cut,
    )


def _with_shares(counted: ResidentParameters, stage: Stage, parameters: int) -> ResidentParameters:
    """Add shares of the parameters of a stage."""
    ranks, share = np.array(stage.ranks), parameters * stage.tensor / len(stage.ranks)
    rank, node = counted.rank.copy(), counted.node.copy()
    rank[ranks] += share
    node += np.bincount(ranks // (len(rank) // len(node)), minlength=len(node)) * share
    return ResidentParameters(rank, counted.others, node)


# -- for every pass: FSDP with reshard_after_forward ----------------------------


class UnshardTimes(NamedTuple):
    """ns of the messages of one pass of a stage that is unsharded for every pass."""

    gather: int  # all-gather of the parameters, before every pass
    sum: int  # reduce-scatter of the gradients, after a backward

    def of(self, move: ShardCollective | None) -> int:
        """ns of one move; 0 of none."""
        return 0 if move is None else self.gather if move is ShardCollective.ALL_GATHER else self.sum


def unshard_times_by_stage(cost: CostModel, pipeline: Pipeline) -> dict[int, UnshardTimes]:
    """Times of every stage that the pipeline unshards for every pass. Only free sharding does."""
    if cost.sharding != Sharding.FREE:
        return {}
    stages, layers = pipeline.stages, pipeline.layer_ranges
    return {s: unshard_times(cost, stages[s], layers[s]) for s in sorted(reshard_after_forward_stages(pipeline))}


def unshard_ns(cost: CostModel, pipeline: Pipeline) -> int:
    """ns of all gathers and sums of a pipeline of one stage in a step."""
    times = unshard_times_by_stage(cost, pipeline)
    return sum(times[0].of(move) for move in shard_collectives(pipeline.actions[0], frozenset(times))) if times else 0


@lru_cache(maxsize=256)
def unshard_times(cost: CostModel, stage: Stage, layers: LayerRange) -> UnshardTimes:
    """Time of gathering the parameters of a stage, and of bringing its gradients back to shares.

    The ranks of a stage with the same tensor slice share its parameters. Before a pass each sends its share to the
    others, in bf16; in a backward it sends them their shares of its gradients, in float32, as soon as a layer has them.
    Messages go straight from rank to rank, in one bucket for every layer, one for the embedding and one for norm and
    head. Computing waits for them, so nothing is hidden.
    """
    shares = dp_cp_size(stage)
    if shares == 1:
        return UnshardTimes(0, 0)
    links, cluster = cost.links, cost.cluster
    (node, nic), index = nodes_and_nics(stage.ranks, cluster.nic_of_gpu), np.arange(len(stage.ranks)) % stage.tensor
    near = ((node[:, None] == node) & (index[:, None] == index)).sum(axis=1) - 1
    far = shares - 1 - near
    latency = links.latency("all_to_all", bool(far.any()), (shares - 1).bit_length())
    every, reductions = layers.stop - layers.first + layers.has_embedding + layers.has_head, 0
    if cost.model.adapters:
        reductions = sum(each.parameters > 0 for each in cost.model.adapters[layers.first : layers.stop])
    else:
        reductions = every
    times = []
    for size, calls in ((PARAMETER_BYTES, every), (GRADIENT_BYTES, reductions)):
        share = stage_parameters(cost, layers, stage.tensor, trained=size == GRADIENT_BYTES) / shares
        link_ns, nic_ns = links.message_ns(size * share, "all_to_all")
        busiest = max(int(near.max()) * link_ns, float(np.bincount(nic, far).max()) * nic_ns)
        times.append(int(np.rint(busiest + calls * latency)))
    return UnshardTimes(*times)


def dp_cp_size(stage: Stage) -> int:
    """Ranks of a stage that have the same tensor slice of its weights."""
    return len(stage.ranks) // stage.tensor


class UnshardMemory(NamedTuple):
    """Bytes of parameters and gradients on a rank of a stage that is unsharded for every pass.

    With P parameters on a rank while it computes (a stage whose parameters stay for the step has 6 P all the time). Of
    those that are not trained, gradients (the 4 and 8) do not count:
    """

    always: int  # (2 + 4) P / shares, and 4 of the head: its gradient is made in a forward and waits for the backward
    copies: int  # in every pass: 2 P
    layer: int  # in a backward: 4 of the layer that goes backward
    rest: int  # where a backward ends: 4 of embedding, positions and norm, 8 of a table packed and received
    halves: int  # from the first W to the REDUCE: 4 P, gradients of weight halves

    @classmethod
    def of(cls, cost: CostModel, layers: LayerRange, shares: int) -> UnshardMemory:
        """Bytes of a stage, by the cost model's tensor parallel degree, over so many shares."""
        parameters, trained = stage_parameters(cost, layers), stage_parameters(cost, layers, trained=True)
        head = 0 if cost.model.adapters else cost.model.head_parameters  # of tables, those that are trained
        if shares == 1:  # nobody to share with: they stay for the step
            return cls(PARAMETER_BYTES * parameters + GRADIENT_BYTES * trained, 0, 0, 0, 0)
        own_head = head if layers.has_head else 0
        each = [cost.model.trained_parameters(layer, cost.tensor) for layer in range(layers.first, layers.stop)]
        table = head if layers.has_embedding or layers.has_head else 0
        packed = 2 * max(0, table - max(each))  # beyond a layer's, which is in the working bytes
        return cls(
            always=PARAMETER_BYTES * -(-parameters // shares) + GRADIENT_BYTES * (-(-trained // shares) + own_head),
            copies=PARAMETER_BYTES * parameters,
            layer=GRADIENT_BYTES * max(each),
            rest=GRADIENT_BYTES * (trained - sum(each) - own_head + packed),
            halves=GRADIENT_BYTES * (trained - own_head),
        )


def microbatch_tokens(cost: CostModel, layers: LayerRange, shares: int, checkpoint: Checkpoint, in_flight: int) -> int:
    """Tokens of a micro-batch that a rank of a stage unsharded for every pass can hold, with so many in flight."""
    unsharded = UnshardMemory.of(cost, layers, shares)
    free = cost.budget_bytes - cost.memory.working_bytes(layers) - unsharded.always - unsharded.copies
    held, forward, backward, *_ = cost.memory.activation_bytes(layers, checkpoint)
    in_forward = free // (in_flight * held + forward)
    in_backward = (free - unsharded.layer) // (in_flight * held + backward)
    at_its_end = (free - unsharded.layer - unsharded.rest) // ((in_flight - 1) * held + backward)
    return cost.microbatch_capacity(max(0, int(min(in_forward, in_backward, at_its_end))))
