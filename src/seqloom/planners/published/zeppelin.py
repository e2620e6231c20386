"""Rival ``zeppelin``: zones by length, all NICs, two layouts, as published (arXiv 2509.21841).

Published: documents fall into three zones, cut across nodes, cut inside a node, whole on one GPU, by two greedy passes
under a token capacity per GPU that balance squared lengths; a cut document is a ring; ranks run rings between nodes
first, then those inside, then whole documents. Messages between nodes are spread over all NICs of the node (routing).
Linear modules see another layout, in which every GPU has the same number of tokens (remapping).

Both passes are greedy with a threshold: they cut every document at least that long and place the rest whole, longest
first, where the load is least. If a document does not fit, the threshold drops to the longest document that is still
whole, and the pass starts again.

Our reading, since only a description of the algorithms could be read: thresholds begin at what a node, and a GPU, can
hold and drop to the next length when a document does not fit. A document that crosses nodes takes all GPUs of as few
nodes as hold it; inside a node a cut document gets GPUs in proportion to its squared length, two at least. Routing and
remapping are always on: no gate by cost is described. Remapping is around attention, so that projections are balanced
too. A batch beyond the memory of all GPUs is cut in its order of arrival.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from seqloom.cost import CostModel
from seqloom.layout.balance import balanced_token_counts, rebalance_layout
from seqloom.plan import Plan, StageMicroBatch
from seqloom.planners.packing import next_fit
from seqloom.planners.published.rivals import RivalGroup, Rounds, fullest, tuned_plan


def plan_zeppelin(lengths: np.ndarray, cost: CostModel, *, routing: bool = True, remapping: bool = True) -> Plan:
    """Plan a batch, int64[n] tokens, as Zeppelin does.

    ``routing`` spreads messages between nodes over all NICs, ``remapping`` gives every GPU the same number of tokens in
    linear modules.
    """
    node = cost.node_size

    def published(tokens: np.ndarray, capacity: int) -> list[Rounds]:
        nodes = Nodes(cost.ranks // node, node, capacity)
        packs = next_fit(tokens, cost.ranks * capacity)
        return [[list(map(routed, partition(tokens, pack, nodes))) for pack in packs]]

    def routed(group: RivalGroup) -> RivalGroup:
        return group._replace(routed=routing and min(group.ranks) // node != max(group.ranks) // node)

    def finish(work: StageMicroBatch) -> StageMicroBatch:
        return even_tokens(work, cost) if remapping else work

    return tuned_plan(lengths, cost, "zeppelin", published, finish=finish)


def even_tokens(work: StageMicroBatch, cost: CostModel) -> StageMicroBatch:
    """The same round with as many tokens on every GPU of a shard group in linear modules."""
    layout = work.attention_layout()
    held = np.bincount(layout.rank, weights=layout.sizes, minlength=cost.ranks).astype(np.int64)
    shard_groups = cost.limits().shard_groups(cost.sharding, range(cost.ranks))
    targets = balanced_token_counts(np.zeros_like(held), 1, held, shard_groups)
    if np.array_equal(targets, held):
        return work
    return replace(work, linear=rebalance_layout(layout, targets, cost.node_size, shard_groups))


@dataclass(frozen=True, slots=True)
class Nodes:
    """Nodes of equal GPUs, and the tokens that a GPU may hold."""

    count: int
    size: int
    capacity: int

    def ranks(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.size, (node + 1) * self.size)


def partition(tokens: np.ndarray, documents: list[int], nodes: Nodes) -> list[RivalGroup]:
    """Place these documents of the batch, int64[n] tokens, which all GPUs together can hold."""
    order = sorted(documents, key=lambda document: (-int(tokens[document]), document))
    if nodes.count == 1:
        return inside_node(tokens, order, nodes, 0, 0, 0.0)
    for cut in _cuts(tokens, order, nodes.size * nodes.capacity):
        placed = over_nodes(tokens, order, cut, nodes)
        if placed is not None:
            return placed
    return [RivalGroup(tuple(range(nodes.count * nodes.size)), order)]


def _cuts(tokens: np.ndarray, order: list[int], threshold: int) -> list[int]:
    """How many of the longest documents to cut, attempt by attempt: from the threshold up, then one length more."""
    sizes = [*tokens[order].tolist(), -1]
    first = sum(1 for size in sizes if size >= threshold)
    return [first, *(k + 1 for k in range(first, len(order)) if sizes[k + 1] < sizes[k])]


def over_nodes(tokens: np.ndarray, order: list[int], cut: int, nodes: Nodes) -> list[RivalGroup] | None:
    """The inter-node pass: the ``cut`` longest cross nodes, the others go whole to the node with the least load.

    A document that crosses takes all GPUs of as few nodes as hold it, at least two.
    """
    load = [0] * nodes.count
    shared = [0] * nodes.count  # tokens that every GPU of a node holds of documents that cross
    work = [0.0] * nodes.count  # squared tokens of every GPU likewise
    inside: list[list[int]] = [[] for _ in range(nodes.count)]
    groups = []
    for document in order[:cut]:
        size = int(tokens[document])
        chosen = _nodes_for(size, load, nodes)
        if chosen is None:
            return None
        gpus = len(chosen) * nodes.size
        for node in chosen:
            shared[node] += -(-size // gpus)
            load[node] = shared[node] * nodes.size
            work[node] += size * size / gpus
        groups.append(RivalGroup(tuple(rank for node in chosen for rank in nodes.ranks(node)), [document]))
    for document in order[cut:]:
        node = load.index(min(load))
        load[node] += int(tokens[document])
        if load[node] > nodes.size * nodes.capacity:
            return None
        inside[node].append(document)
    for node in range(nodes.count):
        groups += inside_node(tokens, inside[node], nodes, node, shared[node], work[node])
    return groups if fullest(groups, tokens) <= nodes.capacity else None


def _nodes_for(size: int, load: list[int], nodes: Nodes) -> list[int] | None:
    """As few nodes as hold a document, at least two, the emptiest; None if they do not hold it."""
    capacity = nodes.size * nodes.capacity
    by_load = sorted(range(nodes.count), key=lambda node: (load[node], node))
    for count in range(max(2, -(-size // capacity)), nodes.count + 1):
        if load[by_load[count - 1]] + -(-size // count) <= capacity:
            return sorted(by_load[:count])
    return None


def inside_node(
    tokens: np.ndarray, order: list[int], nodes: Nodes, node: int, held: int, work: float
) -> list[RivalGroup]:
    """The intra-node pass: documents of one node, longest first, on its GPUs.

    Each GPU has ``held`` tokens, and ``work`` squared tokens, of documents that cross nodes.
    """
    if not order:
        return []
    ranks = nodes.ranks(node)
    for cut in _cuts(tokens, order, nodes.capacity):
        placed = _on_gpus(tokens, order, cut, nodes, held, work)
        if placed is not None:
            return [RivalGroup(tuple(ranks[gpu] for gpu in gpus), [document]) for document, gpus in placed]
    return [RivalGroup(tuple(ranks), order)]


def _on_gpus(
    tokens: np.ndarray, order: list[int], cut: int, nodes: Nodes, held: int, work: float
) -> list[tuple[int, list[int]]] | None:
    """(document, GPUs): the ``cut`` longest by their squared length, the others whole; None if one does not fit."""
    capacity, most = nodes.capacity, nodes.size
    tokens_of, work_of = [held] * most, [work] * most
    fair = sum(float(tokens[document]) ** 2 for document in order[:cut]) / most
    placed = []
    for k, document in enumerate(order):
        size = int(tokens[document])
        count = 1 if k >= cut else min(most, max(2, -(-size // capacity), int(np.ceil(size * size / fair))))
        share = -(-size // count)
        fitting = [gpu for gpu in range(most) if tokens_of[gpu] + share <= capacity]
        gpus = sorted(sorted(fitting, key=lambda gpu: (work_of[gpu], tokens_of[gpu], gpu))[:count])
        if len(gpus) < count:
            return None
        for gpu in gpus:
            tokens_of[gpu] += share
            work_of[gpu] += size * size / count
        placed.append((document, gpus))
    return placed
