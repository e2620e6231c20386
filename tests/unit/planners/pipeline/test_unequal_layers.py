"""Layers that differ: each has its own time, stages are level by it; planner, simulator and bound price it alike."""

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqloom.cost import CostModel, MemoryPolicy
from seqloom.cost.memory import kv_cache_bytes
from seqloom.cost.shapes import COST_COLUMNS
from seqloom.describe import Cluster, ModelSpec
from seqloom.layout import Span
from seqloom.plan import ActionKind, Checkpoint, Group, LayerRange, Reduce
from seqloom.planners.bounds import plan_bound
from seqloom.planners.pipeline import plan_pipeline, stage_layers
from seqloom.planners.pipeline.planner import Candidate, PipelineSearch
from seqloom.planners.pipeline.recompute_offload import ActivationMemory, ActivationPolicy, MicroBatchCosts
from seqloom.planners.pipeline.stage_layout import StageLayout, level_layers
from seqloom.simulate import predicted_ns, simulate
from seqloom.simulate.microbatch import MicroBatchKey, price

KINDS = (ActionKind.F, ActionKind.I, ActionKind.W)
LAYERS = 12
NONE = MemoryPolicy(Checkpoint.NONE, Reduce.STEP, resident=True)
SIZES = {"layers": LAYERS, "hidden": 1024, "heads": 8, "kv_heads": 4, "head_dim": 128, "vocabulary": 32_000}
DENSE = ModelSpec("dense", **SIZES, ffn=4096, gated=True, tied=False)
EXPERTS = {"experts": 16, "active_experts": 2, "expert_ffn": 1024, "shared_ffn": 512}
SCANS = {"mixer_parameters": 4 << 20, "mixer_values": 8192, "mixer_flops": 1 << 16, "mixer_heads": 8}
MODELS = {
    "windows": replace(DENSE, windows=tuple(None if layer % 6 == 5 else 512 for layer in range(LAYERS))),
    "dense first": replace(DENSE, **EXPERTS, moe_layers=tuple(range(3, LAYERS))),
    "hybrid": replace(
        DENSE,
        windows=tuple(None if layer % 4 == 3 else 0 for layer in range(LAYERS)),
        mixer_layers=tuple(layer for layer in range(LAYERS) if layer % 4 != 3),
        **SCANS,
    ),
}
kinds = st.sampled_from(sorted(MODELS))


@cache
def cost_of(kind, cluster="1x8xH100"):
    return CostModel(Cluster.parse(cluster), MODELS[kind], max_length=65_536, stages=8)


def table_of(cost, spans, ranks=2):
    return cost.group_costs([Group(tuple(range(ranks)), ranks, 1, tuple(spans))], NONE)


@given(
    st.lists(st.integers(1, 50), min_size=4, max_size=9),
    st.integers(2, 4),
    st.integers(0, 60),
)
def test_no_cut_is_more_level(times, stages, head):
    counts = level_layers(times, range(stages), head)

    def slowest(edges):
        loads = [sum(times[first:stop]) for first, stop in pairwise((0, *edges, len(times)))]
        return max(*loads[:-1], loads[-1] + head)

    every = [slowest(edges) for edges in combinations(range(1, len(times)), stages - 1)]
    assert sum(counts) == len(times) and min(counts) >= 1
    assert slowest(np.cumsum(counts)[:-1].tolist()) == min(every)


@given(st.lists(st.integers(1, 50), min_size=8, max_size=14), st.integers(0, 60), st.booleans())
def test_of_several_stages_per_pp_rank_no_layer_is_better_one_stage_on(times, head, v_shape):
    pp_ranks = (0, 1, 1, 0) if v_shape else (0, 1, 0, 1)
    edges = np.cumsum([0, *level_layers(times, pp_ranks, head)]).tolist()

    def slowest(edges):
        loads = [0, 0]
        for pp_rank, (first, stop) in zip(pp_ranks, pairwise(edges), strict=True):
            loads[pp_rank] += sum(times[first:stop])
        loads[pp_ranks[-1]] += head
        return max(loads)

    for stage in (1, 2, 3):
        for step in (-1, 1):
            moved = [*edges[:stage], edges[stage] + step, *edges[stage + 1 :]]
            if min(stop - first for first, stop in pairwise(moved)) > 0:
                assert slowest(edges) <= slowest(moved)


@given(kinds, st.sets(st.integers(1, LAYERS - 1), max_size=4), st.integers(1, 40_000), st.integers(1, 9_000))
def test_stages_add_up_to_the_model(kind, cuts, first, second):
    """To some nanoseconds of rounding. The head does not depend on layers: `scale_to_layers` leaves it to one stage."""
    cost, spans = cost_of(kind), (Span(0, 0, first), Span(1, 0, second))
    parts = [LayerRange(a, b, LAYERS) for a, b in pairwise((0, *sorted(cuts), LAYERS))]
    whole, stages = table_of(cost, spans), [table_of(cost.for_layers(part), spans) for part in parts]
    head = COST_COLUMNS.index("head")
    assert all(stage[0, head] == whole[0, head] for stage in stages)
    gap = np.delete(sum(stages) - whole, head, axis=1)
    assert np.abs(gap).max() <= 4 * len(stages)


def test_a_part_of_the_layers_costs_what_a_model_of_them_does():
    """A model that has these layers and no others, described anew; but for what a round costs without tokens."""
    cost, span = cost_of("windows"), Span(0, 0, 30_000)
    model = replace(DENSE, layers=3, windows=(512, None, 512))
    alone = CostModel(cost.cluster, model, max_length=65_536, stages=8)
    table = table_of(cost.for_layers(LayerRange(4, 7, LAYERS)), [span])
    same = [name != "fixed" for name in COST_COLUMNS]
    assert (table[:, same] == table_of(alone, [span])[:, same]).all()


def test_equal_layers_are_priced_as_ever():
    cost = CostModel(Cluster.parse("1x8xH100"), DENSE, max_length=65_536, stages=8)
    assert cost.for_layers(LayerRange(0, 5, LAYERS)) is cost


def test_only_layers_that_attend_keep_keys():
    cost, group = cost_of("hybrid"), Group((0,), 1, 1, ())
    kept = [kv_cache_bytes(cost, LayerRange(first, first + 3, LAYERS), group, 1000)[0] for first in (0, 1, 4)]
    assert kept == [0, 1000 * 2 * 4 * 128 * 2, 0]


@pytest.mark.parametrize("kind", sorted(MODELS))
def test_a_slower_layer_leaves_fewer_to_its_stage(kind):
    """Beside stages of equal numbers of layers, by the sum of single layers."""
    cost, length = cost_of(kind), 32_768
    ns = [
        int(np.delete(table_of(cost.for_layers(LayerRange(k, k + 1, LAYERS)), [Span(0, 0, length)], 1), 1).sum())
        for k in range(LAYERS)
    ]
    assert len(set(ns)) > 1

    def slowest(counts):
        edges = np.cumsum([0, *counts])
        return max(sum(ns[a:b]) for a, b in pairwise(edges))

    for stages in (4, 8):
        level = stage_layers(cost, stages, length=length, head_stages=True)
        assert slowest(level) <= slowest([LAYERS // stages + (k >= stages - LAYERS % stages) for k in range(stages)])


@settings(max_examples=12)
@given(
    kinds,
    st.lists(st.integers(1, 30_000), min_size=1, max_size=12).map(np.array),
    st.sampled_from([(2, 1), (4, 1), (8, 1), (2, 2)]),
    st.sampled_from(["last", "all"]),
)
def test_plans_are_valid_within_memory_and_above_the_bound(kind, lengths, layout, head):
    cost, (stages, chunks) = cost_of(kind), layout
    plan = plan_pipeline(lengths, cost, stages=stages, chunks=chunks, head=head if chunks == 1 else "last")
    plan.validate()
    found = simulate(plan, cost)
    assert int(found.peak_memory.max()) <= cost.budget_bytes
    assert found.step_ns == predicted_ns(plan, cost) >= plan_bound(plan, cost) > 0


@pytest.mark.parametrize("kind", sorted(MODELS))
@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, Checkpoint.FULL])
def test_planner_and_simulator_price_every_stage_alike(kind, checkpoint):
    cost, lengths = cost_of(kind), np.array([30_000, 9_000, 4_000, 700, 20_000])
    search, policy = PipelineSearch(cost, StageLayout.of(cost, 4), lengths, ("seq1f1b",)), ActivationPolicy(checkpoint)
    made = list(search._sizes(0))[-1]
    costs = MicroBatchCosts(cost, search.layout, made, lengths, search.policies)
    times = costs.times_under(policy)
    choice = np.full(times.forward.shape, search.policies.index(policy))
    schedule = search._candidate("seq1f1b", ActivationMemory(costs, search.limits), 0, 1).schedule
    windows = price(search.plan(Candidate(made, schedule, choice, 0, 0.0)), cost)
    for stage, unit in product(range(4), range(len(made.units))):
        window = windows[MicroBatchKey(0, stage, unit)]
        found = [int(window.action(each).duration[window.length.argmax()]) for each in KINDS]
        assert found == [
            int(column[stage, unit]) for column in (times.forward, times.backward_input, times.split_weight)
        ]
