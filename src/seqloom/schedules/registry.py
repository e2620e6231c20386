"""Schedules by their names."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from seqloom.errors import PlanError, unknown_name
from seqloom.schedules import fixed as looped
from seqloom.schedules import fixed as strict
from seqloom.schedules import zero_bubble
from seqloom.schedules import zero_bubble as vee
from seqloom.schedules.schedule import Schedule, units_of
from seqloom.schedules.search import balanced_schedule
from seqloom.schedules.timing import Times, simulate_schedule, unit_sizes, unit_sizes_on

MOST_CELLS = 1 << 15
"""Stages times units: the largest table that is built by name."""


class Request(NamedTuple):
    """What is asked for, checked."""

    name: str
    pp_size: int
    chunks: int
    pieces: tuple[int, ...]
    """Of every micro-batch."""
    times: Times
    memory: Fraction | None
    """What a host may hold, in micro-batches on all its stages; None for no limit."""

    @property
    def micro_batches(self) -> int:
        """How many there are."""
        return len(self.pieces)


class Family(NamedTuple):
    """How a schedule is built, and what it takes."""

    build: Callable[[Request], Schedule]
    chunks: tuple[int, int | None]
    """The least and the most stages per host; None for any number."""
    whole: str = ""
    """What to use for sequences in pieces, where this one takes only whole micro-batches."""


_ONE, _LOOPED, _VEE = (1, 1), (2, None), (2, 2)

FAMILIES: dict[str, Family] = {
    "gpipe": Family(lambda r: strict.all_forwards_first(r.name, r.pp_size, r.pieces), _ONE),
    "1f1b": Family(lambda r: strict.one_forward_one_backward(r.name, r.pp_size, r.pieces), _ONE),
    "interleaved": Family(lambda r: looped.interleaved(r.name, r.pp_size, r.chunks, r.pieces), _LOOPED),
    "breadth-first": Family(lambda r: looped.breadth_first(r.name, r.pp_size, r.chunks, r.pieces), _LOOPED),
    "zb-h1": Family(lambda r: zero_bubble.zero_bubble(r.name, r.pp_size, r.pieces, r.times), _ONE),
    "zb-h2": Family(lambda r: zero_bubble.zero_bubble(r.name, r.pp_size, r.pieces, r.times, 2), _ONE),
    "zb-v": Family(lambda r: vee.zb_v(r.name, r.pp_size, r.micro_batches, r.times), _VEE, "seq1f1b-zb"),
    "v-half": Family(lambda r: vee.v_half(r.name, r.pp_size, r.micro_batches, r.times), _VEE, "seq1f1b-zb"),
    "v-min": Family(lambda r: vee.v_min(r.name, r.pp_size, r.micro_batches, r.times), _VEE, "seq1f1b"),
    "terapipe": Family(lambda r: strict.all_forwards_first(r.name, r.pp_size, r.pieces), _ONE),
    "seq1f1b": Family(lambda r: strict.one_forward_one_backward(r.name, r.pp_size, r.pieces), _ONE),
    "seq1f1b-i": Family(lambda r: looped.interleaved(r.name, r.pp_size, r.chunks, r.pieces), _LOOPED),
    "seq1f1b-zb": Family(lambda r: zero_bubble.zero_bubble(r.name, r.pp_size, r.pieces, r.times), _ONE),
    "balanced": Family(lambda request: _balanced(request), (1, None)),
}

SCHEDULE_NAMES = tuple(FAMILIES)
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
        name: one of `NAMES`.
        stages: hosts of the pipeline; each has `chunks` stages of the model.
        micro_batches: sequences (or packs) of the step.
        pieces: pieces of every sequence, or one number per sequence.
        chunks: stages per host; None takes the least that the schedule allows.
        times: forward, input half and weight half of a micro-batch on a stage, or of every unit on every stage: orders
            with split backwards are fitted to them.
        memory: the most that a host may hold, in micro-batches on all its stages; a schedule that holds more is
            refused. `balanced` uses what it may, without a limit as much as seq1f1b.
    """
    if name not in FAMILIES:
        raise unknown_name("schedule", name, SCHEDULE_NAMES)
    family = FAMILIES[name]
    least, units = _least_and_sum(pieces, micro_batches)
    for what, value in (("stages", stages), ("micro-batches", micro_batches), ("pieces", least)):
        if value < 1:
            raise PlanError(f"{name} with {value:,} {what}; there is at least 1; use 1 or more")
    asked = _chunks(name, family, chunks)
    _size(name, stages * asked, micro_batches, units)
    counts = [pieces] * micro_batches if isinstance(pieces, int) else list(pieces)
    if len(counts) != micro_batches:
        raise PlanError(f"{len(counts)} numbers of pieces for {micro_batches} micro-batches; give one for each")
    if family.whole and max(counts) > 1:
        raise PlanError(
            f"{name} with {max(counts)} pieces per micro-batch; it runs whole micro-batches, because it orders their "
            f"backwards first in, first out; use 1 piece, or the schedule {family.whole}"
        )
    if not isinstance(times, Times):
        parts, _ = unit_sizes_on(tuple(range(stages)) * asked, units_of(counts))
        times = Times(*(parts * value for value in times))
    if memory is not None and memory < 1:
        must = "all pieces of a micro-batch go forward before the first goes backward"
        raise PlanError(f"{name} with memory for {float(memory):g} micro-batches; {must}; use 1 or more")
    made = family.build(Request(name, stages, asked, tuple(counts), times, memory))
    if memory is not None:
        check_memory(made, memory)
    return made


def _least_and_sum(pieces: int | Sequence[int], micro_batches: int) -> tuple[int, int]:
    """Return the fewest pieces of a micro-batch, and those of all."""
    return (pieces, pieces * micro_batches) if isinstance(pieces, int) else (min(pieces, default=1), sum(pieces))


def check_memory(schedule: Schedule, memory: Fraction) -> None:
    """Refuse a schedule whose hosts hold more than so many micro-batches."""
    held, one = unit_sizes(schedule)
    schedule.validate(math.floor(memory * one), held, one)


def _balanced(request: Request) -> Schedule:
    """Equal pieces on equal stages, for the memory of Seq1F1B or what is asked for."""
    hosts, units = tuple(range(request.pp_size)) * request.chunks, units_of(request.pieces)
    held, one = unit_sizes_on(hosts, units)
    if request.memory is None:
        order = strict.one_forward_one_backward(request.name, request.pp_size, request.pieces)
        cap = request.chunks * max(simulate_schedule(order, Times.uniform(order), held[: request.pp_size]).peak_memory)
    else:
        cap = math.floor(request.memory * one)
    return balanced_schedule(hosts, units, request.times, held, cap)


def _chunks(name: str, family: Family, chunks: int | None) -> int:
    """Return the stages per host."""
    least, most = family.chunks
    if chunks is None:
        return least
    if chunks < least or (most is not None and chunks > most):
        must = f"{least}" if most == least else f"at least {least}"
        other = {1: "interleaved or seq1f1b-i take more", 2: "1f1b or seq1f1b take 1"}[least]
        nearest = max(chunks, least) if most is None else min(max(chunks, least), most)
        raise PlanError(f"{name} with {chunks} chunks per stage; it has {must}, {other}; use {nearest}")
    return chunks


def _size(name: str, stages: int, micro_batches: int, units: int) -> None:
    """Refuse a table that nobody could want."""
    if stages * units <= MOST_CELLS:
        return
    most = MOST_CELLS // stages
    way_out = f"{most // micro_batches:,} pieces"
    if most < micro_batches:
        way_out = f"{most:,} micro-batches" if most else f"{MOST_CELLS:,} stages"
    value = f"{name} with {stages:,} stages and {units:,} units"
    raise PlanError(f"{value}; a table has at most {MOST_CELLS:,} cells; use at most {way_out}")
