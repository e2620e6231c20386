"""What every rank does when, as columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import IntEnum

import numpy as np

from seqloom.plan import ActionKind
from seqloom.simulate.tasks import TaskGraph
from seqloom.simulate.windows import MicroBatchKey, MicroBatchTimes


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


NETWORK = (EventKind.SEND_F, EventKind.RECV_F, EventKind.SEND_B, EventKind.RECV_B)
"""Kinds that run beside a rank's other events; all others follow each other."""


@dataclass(frozen=True, slots=True, eq=False)
class EventTable:
    """One row per rank and piece of work, int64, sorted by rank and start. Waiting has no rows.

    `round`, `group`, `pipeline` and `stage` are -1 where they make no sense (messages have no group, the
    end of the step has none of them); `degree` is then 0. Gathers for one pass, and sums after it, have no group
    and the ranks of their stage as degree.
    """

    rank: np.ndarray
    start: np.ndarray
    """ns since the step began."""
    stop: np.ndarray
    """ns since the step began."""
    kind: np.ndarray
    """`EventKind`."""
    comm: np.ndarray
    """ns of exposed communication inside the event."""
    round: np.ndarray
    group: np.ndarray
    """Index of the group in its `Work`."""
    degree: np.ndarray
    """Ranks of the group."""
    pipeline: np.ndarray
    stage: np.ndarray

    def __len__(self) -> int:
        """Number of events."""
        return len(self.rank)

    def where(self, chosen: np.ndarray) -> EventTable:
        """Return the rows of a mask or of indices."""
        return EventTable(*(getattr(self, field.name)[chosen] for field in fields(self)))

    @property
    def beside(self) -> np.ndarray:
        """bool[events]: messages, which run beside a rank's other events."""
        return np.isin(self.kind, NETWORK)


_NAMES = tuple(field.name for field in fields(EventTable))
_Rows = dict[str, np.ndarray | int]


def event_table(
    program: TaskGraph,
    windows: dict[MicroBatchKey, MicroBatchTimes],
    starts: np.ndarray,
    ranks: int,
    end: tuple[int, int],
) -> EventTable:
    """Write down the events of a program that has run.

    Args:
        program: the tasks.
        windows: what they stand for.
        starts: int64[tasks] ns.
        ranks: ranks of the cluster.
        end: ns that the end of the step takes, on every rank, and how many of them are communication.
    """
    finish = 0
    blocks: list[_Rows] = []
    for step in program.steps:
        window, phase = windows[step.place], step.phase
        begin = starts[step.first : step.first + len(phase.duration)]
        finish = max(finish, int((begin + phase.duration).max()))
        at = begin[window.component]
        blocks.append(
            {
                "rank": window.rank,
                "start": at + phase.start,
                "stop": at + phase.stop,
                "kind": int(EventKind[step.kind.value]),
                "comm": phase.comm,
                "group": window.group,
                "degree": window.degree,
            }
            | step.place._asdict()
        )
    for message in program.messages:
        begin = int(starts[message.task])
        finish = max(finish, begin + message.ns)
        receive = ActionKind.RECV_F if message.kind == ActionKind.SEND_F else ActionKind.RECV_B
        for place, kind in ((message.sender, message.kind), (message.receiver, receive)):
            rows = _alike(np.unique(windows[place].rank), begin, begin + message.ns, EventKind[kind.value])
            blocks.append(rows | place._asdict())
    for place, _, move, ns, task in program.gatherings:
        begin = int(starts[task])
        finish = max(finish, begin + ns)
        ranks_there = np.unique(windows[place].rank)
        rows = _alike(ranks_there, begin, begin + ns, EventKind[move.name])
        blocks.append(rows | place._asdict() | {"comm": ns, "degree": len(ranks_there)})
    last = _alike(np.arange(ranks), finish, finish + end[0], EventKind.STEP)
    blocks.append(last | {"comm": end[1], "pipeline": -1, "stage": -1, "round": -1})
    return _join(blocks)


def _alike(rank: np.ndarray, start: int, stop: int, kind: EventKind) -> _Rows:
    """Return the same event on many ranks, without a group."""
    return {
        "rank": rank,
        "start": start,
        "stop": stop,
        "kind": int(kind),
        "comm": 0,
        "group": -1,
        "degree": 0,
    }


def _join(blocks: list[_Rows]) -> EventTable:
    """Put blocks together, without events of no duration."""
    sizes = [len(np.atleast_1d(block["rank"])) for block in blocks]
    columns = {}
    for name in _NAMES:
        full = [
            value if isinstance(value, np.ndarray) else np.full(size, value)
            for value, size in zip((block[name] for block in blocks), sizes, strict=True)
        ]
        columns[name] = np.concatenate(full).astype(np.int64, copy=False)
    table = EventTable(**columns)
    order = np.lexsort((table.start, table.rank))
    return table.where(order[(table.stop > table.start)[order]])


# ---- merged: simulate.cards
# How busy network cards and NVLink ports are, over the step and in the course of it.


@dataclass(frozen=True, slots=True, eq=False)
class NicTable:
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


def busy_ns(windows: Iterable[MicroBatchTimes], nodes: int, cards: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """(int64[nodes, cards], int64[ranks]) ns in which cards and NVLink ports are taken, all rounds together."""
    nic, link = np.zeros((nodes, cards), dtype=np.int64), np.zeros(ranks, dtype=np.int64)
    for window in windows:
        nic += window.nic
        link += window.link
    return nic, link


def nic_table(
    program: TaskGraph, windows: dict[MicroBatchKey, MicroBatchTimes], starts: np.ndarray, node_size: int
) -> NicTable:
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
    return NicTable(*rows[np.lexsort((rows[:, 1], rows[:, 0]))].T)
