"""Seconds by name: the host's clock, or a GPU's own events, which nobody waits for until the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Measures from its making on."""

    def __init__(self, device: torch.device) -> None:
        """Start; on a GPU, in the order of its current stream."""
        self._cuda = device.type == "cuda"
        self._begin = self._now()
        self._measured: list[tuple[str, float | torch.cuda.Event, float | torch.cuda.Event]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time of the block to that of `name`."""
        begin = self._now()
        yield
        self._measured.append((name, begin, self._now()))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of every name, and of all since the start as "step". Waits for the GPU."""
        end = self._now()
        if self._cuda:
            torch.cuda.synchronize()
        total = {"step": _between(self._begin, end)}
        for name, begin, stop in self._measured:
            total[name] = total.get(name, 0.0) + _between(begin, stop)
        return total

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
        return begin.elapsed_time(end) / 1000
    assert isinstance(begin, float) and isinstance(end, float)
    return end - begin
