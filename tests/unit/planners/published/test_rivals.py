"""Rivals: valid plans, small cases by hand, and what their publications promise."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqloom.api import cost_model
from seqloom.cost.memory import pipeline_limits
from seqloom.describe import ModelSpec
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Method
from seqloom.planners import RIVALS, make_plan, plan_batches
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.planners.published import balanced, chunkflow, megatron, rivals
from seqloom.planners.published.rivals import capacities
from seqloom.planners.registry import PLANNERS, PublishedClaim
from seqloom.schedules import Times, build_schedule, simulate_schedule
from seqloom.simulate import simulate

COST = cost_model("2x8xA800", "llama-7b", capacity=2_000)
ODD = cost_model("3x4xH100", "llama-7b", capacity=2_000)


def groups_of(plan):
    return [group for current in plan.pipelines[0].rounds for group in current.groups]


def places_of(rounds):
    return [[(place.ranks, sorted(place.documents)) for place in places] for places in rounds]


def tokens(*lengths):
    return np.array(lengths, dtype=np.int64)


@pytest.mark.parametrize("name", RIVALS)
@pytest.mark.parametrize("cost", [COST, ODD], ids=repr)
def test_plans_are_valid_and_the_same_again(name, cost):
    generator = np.random.default_rng(5)
    for count in (1, 7, 40):
        lengths = np.minimum(generator.lognormal(6.5, 1.3, count).astype(np.int64) + 1, 16_000)
        plan = make_plan(name, lengths, cost)
        assert plan.planner == name and plan.documents == tuple(lengths.tolist())
        assert plan.hash == make_plan(name, lengths, cost).hash
        assert simulate(plan, cost).step_ns > 0


CLAIMS = {name: spec.claim for name, spec in PLANNERS.items() if spec.claim}


def test_each_has_a_claim():
    assert set(CLAIMS) == {"flexsp", *RIVALS}


@pytest.mark.parametrize("name", RIVALS)
def test_what_no_gpu_holds_is_refused(name):
    with pytest.raises(SeqloomError, match="--max-length"):
        make_plan(name, np.array([10**8]), COST)
    if name in ("verl", "chunkflow"):  # their groups are Ulysses, for which that profile has constants
        return
    additive = cost_model("1x8xA100-40G", "gpt-7b", profile="flexsp-a100")
    with pytest.raises(SeqloomError, match="no constants for a group of ulysses 1 x ring"):
        make_plan(name, np.array([20_000, 20_000]), additive)


def test_auto_is_not_told_of_rivals(monkeypatch):
    seen = {}

    def auto(lengths, cost, *, seed, known=()):
        seen["known"] = [plan.planner for plan in known]
        return make_plan("adaptive", lengths, cost)

    monkeypatch.setattr("seqloom.planners.auto.plan_auto", auto)
    plan_batches(["te-cp", "adaptive", "auto"], [np.array([500, 400])], COST)
    assert seen["known"] == ["adaptive"]


def test_capacities_halve_from_memory_to_the_mean_load():
    assert capacities(tokens(4_000, 4_000), COST) == [2_000, 1_000, 500]
    assert capacities(tokens(30_000), COST) == [2_000]
    free = cost_model("2x8xA800", "llama-7b")
    held = {free.capacity(policy) for policy in free.policies}
    assert set(capacities(tokens(5), free, halved=False)) == held
    long = tokens(16 * max(held))
    assert capacities(long, free) == [max(held)]


# One group over everything.


def test_te_cp_is_one_ring_of_all_ranks_in_arrival_order():
    lengths = tokens(20_000, 15_000, 10, 16_000, 3_000)
    plan = make_plan("te-cp", lengths, COST)
    groups = groups_of(plan)
    assert [[span.document for span in group.spans] for group in groups] == [[0], [1, 2, 3], [4]]
    assert {(group.ranks, group.ulysses, group.ring, group.method) for group in groups} == {
        (tuple(range(16)), 1, 16, Method.RING)
    }
    gathered = groups_of(make_plan("llama-cp", lengths, COST))
    assert [group.spans for group in gathered] == [group.spans for group in groups]
    assert {group.method for group in gathered} == {Method.GATHER}


# Hybrid data parallelism.


def test_hybrid_dp_by_hand():
    lengths = tokens(250, 60, 40, 30, 90)
    work = lengths.astype(float) ** 2
    assert rivals.units(lengths, work, 100) == [([0], 3), ([4], 1), ([1, 2], 1), ([3], 1)]
    # 62,500 / 3 on ranks 0-2; then 8,100 and 5,200 on rank 3, which is behind; 900 there too: 14,200 < 20,833
    rounds = rivals.hand_out(lengths, work, 100, 4)
    assert places_of(rounds) == [[((0, 1, 2), [0]), ((3,), [4])], [((3,), [1, 2])], [((3,), [3])]]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=30))
def test_hybrid_dp_takes_the_fewest_ranks_and_gives_work_to_those_behind(sizes):
    lengths = tokens(*sizes)
    rounds = rivals.hand_out(lengths, lengths.astype(float), 100, 4)
    for places in rounds:
        ranks = [rank for place in places for rank in place.ranks]
        assert len(ranks) == len(set(ranks))
        for place in places:
            held = sum(sizes[k] for k in place.documents)
            assert len(place.ranks) == max(1, -(-held // 100))
    load = np.zeros(4)
    last = np.zeros(4)
    for place in (place for places in rounds for place in places):
        each = sum(sizes[k] for k in place.documents) / len(place.ranks)
        load[list(place.ranks)] += each
        last[list(place.ranks)] = np.maximum(last[list(place.ranks)], each)
    if all(size <= 100 for size in sizes):  # handed out one by one, so no rank is ahead by more than a unit
        assert load.max() - load.min() <= last.max() + 1e-9


# Megatron.


def test_megatron_by_hand():
    # 20 opens a pair (work 200 of at most 210); 8 and 8 open one rank each; 4 finds no token room and waits, then
    # has all ranks to itself
    rounds = megatron.micro_batches(tokens(8, 20, 4, 8), 10, 4)
    assert places_of(rounds) == [[((0, 1), [1]), ((2,), [0]), ((3,), [3])], [((0, 1, 2, 3), [2])]]
    # 10 opens one rank and reaches the cap of 105 with any partner; 9 opens another; 3 joins nobody (no room) and
    # takes a third; the first of the smallest groups is doubled onto the free one
    assert places_of(megatron.micro_batches(tokens(10, 9, 3), 10, 4)) == [[((0, 1), [0]), ((2,), [1]), ((3,), [2])]]


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.sampled_from([1, 4, 8, 12]))
def test_megatron_keeps_its_sizes_its_cap_and_no_rank_empty(sizes, ranks):
    lengths = tokens(*(min(size, 50 * ranks) for size in sizes))
    rounds = megatron.micro_batches(lengths, 50, ranks)
    assert sorted(k for places in rounds for place in places for k in place.documents) == list(range(len(sizes)))
    for places in rounds:
        assert [rank for place in places for rank in place.ranks] == list(range(ranks))
        tallest = max(int(lengths[k]) for place in places for k in place.documents)
        for place in places:
            size = len(place.ranks)
            assert size & (size - 1) == 0 or size == ranks
            held = lengths[list(place.documents)]
            assert held.sum() <= 50 * size
            if size & (size - 1) == 0:
                assert (held.astype(float) ** 2).sum() / size <= 1.05 * tallest * 50 + 1e-6


def test_megatron_hybrid_by_hand():
    # 30 needs all four ranks; after the barrier each 10 opens a rank, and the first doubles onto the free one
    rounds = megatron.balanced_rounds(tokens(30, 10, 10, 10), 10, 4)
    assert places_of(rounds) == [[((0, 1, 2, 3), [0])], [((0, 1), [1]), ((2,), [2]), ((3,), [3])]]
    # 8 and 6 open a rank each, 5 joins the 6: 61 beside 64 is level, but no smaller group was filled, so 2 joins too
    assert places_of(megatron.balanced_rounds(tokens(8, 6, 5, 2), 13, 2)) == [[((0,), [0]), ((1,), [1, 2, 3])]]


def test_megatron_hybrid_deals_as_the_released_scheduler():
    """SHA-256 of the documents of every rank, group after group, by `BalancedCPScheduler` of megatron-core 0.16.1."""
    digest = sha256()
    for seed in range(300):
        draw = Random(seed)
        ranks, capacity, count = draw.choice([2, 4, 8, 16]), draw.choice([50, 1000]), draw.randint(1, 60)
        sizes = [int(draw.lognormvariate(draw.choice([2, 3.5, 5, 6]), 1.2)) for _ in range(count)]
        lengths = tokens(*(max(1, min(size, capacity * ranks)) for size in sizes))
        waiting = np.argsort(-lengths, kind="stable").tolist()
        while waiting:
            groups, waiting = megatron.next_balanced(lengths, waiting, capacity, ranks)
            held = [group.documents for group, places in megatron.side_by_side(groups) for _ in places]
            digest.update(json.dumps(held).encode())
    assert digest.hexdigest() == "bd8f742392ced1410b4d632327c6f583516d7170a03f1c8ad44af66fce48e853"


# One size of groups, balanced by work.


def test_wlb_llm_by_hand():
    # 8 | 5; 4 goes to the 5 with less work; 3 fits neither there nor beside the 8, and is carried over
    lengths = tokens(8, 5, 4, 3)
    assert balanced.fill_by_work(lengths, lengths**2, [0, 1, 2, 3], 2, 10) == ([[0], [1, 2]], [3])
    assert balanced.equal_work_packs(lengths, lengths**2, 2, 10) == [[0], [1, 2], [3]]


def test_skrull_by_hand():
    # 2 | 3; 4 joins the 2; 9 fits nowhere whole, nor as halves beside 6: the 4 is cut too, then the 9 fits as halves
    lengths = tokens(2, 3, 4, 9)
    assert balanced.whole_or_cut(lengths, lengths**2, [0, 1, 2, 3], 2, 10) == ([[0], [1]], [2, 3])
    assert balanced.whole_or_cut(lengths, lengths**2, [0, 1, 2], 2, 10) == ([[0, 2], [1]], [])


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.sampled_from([1, 2, 4]))
def test_skrull_keeps_the_bucket_of_every_rank(sizes, ranks):
    lengths = tokens(*sizes)
    capacity = -(-int(lengths.sum()) // ranks)
    whole, cut = balanced.whole_or_cut(lengths, lengths**2, list(range(len(sizes))), ranks, capacity)
    assert sorted([*cut, *(document for own in whole for document in own)]) == list(range(len(sizes)))
    assert max(int(lengths[own].sum()) for own in whole) + -(-int(lengths[cut].sum()) // ranks) <= capacity


def test_verl_by_hand():
    # 18 tokens need two micro-batches of 10, which the largest differencing fills with 12 and 6: three then
    assert sorted(balanced.differencing_packs(tokens(6, 6, 6), 1, 10)[0]) == [[0], [1], [2]]
    # as many documents in each group, the heaviest with the lightest
    found = balanced.differencing_packs(tokens(9, 1, 5, 4), 2, 10)
    assert sorted(sorted(pack) for own in found for pack in own) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("name", ["wlb-llm", "skrull", "verl"])
def test_groups_have_one_size_and_hold_every_document_once(name):
    lengths = np.minimum(np.random.default_rng(3).lognormal(6.5, 1.3, 60).astype(np.int64) + 1, 16_000)
    plan = make_plan(name, lengths, COST)
    sizes = {len(group.ranks) for group in groups_of(plan)}
    assert len(sizes - {1}) <= 1
    for group in groups_of(plan):
        assert group.ranks[0] % len(group.ranks) == 0 and group.ranks[-1] - group.ranks[0] == len(group.ranks) - 1
    assert sorted(span.document for group in groups_of(plan) for span in group.spans) == list(range(60))


# ChunkFlow.


def test_chunkflow_by_hand():
    # the 25 in chunks of 10, 10 and 5; of the others, longest first, 7 and 3 fill a chunk, and 6 begins another
    spans = [[[(span.document, span.tokens) for span in part] for part in chain] for chain in chunked(6, 25, 3, 7)]
    assert spans == [[[(1, 10)], [(1, 10)], [(1, 5)]], [[(3, 7), (2, 3)]], [[(0, 6)]]]


def test_chunkflow_refuses_models_whose_tokens_see_later_ones():
    encoder = replace(ModelSpec.load("qwen2.5-0.5b"), causal=False)
    with pytest.raises(SeqloomError, match="is not causal: tokens of a chunk would see later chunks"):
        make_plan("chunkflow", tokens(500, 100), cost_model("1x4xH100", encoder))


def test_chunkflow_asks_for_a_number_of_stages_where_the_usual_ones_do_not_divide_the_ranks():
    cost = cost_model("1x3xH100", "qwen2.5-0.5b")
    with pytest.raises(SeqloomError, match="cannot be cut into 2, 4 or 8 stages"):
        make_plan("chunkflow", tokens(500, 100), cost)
    assert len(make_plan("chunkflow:3", tokens(500, 100), cost).pipelines[0].stages) == 3


def test_chunkflow_by_the_papers_example():
    """Documents of 1, 1, 2 and 4 units on four stages: 57.1 % bubble whole, 47.8 % in chunks of 2 that are all kept."""
    whole = build_schedule("1f1b", 4, 4)
    times = np.tile([4, 2, 1, 1], (4, 1))
    assert simulate_schedule(whole, Times(times, times, times)).bubble == pytest.approx(0.571, abs=5e-4)
    chains = [len(chain) for chain in chunkflow.chunked(tokens(1, 1, 2, 4), 2)]
    assert chains == [2, 1, 1]
    bubbles = []
    for order in (chains[::-1], chains):  # the paper's order; longest first, as here, is equal chunks without a chain
        made = build_schedule("seq1f1b", 4, len(order), order, 1)
        bubbles.append(simulate_schedule(made, Times.uniform(made)).bubble)
    assert bubbles == pytest.approx([0.478, 0.4286], abs=5e-4)


def chunked(*lengths):
    return chunkflow.chunked(tokens(*lengths), 10)


def test_chunkflow_keeps_the_last_chunks_of_a_document_and_forwards_the_others_again():
    cost = cost_model("1x4xH100", "llama-3b", max_length=40_000)
    layout = StageLayout.of(cost, 2)
    limits = pipeline_limits(cost, layout.ranges_by_pp_rank, layout.shard_group_size(cost))
    lengths, peaks = tokens(32_000, 4_000, 3_000), []
    for kept in (1, 2, None):
        plan = chunkflow.chunk_plan(lengths, cost, layout, limits, 8_000, kept)
        stored = [
            work.checkpoint == Checkpoint.NONE for work in (each.by_stage[0] for each in plan.pipelines[0].rounds)
        ]
        assert stored == [kept is None or number >= 4 - kept for number in range(4)] + [True]
        peaks.append(int(simulate(plan, cost).peak_memory.max()))
    assert peaks == sorted(set(peaks))


# Claims.


def test_a_claim_is_validated_only_where_it_is_met():
    claim = PublishedClaim("te-cp", 2.0, 0.2, {"a": 2.3, "b": 2.5}, "on 8 GPUs")
    assert [claim.validated(profile) for profile in "abc"] == [True, False, False]
    assert claim.verdict("a") == "validated: 2.30x under profile a, on 8 GPUs; published 2.00x over te-cp"
    assert "not tried" in claim.verdict("c")
    assert not PublishedClaim(remark="nothing").validated("a")


def test_claims_are_those_of_the_committed_results():
    results = Path(__file__).parents[4] / "benchmarks" / "results"
    solver = json.loads((results / "flexsp_cells.json").read_text())["figures"]["flexsp"]
    assert CLAIMS["flexsp"].ratio == solver["published"]
    assert CLAIMS["flexsp"].measured == {"flexsp-a100": round(solver["static_over_flexsp"], 2)}
    figures = json.loads((results / "zeppelin.json").read_text())["figures"]
    found = {
        device.lower(): round(figures["validation"][f"cluster {cluster}"]["found"], 2)
        for cluster, device in figures["clusters"].items()
    }
    assert CLAIMS["zeppelin"].measured == found, "bench_zeppelin.py was run again: enter its means in registry.py"
    assert CLAIMS["zeppelin"].ratio == figures["validation"]["all cells"]["published"]
