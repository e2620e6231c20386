"""Progress of long work: a bar on stderr, only when somebody is looking at it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def planning(total: int) -> Iterator[Callable[[str, int], None] | None]:
    """Give a function to call with a planner's name and a batch's index before each of ``total`` plannings.

    None when stderr is not a terminal.
    """
    with steps("planning", total) as step:
        yield None if step is None else lambda name, index: step(f"batch {index}: {name}")


@contextmanager
def steps(first: str, total: int) -> Iterator[Callable[[str], None] | None]:
    """Give a function to call before each of ``total`` steps with what it does; None when nobody is looking.

    Args:
        first: what stands there until the first call.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(first, total=total)
        begun = 0

        def report(what: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=what)
            begun += 1

        yield report
