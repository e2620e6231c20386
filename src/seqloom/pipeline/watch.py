"""Where a rank is in its row of actions: kept while a step runs, told when it hangs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from seqloom.errors import SeqloomError
from seqloom.plan import Action, ActionKind, Pipeline
from seqloom.plan.schedules.grid import grid

MAKES = {
    True: (ActionKind.F,),
    False: (ActionKind.B, ActionKind.I),
}
"""What makes a message, whether it goes forward."""


class Progress:
    """What one rank is at. Another thread may ask at any time."""

    def __init__(self, pipeline: Pipeline | None, rank: int, name: str = "") -> None:
        """Start before the first action.

        Args:
            pipeline: the one that the rank is in; None: it is in none.
            rank: this one.
            name: of the pipeline, where others run beside it.
        """
        self._rows, self._rank, self._name = () if pipeline is None else pipeline.actions, rank, name
        hosts = () if pipeline is None else pipeline.hosts
        self._host = next((h for h, ranks in enumerate(hosts) if rank in ranks), None)
        self._action: Action | None = None
        self._awaited: tuple[Action, int | None] | None = None

    def at(self, action: Action | None) -> None:
        """Note the action that comes now; None: the row is done."""
        self._action = action

    @contextmanager
    def waiting(self, action: Action, peer: int | None) -> Iterator[None]:
        """Note that a message is waited for; an error says so, with the grid.

        Args:
            action: the SEND or RECV of the message.
            peer: where it comes from; None: it was sent, to whoever.
        """
        self._awaited = (action, peer)
        try:
            yield
        except SeqloomError as error:
            error.add_note(self.report())
            raise
        except RuntimeError as error:  # what transports raise for a rank that is gone or late
            line = re.sub(r"^\[\S+:\d+\] ", "", next(iter(str(error).strip().splitlines()), type(error).__name__))
            raise SeqloomError(self.report(f" ({line})")) from error
        self._awaited = None

    def place(self) -> str:
        """Say in one line what this rank is at."""
        words = f"rank {self._rank} is at {'the end of its row' if self._action is None else f'action {self._action}'}"
        words += f" of {self._name}" if self._name else ""
        if self._awaited is None:
            return words
        action, peer = self._awaited
        return f"{words} and waits for {action}{'' if peer is None else f' from rank {peer}'}"

    def report(self, why: str = "") -> str:
        """Say what this rank is at, and why if that is known, and draw the rows of all hosts around that action."""
        if not self._rows:
            return f"{self.place()}{why}"
        mark = None if self._host is None else (self._host, _place_in(self._rows[self._host], self._action))
        return f"{self.place()}{why}:\n{grid(self._rows, mark=mark)}"


def _place_in(row: Sequence[Action], action: Action | None) -> int:
    """Return the place of an action in a row; messages among a host's own ranks are not in it, but what makes them."""
    if action is None:
        return len(row) - 1
    if action in row:
        return row.index(action)
    forward = action.kind in (ActionKind.SEND_F, ActionKind.RECV_F)
    stage = action.stage - (action.kind == ActionKind.RECV_F) + (action.kind == ActionKind.RECV_B)
    makers = [Action(stage, kind, action.round) for kind in MAKES[forward]]
    return next(k for k, each in enumerate(row) if each in makers)
