"""Schedules by their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from seqloom.errors import PlanError, unknown_name
from seqloom.schedules import fixed, zero_bubble
from seqloom.schedules.memory import peak_memory
from seqloom.schedules.schedule import Schedule, units_of
from seqloom.schedules.search import balanced_schedule
from seqloom.schedules.timing import Times, unit_sizes

MAX_CELLS = 1 << 15
"""Stages times units: the largest table that is built by name."""


class Request(NamedTuple):
    """A checked request for a schedule.

    Attributes:
        pieces: of every micro-batch.
        memory: what a pipeline rank may hold, in micro-batches on all its stages; None for no limit.
    """

    name: str
    pp_size: int
    chunks: int
    pieces: tuple[int, ...]
    times: Times
    memory: Fraction | None


class ScheduleSpec(NamedTuple):
    """How a schedule is built, and what it takes.

    Attributes:
        chunks: the least and the most stages per pipeline rank; None for any number.
        for_pieces: the schedule to use for sequences in pieces, where this one takes only whole micro-batches.
    """

    build: Callable[[Request], Schedule]
    chunks: tuple[int, int | None] = (1, 1)
    for_pieces: str = ""


def _all_forwards_first(r: Request) -> Schedule:
    return fixed.all_forwards_first(r.name, r.pp_size, r.chunks, r.pieces)


def _1f1b(r: Request) -> Schedule:
    return fixed.one_forward_one_backward(r.name, r.pp_size, r.pieces)


def _interleaved(r: Request) -> Schedule:
    return fixed.interleaved(r.name, r.pp_size, r.chunks, r.pieces)


def _zero_bubble(r: Request) -> Schedule:
    return zero_bubble.zero_bubble(r.name, r.pp_size, r.pieces, r.times, 2 if r.name == "zb-h2" else 1)


def _balanced(r: Request) -> Schedule:
    """Equal pieces on equal stages, with the memory of Seq1F1B or the requested memory."""
    pp_ranks, units = tuple(range(r.pp_size)) * r.chunks, units_of(r.pieces)
    sizes, one = unit_sizes(pp_ranks, units)
    if r.memory is not None:
        return balanced_schedule(pp_ranks, units, r.times, sizes, math.floor(r.memory * one))
    return balanced_schedule(pp_ranks, units, r.times, sizes, r.chunks * max(peak_memory(_1f1b(r), sizes[: r.pp_size])))


def _v(build: Callable[[str, int, int, Times], Schedule], for_pieces: str) -> ScheduleSpec:
    return ScheduleSpec(lambda r: build(r.name, r.pp_size, len(r.pieces), r.times), (2, 2), for_pieces)


SCHEDULES: dict[str, ScheduleSpec] = {
    "gpipe": ScheduleSpec(_all_forwards_first),
    "1f1b": ScheduleSpec(_1f1b),
    "interleaved": ScheduleSpec(_interleaved, (2, None)),
    "breadth-first": ScheduleSpec(_all_forwards_first, (2, None)),
    "zb-h1": ScheduleSpec(_zero_bubble),
    "zb-h2": ScheduleSpec(_zero_bubble),
    "zb-v": _v(zero_bubble.zb_v, "seq1f1b-zb"),
    "v-half": _v(zero_bubble.v_half, "seq1f1b-zb"),
    "v-min": _v(zero_bubble.v_min, "seq1f1b"),
    "terapipe": ScheduleSpec(_all_forwards_first),
    "seq1f1b": ScheduleSpec(_1f1b),
    "seq1f1b-i": ScheduleSpec(_interleaved, (2, None)),
    "seq1f1b-zb": ScheduleSpec(_zero_bubble),
    "balanced": ScheduleSpec(_balanced, (1, None)),
}

SCHEDULE_NAMES = tuple(SCHEDULES)
"""Every schedule that can be asked for by name."""


def build_schedule(
    name: str,
    stages: int,
    micro_batches: int,
    pieces: int | Sequence[int] = 1,
    chunks: int | None = None,
    times: Times | tuple[int, int, int] = (1, 1, 1),
    memory: Fraction | None = None,
) -> Schedule:
    """Build a schedule by its name.

    Args:
        name: one of `SCHEDULE_NAMES`.
        stages: pipeline ranks; each has `chunks` stages of the model.
        micro_batches: sequences (or packs) of the step.
        pieces: pieces of every sequence, or one number per sequence.
        chunks: stages per pipeline rank; None takes the least that the schedule allows.
        times: forward, input half and weight half of a micro-batch on a stage, or of every unit on every stage: orders
            with split backwards are fitted to them.
        memory: the most that a pipeline rank may hold, in micro-batches on all its stages; a schedule that holds more
            is refused. `balanced` uses what it may, without a limit as much as seq1f1b.
    """
    if name not in SCHEDULES:
        raise unknown_name("schedule", name, SCHEDULE_NAMES)
    spec = SCHEDULES[name]
    uniform = isinstance(pieces, int)
    least, units = (pieces, pieces * micro_batches) if uniform else (min(pieces, default=1), sum(pieces))
    for what, value in (("stages", stages), ("micro-batches", micro_batches), ("pieces", least)):
        if value < 1:
            raise PlanError(f"{name} with {value:,} {what}; there is at least 1; use 1 or more")
    chunk_count = _checked_chunks(name, spec, chunks)
    _check_size(name, stages * chunk_count, micro_batches, units)
    counts = [pieces] * micro_batches if uniform else list(pieces)
    if len(counts) != micro_batches:
        raise PlanError(f"{len(counts)} numbers of pieces for {micro_batches} micro-batches; give one for each")
    if spec.for_pieces and max(counts) > 1:
        raise PlanError(
            f"{name} with {max(counts)} pieces per micro-batch; it runs whole micro-batches, because it orders their "
            f"backwards first in, first out; use 1 piece, or the schedule {spec.for_pieces}"
        )
    if not isinstance(times, Times):
        sizes, _ = unit_sizes(tuple(range(stages)) * chunk_count, units_of(counts))
        times = Times(*(sizes * value for value in times))
    if memory is not None and memory < 1:
        must = "all pieces of a micro-batch go forward before the first goes backward"
        raise PlanError(f"{name} with memory for {float(memory):g} micro-batches; {must}; use 1 or more")
    schedule = spec.build(Request(name, stages, chunk_count, tuple(counts), times, memory))
    if memory is not None:
        check_memory(schedule, memory)
    return schedule


def check_memory(schedule: Schedule, memory: Fraction) -> None:
    """Refuse a schedule in which a pipeline rank holds more than so many micro-batches."""
    sizes, one = unit_sizes(schedule.pp_ranks, schedule.units)
    schedule.validate(math.floor(memory * one), sizes, one)


def _checked_chunks(name: str, spec: ScheduleSpec, chunks: int | None) -> int:
    least, most = spec.chunks
    if chunks is None:
        return least
    if chunks < least or (most is not None and chunks > most):
        must = f"{least}" if most == least else f"at least {least}"
        other = {1: "interleaved or seq1f1b-i take more", 2: "1f1b or seq1f1b take 1"}[least]
        nearest = max(chunks, least) if most is None else min(max(chunks, least), most)
        raise PlanError(f"{name} with {chunks} chunks per stage; it has {must}, {other}; use {nearest}")
    return chunks


def _check_size(name: str, stages: int, micro_batches: int, units: int) -> None:
    if stages * units <= MAX_CELLS:
        return
    most = MAX_CELLS // stages
    way_out = f"{most // micro_batches:,} pieces"
    if most < micro_batches:
        way_out = f"{most:,} micro-batches" if most else f"{MAX_CELLS:,} stages"
    value = f"{name} with {stages:,} stages and {units:,} units"
    raise PlanError(f"{value}; a table has at most {MAX_CELLS:,} cells; use at most {way_out}")
