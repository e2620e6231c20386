"""How far a group reaches: which of its traffic leaves a node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from seqloom.cost.values import Shape


class Reach(NamedTuple):
    """What decides whether a group's messages use NVLink or the network."""

    ulysses_nodes: int = 1  # nodes that the widest Ulysses subgroup touches
    ring_exits: int = 0  # most ranks of one node whose ring successor lies in another node
    node_ranks: int = 1  # most ranks of the group in one node


@lru_cache(maxsize=8192)
def reach_of(ranks: Sequence[int], shape: Shape, node_size: int) -> Reach:
    """Reach of the group on these ranks, wherever they lie.

    Ulysses is the inner axis: rank ``i`` of the group has Ulysses index ``i % ulysses`` and ring index
    ``i // ulysses``, so Ulysses subgroups are consecutive runs and ring neighbours are ``ulysses`` apart.
    """
    nodes = [rank // node_size for rank in ranks]
    inner, count = shape.ulysses, len(nodes)
    widest = max(len(set(nodes[start : start + inner])) for start in range(0, count, inner))
    exits = Counter(nodes[i] for i in range(count) if nodes[i] != nodes[(i + inner) % count])
    return Reach(widest, max(exits.values(), default=0), max(Counter(nodes).values()))


def aligned_reach(shape: Shape, node_size: int) -> Reach:
    """Reach of a group on an aligned block of the group family: the same for every block of one size."""
    return reach_of(range(shape.degree), shape, node_size)
