"""The watchdog of a training rank: it knows what the rank does, and ends it when it cannot go on.

Another rank may die, or nothing may move: the main thread may then be deep in a call that never returns. It also takes
the signals that ask a run to leave (`signals`), which the trainer does after the step.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Self

from seqloom.compat import lost_rank_reason
from seqloom.errors import LeftEarly, LostRankError, SeqloomError
from seqloom.train.run_folder import latest_checkpoint
from seqloom.train.signals import END, LEAVE_SIGNALS, URGENT, SignalPipe

START_S = 600.0
"""Seconds that ranks may take to start and connect, whatever run.timeout_s is."""
EXIT_FAILED = 2
"""Exit code of a rank that could not continue."""
DISK_FACTOR = 3
"""How many times as long as for each other ranks wait where a disk is what they wait for."""
_POLL_S = 1.0
_LATE_S = 25.0
"""Seconds after a signal to leave at which a step that has not ended is reported: torchrun and Slurm kill after 30."""


class Watchdog:
    """Ends a rank that cannot continue, with a report of what it was doing. Used in a `with`.

    A rank stops in three ways: a message fails because the other side is gone, the launcher that saw a process die
    sends `signals.END`, or nothing moves for longer than ranks may wait for each other. In the last two the main thread
    may be deep in a call that never returns, so a thread of the watchdog reports and ends the process. An error leaves
    the `with` with the phase in its message.

    A signal that asks the run to leave ends the process too if no step has begun, or if it is the second urgent one.
    Else `asked_to_leave` is True from then on, for the trainer. Outside of the main thread, where Python allows no
    signal handlers, signals stay with the process that this rank is a part of.
    """

    def __init__(self, ranks: int, timeout_s: float, checkpoints: Path, report: Callable[[str], None]) -> None:
        """Allow `timeout_s` from one `enter_phase` to the next; `report` is called from the watchdog's thread."""
        self._ranks, self._timeout_s, self._checkpoints, self._report = ranks, timeout_s, checkpoints, report
        self._phase, self._on_disk = "", False
        self._details: Callable[[], str] = str
        self._deadline = time.monotonic() + max(timeout_s, START_S)
        self._has_steps = self._has_finished = False
        self._urgent, self._asked_at = 0, inf
        self._signals: SignalPipe | None = None
        self.asked_to_leave = False

    def enter_phase(self, phase: str, *, on_disk: bool = False, details: Callable[[], str] = str) -> None:
        """Note what comes now, and start the clock again; a phase that waits for a disk may take `DISK_FACTOR` as long.

        `details` returns how far the phase has come; it is called from another thread.
        """
        if self._signals is not None:
            self._signals.install_handlers()
        self._phase, self._details, self._on_disk = phase, details, on_disk
        self._deadline = time.monotonic() + self._limit_s

    @property
    def _limit_s(self) -> float:
        return self._timeout_s * (DISK_FACTOR if self._on_disk else 1)

    def begin_steps(self) -> None:
        """Note that steps follow, whose result a process that ends at once would lose."""
        self._has_steps = True

    def finish(self) -> None:
        """Note that all is on disk: no signal to leave has an effect from now on, also after the `with`."""
        self._has_finished = True

    def __enter__(self) -> Self:
        handles_signals = threading.current_thread() is threading.main_thread()
        self._signals = SignalPipe({*LEAVE_SIGNALS, END} if handles_signals else ())
        self._thread = threading.Thread(target=self._watch, args=(self._signals,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Stop the thread. After an error signals stay without effect, since the process still has to report it."""
        signals, self._signals = self._signals, None
        assert signals is not None  # `__enter__` has opened it
        signals.wake()
        self._thread.join()
        signals.close(restore=error is None and not self._has_finished)
        if error is None:
            return
        reason, details = lost_rank_reason(error), ""
        if isinstance(error, LostRankError):  # the lines after the first show where the ranks are
            reason, _, details = str(error).strip().partition("\n")
            reason = reason.removesuffix(":")
        if reason is not None:
            raise LostRankError(self._lost_rank_message(reason, details)) from error
        if self._phase and isinstance(error, SeqloomError) and not str(error).startswith("step "):
            raise SeqloomError(f"{self._phase}: {error}") from error
        if self._phase and not isinstance(error, SeqloomError):
            error.add_note(f"at {self._phase}")

    def _watch(self, signals: SignalPipe) -> None:
        while True:
            now = time.monotonic()
            if now >= self._deadline:
                self._end(self._lost_rank_message(f"nothing has moved for {self._limit_s:g} s", self._details()))
            if now >= self._asked_at + _LATE_S and not self._on_disk and not self._has_finished:
                self._report(self._late_message())
                self._asked_at = inf
            for number in signals.read(min(self._deadline - now, _POLL_S)):
                if number == 0:
                    return
                self._take(number)

    def _take(self, number: int) -> None:
        """Act on a signal."""
        if number == END:
            reason = "ended by the launcher, after another rank has died"
            self._end(self._lost_rank_message(reason, self._details()))
        elif self._has_finished or number not in LEAVE_SIGNALS:
            return
        elif not self._has_steps:
            self._end(left_before_steps(latest_checkpoint(self._checkpoints)), LeftEarly.exit_code)
        self._urgent += number in URGENT
        if self._urgent > 1:
            self._end(
                f"{self._phase}: ended at once by {signal.Signals(number).name}, a second signal. {self._intact()}"
            )
        if not self.asked_to_leave:
            self.asked_to_leave, self._asked_at = True, time.monotonic()

    def _end(self, text: str, code: int = EXIT_FAILED) -> None:
        try:
            self._report(text)
        finally:
            os._exit(code)

    def _intact(self) -> str:
        latest = latest_checkpoint(self._checkpoints)
        return f"{f'{latest} is intact' if latest else 'There is no checkpoint yet'}: run the same command to go on"

    def _disk_limit(self) -> str:
        return f", and {self._limit_s:g} s for a disk" if self._on_disk else ""

    def _late_message(self) -> str:
        return (
            f"{self._phase}: has not ended {_LATE_S:g} s after a signal to leave; a rank may have died, and launchers "
            f"often kill after 30 s. {self._intact()}"
        )

    def _lost_rank_message(self, reason: str, details: str = "") -> str:
        return (
            f"{self._phase or 'the start of the run'}: one of {self._ranks} ranks has died or hangs ({reason}); ranks "
            f"wait at most run.timeout_s = {self._timeout_s:g} s for each other{self._disk_limit()}. {self._intact()}"
            + (f"\n{details}" if details else "")
        )


def left_before_steps(latest: Path | None) -> str:
    """Say that a run was asked to leave while it started."""
    start = f"goes on from {latest}" if latest else "starts it again"
    return f"left at the start of the run, asked by a signal; no step is lost, and the same command {start}"
