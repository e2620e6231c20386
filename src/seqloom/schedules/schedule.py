"""A pipeline schedule: the order in which every pipeline rank runs the forwards and backwards of its stages.

A unit is what flows through the stages at one time: a whole micro-batch, or a piece of one. The pieces of a sequence
form a chain: the forward of a piece reads the keys and values of the pieces before it, and its backward needs the
gradients that the pieces after it have left for them. A plan's `Pipeline` has the same table, with rounds for units
and with messages.

This file has the value `Schedule`, its rules, its messages, its CSV form and its drawing.
"""

from __future__ import annotations

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from seqloom.errors import PlanError, violation
from seqloom.plan.action import Action, ActionKind, B, F, I, W
from seqloom.plan.pipeline import StageChain
from seqloom.plan.rules.actions import (
    ActionTable,
    check_complete,
    check_ends,
    check_messages,
    check_messages_end,
    check_order,
)
from seqloom.schedules.memory import walk_rows

Rows = tuple[tuple[Action, ...], ...]


class Unit(NamedTuple):
    """Piece `piece` of the `pieces` pieces of a sequence; a sequence in one piece may be a pack of many documents."""

    sequence: int
    piece: int
    pieces: int


def units_of(pieces: Sequence[int]) -> tuple[Unit, ...]:
    """Return the units of sequences one after the other; `pieces` has the number of pieces of each."""
    return tuple(Unit(s, piece, count) for s, count in enumerate(pieces) for piece in range(count))


def backward_order(units: Sequence[Unit]) -> Iterator[int]:
    """Yield units in the order of backward: sequences in the order in which they end, pieces from last to first."""
    chains: dict[int, list[int]] = {}
    for number, unit in enumerate(units):
        chain = chains.setdefault(unit.sequence, [])
        chain.append(number)
        if len(chain) == unit.pieces:
            yield from reversed(chain)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Units in forward order, and one row of F and B, or of F, I and W, per pipeline rank.

    With v chunks on each of p pipeline ranks there are p * v stages:

        pp_ranks  0 1 2 3              one stage each
        pp_ranks  0 1 2 3 0 1 2 3      two chunks, interleaved
        pp_ranks  0 1 2 3 3 2 1 0      two chunks, V: the turn at the last pipeline rank needs no message

    Attributes:
        pp_ranks: the pipeline rank of every stage, numbered in the order in which the stages name them.
        rows: actions per pipeline rank in the order in which it runs them; `Action.round` is the number of a unit.
        heads: stages without layers, the last ones, one on every pipeline rank; see `schedules.head`.
    """

    name: str
    pp_ranks: tuple[int, ...]
    units: tuple[Unit, ...]
    rows: Rows
    heads: int = 0

    def __repr__(self) -> str:
        pp_size = max(self.pp_ranks, default=-1) + 1
        return f"<Schedule {self.name}: {len(self.pp_ranks)} stages on {pp_size} pp_ranks, {len(self.units)} units>"

    @property
    def chain(self) -> StageChain:
        """Which stage hands its output to which."""
        return StageChain(len(self.pp_ranks), self.heads)

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
        """For every pipeline rank, those that have a stage next to one of its own."""
        by_stage = ((self.pp_ranks[s] for s in pair) for pair in self.chain.pairs())
        pairs = {(a, b) for a, b in by_stage if a != b}
        pairs |= {(b, a) for a, b in pairs}
        return tuple(tuple(sorted(b for a, b in pairs if a == pp_rank)) for pp_rank in range(len(self.rows)))

    def validate(self, cap: int | Sequence[int] | None = None, memory: np.ndarray | None = None, one: int = 1) -> None:
        """Raise `PlanError`, with the grid and the failing step, at the first rule that is broken.

        Order, causality and deadlock are the rules of a plan's table, applied to rows that have no messages yet: a
        forward waits for the stage before it, a backward for the stage after it.

        Args:
            cap: the most that a pipeline rank may hold, or one number per pipeline rank; None for no limit.
            memory: int64[stages, units], what a unit holds on a stage from its F to its B or W; 1 without it.
            one: what an error calls 1, for example the bytes of a micro-batch.
        """
        _check_shape(self)
        table = ActionTable(self.name, self.pp_ranks, len(self.units), self.rows, self.piece_pairs, self.heads)
        chain = self.chain
        split = {(a.stage, a.round) for row in self.rows for a in row if a.kind is I}

        def awaits(action: Action) -> tuple[Action, ...]:
            stage, number = action.stage, action.round
            if action.kind is F:
                return (Action(chain.previous(stage), F, number),) if stage > 0 else ()
            after = () if action.kind is W else chain.following(stage)
            return tuple(Action(each, I if (each, number) in split else B, number) for each in after)

        with _grid_in_errors(self.rows):
            check_complete(table)
            check_order(table)
            check_ends(table, awaits, "a forward waits for the stage before, a backward for the stage after")
            if cap is not None:
                _check_memory(self, cap, memory, one)

    def with_messages(self) -> Rows:
        """Return the rows with messages that add no waiting and cannot deadlock.

        A SEND follows the action whose result it sends. A RECV comes directly before the action that uses it, or
        earlier where a message that was sent after it is used before it: messages between two pipeline ranks arrive
        in the order in which they are sent, whether they go forward or backward. That costs nothing: who waits for
        the later message waits for the earlier one too.
        """
        used = [
            {Action(a.stage, _MESSAGES[a.kind][2], a.round): k for k, a in enumerate(row) if a.kind in _MESSAGES}
            for row in self.rows
        ]  # where a row would use a RECV
        sends: list[dict[int, list[Action]]] = [defaultdict(list) for _ in self.rows]
        places: list[dict[Action, int]] = [{} for _ in self.rows]  # of every RECV
        for pp_rank, row in enumerate(self.rows):
            sent: dict[int, list[tuple[int, Action]]] = defaultdict(list)  # by receiver: where it uses a RECV, and it
            for k, action in enumerate(row):
                peers = [peer for peer in self._receivers(action) if self.pp_ranks[peer] != pp_rank]
                if not peers:
                    continue
                _, send, receive = _MESSAGES[action.kind]
                sends[pp_rank][k].append(Action(action.stage, send, action.round))
                for peer in peers:
                    arrival, receiver = Action(peer, receive, action.round), self.pp_ranks[peer]
                    sent[receiver].append((used[receiver][arrival], arrival))
            for receiver, messages in sent.items():
                latest = list(accumulate((place for place, _ in reversed(messages)), min))[::-1]
                for place, (_, arrival) in zip(latest, messages, strict=True):
                    places[receiver][arrival] = min(place, places[receiver].get(arrival, place))
        receives: list[dict[int, list[Action]]] = [defaultdict(list) for _ in self.rows]
        for before, placed in zip(receives, places, strict=True):
            for arrival, place in placed.items():
                before[place].append(arrival)
        return tuple(
            tuple(each for k, action in enumerate(row) for each in (*before[k], action, *after[k]))
            for before, row, after in zip(receives, self.rows, sends, strict=True)
        )

    def _receivers(self, action: Action) -> tuple[int, ...]:
        """Return the stages that wait for the result of an action."""
        step, *_ = _MESSAGES.get(action.kind, (0, F, F))
        if step < 0:
            return (self.chain.previous(action.stage),) if action.stage else ()
        return self.chain.following(action.stage) if step else ()

    def pipeline_actions(self) -> Rows:
        """Return a plan's `Pipeline.actions`: with messages, parameters gathered and gradients reduced once.

        A stage that is done reduces its gradients beside what other stages of its ranks still compute.
        """
        rows = []
        for pp_rank, row in enumerate(self.with_messages()):
            stages = [stage for stage, own in enumerate(self.pp_ranks) if own == pp_rank]
            made = [Action(stage, ActionKind.UNSHARD) for stage in stages]
            last = {action.stage: k for k, action in enumerate(row)}
            for k, action in enumerate(row):
                made.append(action)
                if last[action.stage] == k:
                    made += [Action(action.stage, kind) for kind in (ActionKind.REDUCE, ActionKind.RESHARD)]
            rows.append(tuple(made))
        return tuple(rows)

    @classmethod
    def from_csv(cls, text: str, name: str = "file", pieces: int | Sequence[int] = 1) -> Schedule:
        """Read and check a CSV file; messages in it are checked as they stand, the schedule has none.

        Args:
            text: one line per pipeline rank; empty cells, as torch writes them for idle slots, mean nothing.
            name: of the schedule, for errors.
            pieces: units that make one sequence, or one number per sequence. A file says nothing of pieces: its units
                have the numbers of torch's micro-batches, in forward order.
        """
        rows = _parse_csv(text, name)
        pp_ranks = _pp_rank_of_stages(rows, name)
        count = 1 + max((action.round for row in rows for action in row if action.round is not None), default=-1)
        most = sum(map(len, rows))
        if count > most:  # before anything is made of so many units
            value = f"{name} has unit {count - 1} and {most} actions"
            raise PlanError(f"{value}; every unit has actions; number units from 0 without gaps", rule="units")
        compute = tuple(tuple(action for action in row if action.kind in (F, B, I, W)) for row in rows)
        schedule = cls(name, pp_ranks, units_of(_pieces_of_sequences(count, pieces, name)), compute)
        schedule.validate()
        if any(action.kind in _SENDS_AND_RECEIVES for row in rows for action in row):
            table = ActionTable(name, pp_ranks, count, rows)
            with _grid_in_errors(rows):
                check_complete(table)
                check_messages(table)
                check_messages_end(table)
        return schedule


_FORWARD = (1, ActionKind.SEND_F, ActionKind.RECV_F)
_BACKWARD = (-1, ActionKind.SEND_B, ActionKind.RECV_B)
_MESSAGES = {F: _FORWARD, B: _BACKWARD, I: _BACKWARD}
_SENDS_AND_RECEIVES = frozenset(kind for step in (_FORWARD, _BACKWARD) for kind in step[1:])


# -- rules ---------------------------------------------------------------------------------------------------------


def _check_shape(schedule: Schedule) -> None:
    """Check pipeline ranks and units."""
    named = list(dict.fromkeys(schedule.pp_ranks))
    if named != list(range(len(named))) or not named:
        value = f"{schedule.name} has its stages on pp_ranks {list(schedule.pp_ranks)}"
        must = "pp_ranks are numbered from 0 in the order in which the stages name them"
        raise violation("pp-ranks", value, must, f"use {[named.index(each) for each in schedule.pp_ranks] or [0]}")
    done: Counter[int] = Counter()
    for number, (sequence, piece, pieces) in enumerate(schedule.units):
        if piece != done[sequence] or not 0 <= piece < pieces:
            value = f"{schedule.name} has piece {piece} of {pieces} of sequence {sequence} as unit {number}"
            must = "the pieces of a sequence are numbered from 0 and come in that order"
            raise violation("units", value, must, f"its piece {done[sequence]} comes here")
        done[sequence] += 1
    for unit in schedule.units:
        if done[unit.sequence] != unit.pieces:
            value = f"{schedule.name} has {done[unit.sequence]} of the {unit.pieces} pieces of sequence {unit.sequence}"
            raise violation("units", value, "a sequence has all its pieces", "add the others, or lower its number")


def _check_memory(schedule: Schedule, cap: int | Sequence[int], memory: np.ndarray | None, one: int) -> None:
    """Check that no pipeline rank holds more than its cap."""
    for pp_rank, walk in enumerate(walk_rows(schedule, memory)):
        most = cap if isinstance(cap, int) else cap[pp_rank]
        for k, (action, peak, _) in enumerate(walk):
            if peak > most:
                held, allowed = (f"{size:,}" if one == 1 else f"{size / one:.4g}" for size in (peak, most))
                value = f"{schedule.name} pp_rank {pp_rank} holds {held} from {action} (action {k}) on"
                way_out = "run a backward first, raise the limit, or use more pieces"
                raise violation("memory", value, f"at most {allowed} may be held", way_out, (pp_rank, k))


@contextmanager
def _grid_in_errors(rows: Rows) -> Iterator[None]:
    """Add the grid, with the failing step marked, to an error that names one."""
    try:
        yield
    except PlanError as error:
        if error.at is None:
            raise
        raise PlanError(f"{error}\n{grid(rows, mark=error.at)}", rule=error.rule, at=error.at) from None


# -- CSV files -----------------------------------------------------------------------------------------------------

_OURS, _TORCHS = "REDUCE", "REDUCE_GRAD"


def to_csv(rows: Rows) -> str:
    """Write rows (a schedule's, with or without messages, or a plan's) in the action strings of torch's pipelining.

        0F0,0F1,0B0,0B1
        1F0,1B0,1F1,1B1

    A line per pipeline rank, a cell per action; torch's runtime loads the file as it is.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in rows:
        writer.writerow([str(action).replace(_OURS, _TORCHS) for action in row])
    return text.getvalue()


def _parse_csv(text: str, name: str) -> Rows:
    rows: list[tuple[Action, ...]] = []
    for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        row = []
        for column, cell in enumerate(map(str.strip, cells), start=1):
            try:
                row += [Action.parse(cell.replace(_TORCHS, _OURS))] if cell else []
            except PlanError as error:
                raise PlanError(f"{name} line {line} cell {column}: {error}", rule="format") from None
        rows.append(tuple(row))
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise PlanError(f"{name} has no actions; give one line per pp_rank, such as 0F0,0F1,0B0,0B1", rule="format")
    return tuple(rows)


def _pp_rank_of_stages(rows: Rows, name: str) -> tuple[int, ...]:
    """Return the pipeline rank of every stage: the line that has its actions."""
    line: dict[int, int] = {}
    for number, row in enumerate(rows):
        for action in row:
            if line.setdefault(action.stage, number) != number:
                first = line[action.stage] + 1
                value = f"{name} has {action} in line {number + 1} and stage {action.stage} in line {first}"
                raise PlanError(f"{value}; a stage is on one pp_rank; move it to one line", rule="pp-ranks")
    missing = next((stage for stage in range(len(line)) if stage not in line), None)
    if missing is not None:
        value = f"{name} has stage {max(line)} but nothing for stage {missing}"
        raise PlanError(f"{value}; stages are numbered from 0 without gaps; add or renumber it", rule="pp-ranks")
    return tuple(line[stage] for stage in range(len(line)))


def _pieces_of_sequences(units: int, pieces: int | Sequence[int], name: str) -> Sequence[int]:
    if not isinstance(pieces, int):
        if sum(pieces) != units or min(pieces, default=1) < 1:
            value = f"{name} has {units} units, and the pieces {', '.join(map(str, pieces))} make {sum(pieces)}"
            raise PlanError(f"{value}; every unit is one piece; give numbers that make {units}", rule="units")
        return pieces
    if pieces < 1 or units % pieces:
        nearest = min((k for k in range(1, units + 1) if units % k == 0), key=lambda k: abs(k - pieces), default=1)
        value = f"{name} has {units} units, which are not sequences of {pieces} pieces"
        raise PlanError(f"{value}; the number of pieces divides the number of units; use {nearest}", rule="units")
    return [pieces] * (units // pieces)


# -- drawing -------------------------------------------------------------------------------------------------------

IDLE, CONTINUES = ".", "-"
MAX_WIDTH = 118
MAX_SLOTS = 4096

Cells = list[list[str]]


def grid(
    rows: Sequence[Sequence[Action]],
    start: Sequence[Sequence[int]] | None = None,
    stop: Sequence[Sequence[int]] | None = None,
    mark: tuple[int, int] | None = None,
    width: int = MAX_WIDTH,
) -> str:
    """Draw rows of actions, time to the right, cut into blocks of lines of `width` characters.

        pp_rank 0 | 0F0 0F1  .   .  0B0 0B1
        pp_rank 1 |  .  1F0 1B0 1F1 1B1  .

    Without `start` and `stop`, the times of the actions, every action takes one column, in the order of its row. `mark`
    is the (pp_rank, number of the action) to point at; then only the block around it is drawn.
    """
    cells = [
        [f">{action}<" if (pp_rank, k) == mark else str(action) for k, action in enumerate(row)]
        for pp_rank, row in enumerate(rows)
    ]
    column_of_mark = None if mark is None else mark[1]
    if start is not None and stop is not None:
        slot = math.gcd(*(moment for moments in (*start, *stop) for moment in moments)) or 1
        end = max((moment for moments in stop for moment in moments), default=0) // slot
        if end <= MAX_SLOTS:
            column_of_mark = None if mark is None else start[mark[0]][mark[1]] // slot
            cells = [_in_time(*row, slot, end) for row in zip(cells, start, stop, strict=True)]
    size = max((len(cell) for row in cells for cell in row), default=1)
    margin = len(f"pp_rank {len(cells) - 1}")
    columns = max(1, (width - margin - 3) // (size + 1))
    slots = max(map(len, cells), default=0)
    firsts = range(0, max(slots, 1), columns)
    if column_of_mark is not None:
        firsts = [max(0, min(column_of_mark - columns // 2, slots - columns))]
    blocks = []
    for first in firsts:
        shown = (" ".join(cell.center(size) for cell in row[first : first + columns]) for row in cells)
        blocks.append("\n".join(f"{f'pp_rank {k}':<{margin}} | {line}".rstrip() for k, line in enumerate(shown)))
    return "\n\n".join(blocks)


def _in_time(names: Sequence[str], start: Sequence[int], stop: Sequence[int], slot: int, end: int) -> list[str]:
    line = [IDLE] * end
    for name, begins, ends in zip(names, start, stop, strict=True):
        first, last = begins // slot, ends // slot
        line[first:last] = [CONTINUES] * (last - first)
        if last > first:
            line[first] = name
    return line
