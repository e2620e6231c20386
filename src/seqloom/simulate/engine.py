"""A discrete-event engine: tasks with durations on streams and links, and the time at which each one runs.

A **stream** runs its tasks one after the other, in the order in which they were added: the program of the ranks of a
shard group. A task may stand on many streams at once (lock step). A **link** carries one task at a time, first come
first served: a NIC. A task starts when everything it needs is done, it is the next on all its streams, and all its
links are free.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from heapq import heapify, heappop, heappush

import numpy as np

from seqloom.errors import SeqloomError

_DONE, _READY = 0, 1  # at equal times tasks end before others start, so that what they free can be taken


class DeadlockError(SeqloomError):
    """Tasks that wait for each other for ever."""

    def __init__(self, cycle: Iterable[str]) -> None:
        self.cycle = tuple(cycle)  # names of the tasks; each waits for the next, the last for the first
        chain = " waits for ".join((*self.cycle, self.cycle[0]))
        super().__init__(
            f"deadlock: {chain}; the rows of actions must have an order that ends; "
            f"move {self.cycle[0]} later in its row, or what it waits for earlier"
        )

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the cycle, so that the error survives a trip from a worker process."""
        return (DeadlockError, (self.cycle,))


class Engine:
    """Tasks to be run once. Tasks are numbered from 0 in the order in which they are added; times in ns."""

    def __init__(self) -> None:
        self._duration: list[int] = []
        self._needs: list[set[int]] = []
        self._links: list[tuple[Hashable, ...]] = []
        self._last: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._duration)

    def add(
        self,
        duration: int,
        *,
        streams: Iterable[Hashable] = (),
        links: tuple[Hashable, ...] = (),
        after: Iterable[int] = (),
    ) -> int:
        """Add a task and return its number. It comes after those in `after` and all that its streams hold already."""
        task = len(self._duration)
        needs = set(after)
        for stream in set(streams):
            if stream in self._last:
                needs.add(self._last[stream])
            self._last[stream] = task
        self._duration.append(duration)
        self._needs.append(needs)
        self._links.append(links)
        return task

    def require(self, task: int, after: Iterable[int]) -> None:
        """Let `task` wait for these tasks as well."""
        self._needs[task].update(after)

    def last(self, streams: Iterable[Hashable]) -> list[int]:
        """Return the tasks that stand last on these streams."""
        return [self._last[stream] for stream in streams if stream in self._last]

    def run(self, name: Callable[[int], str] = str) -> tuple[np.ndarray, np.ndarray]:
        """Run everything; return start and stop of every task, int64[tasks] ns. Errors about a deadlock name tasks."""
        count = len(self._duration)
        missing = [len(needs) for needs in self._needs]
        users: list[list[int]] = [[] for _ in range(count)]
        for task, needs in enumerate(self._needs):
            for need in needs:
                users[need].append(task)
        stop = [-1] * count
        queue = [(0, _READY, 0, task) for task in range(count) if not missing[task]]
        heapify(queue)
        taken: set[Hashable] = set()
        waiting: list[tuple[int, int]] = []  # (time at which it became ready, task), for tasks without a link
        done = 0
        while queue:
            now, event, ready, task = heappop(queue)
            links = self._links[task]
            if event == _READY:
                if links and not taken.isdisjoint(links):
                    waiting.append((ready, task))
                    continue
                taken.update(links)
                stop[task] = now + self._duration[task]
                heappush(queue, (stop[task], _DONE, ready, task))
                continue
            done += 1
            for user in users[task]:
                missing[user] -= 1
                if not missing[user]:
                    heappush(queue, (now, _READY, now, user))
            if links:
                taken.difference_update(links)
                for since, other in waiting:  # whoever still finds its links taken comes back here
                    heappush(queue, (now, _READY, since, other))
                waiting.clear()
        if done < count:
            raise DeadlockError(map(name, self._cycle(stop)))
        stops = np.array(stop, dtype=np.int64)
        return stops - np.array(self._duration, dtype=np.int64), stops

    def _cycle(self, stop: list[int]) -> list[int]:
        """Return tasks that wait for each other: every task left over needs another one that is left over."""
        path: dict[int, int] = {}
        task = next(task for task, time in enumerate(stop) if time < 0)
        while task not in path:
            path[task] = len(path)
            task = min(need for need in self._needs[task] if stop[need] < 0)
        return list(path)[path[task] :]
