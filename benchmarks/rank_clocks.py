"""Clocks of ranks that share cores: what a step would take if every process had a core of its own.

Sixteen processes on two cores take the time of all of them together, whichever of them waits for whom. So every rank
has a clock of its own. It runs while the rank's thread computes (processor time of the thread), and stands still while
another process has the core. What a rank sends carries its clock: the receiver's is set to the time at which the last
byte arrives, if that is later. Each rank has one link in each direction, on which messages follow one another.

    departs = max(sender's clock, end of what it sent before)
    arrives = max(departs + latency, end of what the receiver took in before) + bytes / rate

A collective begins when its last rank is there and takes `latency` and the bytes that a rank sends, for an all-reduce
both twice. So computing is measured, waiting follows from the messages that were really sent, and the links are a
model; nothing else that the machine does enters the times.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Link(NamedTuple):
    """Of a rank, in each direction."""

    latency_s: float
    bytes_per_s: float


@dataclass(slots=True, eq=False)
class RankClock:
    """The time of one rank, and until when its link is busy. Seconds."""

    link: Link
    now: float = 0.0
    sends_until: float = 0.0
    receives_until: float = 0.0
    _since: float = field(default_factory=time.thread_time)

    def stop(self) -> float:
        """Add what this thread has computed since `go`."""
        self.now += time.thread_time() - self._since
        return self.now

    def go(self) -> None:
        """Count from here."""
        self._since = time.thread_time()

    def read(self) -> float:
        """Return the time."""
        now = self.stop()
        self.go()
        return now

    def depart(self, size: int) -> float:
        """Return when a message of so many bytes leaves."""
        begin = max(self.now, self.sends_until)
        self.sends_until = begin + size / self.link.bytes_per_s
        return begin

    def arrive(self, messages: Sequence[tuple[float, int]]) -> None:
        """Wait for messages (departure, bytes)."""
        for departed, size in sorted(messages):
            first = max(departed + self.link.latency_s, self.receives_until)
            self.receives_until = first + size / self.link.bytes_per_s
            self.now = max(self.now, self.receives_until)
