"""The loops of planner flex: aligned blocks, one filled round, a decoded target time, the ranks of its groups."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from seqloom.cost.plan_cost import finish_times, join_shard_groups
from seqloom.plan import GroupFamily
from seqloom.planners import loops
from seqloom.planners.compiled import kernels
from seqloom.planners.flex import LIMIT_GROWTH, FlexSearch, placed_rounds, virtual_shard_groups, work_bound
from seqloom.planners.loops import MAX_LIMITS, NEVER
from seqloom.planners.problem import BatchProblem
from support.strategies import batches, cost_models


@st.composite
def problems(draw, **limits):
    """A batch under one policy of a drawn cost model."""
    cost, lengths = draw(cost_models(**limits)), draw(batches())
    policy = draw(st.sampled_from(cost.policies))
    problem = BatchProblem(lengths, cost, policy)
    assume(problem.fits)
    return problem


@pytest.mark.parametrize(("ranks", "node"), [(8, 8), (6, 6), (12, 6), (24, 8), (7, 7), (12, 4), (9, 3)])
def test_blocks_are_those_of_the_family(ranks, node):
    family = GroupFamily(ranks, node)
    for size in family.sizes:
        starts = [loops.block_start(index, size, node) for index in range(loops.block_count(size, ranks, node))]
        assert starts == [block.start for block in family.blocks(size)]


def test_blocks_are_placed_on_the_lowest_free_ranks():
    place, starts = loops.place_aligned_blocks, np.zeros(4, np.int64)
    assert place(np.array([4, 2, 1, 1]), 8, 8, starts) and starts.tolist() == [0, 4, 6, 7]
    assert place(np.array([3, 2, 1]), 6, 6, starts) and starts[:3].tolist() == [0, 4, 3]
    assert not place(np.array([5, 4]), 9, 9, starts)  # five from 0, four from 0 or 4: no room though 9 ranks would do
    assert not place(np.array([4, 4, 4]), 8, 8, starts)


def filled(tables, limit, least_degree, order, descending):
    """Fill one round of all ranks; returns (groups, time, value), the group of each place, and the groups."""
    joined = np.full(len(order), -1, np.int64)
    groups = loops.no_groups(tables, tables.ranks)
    shortest = int(tables.tokens[order].min())
    answer = kernels().fill_round(
        tables, limit, least_degree, order, shortest, descending, joined, groups, tables.rank_class
    )
    return tuple(map(int, answer)), joined, groups


@st.composite
def fillings(draw):
    """A problem, a limit between what the shortest document takes and far beyond the longest, and a least degree."""
    problem = draw(problems(max_nodes=2, max_ranks=16))
    times = problem.batch_tables.solo_ns.min(axis=0)
    limit = draw(st.integers(int(times.min()), 3 * int(times.max())))
    return problem, limit, draw(st.integers(0, len(problem.batch_tables.degrees) - 1))


@given(fillings())
def test_groups_are_disjoint_blocks_of_the_family_within_memory_and_limit(drawn):
    problem, limit, least_degree = drawn
    tables, family = problem.batch_tables, problem.cost.family
    order = np.argsort(-tables.tokens, kind="stable")
    (count, longest, value), joined, groups = filled(tables, limit, least_degree, order, True)
    taken = np.zeros(tables.ranks, np.int64)
    for group in range(count):
        documents, degree = order[joined == group], int(tables.shape_degree[groups.shape[group]])
        assert len(documents) > 0 and degree >= tables.degrees[least_degree]
        assert family.contains(int(groups.start[group]), degree)
        taken[groups.start[group] : groups.start[group] + degree] += 1
        assert groups.tokens[group] == tables.tokens[documents].sum() <= degree * tables.capacity
        time = problem.tables.group_ns(int(groups.shape[group]), documents)
        assert time == groups.load[:, group].max() <= limit
        assert time <= longest
    assert taken.max() <= 1
    assert value == tables.value[order[joined >= 0]].sum()
    assert longest == groups.load[:, :count].max(initial=0)
    assert joined.max() == count - 1


@given(fillings())
def test_skipping_what_cannot_fit_changes_no_round(drawn):
    problem, limit, least_degree = drawn
    order = np.argsort(-problem.batch_tables.tokens, kind="stable")
    skipping, trying = (filled(problem.batch_tables, limit, least_degree, order, skip) for skip in (True, False))
    count = skipping[0][0]
    assert skipping[0] == trying[0]
    assert skipping[1].tolist() == trying[1].tolist()
    for a, b in zip(skipping[2][:4], trying[2][:4], strict=True):
        assert (a[..., :count] == b[..., :count]).all()


@given(fillings(), st.randoms(use_true_random=False))
def test_any_order_is_filled_within_the_limits(drawn, random):
    problem, limit, least_degree = drawn
    order = np.array(random.sample(range(len(problem.lengths)), len(problem.lengths)))
    (count, longest, _), joined, groups = filled(problem.batch_tables, limit, least_degree, order, False)
    assert longest <= limit
    for group in range(count):
        assert problem.tables.group_ns(int(groups.shape[group]), order[joined == group]) <= limit


@st.composite
def decodings(draw):
    """A search over drawn shard groups, drawn parameters, and a target between the work bound and far beyond it."""
    problem = draw(problems(max_ranks=24))
    tables, n = problem.batch_tables, len(problem.lengths)
    search = FlexSearch.over(tables, draw(st.sampled_from(virtual_shard_groups(tables))))
    target = work_bound(tables) * draw(st.integers(80, 600)) // 100
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    params = search.params
    if draw(st.booleans()):
        params = params._replace(order=random.permutation(n), descending=False)
    if draw(st.booleans()):
        params = params._replace(extra_degrees=random.integers(0, 3, n))
    if draw(st.booleans()):
        params = params._replace(limit_index=random.integers(-1, MAX_LIMITS * len(tables.degrees), n))
    return problem, search, target, params


@given(decodings())
def test_a_decoding_places_each_document_at_most_once_and_ends_in_time(drawn):
    problem, search, target, params = drawn
    tables, rounds = search.tables, search.rounds
    left = int(kernels().decode(tables, target, params, rounds))
    missing = rounds.group_of < 0
    groups, count = rounds.count.tolist()
    if left:  # the value counts what is missing, or all of it where a wide document finds no place
        assert missing.any() and left in (tables.value[missing].sum(), tables.value.sum())
    else:
        assert not missing.any() and rounds.load.max() <= target
    assert set(rounds.group_of[~missing].tolist()) == set(range(groups))
    busy = np.zeros(len(rounds.load), np.int64)
    for index in range(count):
        members = np.flatnonzero(rounds.group_round[:groups] == index)
        first, width = int(rounds.round_shard_group[index]), int(rounds.round_width[index])
        taken, time = np.zeros(width * tables.shard_group, np.int64), 0
        for group in members:
            shape, start = int(rounds.group_shape[group]), int(rounds.group_start[group])
            degree, documents = int(tables.shape_degree[shape]), np.flatnonzero(rounds.group_of == group)
            assert tables.tokens[documents].sum() <= degree * tables.capacity
            assert problem.cost.family.contains(first * tables.shard_group + start, degree)
            taken[start : start + degree] += 1
            time = max(time, problem.tables.group_ns(shape, documents))
        assert len(members) and taken.max() == 1
        busy[first : first + width] = busy[first : first + width].max() + time
    assert (busy <= rounds.load).all()


@given(decodings())
def test_skipping_changes_no_decoding_of_falling_lengths(drawn):
    _, search, target, params = drawn
    params = params._replace(order=search.params.order)
    seen = []
    for descending in (True, False):
        left = int(kernels().decode(search.tables, target, params._replace(descending=descending), search.rounds))
        seen.append((left, *(getattr(search.rounds, name).tolist() for name in ("group_of", "load", "count"))))
    assert seen[0] == seen[1]


@given(decodings(), st.integers(0, 59))
def test_time_limits_rise_from_the_document_to_the_budget(drawn, k):
    _, search, target, _ = drawn
    tables, limits = search.tables, np.empty(MAX_LIMITS + 2, np.int64)
    k %= len(tables.tokens)
    count = kernels().time_limits(tables, k, target, LIMIT_GROWTH, limits, np.ones(len(tables.degrees), np.int64))
    inside = tables.solo_ns[tables.degrees <= tables.shard_group, k]
    if not (inside <= target).any():
        assert count == 0
        return
    assert 1 <= count <= MAX_LIMITS and limits[0] == inside.min()
    assert (limits[:count] <= target).all()
    assert (limits[1:count] * 100 > limits[: count - 1] * loops.LIMIT_SPACING_PERCENT).all()


@st.composite
def complete_decodings(draw):
    """A decoding that places all documents, over a drawn virtual shard group."""
    problem = draw(problems(max_ranks=24))
    search = FlexSearch.over(problem.batch_tables, draw(st.sampled_from(virtual_shard_groups(problem.batch_tables))))
    target = work_bound(problem.batch_tables) * draw(st.integers(100, 300)) // 100
    while kernels().decode(search.tables, target, search.params, search.rounds):
        target = target * 3 // 2
    return problem, search


@given(complete_decodings())
def test_groups_with_ranks_make_a_valid_plan_of_that_time(drawn):
    problem, search = drawn
    step = search.assign_ranks()
    if step >= NEVER:
        assert search.tables.shard_group != search.shard_group  # only groups from wider shard groups may find no place
        return
    rounds = placed_rounds(problem, search.rounds, search.ranks)
    plan = problem.plan(rounds, "test")
    plan.validate()
    ends = problem.cost.plan_ns(plan)
    assert ends == problem.step_ns(rounds)
    overhead = problem.cost.step_overhead_ns(problem.policy)
    if problem.cost.model.moe_layers:
        return  # loops charge every rank for its own tokens times the imbalance, plans by EP group
    # a round may keep more activations than it was decoded with, which only makes it shorter
    assert ends == step + overhead if len(problem.cost.policies) == 1 else ends <= step + overhead
    assert step == search.ranks.load.max()


@given(complete_decodings())
def test_the_compiled_clock_is_that_of_the_closed_form(drawn):
    _, search = drawn
    if search.assign_ranks() >= NEVER:
        return
    count, size = int(search.rounds.count[0]), search.shard_group
    number, start = search.ranks.round_of[:count], search.ranks.start[:count]
    stop = start + search.tables.shape_degree[search.rounds.group_shape[:count]]
    slowest = np.zeros((number.max() + 1, len(search.ranks.load)), dtype=np.int64)
    np.maximum.at(slowest, (number, start // size), search.ranks.time[:count])
    touched = [range(a // size, -(-b // size)) for a, b in zip(start.tolist(), stop.tolist(), strict=True)]
    joined = [join_shard_groups(touched[g] for g in np.flatnonzero(number == r)) for r in range(len(slowest))]
    assert search.ranks.load.tolist() == finish_times(slowest, joined).tolist()


@given(complete_decodings())
def test_real_shard_groups_keep_the_decoded_ranks(drawn):
    problem, search = drawn
    if search.tables.shard_group == search.shard_group:
        assert search.assign_ranks() == search.rounds.load.max()
        groups = int(search.rounds.count[0])
        first = search.rounds.round_shard_group[search.rounds.group_round[:groups]] * search.shard_group
        assert (search.ranks.start[:groups] == first + search.rounds.group_start[:groups]).all()
        assert (np.diff(np.unique(search.ranks.round_of[:groups])) == 1).all()
        assert problem.cost.shard_group_size == search.shard_group
