"""Memory of a pipeline rank along its row of actions: the one walk over F, B, I and W.

A unit (a micro-batch or a piece of one) holds activations on a stage from its F to its B. Where its backward is
split, I frees most of them and what W needs stays until W. Keys and values that later pieces of a document read
come with the first piece's F and go with its backward.

Sizes are whatever supports + and -: integers of a schedule, bytes of one rank, or float64[ranks] bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from seqloom.plan.action import Action, ActionKind, F, I, W

if TYPE_CHECKING:
    from seqloom.schedules.schedule import Schedule


class UnitMemory(NamedTuple):
    """Memory of one unit on one stage."""

    held: Any
    """From F to B, or to I."""
    forward: Any = 0
    """Transient, while F runs."""
    backward: Any = 0
    """Transient, while B or I runs."""
    deferred: Any = 0
    """From I to W."""
    split: Any = 0
    """Transient, while I runs, beside `backward`."""
    kv: Any = 0
    """Keys and values that its F allocates."""
    kv_grad: Any = 0
    """Gradients of keys and values that its backward allocates."""
    kv_freed: Any = 0
    """Keys, values and their gradients that its backward frees."""
    weight: Any = 0
    """Transient, while W runs."""


def _memory_change(kind: ActionKind, unit: UnitMemory) -> tuple[Any, Any, Any]:
    """Return what an action allocates before it runs, needs while it runs, and frees when it ends."""
    if kind is F:
        return unit.held + unit.kv, unit.forward, 0
    if kind is W:
        return 0, unit.weight, unit.deferred
    freed = unit.held + unit.kv_freed
    if kind is I:
        return unit.kv_grad, unit.backward + unit.split, freed - unit.deferred
    return unit.kv_grad, unit.backward, freed


def memory_walk(row: Iterable[Action], unit_of: Callable[[Action], UnitMemory]) -> Iterator[tuple[Action, Any, Any]]:
    """Yield (action, memory at its peak while it runs, memory after it) of the F, B, I and W of a pipeline rank.

    `unit_of` gives the memory of an action's unit on its stage; it is asked when the walk comes to the action.
    """
    live = 0
    for action in row:
        allocated, transient, freed = _memory_change(action.kind, unit_of(action))
        live = live + allocated
        peak = live + transient
        live = live - freed
        yield action, peak, live


def peak_memory(schedule: Schedule, memory: np.ndarray | None = None) -> tuple[int, ...]:
    """Return the most that every pipeline rank holds at once.

    `memory`, int64[stages, units], is what a unit holds on a stage from its F to its B or W; 1 without it.
    """
    return tuple(max((peak for _, peak, _ in walk), default=0) for walk in walk_rows(schedule, memory))


def walk_rows(schedule: Schedule, memory: np.ndarray | None) -> Iterator[Iterator[tuple[Action, int, int]]]:
    """Yield the walk of every row, where a unit holds the same from its F to its B or W."""
    shape = len(schedule.pp_ranks), len(schedule.units)
    sizes = np.ones(shape, dtype=np.int64) if memory is None else memory
    units = [[UnitMemory(size, deferred=size) for size in sizes_of_stage] for sizes_of_stage in sizes.tolist()]
    for row in schedule.rows:
        yield memory_walk(row, lambda action: units[action.stage][action.round or 0])
