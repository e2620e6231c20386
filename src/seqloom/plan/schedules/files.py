"""Schedules as CSV files, in the action strings of torch.distributed.pipelining: a line per host, a cell per action.

    0F0,0F1,0B0,0B1
    1F0,1B0,1F1,1B1

torch's runtime loads such a file as it is. Its REDUCE_GRAD is our REDUCE. A file says nothing of pieces: units have
the numbers of torch's micro-batches, in forward order, and whoever reads it says which of them are one sequence's.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.check_actions import complete
from seqloom.plan.check_messages import ending, matched, send_of
from seqloom.plan.error import PlanError
from seqloom.plan.schedules.rules import drawn
from seqloom.plan.schedules.schedule import Rows, Schedule, units_of
from seqloom.plan.table import Table

_OURS, _TORCHS = "REDUCE", "REDUCE_GRAD"
_COMPUTE = (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
_MESSAGES = (ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.SEND_B, ActionKind.RECV_B)


def to_csv(rows: Rows) -> str:
    """Write rows as text: a schedule's own, with messages, or a plan's."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([str(action).replace(_OURS, _TORCHS) for action in row])
    return text.getvalue()


def from_csv(text: str, name: str = "file", pieces: int | Sequence[int] = 1) -> Schedule:
    """Read and check a schedule. Messages in the file are checked as they stand; the schedule has none.

    Args:
        text: one line per host; empty cells, as torch writes them for idle slots, mean nothing.
        name: of the schedule, for errors.
        pieces: units that make one sequence, or one number per sequence.
    """
    rows = _rows(text, name)
    hosts = _hosts(rows, name)
    count = 1 + max((action.round for row in rows for action in row if action.round is not None), default=-1)
    units = units_of(_pieces(count, pieces, name))
    kept = tuple(tuple(action for action in row if action.kind in _COMPUTE) for row in rows)
    schedule = Schedule(name, hosts, units, kept)
    schedule.validate()
    if any(action.kind in _MESSAGES for row in rows for action in row):
        table = Table(name, hosts, count, rows)
        with drawn(rows):
            complete(table)
            matched(table)
            ending(table, send_of, "a receive waits for its send")
    return schedule


def _rows(text: str, name: str) -> Rows:
    rows: list[tuple[Action, ...]] = []
    for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        row = []
        for column, cell in enumerate(map(str.strip, cells), start=1):
            if cell:
                row.append(_action(cell, f"{name} line {line} cell {column}"))
        rows.append(tuple(row))
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise PlanError(f"{name} has no actions; give one line per host, such as 0F0,0F1,0B0,0B1", rule="format")
    return tuple(rows)


def _action(cell: str, here: str) -> Action:
    try:
        return Action.parse(cell.replace(_TORCHS, _OURS))
    except PlanError as error:
        raise PlanError(f"{here}: {error}", rule="format") from None


def _hosts(rows: Rows, name: str) -> tuple[int, ...]:
    """Return the host of every stage: the line that has its actions."""
    host: dict[int, int] = {}
    for h, row in enumerate(rows):
        for action in row:
            if host.setdefault(action.stage, h) != h:
                value = f"{name} has {action} in line {h + 1} and stage {action.stage} in line {host[action.stage] + 1}"
                raise PlanError(f"{value}; a stage is on one host; move it to one line", rule="hosts")
    missing = sorted(set(range(max(host) + 1)) - set(host))
    if missing:
        value = f"{name} has stage {max(host)} but nothing for stage {missing[0]}"
        raise PlanError(f"{value}; stages are numbered from 0 without gaps; add or renumber it", rule="hosts")
    return tuple(host[stage] for stage in range(len(host)))


def _pieces(units: int, pieces: int | Sequence[int], name: str) -> Sequence[int]:
    """Return the pieces of every sequence."""
    if not isinstance(pieces, int):
        if sum(pieces) != units or min(pieces, default=1) < 1:
            value = f"{name} has {units} units, and the pieces {', '.join(map(str, pieces))} make {sum(pieces)}"
            raise PlanError(f"{value}; every unit is one piece; give numbers that make {units}", rule="units")
        return pieces
    if pieces < 1 or units % pieces:
        legal = [k for k in range(1, units + 1) if units % k == 0]
        nearest = min(legal, key=lambda k: abs(k - pieces), default=1)
        value = f"{name} has {units} units, which are not sequences of {pieces} pieces"
        raise PlanError(f"{value}; the number of pieces divides the number of units; use {nearest}", rule="units")
    return [pieces] * (units // pieces)
