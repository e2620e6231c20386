"""Seating the groups of a draft on real ranks."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from seqloom.cost.plan_cost import finish_times, join_shard_groups
from seqloom.planners.fill import NEVER
from seqloom.planners.flex.assign_ranks import settle
from seqloom.planners.flex.decode import decode
from seqloom.planners.flex.planner import rounds_of, virtual_shard_groups, work_bound
from seqloom.planners.flex.search import Search
from seqloom.planners.problem import Problem, price_rounds, to_plan
from support.strategies import batches, cost_models


@st.composite
def drafts(draw):
    """A complete draft over a drawn virtual shard group."""
    cost = draw(cost_models(max_ranks=24))
    variant, lengths = draw(st.sampled_from(cost.variants)), draw(batches())
    problem = Problem(lengths, cost, variant, cost.tables(lengths, variant))
    assume(problem.fits)
    search = Search.over(problem.search, draw(st.sampled_from(virtual_shard_groups(problem.search))))
    target = work_bound(problem.search) * draw(st.integers(100, 300)) // 100
    while decode(search.tables, target, search.keys, search.draft):
        target = target * 3 // 2
    return problem, search


@given(drafts())
def test_seated_groups_make_a_valid_plan_of_that_time(drawn):
    problem, search = drawn
    step = int(settle(search.tables, search.draft, search.shard_group, search.seats))
    if step >= NEVER:
        assert search.tables.shard_group != search.shard_group  # only groups from wider shard groups may find no place
        return
    rounds = rounds_of(problem, search.draft, search.seats)
    plan = to_plan(problem, rounds, "test")
    plan.validate()
    ends = problem.cost.plan_ns(plan)
    assert ends == price_rounds(problem, rounds)
    overhead = problem.cost.step_overhead_ns(problem.variant)
    # a round may keep more activations than it was drafted with, which only makes it shorter
    assert ends == step + overhead if len(problem.cost.variants) == 1 else ends <= step + overhead
    assert step == search.seats.load.max()


@given(drafts())
def test_the_compiled_clock_is_that_of_the_closed_form(drawn):
    _, search = drawn
    if settle(search.tables, search.draft, search.shard_group, search.seats) >= NEVER:
        return
    count, size = int(search.draft.count[0]), search.shard_group
    number, start = search.seats.round_of[:count], search.seats.start[:count]
    stop = start + search.tables.shape_degree[search.draft.group_shape[:count]]
    slowest = np.zeros((number.max() + 1, len(search.seats.load)), dtype=np.int64)
    np.maximum.at(slowest, (number, start // size), search.seats.time[:count])
    touched = [
        range(first // size, -(-last // size)) for first, last in zip(start.tolist(), stop.tolist(), strict=True)
    ]
    joined = [join_shard_groups(touched[g] for g in np.flatnonzero(number == r)) for r in range(len(slowest))]
    assert search.seats.load.tolist() == finish_times(slowest, joined).tolist()


@given(drafts())
def test_real_islands_keep_the_drafted_ranks(drawn):
    problem, search = drawn
    if search.tables.shard_group == search.shard_group:
        assert settle(search.tables, search.draft, search.shard_group, search.seats) == search.draft.load.max()
        groups = int(search.draft.count[0])
        first = search.draft.round_shard_group[search.draft.group_round[:groups]] * search.shard_group
        assert (search.seats.start[:groups] == first + search.draft.group_start[:groups]).all()
        assert (np.diff(np.unique(search.seats.round_of[:groups])) == 1).all()
        assert problem.cost.shard_group_size == search.shard_group
