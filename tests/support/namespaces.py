"""Network namespaces: own links, addresses and routes for threads and processes of this machine.

A namespace made here has no name. It lives as long as a file descriptor of it or a process in it, so nothing is left
behind, whatever way a test ends.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from seqloom.errors import SeqloomError

T = TypeVar("T")

NETWORK = 0x40000000  # CLONE_NEWNET of sched.h


class Namespace:
    """A network namespace with no links but a loopback that is up."""

    def __init__(self) -> None:
        """Make it; raises where this process may not."""
        self._descriptor = _in_a_thread(_make)
        self.ip(["link set lo up"])

    @property
    def path(self) -> str:
        """A file that stands for it, while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def ip(self, commands: Sequence[str]) -> None:
        """Run lines of `ip`, such as `link set lo up`, in one batch."""
        self._run(["ip", "-batch", "-"], commands)

    def tc(self, commands: Sequence[str]) -> None:
        """Run lines of `tc` in one batch."""
        self._run(["tc", "-batch", "-"], commands)

    def write(self, file: str, text: str) -> None:
        """Set a switch of the kernel that every namespace has for itself, a file in /proc/sys/net."""
        self._inside(lambda: _write(f"/proc/sys/net/{file}", text))

    def bytes_sent(self) -> dict[str, int]:
        """Return what every link has sent so far, in bytes; packets that the kernel cuts later count one header."""
        rows = self._inside(lambda: _read("/proc/thread-self/net/dev")).splitlines()[2:]
        counters = ((name.strip(), numbers.split()) for name, _, numbers in (row.partition(":") for row in rows))
        return {name: int(numbers[8]) for name, numbers in counters}  # eight columns received, then bytes sent

    def close(self) -> None:
        """Let go of it. The kernel removes it with its links when the last process in it has ended."""
        os.close(self._descriptor)

    def _inside(self, body: Callable[[], T]) -> T:
        def entered() -> T:
            _join(self._descriptor)
            return body()

        return _in_a_thread(entered)

    def _run(self, command: list[str], lines: Sequence[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        done = self._inside(lambda: subprocess.run(command, input=text, capture_output=True, text=True))
        if done.returncode:
            raise SeqloomError(f"{command[0]} failed: {done.stderr.strip()}; it was to do\n{text}")


def enter(path: str) -> None:
    """Move this thread into a namespace, and so all threads and processes that it starts from now on."""
    descriptor = os.open(path, os.O_RDONLY)
    _join(descriptor)
    os.close(descriptor)


def _make() -> int:
    """Leave this thread's namespace for a new one and return a descriptor of it."""
    _call("unshare", NETWORK)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY)


def _join(descriptor: int) -> None:
    _call("setns", descriptor, NETWORK)


def _call(name: str, *numbers: int) -> None:
    """Call a function of the C library; os.unshare and os.setns came with Python 3.12."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, name)(*numbers):
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


def _in_a_thread(body: Callable[[], T]) -> T:
    """Call it in a thread of its own, whose namespace may change without changing anyone else's."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(body).result()


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
