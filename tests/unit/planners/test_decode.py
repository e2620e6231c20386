"""Decoding a target time into a seating, and settling it on real shard groups."""

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from seqloom.planners.flex.decode import LADDER_STEPS, NEAR, decode, limit_ladder
from seqloom.planners.flex.planner import virtual_shard_groups, work_bound
from seqloom.planners.flex.search import LADDER_GROWTH, Search
from seqloom.planners.problem import Problem
from support.strategies import batches, cost_models


@st.composite
def decodings(draw):
    """A search over drawn shard groups, drawn keys, and a target between the work bound and far beyond it."""
    cost = draw(cost_models(max_ranks=24))
    policy, lengths = draw(st.sampled_from(cost.policies)), draw(batches())
    problem = Problem(lengths, cost, policy, cost.tables(lengths, policy))
    assume(problem.fits)
    tables = problem.search
    search = Search.over(tables, draw(st.sampled_from(virtual_shard_groups(tables))))
    target = work_bound(tables) * draw(st.integers(80, 600)) // 100
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    keys = search.keys
    if draw(st.booleans()):
        keys = keys._replace(order=random.permutation(len(lengths)), falling=False)
    if draw(st.booleans()):
        keys = keys._replace(widen=random.integers(0, 3, len(lengths)))
    if draw(st.booleans()):
        keys = keys._replace(rung=random.integers(-1, LADDER_STEPS * len(tables.degrees), len(lengths)))
    return problem, search, target, keys


@given(decodings())
def test_a_decoding_places_each_document_at_most_once_and_ends_in_time(drawn):
    problem, search, target, keys = drawn
    tables, draft = search.tables, search.draft
    left = int(decode(tables, target, keys, draft))
    missing = draft.group_of < 0
    groups, rounds = draft.count.tolist()
    if left:  # the value counts what is missing, or all of it where a wide document finds no place
        assert missing.any() and left in (tables.value[missing].sum(), tables.value.sum())
    else:
        assert not missing.any() and draft.load.max() <= target
    assert set(draft.group_of[~missing].tolist()) == set(range(groups))
    busy = np.zeros(len(draft.load), np.int64)
    for index in range(rounds):
        members = np.flatnonzero(draft.group_round[:groups] == index)
        width = int(draft.round_width[index])
        taken, time = np.zeros(width * tables.shard_group, np.int64), 0
        for group in members:
            shape, start = int(draft.group_shape[group]), int(draft.group_start[group])
            degree, documents = int(tables.shape_degree[shape]), np.flatnonzero(draft.group_of == group)
            assert tables.tokens[documents].sum() <= degree * tables.capacity
            assert problem.cost.family.contains(
                int(draft.round_shard_group[index]) * tables.shard_group + start, degree
            )
            taken[start : start + degree] += 1
            time = max(time, problem.tables.group_ns(shape, documents))
        assert len(members) and taken.max() == 1
        shard_groups = slice(int(draft.round_shard_group[index]), int(draft.round_shard_group[index]) + width)
        busy[shard_groups] = busy[shard_groups].max() + time
    assert (busy <= draft.load).all()


@given(decodings())
def test_skipping_changes_no_decoding_of_falling_lengths(drawn):
    _, search, target, keys = drawn
    keys = keys._replace(order=search.keys.order)
    seen = []
    for falling in (True, False):
        left = int(decode(search.tables, target, keys._replace(falling=falling), search.draft))
        seen.append((left, search.draft.group_of.tolist(), search.draft.load.tolist(), search.draft.count.tolist()))
    assert seen[0] == seen[1]


@given(decodings(), st.integers(0, 59))
def test_a_ladder_rises_from_the_document_to_the_budget(drawn, k):
    _, search, target, _ = drawn
    tables, ladder = search.tables, np.empty(LADDER_STEPS + 2, np.int64)
    k %= len(tables.tokens)
    count = limit_ladder(tables, k, target, LADDER_GROWTH, ladder)
    inside = tables.alone[tables.degrees <= tables.shard_group, k]
    if not (inside <= target).any():
        assert count == 0
        return
    assert 1 <= count <= LADDER_STEPS and ladder[0] == inside.min()
    assert (ladder[:count] <= target).all()
    assert (ladder[1:count] * 100 > ladder[: count - 1] * NEAR).all()
