"""How busy ranks are in every cell of a Gantt chart, by the degree of the group at work."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from seqloom.simulate import Simulation


@dataclass(frozen=True, slots=True, eq=False)
class Occupancy:
    """A grid of rows (ranks, nodes or runs of them) x columns (equal slices of the step)."""

    labels: tuple[str, ...]
    degrees: tuple[int, ...]
    """Ascending; 0 is the end of the step."""
    share: np.ndarray
    """float64[rows, degrees, columns]: share of the cell's rank-time."""


def occupancy(simulation: Simulation, rows: int, columns: int) -> Occupancy:
    """Count the work of every cell. Messages between stages are left out: they run beside the work.

    Args:
        simulation: whose events.
        rows: at most this many; ranks if they fit, else nodes, else runs of nodes (of ranks in one node).
        columns: slices of time.
    """
    size, labels = _rows(simulation, rows)
    events = simulation.events.where(~simulation.events.beside)
    degrees = np.unique(events.degree)
    edges = np.arange(columns + 1) * max(simulation.step_ns, 1) / columns
    share = np.zeros((len(labels), len(degrees), columns))
    row = events.rank // size
    for r in range(len(labels)):
        ranks = min(size, simulation.ranks - r * size)
        for d, degree in enumerate(degrees):
            chosen = (row == r) & (events.degree == degree)
            so_far = _elapsed(events.start[chosen], edges) - _elapsed(events.stop[chosen], edges)
            share[r, d] = np.diff(so_far) / (ranks * np.diff(edges))
    return Occupancy(labels, tuple(degrees.tolist()), share)


def card_use(simulation: Simulation, rows: int, columns: int) -> tuple[tuple[str, ...], np.ndarray]:
    """(labels, float64[rows, columns]): share of every cell in which network cards are in use.

    Rows are nodes, or runs of them if there are more than ``rows``; none where nothing leaves a node.
    """
    nodes, table = len(simulation.nic_busy_ns), simulation.cards
    if nodes == 1 or not len(table):
        return (), np.zeros((0, columns))
    size = -(-nodes // max(rows, 1))
    edges = np.arange(columns + 1) * max(simulation.step_ns, 1) / columns
    low, high = np.maximum(table.start[:, None], edges[:-1]), np.minimum(table.stop[:, None], edges[1:])
    part = np.maximum(high - low, 0.0) / (table.stop - table.start)[:, None]
    use = np.zeros((-(-nodes // size), columns))
    np.add.at(use, table.node // size, part * table.busy[:, None])
    counts = np.minimum(size, nodes - size * np.arange(len(use)))
    labels = tuple(_label("NICs", first, min(first + size, nodes)) for first in range(0, nodes, size))
    return labels, use / (counts[:, None] * np.diff(edges))


def row_labels(simulation: Simulation, rows: int) -> tuple[str, ...]:
    """Return the names of the rows of `occupancy`."""
    return _rows(simulation, rows)[1]


def _elapsed(times: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """float64[edges]: sum over all times t before an edge of (edge - t)."""
    ordered = np.sort(times).astype(np.float64)
    sums = np.concatenate([[0.0], np.cumsum(ordered)])
    count = np.searchsorted(ordered, edges)
    return count * edges - sums[count]


def _rows(simulation: Simulation, rows: int) -> tuple[int, tuple[str, ...]]:
    """(ranks per row, labels)."""
    ranks, node = simulation.ranks, simulation.node_size
    if ranks <= rows or node >= ranks:
        size = -(-ranks // max(rows, 1))
        return size, tuple(_label("rank", first, min(first + size, ranks)) for first in range(0, ranks, size))
    nodes = -(-ranks // node)
    size = -(-nodes // max(rows, 1))
    return size * node, tuple(_label("node", first, min(first + size, nodes)) for first in range(0, nodes, size))


def _label(noun: str, first: int, stop: int) -> str:
    many = noun if noun.endswith("s") else f"{noun}s"
    return f"{noun} {first}" if stop == first + 1 else f"{many} {first}-{stop - 1}"
