"""FlexSP: the blaster's cut and the buckets against all there are, and the planner on small clusters."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec, sample
from seqloom.planners.published import flexsp as buckets
from seqloom.planners.published.flexsp import blast, bucket, fewest_chunks, plan_flexsp
from seqloom.planners.uniform import plan_adaptive
from seqloom.simulate.memory import peak_memory

MODEL = ModelSpec.load("gpt-7b")


def published(cluster="1x8xA100-40G", sharding="full", budget=60):
    return CostModel(Cluster.parse(cluster), MODEL, "flexsp-a100", sharding, budget_gib=budget)


def used(plan):
    return {degree for found in degrees(plan) for degree in found}


def degrees(plan):
    return [[group.degree for group in current.groups] for current in plan.pipelines[0].rounds]


def test_a_mix_of_degrees_beats_one_degree():
    cost = published()
    lengths = np.array([40_000, 12_000] + [3_000] * 10 + [800] * 20)
    plan = plan_flexsp(lengths, cost)
    plan.validate()
    assert plan.planner == "flexsp" and plan.hash == plan_flexsp(lengths, cost).hash
    assert len(used(plan)) > 1
    assert all(sum(found) == 8 for found in degrees(plan))  # no rank idles
    assert cost.plan_ns(plan) < cost.plan_ns(plan_adaptive(lengths, cost))


def test_the_released_solver_has_no_single_ranks():
    cost = published()
    lengths = np.full(40, 700)
    assert used(plan_flexsp(lengths, cost)) == {1}
    assert 1 not in used(plan_flexsp(lengths, cost, smallest=2))


def test_the_draw_is_seeded():
    lengths = sample("wikipedia", 60, seed=5, max_length=8_000)
    cost = published()
    few = {seed: plan_flexsp(lengths, cost, buckets=2, counts=1, seed=seed).hash for seed in (0, 1)}
    assert few[0] != few[1] == plan_flexsp(lengths, cost, buckets=2, counts=1, seed=1).hash


@pytest.mark.parametrize("lengths", [[1], [50_000], [7, 7], [80_000, 80_000, 1]])
def test_few_documents(lengths):
    cost = published()
    plan = plan_flexsp(np.array(lengths), cost)
    plan.validate()
    assert (peak_memory(plan, cost) <= cost.budget_bytes).all()


def test_ranks_idle_where_no_groups_use_them_all():
    cost = published("3x8xA100-40G", budget=30)  # no constants for 24 ranks: 16 and 8 at most
    plan = plan_flexsp(np.array([40_000]), cost)
    plan.validate()
    assert degrees(plan) in ([[8]], [[16]])
    assert [sum(found) for found in degrees(plan_flexsp(np.full(30, 900), cost))] == [24]


@pytest.mark.parametrize(("sharding", "budget"), [("hybrid", 60), ("none", 150)])
def test_lock_step_micro_batches_are_valid_under_other_shardings(sharding, budget):
    cost = published("2x8xA100-40G", sharding, budget)
    plan = plan_flexsp(np.array([30_000] + [2_000] * 25), cost)
    plan.validate()
    assert all(sum(found) == 16 for found in degrees(plan))


def test_lanes_shapes_and_variants_of_a_measured_profile():
    cost = CostModel(Cluster.parse("2x4xH100"), ModelSpec.load("llama3-8b"))
    lengths = sample("commoncrawl", 60, seed=2, max_length=60_000)
    plan = plan_flexsp(lengths, cost)
    plan.validate()
    assert (peak_memory(plan, cost) <= cost.budget_bytes).all()


def test_a_wall_limit_may_be_asked_for():
    plan = plan_flexsp(np.array([20_000, 900, 900, 900]), published(), time_limit_s=0.5)
    plan.validate()


FEW = st.lists(st.integers(1, 30), min_size=1, max_size=9)


def every_cut(n, count):
    for inner in combinations(range(1, n), count - 1):
        yield list(pairwise((0, *inner, n)))


@given(FEW, st.data())
def test_the_largest_chunk_is_as_small_as_can_be(sizes, data):
    tokens = np.sort(sizes)[::-1]
    count = data.draw(st.integers(1, len(tokens)))
    chunks = blast(tokens, count)
    assert len(chunks) == count and all(len(chunk) for chunk in chunks)
    assert np.concatenate(chunks).tolist() == list(range(len(tokens)))
    best = min(max(tokens[a:b].sum() for a, b in edges) for edges in every_cut(len(tokens), count))
    assert max(tokens[chunk].sum() for chunk in chunks) == best


@given(FEW, st.data())
def test_of_equal_cuts_the_last_chunk_is_longest(sizes, data):
    tokens = np.sort(sizes)[::-1]
    count = data.draw(st.integers(1, len(tokens)))
    table = {0: [0] + [10**9] * len(tokens)}
    for chunk in range(1, count + 1):  # the published recurrence, first of equals
        row, found = [10**9], []
        for k in range(1, len(tokens) + 1):
            row.append(min((max(table[chunk - 1][j], tokens[j:k].sum()) for j in range(chunk - 1, k)), default=10**9))
            found.append(row[-1])
        table[chunk] = row
    end, edges = len(tokens), []
    for chunk in range(count, 0, -1):
        options = [max(table[chunk - 1][j], tokens[j:end].sum()) for j in range(chunk - 1, end)]
        start = chunk - 1 + int(np.argmin(options))
        edges.append((start, end))
        end = start
    assert [(int(chunk[0]), int(chunk[-1]) + 1) for chunk in blast(tokens, count)] == edges[::-1]


def test_fewest_chunks_stay_below_the_capacity():
    tokens = np.array([9, 5, 5, 4, 1])
    assert fewest_chunks(tokens, 100) == 1
    assert fewest_chunks(tokens, 24) == 2  # one chunk would fill it exactly
    assert fewest_chunks(tokens, 10) == 4
    assert fewest_chunks(np.array([10, 10]), 10) == 2  # a document may fill it: it cannot be cut


SIZES = st.lists(st.integers(1, 25), min_size=1, max_size=10)


def least_tokens(sizes, count):
    ordered = np.sort(sizes)
    cuts = (pairwise((0, *inner, len(ordered))) for inner in combinations(range(1, len(ordered)), count - 1))
    return min(sum(int(ordered[b - 1]) * (b - a) for a, b in edges) for edges in cuts)


def bucketed_tokens(sizes, found):
    return sum(max(sizes[k] for k in members) * len(members) for members in found)


@given(SIZES, st.integers(1, 5))
def test_bucketed_tokens_are_as_few_as_can_be(sizes, least):
    found = bucket(np.array(sizes), least, 10**6)
    assert len(found) == min(least, len(set(sizes)))
    assert bucketed_tokens(sizes, found) == least_tokens(sizes, min(least, len(sizes)))
    assert sorted(np.concatenate(found).tolist()) == list(range(len(sizes)))
    for lower, upper in pairwise(found):
        assert max(sizes[k] for k in lower) < min(sizes[k] for k in upper)


@given(SIZES, st.integers(0, 40))
def test_buckets_are_added_until_the_batch_fits(sizes, room):
    capacity = sum(sizes) + room
    found = bucket(np.array(sizes), 1, capacity)
    assert 2 * bucketed_tokens(sizes, found) <= sum(sizes) + capacity
    fewer = len(found) - 1
    assert fewer == 0 or 2 * least_tokens(sizes, fewer) > sum(sizes) + capacity


def test_blocks_of_rows_do_not_change_the_answer(monkeypatch):
    tokens = np.random.default_rng(0).integers(1, 10**6, 300)
    whole = bucket(tokens, 16, 10**12)
    monkeypatch.setattr(buckets, "ROWS", 7)
    again = bucket(tokens, 16, 10**12)
    assert all((one == other).all() for one, other in zip(again, whole, strict=True))
