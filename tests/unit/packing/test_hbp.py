"""Hierarchical balance packing: greedy fill against plain lists, levels against all other ways, steps, their order."""

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest

from seqloom.cost import GroupShape
from seqloom.describe import sample
from seqloom.errors import SeqloomError
from seqloom.packing import cheapest_level, choose_levels, hbp, plain_packing
from seqloom.packing.hbp import cut_into_steps, running_order
from seqloom.packing.levels import PackingLevel, level_lengths, level_sets, packs_per_step
from seqloom.planners.loops import fill_packs, least_loaded
from seqloom.simulate import predicted_ns
from support.strategies import roomy_cost_model

COST = roomy_cost_model("1x8xA100-40G", "gpt-7b", "flexsp-a100", "full", 1)
LENGTHS = sample("commoncrawl", 400, seed=3, max_length=40_000)
BUDGET = 160_000


# -- fill ---------------------------------------------------------------------------------------------------------


def filled(sizes, room, low, per_step):
    """Packs that the loop makes of ascending sizes, and the documents that it leaves."""
    sizes = np.array(sizes)
    upto = np.searchsorted(sizes, np.arange(sizes[-1] + 1), side="right")
    out = np.full(len(sizes), -1)
    made = fill_packs(sizes, upto, np.arange(len(sizes) + 1), room, low, per_step, 0, out)
    packs = [sorted(sizes[out == pack].tolist(), reverse=True) for pack in range(made)]
    return packs, sorted(sizes[out < 0].tolist())


def plainly_filled(sizes, room, low, per_step):
    """The same with a list that documents are taken from."""
    waiting, own, packs = sorted(sizes, reverse=True), len(sizes) - low, []
    while own > 0 or (waiting and len(packs) % per_step):
        packs.append([])
        for size in list(waiting):
            if size <= room - sum(packs[-1]):
                packs[-1].append(size)
                waiting.remove(size)
        own -= sum(size >= sizes[low] for size in packs[-1]) if low < len(sizes) else 0
    return packs, sorted(waiting)


def fewest_packs(sizes, room):
    """The least number of packs, by trying everything."""

    def search(left, packs, best):
        if not left:
            return min(best, len(packs))
        if len(packs) >= best:
            return best
        for k in {packs.index(used) for used in packs if used + left[0] <= room}:
            best = search(left[1:], [*packs[:k], packs[k] + left[0], *packs[k + 1 :]], best)
        return search(left[1:], [*packs, left[0]], best)

    return search(sorted(sizes, reverse=True), [], len(sizes) + 1)


def test_greedy_fill_on_every_tiny_case():
    for count in range(1, 6):
        for sizes in combinations_with_replacement((1, 2, 3, 5), count):
            for low in {0, *(k for k in range(1, count) if sizes[k] > sizes[k - 1])}:
                for room, per_step in ((5, 1), (6, 2), (8, 3)):
                    packs, left = filled(sizes, room, low, per_step)
                    assert (packs, left) == plainly_filled(list(sizes), room, low, per_step)
                    assert not left or left[-1] < sizes[low]  # none of the level's own
                    assert not left or len(packs) % per_step == 0  # whole steps while shorter ones are left
                    assert all(room - sum(pack) < min(left, default=room) for pack in packs)  # nothing left would fit
            assert 9 * len(filled(sizes, 6, 0, 1)[0]) <= 11 * fewest_packs(sizes, 6) + 6


# -- levels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["full", "none"])
@pytest.mark.parametrize(("tokens", "budget"), [(2048, 2048 * 24), (24_000, 48_000)])
def test_a_level_is_run_in_the_cheapest_of_all_ways(sharding, tokens, budget):
    cost = roomy_cost_model("2x4xH100", "qwen3-0.6b", None, sharding, 0)
    level = cheapest_level([tokens], np.array([tokens]), cost, budget)
    times = {}
    for policy in cost.policies:
        for shape in cost.shapes:
            if tokens <= shape.degree * cost.capacity(policy):
                packs, _ = packs_per_step(tokens, shape.degree, cost, budget)
                own = hbp([tokens] * packs, cost, budget, levels=[PackingLevel(tokens, shape, policy, packs, 0)])
                assert own.steps == 1
                times[shape, policy] = 1000 * predicted_ns(own.plan(0), cost) // (packs * tokens)
    assert level.token_ps == times[level.shape, level.policy] == min(times.values())


def test_packs_are_as_long_as_the_step_and_the_memory_allow():
    capacity = max(COST.capacity(policy) for policy in COST.policies)
    for tokens, budget in ((1024, 8 * 1500), (1024, 10**6), (3072, 7 * 3072)):
        level = cheapest_level([tokens], np.array([512]), COST, budget)
        packs, _ = packs_per_step(tokens, level.shape.degree, COST, budget)
        longest = min(level.shape.degree * capacity, budget // packs)
        assert level.packs == packs and tokens <= level.tokens <= longest < level.tokens + COST.pad_multiple


def test_steps_have_nearly_all_of_their_tokens():
    cost = roomy_cost_model("4x8xH100", "llama3-8b", None, "full", 3)
    packing = hbp(sample("commoncrawl", 4000, seed=0, max_length=100_000), cost, 1 << 20)
    full = [level.packs * level.tokens for level in packing.levels]
    assert min(full) > 0.9 * (1 << 20) and max(full) <= 1 << 20
    assert packing.steps <= 1.05 * packing.lengths.sum() / (1 << 20) + 2


def test_levels_are_those_of_the_rule():
    lengths = level_lengths(LENGTHS, COST, BUDGET)
    assert lengths == sorted(set(lengths)) and lengths[-1] >= COST.padded_lengths(LENGTHS).max() > lengths[-2]
    sets = list(level_sets(LENGTHS, COST, BUDGET))
    assert len(sets[0]) == 1 and len(set(sets)) == len(sets) <= 2 ** (len(lengths) - 1)
    for levels in sets:
        assert levels[-1].tokens >= COST.padded_lengths(LENGTHS).max()
        assert all(level.packs * level.tokens <= BUDGET and level.tokens % COST.pad_multiple == 0 for level in levels)
        assert all(a.tokens < b.tokens for a, b in pairwise(levels))
    assert max(sets, key=len)[0].shape == GroupShape(1, 1)  # short documents need no communication


def test_the_levels_with_the_least_time_are_taken():
    times = {
        levels: hbp(LENGTHS, COST, BUDGET, levels=levels).step_ns.sum() for levels in level_sets(LENGTHS, COST, BUDGET)
    }
    assert len(times) > 1
    assert (
        times[choose_levels(LENGTHS, COST, BUDGET)] == min(times.values()) == hbp(LENGTHS, COST, BUDGET).step_ns.sum()
    )


def test_short_documents_have_one_level_whose_packs_are_longer_than_they_are():
    (level,) = choose_levels(np.full(500, 128), COST, BUDGET)
    assert level.tokens > 128 and level.shape == GroupShape(1, 1)


def test_what_no_level_holds_is_refused():
    with pytest.raises(SeqloomError, match=r"sequence 1 has 10000000 tokens.*--max-length \d+"):
        hbp([5, 10**7], COST, 10**8)
    with pytest.raises(SeqloomError, match=r"sequence 1 has 40000 tokens, more than the 30000 of a step; raise"):
        hbp([5, 40_000], COST, 30_000)
    with pytest.raises(SeqloomError, match="give 1 or more"):
        plain_packing([5], COST, 0)
    with pytest.raises(SeqloomError, match="short steps first"):
        hbp([5], COST, 1000, short_first=-1)
    with pytest.raises(SeqloomError, match="empty"):
        hbp([], COST, 1000)
    short = cheapest_level([1024], np.array([512]), COST, BUDGET)
    for levels in ([], [short], [short, short]):
        with pytest.raises(SeqloomError, match="the last of at least 3072"):
            hbp([3000], COST, BUDGET, levels=levels)
    for shape in (GroupShape(1, 1), GroupShape(7, 1)):
        with pytest.raises(SeqloomError, match=f"on groups of shape {shape}, which hold"):
            hbp([3000], COST, BUDGET, levels=[short._replace(tokens=10**6, shape=shape)])
    with pytest.raises(SeqloomError, match="9 packs of 1024 tokens in a step of 8000"):
        hbp([900], COST, 8000, levels=[short._replace(packs=9)])
    with pytest.raises(SeqloomError, match=r"raise the tokens per step to 128$"):
        hbp([5], COST, 100)


# -- steps --------------------------------------------------------------------------------------------------------


def test_consecutive_packs_by_work_make_a_step_and_the_rest_its_own():
    level = cheapest_level([1024], np.array([512]), COST, BUDGET)
    levels = [level._replace(packs=2), level._replace(packs=3)]
    steps = cut_into_steps(np.array([5, 9, 1, 7, 3, 100]), np.array([0, 0, 0, 0, 0, 1]), levels)
    assert [(index, packs.tolist()) for index, packs in steps] == [(0, [1, 3]), (0, [0, 2]), (0, [4]), (1, [5])]


def test_levels_alternate_in_proportion_after_short_ones():
    levels = np.repeat([0, 1, 2], [30, 10, 2])
    order = running_order(levels, short_first=0, seed=0)
    assert sorted(order.tolist()) == list(range(42))
    for level in range(3):
        so_far = np.cumsum(levels[order] == level)
        due = np.arange(1, 43) * (levels == level).sum() / 42
        assert np.abs(so_far - due).max() < 2
    first = running_order(levels, short_first=12, seed=0)
    assert not levels[first[:12]].any() and levels[first[12:]].any() and sorted(first.tolist()) == list(range(42))
    assert not levels[running_order(levels, short_first=99, seed=0)[:30]].any()  # as far as there are any
    assert running_order(levels, short_first=0, seed=1).tolist() != order.tolist()


def test_documents_of_a_part_step_go_to_the_pack_with_the_least():
    found = np.empty(4, np.int64)
    sizes = np.array([5, 4, 3, 1])
    assert least_loaded(sizes, sizes, 7, 2, False, found) == 7 and found.tolist() == [0, 1, 1, 0]
    assert least_loaded(np.array([5, 4, 4]), np.array([5, 4, 4]), 7, 2, False, found) == -1


def test_the_last_step_is_even():
    """Packs that are not full come last, and share their documents evenly."""
    packing = hbp([1000] * 100, COST, BUDGET)
    counts = [[len(pack) for pack in packing.packs(step)] for step in range(packing.steps)]
    assert all(max(count) - min(count) <= 1 for count in counts)


def test_plain_packing_keeps_the_order_of_the_data():
    packing = plain_packing(LENGTHS, COST, BUDGET)
    assert len(packing.levels) == 1
    firsts = [int(pack[0]) for step in range(packing.steps) for pack in packing.packs(step)]
    assert firsts == sorted(firsts)


def test_it_is_faster_than_plain_packing_where_nodes_are_far_apart():
    cost = roomy_cost_model("8x8xA100-40G", "gpt-7b", "flexsp-a100", "full", 1)
    lengths = sample("commoncrawl", 3000, seed=3, max_length=100_000)
    packed, plain = hbp(lengths, cost, 400_000), plain_packing(lengths, cost, 400_000)
    assert 1.2 * packed.step_ns.sum() < plain.step_ns.sum()
    assert 2 * packed.balance.attention < plain.balance.attention
    assert packed.balance.communication < plain.balance.communication == 1


@pytest.mark.parametrize("cluster", ["1x4xH100", "2x2xH100"])
def test_free_sharding_adds_what_is_not_hidden_of_its_moves(cluster):
    cost = roomy_cost_model(cluster, "qwen3-0.6b", None, "free", 0)
    packing = hbp(sample("commoncrawl", 60, seed=1, max_length=8000), cost, 30_000)
    assert packing.steps > 2
    for step in range(packing.steps):
        assert packing.step_ns[step] == predicted_ns(packing.plan(step), cost)


def test_a_step_that_is_not_there():
    with pytest.raises(SeqloomError, match=r"choose 0 .. 0"):
        hbp([5], COST, 1000).plan(1)
