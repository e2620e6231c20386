"""Schedules by their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seqloom.errors import unknown
from seqloom.plan.error import PlanError
from seqloom.plan.schedules import strict
from seqloom.plan.schedules.schedule import Schedule

_SCHEDULES: dict[str, Callable[[str, int, Sequence[int]], Schedule]] = {
    "gpipe": strict.all_forwards_first,
    "1f1b": strict.one_forward_one_backward,
    "terapipe": strict.all_forwards_first,
    "seq1f1b": strict.one_forward_one_backward,
}

NAMES = tuple(_SCHEDULES)
"""Every schedule that can be asked for by name."""


def schedule_of(
    name: str, stages: int, micro_batches: int, pieces: int | Sequence[int] = 1, chunks: int | None = None
) -> Schedule:
    """Build a schedule by its name.

    Args:
        name: one of `NAMES`.
        stages: hosts of the pipeline; each has `chunks` stages of the model.
        micro_batches: sequences (or packs) of the step.
        pieces: pieces of every sequence, or one number per sequence.
        chunks: stages per host; None takes the least that the schedule allows.
    """
    if name not in _SCHEDULES:
        raise unknown("schedule", name, NAMES)
    counts = [pieces] * micro_batches if isinstance(pieces, int) else list(pieces)
    if len(counts) != micro_batches:
        raise PlanError(f"{len(counts)} numbers of pieces for {micro_batches} micro-batches; give one for each")
    return _SCHEDULES[name](name, stages, counts)
