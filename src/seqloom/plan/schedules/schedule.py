"""A schedule: units of work, and the order in which every host runs their forwards and backwards.

A unit is what flows through the stages at one time: a whole micro-batch, or a piece of one. The units of one
sequence form a chain: a piece reads the keys and values of the pieces before it, and its backward needs what the
backward of the pieces after it left behind. A `Pipeline` has the same table with rounds for units, and messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from seqloom.plan.action import Action, ActionKind

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
    hosts: tuple[int, ...]
    """The host of every stage; hosts are numbered in the order in which the stages name them."""
    units: tuple[Unit, ...]
    rows: Rows
    """Per host, in the order in which it runs them; `Action.round` is the number of a unit."""

    def __repr__(self) -> str:
        """Name and size in one line."""
        width = max(self.hosts, default=-1) + 1
        return f"<Schedule {self.name}: {len(self.hosts)} stages on {width} hosts, {len(self.units)} units>"

    @property
    def links(self) -> tuple[tuple[int, int], ...]:
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
        pairs = {(a, b) for a, b in pairwise(self.hosts) if a != b}
        pairs |= {(b, a) for a, b in pairs}
        return tuple(tuple(sorted(b for a, b in pairs if a == host)) for host in range(len(self.rows)))

    def validate(self, cap: int | Sequence[int] | None = None, held: np.ndarray | None = None, one: int = 1) -> None:
        """Refuse an order that breaks a rule, never ends, or holds more than `cap`; see `rules.validate`."""
        from seqloom.plan.schedules.rules import validate

        validate(self, cap, held, one)

    def grid(self, mark: tuple[int, int] | None = None) -> str:
        """Draw one line per host, an action per column; `mark` is the (host, action) to point at."""
        from seqloom.plan.schedules.grid import grid

        return grid(self.rows, mark=mark)

    def with_messages(self) -> Rows:
        """The rows with every SEND directly after what makes it and every RECV as late as it may come."""
        from seqloom.plan.schedules.messages import with_messages

        return with_messages(self.hosts, self.rows)

    def to_csv(self) -> str:
        """The rows as a CSV file that torch.distributed.pipelining loads; see `files`."""
        from seqloom.plan.schedules.files import to_csv

        return to_csv(self.rows)

    @classmethod
    def from_csv(cls, text: str, name: str = "file", pieces: int | Sequence[int] = 1) -> Schedule:
        """Read and check a CSV file whose units are sequences of so many pieces; see `files`."""
        from seqloom.plan.schedules.files import from_csv

        return from_csv(text, name, pieces)

    def rows_of_plan(self) -> Rows:
        """The rows of a plan's `Pipeline.actions`: with messages, parameters gathered and gradients reduced once."""
        rows = []
        for host, row in enumerate(self.with_messages()):
            stages = [stage for stage, own in enumerate(self.hosts) if own == host]
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
