"""Bundles of a relay under way, in one hop or in two: the second begins when the first has arrived.

All ranks begin their exchanges in one order. Where waiting is done by streams of a GPU, both hops are started at once,
on a stream of their own, so the orders of the starts are those of the exchanges:

    stream     hop 1 of bundle 0, hop 2 of bundle 0, hop 1 of bundle 1, hop 2 of bundle 1, ..

Where the caller itself waits, it has to begin the second hops. They begin one after the other as the bundles were
started, up to the one that is asked for: when it is waited for, or before (`Pending.go_on`).

    caller     hop 1 of bundles 0 .. n, .. asked for bundle 1: hop 2 of bundle 0, hop 2 of bundle 1, ..

Until then other ranks of the node wait for this one, which must not wait for them meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache

import torch

from seqloom.comm.transport import Handle

Result = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Leg:
    """A hop under way.

    Attributes:
        handle: to wait for.
        kept: what must stay in memory until then.
        finish: called after that, of the last hop: gives what this rank holds.
        onward: the same, of a hop that another follows: starts that.
    """

    handle: Handle
    kept: object
    finish: Callable[[], Result] | None = None
    onward: Callable[[], Leg] | None = None


class Pending:
    """A bundle under way."""

    def __init__(self, leg: Leg, line: deque[Pending]) -> None:
        """Follow a bundle from its first hop on; `line`: those before it whose second hop has not begun."""
        self._leg: Leg | None = leg
        self._result: Result = {}
        self._line = line
        if leg.onward is not None:
            line.append(self)

    def go_on(self) -> None:
        """Begin the second hop, if there is one, after those of the bundles before; waits for first hops only."""
        while self in self._line:
            self._line.popleft()._take_off()

    def wait(self) -> Result:
        """Return what this rank holds after the move: {weight: [rows, columns] of its box}. Waiting twice is fine.

        On a GPU it is in the current stream's order, where the transport waits in stream; the host goes on.
        """
        self.go_on()
        if self._leg is not None and self._leg.finish is not None:
            self._leg.handle.wait()
            with torch.no_grad():
                self._result = self._leg.finish()
            self._leg = None
        return self._result

    @torch.no_grad()
    def _take_off(self) -> None:
        if self._leg is not None and self._leg.onward is not None:
            self._leg.handle.wait()
            self._leg = self._leg.onward()


def in_stream(begin: Callable[[], Leg], device: torch.device, used: Iterable[torch.Tensor]) -> Pending:
    """Run all hops of a bundle on a stream of their own, behind what the current one has been given so far.

    Args:
        begin: starts the first hop.
        device: of the stream.
        used: tensors that may be dropped meanwhile; their memory is kept.
    """
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        result = Pending(begin(), deque()).wait()
    done = torch.cuda.Event()
    done.record(stream)
    for tensor in used:
        tensor.record_stream(stream)
    return Pending(Leg(_Done(done, result, device), None, lambda: result), deque())


@dataclass(frozen=True, slots=True)
class _Done:
    """The end of a bundle on the relays' stream."""

    event: torch.cuda.Event
    result: Result
    device: torch.device

    def wait(self) -> None:
        """Let the current stream wait; what was made on the other may then be used, and dropped, on this one."""
        current = torch.cuda.current_stream(self.device)
        current.wait_event(self.event)
        for tensor in self.result.values():
            tensor.record_stream(current)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream of all relays of a device: what they exchange has one order."""
    return torch.cuda.Stream(device)
