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
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("planning", total=total)
        begun = 0

        def report(name: str, index: int) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=f"batch {index}: {name}")
            begun += 1

        yield report
