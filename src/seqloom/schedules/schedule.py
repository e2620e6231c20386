"""A schedule: units of work, and the order in which every host runs their forwards and backwards.

A unit is what flows through the stages at one time: a whole micro-batch, or a piece of one. The units of one
sequence form a chain: a piece reads the keys and values of the pieces before it, and its backward needs what the
backward of the pieces after it left behind. A `Pipeline` has the same table with rounds for units, and messages.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seqloom.errors import PlanError, violation
from seqloom.plan.action import Action, ActionKind
from seqloom.plan.rules.actions import Table, complete, ending, matched, ordered, send_of

Rows = tuple[tuple[Action, ...], ...]


class Unit(NamedTuple):
    """Piece `piece` of the `pieces` pieces of a sequence; a sequence in one piece may be a pack of many documents."""

    sequence: int
    piece: int
    pieces: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Units in forward order, and one row per host of F and B, or of F, I and W.

    With v chunks on each of p hosts there are p * v stages:

        hosts  0 1 2 3              one stage per host
        hosts  0 1 2 3 0 1 2 3      two chunks, interleaved
        hosts  0 1 2 3 3 2 1 0      two chunks, V: the turn at the last host needs no message
    """

    name: str
    pp_ranks: tuple[int, ...]
    """The host of every stage; hosts are numbered in the order in which the stages name them."""
    units: tuple[Unit, ...]
    rows: Rows
    """Per host, in the order in which it runs them; `Action.round` is the number of a unit."""

    def __repr__(self) -> str:
        """Name and size in one line."""
        width = max(self.pp_ranks, default=-1) + 1
        return f"<Schedule {self.name}: {len(self.pp_ranks)} stages on {width} hosts, {len(self.units)} units>"

    @property
    def piece_pairs(self) -> tuple[tuple[int, int], ...]:
        """(early, late) units that hold neighbouring pieces of one sequence."""
        last: dict[int, int] = {}
        pairs = []
        for number, unit in enumerate(self.units):
            if unit.sequence in last:
                pairs.append((last[unit.sequence], number))
            last[unit.sequence] = number
        return tuple(pairs)

    @property
    def neighbours(self) -> tuple[tuple[int, ...], ...]:
        """For every host, the hosts that have a stage next to one of its own."""
        pairs = {(a, b) for a, b in pairwise(self.pp_ranks) if a != b}
        pairs |= {(b, a) for a, b in pairs}
        return tuple(tuple(sorted(b for a, b in pairs if a == host)) for host in range(len(self.rows)))

    def validate(self, cap: int | Sequence[int] | None = None, memory: np.ndarray | None = None, one: int = 1) -> None:
        """Refuse an order that breaks a rule, never ends, or holds more than `cap`; see `rules.validate`."""

        validate(self, cap, memory, one)

    def grid(self, mark: tuple[int, int] | None = None) -> str:
        """Draw one line per host, an action per column; `mark` is the (host, action) to point at."""

        return grid(self.rows, mark=mark)

    def with_messages(self) -> Rows:
        """The rows with every SEND directly after what makes it and every RECV as late as it may come."""

        return with_messages(self.pp_ranks, self.rows)

    def to_csv(self) -> str:
        """The rows as a CSV file that torch.distributed.pipelining loads; see `files`."""

        return to_csv(self.rows)

    @classmethod
    def from_csv(cls, text: str, name: str = "file", pieces: int | Sequence[int] = 1) -> Schedule:
        """Read and check a CSV file whose units are sequences of so many pieces; see `files`."""

        return from_csv(text, name, pieces)

    def pipeline_actions(self) -> Rows:
        """The rows of a plan's `Pipeline.actions`: with messages, parameters gathered and gradients reduced once."""
        rows = []
        for host, row in enumerate(self.with_messages()):
            stages = [stage for stage, own in enumerate(self.pp_ranks) if own == host]
            gather = [Action(stage, ActionKind.UNSHARD) for stage in stages]
            end = [Action(stage, kind) for stage in stages for kind in (ActionKind.REDUCE, ActionKind.RESHARD)]
            rows.append((*gather, *row, *end))
        return tuple(rows)


def units_of(pieces: Sequence[int]) -> tuple[Unit, ...]:
    """Return the units of sequences one after the other, each in so many pieces."""
    return tuple(Unit(s, piece, count) for s, count in enumerate(pieces) for piece in range(count))


def backward_order(units: Sequence[Unit]) -> Iterator[int]:
    """Yield units in the order of backward: sequences in the order in which they end, pieces from last to first."""
    chains: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        chain = chains.setdefault(unit.sequence, [])
        chain.append(number)
        if len(chain) == unit.pieces:
            yield from reversed(chain)


# ---- merged: plan.schedules.grid
# A schedule as text: one line per host, time to the right.
#
# host 0 | 0F0 0F1  .   .  0B0 0B1
# host 1 |  .  1F0 1B0 1F1 1B1  .


IDLE, GOES_ON = ".", "-"
MARK = (">", "<")
WIDTH = 118
MOST_SLOTS = 4096

Cells = list[list[str]]


def grid(
    rows: Sequence[Sequence[Action]],
    start: Sequence[Sequence[int]] | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    mark: tuple[int, int] | None = None,
    width: int = WIDTH,
) -> str:
    """Draw rows of actions, cut into blocks of lines that fit.

    Args:
        rows: actions per host.
        start: when each action starts; without it every action takes one column, in the order of its row.
        stop: when each action stops, in the same shape.
        mark: (host, number of the action) to point at; then only the block around it is drawn.
        width: characters of a line.
    """
    cells, marked = _cells(rows, start, stop, mark)
    size = max((len(cell) for row in cells for cell in row), default=1)
    labels = [f"host {h}" for h in range(len(cells))]
    margin = max(map(len, labels), default=0)
    columns = max(1, (width - margin - 3) // (size + 1))
    slots = max(map(len, cells), default=0)
    first = 0 if marked is None else max(0, min(marked - columns // 2, slots - columns))
    blocks = []
    while first < max(slots, 1):
        shown = [" ".join(cell.center(size) for cell in row[first : first + columns]) for row in cells]
        lines = [f"{label:<{margin}} | {line}".rstrip() for label, line in zip(labels, shown, strict=True)]
        blocks.append("\n".join(lines))
        first = slots if marked is not None else first + columns
    return "\n\n".join(blocks)


def _cells(
    rows: Sequence[Sequence[Action]],
    start: Sequence[Sequence[int]] | None,
    stop: Sequence[Sequence[int]] | None,
    mark: tuple[int, int] | None,
) -> tuple[Cells, int | None]:
    """Return the cells of every host, and the column of the mark."""
    if start is None or stop is None:
        return _in_order(rows, mark)
    moments = [moment for part in (*start, *stop) for moment in part]
    slot = math.gcd(*moments) or 1
    end = max(moments, default=0) // slot
    if end > MOST_SLOTS:
        return _in_order(rows, mark)
    cells: Cells = []
    marked = None
    for h, row in enumerate(rows):
        line = [IDLE] * end
        for k, (action, begins, stops) in enumerate(zip(row, start[h], stop[h], strict=True)):
            first, last = begins // slot, stops // slot
            line[first:last] = [GOES_ON] * (last - first)
            if last > first:
                line[first] = _name(action, (h, k) == mark)
            if (h, k) == mark:
                marked = first
        cells.append(line)
    return cells, marked


def _in_order(rows: Sequence[Sequence[Action]], mark: tuple[int, int] | None) -> tuple[Cells, int | None]:
    cells = [[_name(action, (h, k) == mark) for k, action in enumerate(row)] for h, row in enumerate(rows)]
    return cells, None if mark is None else mark[1]


def _name(action: Action, marked: bool) -> str:
    return f"{MARK[0]}{action}{MARK[1]}" if marked else str(action)


# ---- merged: plan.schedules.rules
# What must hold of a schedule: every unit once, in order, in causal order, within memory, to an end.
#
# Order, causality and deadlock are the rules of a plan's table (`check_actions`, `check_messages`), asked of rows
# that have no messages yet: a forward waits for the stage before it, a backward for the stage after it.


F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward


def validate(
    schedule: Schedule, cap: int | Sequence[int] | None = None, memory: np.ndarray | None = None, one: int = 1
) -> None:
    """Check every rule; raise `PlanError`, with the grid and its failing step, at the first that is broken.

    Args:
        schedule: to check.
        cap: the most that a host may hold, or one number per host; None for no limit.
        memory: int64[stages, units], what a unit holds on a stage from its F to its B or W; 1 without it.
        one: what an error calls 1, for example the bytes of a micro-batch.
    """
    _shape(schedule)
    table = Table(schedule.name, schedule.pp_ranks, len(schedule.units), schedule.rows, schedule.piece_pairs)
    with drawn(schedule.rows):
        complete(table)
        ordered(table)
        ending(table, _waits(schedule), "a forward waits for the stage before, a backward for the stage after")
        if cap is not None:
            _memory(schedule, cap, memory, one)


@contextmanager
def drawn(rows: Rows) -> Iterator[None]:
    """Add the grid, with the failing step marked, to an error that names one."""
    try:
        yield
    except PlanError as error:
        if error.at is None:
            raise
        raise PlanError(f"{error}\n{grid(rows, mark=error.at)}", rule=error.rule, at=error.at) from None


def _shape(schedule: Schedule) -> None:
    """Check hosts and units."""
    named = list(dict.fromkeys(schedule.pp_ranks))
    if named != list(range(len(named))) or not named:
        value = f"{schedule.name} has its stages on hosts {list(schedule.pp_ranks)}"
        must = "hosts are numbered from 0 in the order in which the stages name them"
        raise violation("hosts", value, must, f"use {[named.index(host) for host in schedule.pp_ranks] or [0]}")
    done: Counter[int] = Counter()
    for number, unit in enumerate(schedule.units):
        if unit.piece != done[unit.sequence] or not 0 <= unit.piece < unit.pieces:
            value = (
                f"{schedule.name} has piece {unit.piece} of {unit.pieces} of sequence {unit.sequence} as unit {number}"
            )
            must = "the pieces of a sequence are numbered from 0 and come in that order"
            raise violation("units", value, must, f"its piece {done[unit.sequence]} comes here")
        done[unit.sequence] += 1
    for unit in schedule.units:
        if done[unit.sequence] != unit.pieces:
            value = f"{schedule.name} has {done[unit.sequence]} of the {unit.pieces} pieces of sequence {unit.sequence}"
            raise violation("units", value, "a sequence has all its pieces", "add the others, or lower its number")


def _waits(schedule: Schedule) -> Callable[[Action], Action | None]:
    """Return what an action waits for: the same unit on the neighbouring stage."""
    split = {(a.stage, a.round) for row in schedule.rows for a in row if a.kind is I}
    last = len(schedule.pp_ranks) - 1

    def awaits(action: Action) -> Action | None:
        stage, number = action.stage, action.round
        if action.kind is F:
            return Action(stage - 1, F, number) if stage > 0 else None
        if action.kind is W or stage == last:
            return None
        return Action(stage + 1, I if (stage + 1, number) in split else B, number)

    return awaits


def _memory(schedule: Schedule, cap: int | Sequence[int], held: np.ndarray | None, one: int) -> None:
    """Check that no host holds more than its cap."""
    size = np.ones((len(schedule.pp_ranks), len(schedule.units)), dtype=np.int64) if held is None else held
    for h, row in enumerate(schedule.rows):
        most = cap if isinstance(cap, int) else cap[h]
        live = 0
        for k, action in enumerate(row):
            if action.kind is F:
                live += int(size[action.stage, action.round])
            elif action.kind is not I:
                live -= int(size[action.stage, action.round])
            if live > most:
                value = f"{schedule.name} host {h} holds {_amount(live, one)} from {action} (action {k}) on"
                must = f"at most {_amount(most, one)} may be held"
                raise violation(
                    "memory", value, must, "run a backward first, raise the limit, or use more pieces", (h, k)
                )


def _amount(value: int, one: int) -> str:
    return f"{value:,}" if one == 1 else f"{value / one:.4g}"


# ---- merged: plan.schedules.messages
# Messages between the hosts of a schedule, placed so that they add no waiting and cannot deadlock.
#
# A SEND follows what makes it. A RECV comes directly before what uses it, or earlier where a message that was sent
# after it is used before it: what one host sends another arrives in the order in which it is sent, whether it goes
# forward or backward. That costs nothing: who waits for the later message waits for the earlier one too.


F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward
_MAKES = {F: (1, ActionKind.SEND_F, ActionKind.RECV_F), B: (-1, ActionKind.SEND_B, ActionKind.RECV_B)}
_MAKES[I] = _MAKES[B]


def with_messages(pp_ranks: Sequence[int], rows: Rows) -> Rows:
    """Return rows of computation with the messages that they need.

    Args:
        pp_ranks: host of every stage.
        rows: F, B, I and W per host, in an order that ends.
    """
    used = [_used_at(row) for row in rows]
    sends: list[dict[int, Action]] = [{} for _ in rows]
    receives: list[dict[int, list[Action]]] = [{} for _ in rows]
    for h, row in enumerate(rows):
        channels: dict[int, list[tuple[int, Action]]] = {}
        for k, action in enumerate(row):
            step, send, receive = _MAKES.get(action.kind, (0, F, F))
            peer = action.stage + step
            if step == 0 or not 0 <= peer < len(pp_ranks) or pp_ranks[peer] == h:
                continue
            sends[h][k] = Action(action.stage, send, action.round)
            arrival = Action(peer, receive, action.round)
            channels.setdefault(pp_ranks[peer], []).append((used[pp_ranks[peer]][arrival], arrival))
        for receiver, sent in channels.items():
            _receive(sent, receives[receiver])
    return tuple(tuple(_joined(row, sends[h], receives[h])) for h, row in enumerate(rows))


def _used_at(row: Sequence[Action]) -> dict[Action, int]:
    """Return where a row uses which RECV, had it one."""
    return {Action(a.stage, _MAKES[a.kind][2], a.round): k for k, a in enumerate(row) if a.kind in _MAKES}


def _receive(sent: list[tuple[int, Action]], into: dict[int, list[Action]]) -> None:
    """Place the receives from one host: before their use, and never after one that was sent later."""
    latest = [place for place, _ in sent]
    for k in range(len(latest) - 2, -1, -1):
        latest[k] = min(latest[k], latest[k + 1])
    for place, (_, arrival) in zip(latest, sent, strict=True):
        into.setdefault(place, []).append(arrival)


def _joined(row: Sequence[Action], sends: dict[int, Action], receives: dict[int, list[Action]]) -> list[Action]:
    joined: list[Action] = []
    for k, action in enumerate(row):
        joined += receives.get(k, [])
        joined.append(action)
        if k in sends:
            joined.append(sends[k])
    return joined


# ---- merged: plan.schedules.files
# Schedules as CSV files, in the action strings of torch.distributed.pipelining: a line per host, a cell per action.
#
#     0F0,0F1,0B0,0B1
#     1F0,1B0,1F1,1B1
#
# torch's runtime loads such a file as it is. Its REDUCE_GRAD is our REDUCE. A file says nothing of pieces: units
# have
# the numbers of torch's micro-batches, in forward order, and whoever reads it says which of them are one
# sequence's.


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
