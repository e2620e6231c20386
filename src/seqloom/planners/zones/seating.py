"""The ranks of a round while it is filled: how loaded each is, how much room it has, and where a shape fits best."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from seqloom.cost import Shape
from seqloom.planners.fill import NEVER

Ranks = tuple[int, ...]


@dataclass(eq=False)
class Seating:
    """Who holds what in a round. Groups may share ranks; loads are estimates in ns, rooms are tokens."""

    load: list[int]
    room: list[int]
    whole: list[list[int]]
    """Documents that are whole on each rank."""
    cut: dict[tuple[Ranks, int], list[int]] = field(default_factory=dict)
    """(ranks, index of the shape) -> documents cut over them: one group."""
    groups: dict[int, list[Ranks]] = field(default_factory=dict)
    """Index of a shape -> the ranks of each group of it."""
    left: list[int] = field(default_factory=list)
    """Documents that found no room."""

    @classmethod
    def empty(cls, begin: list[int], capacity: int) -> Seating:
        """A round in which nobody holds anything; rank i is free from ``begin[i]`` on."""
        return cls(list(begin), [capacity] * len(begin), [[] for _ in begin])

    def place(self, ranks: Ranks, shape: int, document: int, tokens: int, charge: int) -> None:
        """Cut a document over these ranks, each of which takes ``charge`` ns more."""
        if (ranks, shape) not in self.cut:
            self.cut[ranks, shape] = []
            self.groups.setdefault(shape, []).append(ranks)
        self.cut[ranks, shape].append(document)
        share = -(-tokens // len(ranks))
        for rank in ranks:
            self.load[rank] += charge
            self.room[rank] -= share


def best_ranks(
    shape: Shape, load: np.ndarray, room: np.ndarray, share: int, node_size: int
) -> tuple[int, Ranks] | None:
    """The least loaded ranks that a group of this shape may have, each with room for ``share`` tokens.

    Inside a node these are any aligned Ulysses blocks of it (any ranks, for a pure ring), across nodes whole nodes.

    Args:
        load: int64[ranks] ns.
        room: int64[ranks] tokens.

    Returns:
        load of the fullest of them and the ranks, or None where there is no room.
    """
    inner = shape.ulysses
    load = np.where(room >= share, load, NEVER)
    if shape.degree > node_size:
        width = max(inner, node_size)
        blocks = load[: len(load) // width * width].reshape(-1, width).max(axis=1)
        first, count = 0, shape.degree // width
    else:
        width, per_node = inner, node_size // inner
        rows = load.reshape(-1, node_size)[:, : per_node * inner].reshape(-1, per_node, inner).max(axis=2)
        worst = np.sort(rows, axis=1)[:, shape.ring - 1]
        node = int(worst.argmin())
        first, count, blocks = node * node_size, shape.ring, rows[node]
    chosen = np.argsort(blocks, kind="stable")[:count].tolist()
    fullest = int(blocks[chosen[-1]]) if len(chosen) == count else int(NEVER)
    if fullest >= NEVER:
        return None
    starts = (first + block * width for block in sorted(chosen))
    return fullest, tuple(rank for start in starts for rank in range(start, start + width))
