"""No rank waits for ever, or stops without a word: each knows what it is doing, and says so when another one dies.

A rank may be stopped in three ways: a message fails because the other side is gone, the launcher that saw a process die
sends SIGTERM, or nothing moves for longer than ranks may wait for each other. In the last two the main thread may be
deep in a call that never returns, so a thread of its own speaks and ends the process.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from seqloom.errors import SeqloomError
from seqloom.train.checkpoint import complete

FAILED = 2
"""Exit code of a rank that could not go on."""
START_S = 600.0
"""Seconds that ranks may take to start and to meet, whatever the limit in training is."""
_POLL_S = 1.0
_GONE = re.compile(r"closed by peer|reset by peer|broken pipe|connection refused|timed? ?out", re.IGNORECASE)
"""What gloo and the store say of a rank that is gone; they raise plain errors."""


class Watch:
    """What one rank is doing. Used in a `with`, on the main thread; errors leave it with the place in their message."""

    def __init__(self, ranks: int, timeout_s: float, checkpoints: Path, tell: Callable[[str], None]) -> None:
        """Begin with the start of the run.

        Args:
            ranks: of the run.
            timeout_s: longest time from one `at` to the next.
            checkpoints: folder of the run's.
            tell: puts a last message where somebody reads it, from another thread than the main one.
        """
        self._ranks, self._timeout_s, self._checkpoints, self._tell = ranks, timeout_s, checkpoints, tell
        self._place, self._where = "", _nowhere
        self._deadline = time.monotonic() + max(timeout_s, START_S)

    def at(self, place: str, *, limited: bool = True, where: Callable[[], str] | None = None) -> None:
        """Say what comes now.

        Args:
            place: the step and its plan.
            limited: whether it must be done within the limit; not what waits for a disk alone.
            where: says how far it has come, when asked from another thread (`Progress.report`).
        """
        self._place, self._where = place, where or _nowhere
        self._deadline = time.monotonic() + self._timeout_s if limited else float("inf")

    def __enter__(self) -> Self:
        """Start to watch."""
        self._ears, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        self._handler = signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(self._bell.fileno())  # rings at once, also when the main thread is in a call
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop watching. After an error SIGTERM stays without effect, since the process has something to say."""
        signal.set_wakeup_fd(-1)
        self._bell.send(b"\0")
        self._thread.join()
        self._ears.close()
        self._bell.close()
        if error is None:
            signal.signal(signal.SIGTERM, self._handler)
        elif is_lost_rank(error):
            raise SeqloomError(self._last_words(_short(error), _rest(error))) from error
        elif self._place and isinstance(error, SeqloomError) and not str(error).startswith("step "):
            raise SeqloomError(f"{self._place}: {error}") from error
        elif self._place and not isinstance(error, SeqloomError):
            error.add_note(f"at {self._place}")

    def _listen(self) -> None:
        while True:
            left_s = self._deadline - time.monotonic()
            if left_s <= 0:
                self._end(f"nothing has moved for {self._timeout_s:g} s")
            if select.select([self._ears], [], [], min(left_s, _POLL_S))[0]:
                rung = self._ears.recv(64)
                if signal.SIGTERM in rung:
                    self._end("stopped by SIGTERM, as launchers do when a rank has died")
                if 0 in rung:
                    return

    def _end(self, why: str) -> None:
        try:
            self._tell(self._last_words(why, self._where()))
        finally:
            os._exit(FAILED)

    def _last_words(self, why: str, details: str = "") -> str:
        found = complete(self._checkpoints)
        intact = f"{found[-1][1]} is intact" if found else "There is no checkpoint yet"
        return (
            f"{self._place or 'the start of the run'}: one of {self._ranks} ranks has died or hangs ({why}); ranks "
            f"wait at most run.timeout_s = {self._timeout_s:g} s for each other. {intact}: run the same command "
            "to go on" + (f"\n{details}" if details else "")
        )


def is_lost_rank(error: BaseException) -> bool:
    """Whether an error says that another rank is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError | SeqloomError) and _GONE.search(str(error)) is not None


def _nowhere() -> str:
    """Say nothing."""
    return ""


def _rest(error: BaseException) -> str:
    """What an error of ours says beyond its first line: where the ranks are."""
    return str(error).strip().partition("\n")[2] if isinstance(error, SeqloomError) else ""


def _short(error: BaseException) -> str:
    """The first sentence of an error, without the place in torch's source that it comes from."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__).removesuffix(":")
    return re.sub(r"^\[\S+:\d+\] ", "", line).partition(". ")[0]
