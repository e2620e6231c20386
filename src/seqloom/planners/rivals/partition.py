"""Zeppelin's hierarchical partitioner: which documents cross nodes, which stay in one, which on one GPU.

Both levels are greedy with a threshold: what is at least that long is cut, the rest is placed whole, longest first,
where the load is least. If something does not fit, the threshold drops to the longest document that is still whole,
and the level starts again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from seqloom.planners.rivals.tuned import Place, fullest


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
