"""How many layers of a round recompute less, and how many are offloaded: as memory asks for, and never at a loss."""

from dataclasses import replace

import numpy as np
import pytest

from seqloom.api import cost_model
from seqloom.errors import SeqloomError
from seqloom.plan import Checkpoint, Plan, Round
from seqloom.planners.bounds import lower_bound, plan_bound
from seqloom.planners.recompute import offloaded_counts, with_layer_choices, without_layer_choices
from seqloom.planners.registry import make_plan
from seqloom.simulate import predicted_ns, simulate

CASES = {
    "a document between two checkpoints": ("1x1xH200", "llama-3b", [60_000]),
    "rounds of both kinds": ("1x8xH200", "llama3-8b", [131_072] * 3 + [600_000]),
    "nearly nothing fits": ("1x8xH200", "llama3-8b", [1_200_000]),
}


def lighter_of(plan):
    return [current.by_stage[0].lighter_layers for current in plan.pipelines[0].rounds]


def with_counts(plan, counts):
    [line] = plan.pipelines
    works = [replace(each.by_stage[0], lighter_layers=n) for each, n in zip(line.rounds, counts, strict=True)]
    return replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in works)),))


@pytest.mark.parametrize("name", CASES)
def test_as_many_layers_as_memory_holds(name):
    cluster, model, lengths = CASES[name]
    cost, lengths = cost_model(cluster, model), np.array(lengths)
    plan = make_plan("flex", lengths, cost)
    counts, alike = lighter_of(plan), without_layer_choices(plan)
    assert any(counts) and set(lighter_of(alike)) == {0}
    assert with_layer_choices(alike, cost) == plan == with_layer_choices(plan, cost)
    assert lower_bound(lengths, cost) <= cost.plan_ns(plan) < cost.plan_ns(alike)
    assert simulate(plan, cost).peak_memory.max() <= cost.budget_bytes
    for number, count in enumerate(counts):
        if count:
            more = with_counts(plan, [n + (k == number) for k, n in enumerate(counts)])
            assert simulate(more, cost).peak_memory.max() > cost.budget_bytes


def test_rounds_that_keep_everything_stay_as_they_are():
    cost = cost_model("1x8xH200", "llama3-8b")
    plan = make_plan("flex", np.array([9_000, 500, 700]), cost)
    assert {current.by_stage[0].checkpoint for current in plan.pipelines[0].rounds} == {Checkpoint.NONE}
    assert with_layer_choices(plan, cost) is plan


LONG = {  # beyond what fits on the GPU, of which some under selective checkpointing and some under full
    "one GPU": ("1x1xH200", "qwen3-1.7b", "full", [500_000]),
    "one GPU, nearly nothing": ("1x1xH200", "qwen3-1.7b", "full", [700_000]),
    "a document among others": ("1x8xH200", "llama3-8b", "full", [2_000_000, 4_000, 100_000, 700]),
    "without sharding": ("1x4xH200", "qwen3-1.7b", "none", [1_700_000, 600_000]),
    "moved at every step": ("1x4xH200", "qwen3-1.7b", "free", [2_000_000, 600_000]),
}


@pytest.mark.parametrize("name", LONG)
def test_what_does_not_fit_is_offloaded_as_few_layers_as_that_takes(name):
    cluster, model, sharding, lengths = LONG[name]
    cost, lengths = cost_model(cluster, model, sharding=sharding), np.array(lengths)
    if sharding != "free":  # there, pipelines may hold it
        with pytest.raises(SeqloomError, match="tokens"):
            make_plan("flex", lengths, cost_model(cluster, model, sharding=sharding, offload=False))
    plan = make_plan("flex", lengths, cost)
    [line] = plan.pipelines
    offloading = [r for r, current in enumerate(line.rounds) if current.by_stage[0].offload]
    assert offloading and Plan.from_json(plan.to_json()) == plan == Plan.from_text(plan.to_text())
    found = simulate(plan, cost)
    assert found.step_ns == predicted_ns(plan, cost) and found.peak_host_memory.max() > 0
    assert found.peak_memory.max() <= cost.budget_bytes
    if sharding != "free":
        assert plan_bound(plan, cost) == lower_bound(lengths, cost) <= found.step_ns
    for r in offloading:
        works = [current.by_stage[0] for current in line.rounds]
        works[r] = replace(works[r], offloaded_layers=works[r].offloaded_layers - 1)
        fewer = replace(plan, pipelines=(replace(line, rounds=tuple(Round((work,)) for work in works)),))
        assert simulate(fewer, cost).peak_memory.max() > cost.budget_bytes


def test_a_document_beyond_host_memory_too_is_refused_with_the_way_out():
    cost = cost_model("1x1xH200", "qwen3-1.7b", host_gib=20)
    plan = make_plan("flex", np.array([470_000]), cost)
    assert 0 < simulate(plan, cost).peak_host_memory.max() <= 20 * 2**30
    with pytest.raises(SeqloomError, match=r"500000 tokens.*holds 474890"):
        make_plan("flex", np.array([500_000]), cost)
    described = replace(cost.cluster, host_gib=100.0)
    assert cost_model(described, "qwen3-1.7b").host_bytes == 90 * 2**30


def test_offloading_by_price_is_never_slower_and_sometimes_much_faster():
    for tokens, least in ((30_000, 0.0), (150_000, 0.0), (300_000, 0.1)):
        by_need, by_price = (
            make_plan("auto", np.array([tokens]), cost_model("1x1xH200", "qwen3-1.7b", offload=offload))
            for offload in ("auto", True)
        )
        cost = cost_model("1x1xH200", "qwen3-1.7b", offload=True)
        assert predicted_ns(by_price, cost) <= (1 - least) * predicted_ns(by_need, cost)
        assert not any(offloaded_counts(by_need)) and not by_need.limits.offload_capacity
        assert plan_bound(by_price, cost) <= predicted_ns(by_price, cost)


def test_nothing_is_offloaded_from_a_cpu_unless_somebody_asks():
    tokens = np.array([88_000])
    with pytest.raises(SeqloomError, match="holds"):
        make_plan("flex", tokens, cost_model("1x1xCPU", "qwen2.5-0.5b", budget_gib=14))
    plan = make_plan("flex", tokens, cost_model("1x1xCPU", "qwen2.5-0.5b", budget_gib=14, offload=True))
    assert any(offloaded_counts(plan))


PIPELINES = {
    "four stages": ("1x8xH200", "llama3-8b", "full", "pipeline:4", [131_072] * 6 + [300_000]),
    "two stages": ("1x8xH100", "llama3-8b", "hybrid", "pipeline:2", [65_536] * 12),
    "two chunks": ("1x4xH100", "llama-3b", "full", "pipeline:2", [65_536] * 8),
    "side by side": ("1x8xA100-40G", "llama-7b", "free", "auto", [20_000] * 6 + [60_000] * 2 + [500] * 9),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_micro_batches_of_stages_fill_what_their_neighbours_leave(name):
    """Each on each stage by itself; of what they got nobody has room for one layer more."""
    cluster, model, sharding, planner, lengths = PIPELINES[name]
    cost, lengths = cost_model(cluster, model, sharding=sharding, stages=2), np.array(lengths)
    plan = make_plan(planner, lengths, cost, **({"chunks": 2} if name == "two chunks" else {}))
    alike = without_layer_choices(plan)
    assert with_layer_choices(alike, cost) == plan == with_layer_choices(plan, cost) != alike
    assert predicted_ns(plan, cost) < predicted_ns(alike, cost)
    assert simulate(plan, cost).peak_memory.max() <= cost.budget_bytes
    changed = one_layer_more(plan)
    assert changed
    for more in changed:
        assert simulate(more, cost).peak_memory.max() > cost.budget_bytes


def one_layer_more(plan, most=12):
    """Plans with one more lighter layer of one micro-batch on one stage, where it has some but not all."""
    found = []
    for p, line in enumerate(plan.pipelines):
        for r, current in enumerate(line.rounds):
            for s, work in enumerate(current.by_stage):
                if 0 < work.lighter_layers < line.stages[s].layer_count - 1:
                    works = list(current.by_stage)
                    works[s] = replace(work, lighter_layers=work.lighter_layers + 1)
                    rounds = (*line.rounds[:r], Round(tuple(works)), *line.rounds[r + 1 :])
                    lines = list(plan.pipelines)
                    lines[p] = replace(line, rounds=rounds)
                    found.append(replace(plan, pipelines=tuple(lines)))
    return found[:: max(1, len(found) // most)]


def test_auto_is_not_slower_than_any_planner_with_lighter_layers():
    cost, lengths = cost_model("1x8xH200", "llama3-8b"), np.array([131_072] * 3 + [600_000, 5_000, 300])
    times = {name: cost.plan_ns(make_plan(name, lengths, cost)) for name in ("static", "adaptive", "flex", "zones")}
    assert cost.plan_ns(make_plan("auto", lengths, cost)) <= min(times.values())
