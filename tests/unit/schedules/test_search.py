"""The balanced schedule: valid, under its cap, never slower than Seq1F1B, and near the best of all orders."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.errors import PlanError
from seqloom.schedules import Schedule, Times, Unit, peak_memory, simulate_schedule, units_of
from seqloom.schedules.fixed import one_forward_one_backward
from seqloom.schedules.search import SchedulingProblem, balanced_schedule, list_schedule
from support.schedule_bounds import least_makespan

PP_RANKS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0))


@st.composite
def problems(draw, among=PP_RANKS, mixed=False):
    """Pipeline ranks, units, times, held, and a cap that is between the least possible and plenty."""
    placed = draw(st.sampled_from(among))
    units = units_of(draw(st.lists(st.integers(1, 4), min_size=1, max_size=8)))
    shape = len(placed), len(units)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if mixed and draw(st.booleans()):  # sequences take turns, each in its own order
        turns = rng.permutation([unit.sequence for unit in units]).tolist()
        chains = {s: iter([unit for unit in units if unit.sequence == s]) for s in set(turns)}
        units = tuple(next(chains[s]) for s in turns)
    times = Times(*(rng.integers(1, draw(st.sampled_from([2, 5, 100])), shape) for _ in range(3)))
    held = rng.integers(1, draw(st.sampled_from([2, 10])), shape)
    least = max(SchedulingProblem.of(placed, units, times, held).min_memory)
    return placed, units, times, held, least + draw(st.integers(0, 2 * least))


@given(problems(mixed=True), st.sampled_from([1, 3, 8]))
def test_every_schedule_is_valid_and_keeps_its_cap(problem, budget):
    pp_ranks, units, times, held, cap = problem
    found = balanced_schedule(pp_ranks, units, times, held, cap, budget=budget)
    found.validate(cap, held)
    assert max(peak_memory(found, held)) <= cap
    assert simulate_schedule(found, times).makespan >= least_makespan(pp_ranks, times)
    assert found == balanced_schedule(pp_ranks, units, times, held, cap, budget=budget)


@given(problems(mixed=True), st.integers(-3, 3), st.sampled_from([0, 1, 30]))
def test_a_list_schedule_takes_as_long_as_it_says(problem, lead, message):
    pp_ranks, units, times, held, cap = problem
    taken = SchedulingProblem.of(pp_ranks, units, times, held, message)
    order = list_schedule(taken, [cap] * len(taken.needs), [lead] * len(taken.needs))
    assert (
        simulate_schedule(Schedule("list", pp_ranks, units, order.actions(taken)), times, message=message).makespan
        == order.makespan
    )


@given(problems(PP_RANKS[:4]))
def test_never_slower_than_seq1f1b_at_its_memory(problem):
    pp_ranks, units, times, held, _ = problem
    pieces = [unit.pieces for unit in units if unit.piece == 0]
    strict = one_forward_one_backward("seq1f1b", len(pp_ranks), pieces)
    caps = peak_memory(strict, held)
    found = balanced_schedule(pp_ranks, units, times, held, caps, budget=3)
    found.validate(caps, held)
    assert simulate_schedule(found, times).makespan <= simulate_schedule(strict, times).makespan


@given(problems(PP_RANKS[:4]))
def test_more_tries_are_never_slower(problem):
    pp_ranks, units, times, held, cap = problem
    spans = [
        simulate_schedule(balanced_schedule(pp_ranks, units, times, held, cap, budget=n), times).makespan
        for n in (1, 2, 6, 12)
    ]
    assert spans == sorted(spans, reverse=True)


def test_sequences_may_take_turns():
    units = (Unit(0, 0, 2), Unit(1, 0, 1), Unit(2, 0, 2), Unit(0, 1, 2), Unit(2, 1, 2))
    shape = (3, len(units))
    times, held = Times(*(np.full(shape, value) for value in (2, 3, 1))), np.ones(shape, dtype=np.int64)
    balanced_schedule((0, 1, 2), units, times, held, 3).validate(3, held)
    with pytest.raises(PlanError, match=r"may hold 2;.*needs 3"):
        balanced_schedule((0, 1, 2), units, times, held, 2)


def test_one_cap_per_pp_rank():
    units = units_of([2, 1, 1, 3])
    times, held = Times(*(np.ones((2, 7), dtype=np.int64) for _ in range(3))), np.ones((2, 7), dtype=np.int64)
    found = balanced_schedule((0, 1), units, times, held, [5, 3])
    found.validate([5, 3], held)
    peak = peak_memory(found, held)
    assert peak[0] <= 5 and peak[1] <= 3


def test_a_sequence_that_does_not_fit_is_refused():
    units = units_of([3])
    ones = np.ones((2, 3), dtype=np.int64)
    with pytest.raises(PlanError, match=r"pp_rank 0 may hold 2;.*needs 3 there; raise the limit"):
        balanced_schedule((0, 1), units, Times(ones, ones, ones), ones, 2)


@cache
def orders(units):
    """All orders in which one pp_rank may run F, I and W of these units, as (kind, unit)."""
    after = {n: n + 1 for n, unit in enumerate(units) if unit.piece + 1 < unit.pieces}
    found = []

    def extend(row, forwards, inputs, weights):
        if len(weights) == len(units):
            found.append(tuple(row))
            return
        if forwards < len(units):
            extend([*row, ("F", forwards)], forwards + 1, inputs, weights)
        for u in range(forwards):
            whole = all(n < forwards for n, unit in enumerate(units) if unit.sequence == units[u].sequence)
            if u not in inputs and whole and (u not in after or after[u] in inputs):
                extend([*row, ("I", u)], forwards, inputs | {u}, weights)
            if u in inputs and u not in weights:
                extend([*row, ("W", u)], forwards, inputs, weights | {u})

    extend([], 0, frozenset(), frozenset())
    return found


def finish(first, last, times):
    """When two pp_ranks are done, by a plain walk; None where they wait for each other."""
    forward, backward, weights = (column.tolist() for column in times[:3])
    clock, at, done = [0, 0], [0, 0], {}
    while at[0] < len(first) or at[1] < len(last):
        stuck = True
        for pp_rank, row in enumerate((first, last)):
            while at[pp_rank] < len(row):
                kind, u = row[at[pp_rank]]
                needed = (
                    (0, "F", u)
                    if pp_rank == 1 and kind == "F"
                    else (1, "I", u)
                    if pp_rank == 0 and kind == "I"
                    else None
                )
                if needed is not None and needed not in done:
                    break
                start = max(clock[pp_rank], done.get(needed, 0))
                clock[pp_rank] = start + {"F": forward, "I": backward, "W": weights}[kind][pp_rank][u]
                done[pp_rank, kind, u] = clock[pp_rank]
                at[pp_rank] += 1
                stuck = False
        if stuck:
            return None
    return max(clock)


def fitting(units, held, cap):
    """The orders that keep a cap on one pp_rank."""

    def keeps(row):
        live = most = 0
        for kind, u in row:
            live += {"F": int(held[u]), "I": 0, "W": -int(held[u])}[kind]
            most = max(most, live)
        return most <= cap

    return [row for row in orders(units) if keeps(row)]


CASES = [((1, 1), 40), ((2,), 40), ((2, 1), 6), ((1, 2), 6), ((3,), 6)]


@pytest.mark.parametrize(("pieces", "count"), CASES)
def test_near_the_best_of_all_orders(pieces, count):
    rng = np.random.default_rng(sum(pieces) + len(pieces))
    units = units_of(pieces)
    ratios = []
    for _ in range(count):
        shape = (2, len(units))
        times, held = Times(*(rng.integers(1, 10, shape) for _ in range(3))), rng.integers(1, 4, shape)
        least = max(SchedulingProblem.of((0, 1), units, times, held).min_memory)
        cap = int(rng.integers(least, 2 * least + 1))
        first, last = (fitting(units, held[pp_rank], cap) for pp_rank in (0, 1))
        spans = (finish(a, b, times) for a in first for b in last)
        best = min(span for span in spans if span is not None)
        assert best >= least_makespan((0, 1), times)
        ratios.append(simulate_schedule(balanced_schedule((0, 1), units, times, held, cap), times).makespan / best)
    assert min(ratios) >= 1
    assert max(ratios) <= 1.05
    assert np.mean(ratios) <= 1.01
