"""What every rank does when, and when the NICs of every node are in use, as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from seqloom.simulate.tasks import TaskGraph


class EventKind(IntEnum):
    """Codes of the column `kind`."""

    F = 0
    B = 1
    I = 2  # noqa: E741 - the field's name for the input half of a backward
    W = 3
    SEND_F = 4
    RECV_F = 5
    SEND_B = 6
    RECV_B = 7
    STEP = 8  # the end of the step: what is reduced once per step, the optimiser
    ALL_GATHER = 9  # parameters of a stage gathered for one pass
    REDUCE_SCATTER = 10  # gradients of such a stage summed into the shares that its ranks keep


@dataclass(frozen=True, slots=True, eq=False)
class EventTable:
    """One row per rank and piece of work, int64, sorted by rank and start. Waiting has no rows.

    `round`, `group`, `pipeline` and `stage` are -1 where they make no sense (messages have no group, the end of the
    step has none of them); `degree` is then 0. Gathers for one pass, and sums after it, have no group and the ranks of
    their stage as degree.
    """

    rank: np.ndarray
    start: np.ndarray  # ns since the step began
    stop: np.ndarray  # ns since the step began
    kind: np.ndarray  # `EventKind`
    comm: np.ndarray  # ns of exposed communication inside the event
    round: np.ndarray
    group: np.ndarray  # index of the group in its `StageMicroBatch`
    degree: np.ndarray  # ranks of the group
    pipeline: np.ndarray
    stage: np.ndarray

    def __len__(self) -> int:
        return len(self.rank)

    def where(self, chosen: np.ndarray) -> EventTable:
        """Return the rows of a mask or of indices."""
        return EventTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def is_message(self) -> np.ndarray:
        """bool[events]: messages between stages, which run beside a rank's other events."""
        return (self.kind >= EventKind.SEND_F) & (self.kind <= EventKind.RECV_B)


@dataclass(frozen=True, slots=True, eq=False)
class NicTable:
    """One row per node and piece of work that uses its NICs, int64, sorted by node and start.

    Within a piece the traffic counts as spread evenly.
    """

    node: np.ndarray
    start: np.ndarray  # ns since the step began
    stop: np.ndarray  # ns since the step began
    busy: np.ndarray  # ns in which a NIC of the node is occupied, mean over its NICs

    def __len__(self) -> int:
        return len(self.node)


def event_table(graph: TaskGraph, starts: np.ndarray, ranks: int, end: tuple[int, int]) -> EventTable:
    """Write down the events of tasks that have run; `end` is (ns, of that communication) of the step's end."""
    finish, blocks = 0, []

    def add(*columns: np.ndarray | int) -> None:
        blocks.append(np.stack(np.broadcast_arrays(*columns)))

    for key, kind, own, first in graph.computing:
        begin, batch = starts[first : first + len(own.duration)], graph.times[key]
        finish = max(finish, int((begin + own.duration).max(initial=0)))
        at, code = begin[batch.component], EventKind[kind.value]
        place = (key.round, batch.group, batch.degree, key.pipeline, key.stage)
        add(batch.rank, at + own.start, at + own.stop, code, own.comm, *place)
    for link in graph.links:
        begin = int(starts[link.task])
        finish = max(finish, begin + link.ns)
        for key, name in link.ends:
            there = np.unique(graph.times[key].rank)
            comm, degree = (link.ns, len(there)) if link.exposed else (0, 0)
            add(there, begin, begin + link.ns, EventKind[name], comm, key.round, -1, degree, key.pipeline, key.stage)
    add(np.arange(ranks), finish, finish + end[0], EventKind.STEP, end[1], -1, -1, 0, -1, -1)
    table = EventTable(*np.concatenate(blocks, axis=1).astype(np.int64, copy=False))
    order = np.lexsort((table.start, table.rank))
    return table.where(order[(table.stop > table.start)[order]])


def nic_table(graph: TaskGraph, starts: np.ndarray, node_size: int) -> NicTable:
    """Write down when NICs are in use, of tasks that have run; arguments as `event_table`, and the ranks of a node."""
    blocks = [np.empty((4, 0), dtype=np.int64)]
    for key, _, own, first in graph.computing:
        batch = graph.times[key]
        occupied = batch.nic.mean(axis=1)
        if not occupied.any():
            continue
        # where several components share a node, its traffic is drawn with the first of them
        node, member = np.unique(batch.rank // node_size, return_index=True)
        component = batch.component[member]
        begin, duration = starts[first + component], own.duration[component]
        busy = occupied[node] * duration / np.maximum(batch.length[component], 1)
        blocks.append(np.stack([node, begin, begin + duration, np.rint(busy).astype(np.int64)]))
    rows = np.concatenate(blocks, axis=1)
    rows = rows[:, rows[3] > 0]
    return NicTable(*rows[:, np.lexsort((rows[1], rows[0]))])
