"""Planner `pipeline`: valid plans within memory, never slower than the strict orders, above the bound; refusals."""

import re
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel, MemoryPolicy, Profile
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.layout import Span
from seqloom.plan import ActionKind, Checkpoint, Group, Reduce
from seqloom.planners import make_plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.explain import explain
from seqloom.planners.pipeline import plan_pipeline, stage_layers
from seqloom.planners.pipeline.planner import Candidate, PipelineSearch, chunk_counts
from seqloom.planners.pipeline.recompute_offload import ActivationMemory, ActivationPolicy, MicroBatchCosts
from seqloom.planners.pipeline.stage_layout import StageLayout
from seqloom.planners.zones import plan_zones
from seqloom.simulate import predicted_ns, simulate
from seqloom.simulate.microbatch import MicroBatchKey, price

KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)


@cache
def cost_of(cluster="2x4xH100", sharding="full", budget=None, layers=8, vocabulary=32000, own=()):
    model = ModelSpec("small", layers, 2048, 16, 4, 128, 8192, True, vocabulary, False)
    sizes = {"sharding": sharding, "budget_gib": budget, "max_length": 65536}
    profile = replace(Profile.load("h100"), **dict(own))
    return CostModel(Cluster.parse(cluster), model, profile, **sizes, stages=8)


def lengths_of(seed, count=24, longest=40_000):
    random = np.random.default_rng(seed)
    return np.clip(random.lognormal(7.2, 1.4, count).astype(np.int64), 16, longest)


batches = st.lists(st.integers(1, 30_000), min_size=1, max_size=14).map(np.array)
MEMORIES = [("full", None), ("full", 9.0), ("hybrid", 11.0), ("none", None), ("none", 11.0)]
"""Sharding and GiB per rank."""
layouts = st.sampled_from([(2, 1), (4, 1), (2, 2), (8, 1)])


@settings(max_examples=15)
@given(batches, layouts, st.sampled_from(MEMORIES))
def test_plans_are_valid_repeatable_within_memory_and_above_the_bound(lengths, layout, memory):
    cost, (stages, chunks) = cost_of(sharding=memory[0], budget=memory[1]), layout
    plan = plan_pipeline(lengths, cost, stages=stages, chunks=chunks)
    plan.validate()
    assert plan == plan_pipeline(lengths, cost, stages=stages, chunks=chunks)
    assert plan.documents == tuple(lengths.tolist()) and len(plan.pipelines[0].ranks_by_pp_rank) == stages
    found = simulate(plan, cost)
    assert int(found.peak_memory.max()) <= cost.budget_bytes
    assert found.step_ns == predicted_ns(plan, cost) >= plan_bound(plan, cost) > 0


@settings(max_examples=8)
@given(batches, st.sampled_from([2, 4]), st.sampled_from([None, 8.7]))
def test_never_slower_than_the_fixed_schedules(lengths, stages, budget):
    cost = cost_of(budget=budget)
    ours = predicted_ns(plan_pipeline(lengths, cost, stages=stages), cost)
    for schedule in ("1f1b", "seq1f1b"):
        assert ours <= predicted_ns(plan_pipeline(lengths, cost, stages=stages, schedule=schedule), cost)


@pytest.mark.parametrize("schedule", ["auto", "balanced", "interleaved", "zb-v"])
@pytest.mark.parametrize("seed", [1, 2])
def test_auto_takes_the_fastest_number_of_chunks(schedule, seed):
    cost, lengths, times = cost_of(), lengths_of(seed, longest=6_000), {}
    for chunks in (1, 2, 4):
        with suppress(SeqloomError):
            plan = plan_pipeline(lengths, cost, stages=2, chunks=chunks, schedule=schedule)
            times[chunks] = predicted_ns(plan, cost)
    best = plan_pipeline(lengths, cost, stages=2, chunks="auto", schedule=schedule)
    assert predicted_ns(best, cost) == min(times.values()) and len(best.pipelines[0].stages) % 2 == 0
    assert list(times) == {"interleaved": [2, 4], "zb-v": [2]}.get(schedule, [1, 2, 4])


def test_chunks_need_layers_and_a_number():
    cost, lengths = cost_of(layers=8), lengths_of(1, longest=6_000)
    assert chunk_counts(cost, 2) == [1, 2, 4] and chunk_counts(cost, 4) == [1, 2] and chunk_counts(cost, 8) == [1]
    assert chunk_counts(cost, 3) == chunk_counts(cost, 8, "zb-v") == [1]  # refused where they are planned with
    assert len(plan_pipeline(lengths, cost, stages=8, chunks="auto").pipelines[0].stages) == 8
    with pytest.raises(SeqloomError, match="3 stages on 8 ranks"):
        plan_pipeline(lengths, cost, stages=3, chunks="auto")
    with pytest.raises(SeqloomError, match=r"a pipeline of 1 stage: .* take planner pieces"):
        make_plan("pipeline:1", lengths, cost)
    for chunks in ("two", 1.5, True):
        with pytest.raises(SeqloomError, match=re.escape(f"chunks {chunks!r}; give 1, 2, 4, ... or 'auto'")):
            plan_pipeline(lengths, cost, stages=2, chunks=chunks)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "terapipe", "seq1f1b", "seq1f1b-zb", "balanced"])
def test_every_schedule_by_name(schedule):
    cost, lengths = cost_of(), lengths_of(3)
    plan = plan_pipeline(lengths, cost, stages=4, schedule=schedule)
    plan.validate()
    pieces = sum(len(group.spans) for r in plan.pipelines[0].rounds for group in r.by_stage[0].groups) - len(lengths)
    assert (pieces > 0) == (schedule in ("terapipe", "seq1f1b", "seq1f1b-zb", "balanced"))


@pytest.mark.parametrize("order", ["interleaved", "zb-v", "seq1f1b-i", "balanced"])
def test_two_stages_per_pp_rank(order):
    plan = plan_pipeline(lengths_of(3), cost_of(), stages=4, chunks=2, schedule=order)
    plan.validate()
    turn = [plan.pipelines[0].pp_rank_of(stage) for stage in range(8)]
    assert turn == ([0, 1, 2, 3, 3, 2, 1, 0] if order == "zb-v" else [0, 1, 2, 3] * 2)


def test_the_longest_document_has_as_many_pieces_as_asked_for():
    plan = plan_pipeline(np.array([30_000, 200, 300]), cost_of(), stages=4, pieces=5)
    spans = [span for r in plan.pipelines[0].rounds for span in r.by_stage[0].spans() if span.document == 0]
    assert len(spans) == 5
    tokens = [span.tokens for span in spans]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] > tokens[-1]  # late tokens cost more


@pytest.mark.parametrize(("layers", "pp_size", "vocabulary"), list(product([8, 11], [2, 3, 4], [1000, 256_000])))
def test_layers_balance_the_slowest_stage(layers, pp_size, vocabulary):
    """Against all ways to cut the layers."""
    cost = cost_of(cluster="1x12xH100", layers=layers, vocabulary=vocabulary)
    one = Group((0,), 1, 1, (Span(0, 0, 8192),))
    parts = cost.group_cost(one, MemoryPolicy(Checkpoint.NONE, Reduce.STEP, resident=True))

    def slowest(counts):
        own = [count * (parts.total_ns - parts.head) / layers for count in counts]
        return max(*own[:-1], own[-1] + parts.head)

    every = [c for c in product(range(1, layers + 1), repeat=pp_size) if sum(c) == layers]
    assert slowest(stage_layers(cost, pp_size)) == pytest.approx(min(map(slowest, every)))


def search_of(cost, stages, lengths):
    return PipelineSearch(cost, StageLayout.of(cost, stages), lengths, ("seq1f1b",))


@pytest.mark.parametrize("seed", range(3))
def test_no_micro_batch_holds_more_than_a_rank_may(seed):
    """Where capacity is tight, and no size around the best may go beyond it."""
    cost = CostModel(Cluster.parse("1x4xH100"), cost_of().model, sharding="none", capacity=3000, max_length=65536)
    plan_pipeline(lengths_of(seed, longest=6000), cost, stages=4).validate()


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 24), min_size=1, max_size=6), st.integers(1, 12), st.sampled_from([(2, 2), (4, 4), (4, 2)])
)
def test_nor_where_a_token_takes_no_time_to_speak_of(lengths, capacity, ranks):
    """Pieces of equal time are then of any length; a model of hidden size 8, and a capacity of a few tokens."""
    ranks, stages = ranks
    model = ModelSpec("smallest", 4, 8, 1, 1, 8, 16, True, 32, False)
    cost = CostModel(Cluster.parse(f"1x{ranks}xCPU"), model, capacity=capacity, stages=stages)
    plan = plan_pipeline(np.array(lengths), cost, stages=stages)
    plan.validate()
    assert plan.documents == tuple(lengths)


def test_a_number_of_pieces_is_not_refused_for_many_documents():
    plan = plan_pipeline(np.full(80, 1024), cost_of("1x2xH100"), stages=2, schedule="1f1b", pieces=1)
    assert len(plan.pipelines[0].rounds) == 80


POLICIES = [
    ActivationPolicy(Checkpoint.NONE),
    ActivationPolicy(Checkpoint.SELECTIVE),
    ActivationPolicy(Checkpoint.FULL, offload=True),
]


@pytest.mark.parametrize("sharding", ["full", "none"])
@pytest.mark.parametrize("policy", POLICIES)
def test_micro_batches_are_priced_as_the_simulator_prices_them(sharding, policy):
    """Except stages whose groups share no shard group: the planner lets the micro-batch wait for its longest group."""
    own = (("piece_us", 40.0), ("prefix_us", 2.0), ("split_us", 50.0))
    cost, lengths = cost_of(sharding=sharding, own=own), lengths_of(7)
    search = search_of(cost, 4, lengths)
    made = list(search._sizes(0))[-1]
    costs = MicroBatchCosts(cost, search.layout, made, lengths, search.policies)
    times = costs.times_under(policy)
    choice = np.full(times.forward.shape, search.policies.index(policy))
    schedule = search._candidate("seq1f1b", ActivationMemory(costs, search.limits), 0, 1).schedule
    windows = price(search.plan(Candidate(made, schedule, choice, 0, 0.0)), cost)
    for stage, unit in product(range(4), range(len(made.units))):
        window = windows[MicroBatchKey(0, stage, unit)]
        longest = window.length.argmax()
        found = [int(window.action(kind).duration[longest]) for kind in KINDS]
        assert found == [
            int(column[stage, unit]) for column in (times.forward, times.backward_input, times.split_weight)
        ]


def test_activation_memory_is_what_the_simulator_finds():
    cost, lengths = cost_of(cluster="1x4xH100"), lengths_of(5)
    search = search_of(cost, 4, lengths)
    for made in search._sizes(0):
        memory = ActivationMemory(MicroBatchCosts(cost, search.layout, made, lengths, search.policies), search.limits)
        candidate = search._candidate("seq1f1b", memory, 0, 1)
        peak = simulate(search.plan(candidate), cost).peak_memory
        state = cost.budget_bytes - np.array(memory.free)
        expected = state + np.array(memory.peaks(candidate.schedule, candidate.choice))
        assert np.abs(peak - expected).max() <= 2 * len(made.units)  # bytes: rounding up, one by one


@pytest.mark.parametrize(("budget", "seed"), [(None, 1), (None, 2), (9.0, 3), (9.0, 4), (7.0, 5)])
def test_what_is_not_tried_is_not_missed(monkeypatch, budget, seed):
    """Micro-batches that take too long even without waiting, and those tried before, change nothing in any memory."""
    cost, trying = cost_of(cluster="1x4xH100", budget=budget), PipelineSearch._try
    drawn = np.exp(np.random.default_rng(seed).normal(7.5, 1.2, 12)).astype(np.int64)
    batch, stages = np.clip(drawn, 1, 30_000), 2 + 2 * (seed % 2)
    counts = []

    def counted(search, *given, **named):
        counts[-1] += 1
        return trying(search, *given, **named)

    def counted_anew(search, *given, **named):
        search._tried.clear()
        return counted(search, *given, **named)

    plans = []
    for near, tries in ((101, counted), (10**9, counted_anew)):
        counts.append(0)
        monkeypatch.setattr("seqloom.planners.pipeline.planner.NEAR_PERCENT", near)
        monkeypatch.setattr(PipelineSearch, "_try", tries)
        plans.append(plan_pipeline(batch, cost, stages=stages).hash)
    assert plans[0] == plans[1] and counts[0] < counts[1]


def test_documents_that_fit_whole_on_no_stage_go_through_in_pieces_and_store_less():
    cost = cost_of(cluster="1x4xH100", budget=7.0)
    plan = plan_pipeline(np.array([30_000, 5_000, 900]), cost, stages=4)
    checkpoints = {work.checkpoint for r in plan.pipelines[0].rounds for work in r.by_stage}
    assert len(plan.pipelines[0].rounds) > 3 and checkpoints - {Checkpoint.NONE}
    assert int(simulate(plan, cost).peak_memory.max()) <= cost.budget_bytes


def test_a_document_too_long_is_refused_with_what_fits():
    cost = cost_of(cluster="1x2xH100", budget=9.0)
    with pytest.raises(SeqloomError, match=r"sequence 1 has 9000000 tokens.*--max-length \d+") as caught:
        plan_pipeline(np.array([10, 9_000_000]), cost, stages=2)
    fits = int(re.search(r"--max-length (\d+)", str(caught.value))[1])
    plan_pipeline(np.array([10, fits]), cost, stages=2).validate()


REFUSED = {
    "9 stages for the 8 layers": dict(stages=9),
    "use at most 4 stages or 1 chunks": dict(stages=8, chunks=2),
    "3 stages on 8 ranks.*use 2 stages": dict(stages=3),
    "0 stages": dict(stages=0),
    "unknown schedule 'seq1f1'.*seq1f1b": dict(stages=2, schedule="seq1f1"),
    "1f1b with 2 chunks": dict(stages=2, chunks=2, schedule="1f1b"),
    "0 pieces.*give 1 to 900": dict(stages=2, pieces=0),
    "901 pieces": dict(stages=2, pieces=901),
    "add up to the 8 layers": dict(stages=2, layers=[4, 5]),
    "need 2 numbers": dict(stages=2, layers=[8]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_bad_input_is_refused_with_the_way_out(message):
    with pytest.raises(SeqloomError, match=message):
        plan_pipeline(np.array([900, 40]), cost_of(), **REFUSED[message])


def test_a_model_that_no_stage_holds_is_refused():
    with pytest.raises(SeqloomError, match=r"stage 1 needs .* GiB.*raise the budget above"):
        plan_pipeline(np.array([900]), cost_of(cluster="1x2xH100", budget=6.5), stages=2)


def test_without_a_number_the_best_of_several_is_taken():
    cost, lengths = cost_of(), lengths_of(1)
    best = predicted_ns(make_plan("pipeline", lengths, cost), cost)
    assert best == min(predicted_ns(make_plan(f"pipeline:{n}", lengths, cost), cost) for n in (2, 4, 8))
    with pytest.raises(SeqloomError, match="give their number"):
        make_plan("pipeline", lengths, cost_of(cluster="1x3xH100"))


def test_stages_have_whole_tensor_groups():
    cost = CostModel(Cluster.parse("8xH100"), ModelSpec.load("qwen3-0.6b"), sharding="free").for_submesh(4, 2)
    plan = plan_pipeline(np.array([3000, 9000, 500]), cost, stages=2, schedule="1f1b")
    plan.validate()
    assert {stage.tensor for stage in plan.pipelines[0].stages} == {2}
    with pytest.raises(SeqloomError, match=r"4 stages on 4 ranks.*whole tensor groups of 2; use 2 stages"):
        plan_pipeline(np.array([3000]), cost, stages=4)
    zones = plan_zones(np.array([3000, 200]), cost)
    zones.validate()
    assert {group.ulysses % 2 for current in zones.pipelines[0].rounds for group in current.groups} == {0}
    with pytest.raises(SeqloomError, match="splits weights over ranks cannot be explained"):
        explain(make_plan("static:2", np.array([3000]), cost), cost)


def test_documents_whose_tokens_see_later_pieces_are_refused():
    cost = CostModel(Cluster.parse("1x8xH100"), replace(ModelSpec.load("qwen3-0.6b"), causal=False), stages=2)
    for planner in ("pipeline", "pipeline:2"):
        with pytest.raises(SeqloomError, match=r"qwen3-0.6b, which is not causal: it cuts .* plan whole documents"):
            make_plan(planner, np.array([3000, 100]), cost)
