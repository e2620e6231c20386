"""Zeppelin's hierarchical partitioner: which documents cross nodes, which stay in one, which on one GPU.

Both levels are greedy with a threshold: what is at least that long is cut, the rest is placed whole, longest first,
where the load is least. If something does not fit, the threshold drops to the longest document that is still whole,
and the level starts again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from seqloom.cost import CostModel
from seqloom.layout.balance import balanced_token_counts, rebalance_layout
from seqloom.plan import Plan, StageMicroBatch
from seqloom.planners.packing import next_fit
from seqloom.planners.published.tuned import Place, Rounds, crosses, fullest, tuned_plan


@dataclass(frozen=True, slots=True)
class Machine:
    """Nodes of equal GPUs, and the tokens that a GPU may hold."""

    nodes: int
    node_size: int
    capacity: int

    @property
    def node_capacity(self) -> int:
        """Tokens of a node."""
        return self.node_size * self.capacity

    def ranks(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.node_size, (node + 1) * self.node_size)


@dataclass(slots=True)
class Loads:
    """What every GPU of a node has got so far."""

    tokens: list[int]
    work: list[float] = field(default_factory=list)  # squared tokens

    def least(self, each: int, capacity: int) -> list[int]:
        """GPUs with room for ``each`` tokens more: least work first, then fewest tokens."""
        roomy = [gpu for gpu, held in enumerate(self.tokens) if held + each <= capacity]
        return sorted(roomy, key=lambda gpu: (self.work[gpu], self.tokens[gpu], gpu))

    def charge(self, gpus: list[int], each: int, work: float) -> None:
        """Add tokens and work to these GPUs."""
        for gpu in gpus:
            self.tokens[gpu] += each
            self.work[gpu] += work


def partition(tokens: np.ndarray, documents: list[int], machine: Machine) -> list[Place]:
    """Place documents that all GPUs together can hold.

    Args:
        tokens: int64[n] of every document of the batch.
        documents: those to place.
        machine: where.
    """
    order = sorted(documents, key=lambda document: (-int(tokens[document]), document))
    if machine.nodes == 1:
        return inside_node(tokens, order, machine, 0, [0] * machine.node_size, 0.0)
    for cut in _cuts(tokens, order, machine.node_capacity):
        placed = over_nodes(tokens, order, cut, machine)
        if placed is not None:
            return placed
    return [Place(tuple(range(machine.nodes * machine.node_size)), order)]


def _cuts(tokens: np.ndarray, order: list[int], threshold: int) -> list[int]:
    """How many of the longest documents to cut, attempt by attempt: from the threshold up, then one length more."""
    first = sum(1 for document in order if tokens[document] >= threshold)
    return [first, *(k + 1 for k in range(first, len(order)) if k + 1 == len(order) or _shorter(tokens, order, k))]


def _shorter(tokens: np.ndarray, order: list[int], k: int) -> bool:
    return bool(tokens[order[k + 1]] < tokens[order[k]])


def over_nodes(tokens: np.ndarray, order: list[int], cut: int, machine: Machine) -> list[Place] | None:
    """The inter-node pass: the ``cut`` longest cross nodes, the others go whole to the node with the least load.

    A document that crosses takes all GPUs of as few nodes as hold it, at least two.
    """
    load = [0] * machine.nodes
    shared = [0] * machine.nodes  # tokens that every GPU of a node holds of documents that cross
    work = [0.0] * machine.nodes
    inside: list[list[int]] = [[] for _ in range(machine.nodes)]
    places = []
    for document in order[:cut]:
        size = int(tokens[document])
        nodes = _nodes_for(size, load, machine)
        if nodes is None:
            return None
        gpus = len(nodes) * machine.node_size
        for node in nodes:
            shared[node] += -(-size // gpus)
            load[node] = shared[node] * machine.node_size
            work[node] += size * size / gpus
        places.append(Place(tuple(rank for node in nodes for rank in machine.ranks(node)), [document]))
    for document in order[cut:]:
        node = min(range(machine.nodes), key=lambda node: (load[node], node))
        if load[node] + int(tokens[document]) > machine.node_capacity:
            return None
        load[node] += int(tokens[document])
        inside[node].append(document)
    for node in range(machine.nodes):
        start = [shared[node]] * machine.node_size
        places += inside_node(tokens, inside[node], machine, node, start, work[node])
    return places if fullest(places, tokens) <= machine.capacity else None


def _nodes_for(size: int, load: list[int], machine: Machine) -> list[int] | None:
    """As few nodes as hold a document, at least two, the emptiest; None if there is no room."""
    by_load = sorted(range(machine.nodes), key=lambda node: (load[node], node))
    for count in range(max(2, -(-size // machine.node_capacity)), machine.nodes + 1):
        nodes = by_load[:count]
        if load[nodes[-1]] + -(-size // count) <= machine.node_capacity:
            return sorted(nodes)
    return None


def inside_node(
    tokens: np.ndarray, order: list[int], machine: Machine, node: int, held: list[int], work: float
) -> list[Place]:
    """The intra-node pass: documents of one node on its GPUs.

    Args:
        tokens: int64[n] of every document of the batch.
        order: the node's documents, longest first.
        machine: where.
        node: which.
        held: tokens that each GPU has of documents that cross nodes.
        work: squared tokens that each GPU has of them.
    """
    if not order:
        return []
    for cut in _cuts(tokens, order, machine.capacity):
        placed = _on_gpus(tokens, order, cut, machine, Loads(list(held), [work] * len(held)))
        if placed is not None:
            first = machine.ranks(node).start
            return [Place(tuple(first + gpu for gpu in gpus), [document]) for document, gpus in placed]
    return [Place(tuple(machine.ranks(node)), order)]


def _on_gpus(
    tokens: np.ndarray, order: list[int], cut: int, machine: Machine, loads: Loads
) -> list[tuple[int, list[int]]] | None:
    """(document, GPUs): the ``cut`` longest by their squared length, the others whole; None if one does not fit."""
    capacity, most = machine.capacity, machine.node_size
    fair = sum(float(tokens[document]) ** 2 for document in order[:cut]) / most
    placed = []
    for k, document in enumerate(order):
        size = int(tokens[document])
        count = 1 if k >= cut else min(most, max(2, -(-size // capacity), int(np.ceil(size * size / fair))))
        each = -(-size // count)
        gpus = sorted(loads.least(each, capacity)[:count])
        if len(gpus) < count:
            return None
        loads.charge(gpus, each, size * size / count)
        placed.append((document, gpus))
    return placed


# ---- merged: planners.rivals.zeppelin
# Rival ``zeppelin``: zones by length, all network cards, two layouts, as published (arXiv 2509.21841).
#
# Published: documents fall into three zones, cut across nodes, cut inside a node, whole on one GPU, by two greedy
# passes under a token capacity per GPU that balance squared lengths (`partition`); what is cut is a ring; ranks run
# rings between nodes first, then those inside, then whole documents. Messages between nodes are spread over all
# network
# cards of the node (routing). Linear modules see another layout, in which every GPU has the same number of tokens
# (remapping).
#
# Our reading, since only a description of the algorithms could be read: thresholds begin at what a node, and a GPU,
# can
# hold and drop to the next length when something does not fit. A document that crosses nodes takes all GPUs of as
# few
# nodes as hold it; inside a node a cut document gets GPUs in proportion to its squared length, two at least.
# Routing
# and remapping are always on: no gate by cost is described. Remapping is around attention, so that projections are
# balanced too. A batch beyond the memory of all GPUs is cut in its order of arrival.


def plan_zeppelin(lengths: np.ndarray, cost: CostModel, *, routing: bool = True, remapping: bool = True) -> Plan:
    """Plan a batch as Zeppelin does.

    Args:
        lengths: int64[n] tokens.
        cost: prices the batch.
        routing: spread messages between nodes over all network cards.
        remapping: give every GPU the same number of tokens in linear modules.
    """

    def placement(tokens: np.ndarray, capacity: int) -> Rounds:
        machine = Machine(cost.ranks // cost.node_size, cost.node_size, capacity)
        packs = next_fit(tokens, cost.ranks * capacity)
        return [[routed(place) for place in partition(tokens, pack, machine)] for pack in packs]

    def routed(place: Place) -> Place:
        return place._replace(routed=routing and crosses(place.ranks, cost.node_size))

    finished = (lambda work: even_tokens(work, cost)) if remapping else None
    return tuned_plan(lengths, cost, "zeppelin", placement, finished=finished)


def even_tokens(work: StageMicroBatch, cost: CostModel) -> StageMicroBatch:
    """The same round with as many tokens on every GPU of a shard group in linear modules."""
    layout = work.attention_layout()
    held = np.bincount(layout.rank, weights=layout.sizes, minlength=cost.ranks).astype(np.int64)
    shard_groups = cost.limits().shard_groups(cost.sharding, range(cost.ranks))
    targets = balanced_token_counts(np.zeros_like(held), 1, held, shard_groups)
    if np.array_equal(targets, held):
        return work
    return replace(work, linear=rebalance_layout(layout, targets, cost.node_size, shard_groups))
