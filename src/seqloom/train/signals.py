"""Signals that ask a run to leave: which they are, how a process reads them, and how it starts others without them.

    SIGTERM, SIGINT    finish the step, write a checkpoint, leave; the second one ends the process at once
    SIGUSR1            the same, but never counts as a second one: Slurm sends it some time before SIGTERM, and the
                       launcher sends it to its ranks, which may have had the signal from the terminal as well, and
                       repeats it until they have left
    SIGUSR2            from the launcher to its ranks: end at once, since a rank has died or a second signal has come

`launch` reads them, in the launcher and in every rank; the trainer decides with all ranks after which step to leave.
"""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker

LEAVE = getattr(signal, "SIGUSR1", signal.SIGTERM)  # there are no user signals on Windows
END = getattr(signal, "SIGUSR2", signal.SIGTERM)
URGENT = frozenset({signal.SIGTERM, signal.SIGINT})
LEAVE_SIGNALS = URGENT | {LEAVE}


class SignalPipe:
    """Signals that arrive while it is open, readable by any thread, also when the main thread is deep in a call."""

    def __init__(self, signals: Iterable[int]) -> None:
        """Take over these signals of the process; called on the main thread, unless there are none."""
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._handlers = {each: signal.getsignal(each) for each in signals}
        self.received = False
        """Whether one has been read."""
        if self._handlers:
            signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self.install_handlers()

    def install_handlers(self) -> None:
        """Install the handlers again, since a library may have replaced them behind Python's back; on the main thread.

        LLVM does so when Triton compiles its first kernel. It hands most signals on, but SIGUSR1 it drops.
        """
        for number in self._handlers:
            signal.signal(number, lambda *_: None)

    def fileno(self) -> int:
        """Return the file to wait for."""
        return self._reader.fileno()

    def read(self, timeout_s: float) -> bytes:
        """Wait for signals and return their numbers; b"" after the time, or 0 among them after `wake`."""
        ready = select.select([self._reader], [], [], timeout_s)[0]
        numbers = self._reader.recv(64) if ready else b""
        self.received = self.received or any(numbers)
        return numbers

    def wake(self) -> None:
        """Have `read` return a 0."""
        self._writer.send(b"\0")

    def close(self, *, restore: bool = True) -> None:
        """Give the signals back to their handlers; without `restore` they are ignored until the process has ended."""
        if self._handlers:
            signal.set_wakeup_fd(-1)
        self._reader.close()
        self._writer.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler if restore else signal.SIG_IGN)


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Start processes inside that a signal to leave does not reach, such as one to a whole process group.

    A process inherits the mask of the thread that starts it. This process gets what has come when the `with` ends.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # when it starts, it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, LEAVE_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def receive_signals() -> None:
    """Let signals to leave reach this process, which was started under `blocked_signals`; each ends it, silently."""
    for each in LEAVE_SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, LEAVE_SIGNALS)
