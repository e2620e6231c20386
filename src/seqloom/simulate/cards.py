"""How busy network cards and NVLink ports are, over the step and in the course of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from seqloom.simulate.translate import Program
from seqloom.simulate.twins import Place
from seqloom.simulate.window import Window


@dataclass(frozen=True, slots=True, eq=False)
class CardTable:
    """When the cards of a node are in use. One row per node and piece of work that leaves it, int64, by node and start.

    Within a piece the traffic counts as spread evenly.
    """

    node: np.ndarray
    start: np.ndarray
    """ns since the step began."""
    stop: np.ndarray
    """ns since the step began."""
    busy: np.ndarray
    """ns in which a card of the node is taken, mean over its cards."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.node)


def busy_ns(windows: Iterable[Window], nodes: int, cards: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64[nodes, cards], int64[ranks]) ns in which cards and NVLink ports are taken, all rounds together."""
    nic, link = np.zeros((nodes, cards), dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    for window in windows:
        nic += window.nic
        link += window.link
    return nic, link


def record_cards(program: Program, windows: dict[Place, Window], starts: np.ndarray, node_size: int) -> CardTable:
    """Write down the use of cards of a program that has run.

    Args:
        program: the tasks.
        windows: what they stand for.
        starts: int64[tasks] ns.
        node_size: ranks of a node.
    """
    blocks = [np.empty((0, 4), dtype=np.int64)]
    for step in program.steps:
        window, phase = windows[step.place], step.phase
        taken = window.nic.mean(axis=1)
        if not taken.any():
            continue
        # where several components share a node, its traffic is drawn with the first of them
        node, first = np.unique(window.rank // node_size, return_index=True)
        component = window.component[first]
        begin = starts[step.first + component]
        duration = phase.duration[component]
        busy = taken[node] * duration / np.maximum(window.length[component], 1)
        blocks.append(np.stack([node, begin, begin + duration, np.rint(busy).astype(np.int64)], axis=1))
    rows = np.concatenate(blocks)
    rows = rows[rows[:, 3] > 0]
    return CardTable(*rows[np.lexsort((rows[:, 1], rows[:, 0]))].T)
