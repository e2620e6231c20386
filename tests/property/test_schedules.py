"""Every schedule that can be asked for by name keeps every rule; playing it agrees with a plain event by event run."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from seqloom.plan.action import ActionKind
from seqloom.plan.rules.actions import ActionTable, check_complete, check_messages, check_messages_end
from seqloom.schedules import SCHEDULE_NAMES, Schedule, Times, build_schedule, peak_memory, simulate_schedule
from seqloom.schedules.registry import SCHEDULES
from seqloom.schedules.schedule import to_csv


@st.composite
def schedules(draw):
    name = draw(st.sampled_from(SCHEDULE_NAMES))
    family = SCHEDULES[name]
    chunks = draw(st.integers(family.chunks[0], family.chunks[1] or 3))
    pieces = draw(st.lists(st.integers(1, 1 if family.for_pieces else 5), min_size=1, max_size=7))
    ratio = draw(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9)))
    return build_schedule(name, draw(st.integers(1, 6)), len(pieces), pieces, chunks, ratio)


@st.composite
def times_of(draw, schedule: Schedule, least: int = 0) -> Times:
    numbers = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = len(schedule.pp_ranks), len(schedule.units)
    apart = numbers.integers(0, 4, (shape[0], 1)) if draw(st.booleans()) else 0
    return Times(*(numbers.integers(least, 20, shape) for _ in range(3)), apart)


@given(schedules())
def test_every_schedule_keeps_every_rule(schedule):
    schedule.validate()
    peak = peak_memory(schedule)
    schedule.validate(cap=peak)
    rows = schedule.pipeline_actions()
    table = ActionTable("plan", schedule.pp_ranks, len(schedule.units), rows)
    check_complete(table)
    check_messages(table)
    check_messages_end(table)
    computing = {ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W}
    assert tuple(tuple(a for a in row if a.kind in computing) for row in rows) == schedule.rows
    assert Schedule.from_csv(to_csv(schedule.rows), schedule.name, pieces_of(schedule)) == schedule


def pieces_of(schedule: Schedule) -> list[int]:
    return [unit.pieces for unit in schedule.units if unit.piece == 0]


@given(st.data())
def test_playing_is_what_an_event_by_event_run_does(data):
    schedule = data.draw(schedules())
    times = data.draw(times_of(schedule))
    held = data.draw(times_of(schedule, 1)).forward
    message = data.draw(st.sampled_from([0, 3]))
    played = simulate_schedule(schedule, times, message)
    start, stop = by_events(schedule, times, message)
    assert [list(row) for row in played.start] == start
    assert [list(row) for row in played.stop] == stop
    assert played.makespan == max(max(row) for row in stop)
    assert played.step_time == max(ends[-1] - begins[0] for begins, ends in zip(start, stop, strict=True))
    busy = sum(sum(ends) - sum(begins) for begins, ends in zip(start, stop, strict=True))
    if played.step_time:
        assert math.isclose(played.bubble, 1 - busy / (played.step_time * len(start)), abs_tol=1e-12)
    assert list(peak_memory(schedule, held)) == [most_held(schedule, pp_rank, held) for pp_rank in range(len(start))]


def by_events(schedule: Schedule, times: Times, message: int) -> tuple[list[list[int]], list[list[int]]]:
    """Relax the starting times until nothing changes: the longest path, without any order of evaluation."""
    halves = {(a.stage, a.round) for row in schedule.rows for a in row if a.kind is ActionKind.I}
    duration, ends = {}, {}
    for row in schedule.rows:
        for a in row:
            forward, backward, weights = (int(column[a.stage, a.round]) for column in times[:3])
            apart = (
                times.split_overhead if isinstance(times.split_overhead, int) else int(times.split_overhead[a.stage, 0])
            )
            whole = {"F": forward, "B": backward + weights, "I": backward, "W": weights + apart}
            duration[a], ends[a] = whole[a.kind.value], 0
    by_name = {(a.stage, a.kind.value, a.round): a for a in ends}
    changed = True
    while changed:
        changed = False
        for row in schedule.rows:
            free = 0
            for a in row:
                other = None
                if a.kind is ActionKind.F:
                    other = by_name.get((a.stage - 1, "F", a.round))
                elif a.kind is not ActionKind.W:
                    other = by_name.get((a.stage + 1, "I" if (a.stage + 1, a.round) in halves else "B", a.round))
                late = message if other and schedule.pp_ranks[other.stage] != schedule.pp_ranks[a.stage] else 0
                free = max(free, ends[other] + late if other else 0) + duration[a]
                changed |= ends[a] != free
                ends[a] = free
    stop = [[ends[a] for a in row] for row in schedule.rows]
    return [[ends[a] - duration[a] for a in row] for row in schedule.rows], stop


def most_held(schedule: Schedule, pp_rank: int, held: np.ndarray) -> int:
    """Count at every moment of the row which units are between F and the end of their backward."""
    row = schedule.rows[pp_rank]
    opened = {(a.stage, a.round): k for k, a in enumerate(row) if a.kind is ActionKind.F}
    closed = {(a.stage, a.round): k for k, a in enumerate(row) if a.kind in (ActionKind.B, ActionKind.W)}
    live = [sum(int(held[key]) for key, k in opened.items() if k <= now < closed[key]) for now in range(len(row))]
    return max(live)
