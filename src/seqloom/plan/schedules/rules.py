"""What must hold of a schedule: every unit once, in order, in causal order, within memory, to an end.

Order, causality and deadlock are the rules of a plan's table (`check_actions`, `check_messages`), asked of rows
that have no messages yet: a forward waits for the stage before it, a backward for the stage after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from seqloom.plan.action import Action, ActionKind
from seqloom.plan.check_actions import complete, ordered
from seqloom.plan.check_messages import ending
from seqloom.plan.error import PlanError, broken
from seqloom.plan.schedules.grid import grid
from seqloom.plan.table import Table

if TYPE_CHECKING:
    from seqloom.plan.schedules.schedule import Rows, Schedule

F, B, W = ActionKind.F, ActionKind.B, ActionKind.W
I = ActionKind.I  # noqa: E741 - the field's name for the input half of a backward


def validate(
    schedule: Schedule, cap: int | Sequence[int] | None = None, held: np.ndarray | None = None, one: int = 1
) -> None:
    """Check every rule; raise `PlanError`, with the grid and its failing step, at the first that is broken.

    Args:
        schedule: to check.
        cap: the most that a host may hold, or one number per host; None for no limit.
        held: int64[stages, units], what a unit holds on a stage from its F to its B or W; 1 without it.
        one: what an error calls 1, for example the bytes of a micro-batch.
    """
    _shape(schedule)
    table = Table(schedule.name, schedule.hosts, len(schedule.units), schedule.rows, schedule.links)
    with drawn(schedule.rows):
        complete(table)
        ordered(table)
        ending(table, _waits(schedule), "a forward waits for the stage before, a backward for the stage after")
        if cap is not None:
            _memory(schedule, cap, held, one)


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
    named = list(dict.fromkeys(schedule.hosts))
    if named != list(range(len(named))) or not named:
        value = f"{schedule.name} has its stages on hosts {list(schedule.hosts)}"
        must = "hosts are numbered from 0 in the order in which the stages name them"
        raise broken("hosts", value, must, f"use {[named.index(host) for host in schedule.hosts] or [0]}")
    done: Counter[int] = Counter()
    for number, unit in enumerate(schedule.units):
        if unit.piece != done[unit.sequence] or not 0 <= unit.piece < unit.pieces:
            value = (
                f"{schedule.name} has piece {unit.piece} of {unit.pieces} of sequence {unit.sequence} as unit {number}"
            )
            must = "the pieces of a sequence are numbered from 0 and come in that order"
            raise broken("units", value, must, f"its piece {done[unit.sequence]} comes here")
        done[unit.sequence] += 1
    for unit in schedule.units:
        if done[unit.sequence] != unit.pieces:
            value = f"{schedule.name} has {done[unit.sequence]} of the {unit.pieces} pieces of sequence {unit.sequence}"
            raise broken("units", value, "a sequence has all its pieces", "add the others, or lower its number")


def _waits(schedule: Schedule) -> Callable[[Action], Action | None]:
    """Return what an action waits for: the same unit on the neighbouring stage."""
    split = {(a.stage, a.round) for row in schedule.rows for a in row if a.kind is I}
    last = len(schedule.hosts) - 1

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
    size = np.ones((len(schedule.hosts), len(schedule.units)), dtype=np.int64) if held is None else held
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
                raise broken("memory", value, must, "run a backward first, raise the limit, or use more pieces", (h, k))


def _amount(value: int, one: int) -> str:
    return f"{value:,}" if one == 1 else f"{value / one:.4g}"
