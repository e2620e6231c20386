"""Planners by name, their options, and whole runs."""

import numpy as np
import pytest

from seqloom.api import chunk_count
from seqloom.describe import sample
from seqloom.errors import SeqloomError
from seqloom.planners import PLANNERS, make_plan, plan_batches
from seqloom.planners.registry import RIVALS, fastest, parse_planner
from seqloom.simulate import predicted_ns
from support.strategies import MIXTURE, roomy_cost_model

COST = roomy_cost_model("1x8xA100-40G", "gpt-7b", "flexsp-a100", "full", 1)
FREE = roomy_cost_model("1x8xH100", "qwen3-0.6b", None, "free", 1)

OURS = [name for name, spec in PLANNERS.items() if not spec.rival and not spec.packs_dataset]


def cost_for(name):
    return FREE if name == "hydraulis" else COST


def degrees_of(plan):
    return {group.degree for current in plan.pipelines[0].rounds for group in current.groups}


def test_static_takes_a_degree():
    assert parse_planner("pipeline:4") == (PLANNERS["pipeline"], {"stages": 4})
    assert parse_planner("static:64") == (PLANNERS["static"], {"degree": 64})
    assert parse_planner("flex") == (PLANNERS["flex"], {})
    assert degrees_of(make_plan("static:4", np.array([900, 800]), COST)) == {4}
    with pytest.raises(SeqloomError, match="choose one of 1, 2, 4, 8"):
        make_plan("static:3", np.array([900]), COST)


@pytest.mark.parametrize(
    "name",
    ["flex:8", "static:", "pipeline:0", "pipeline:two", "static:zero", "static:0", "static:-2", "auto:1", "static:1.5"],
)
def test_other_options_are_refused(name):
    with pytest.raises(SeqloomError, match="only static, pipeline and chunkflow take an option"):
        parse_planner(name)


def test_every_row_of_the_table_loads():
    assert all(callable(spec.load()) and spec.name == name for name, spec in PLANNERS.items())
    dynamic = ("hybrid-dp", "megatron", "megatron-hybrid")
    assert list(RIVALS) == ["te-cp", "llama-cp", *dynamic, "wlb-llm", "skrull", "verl", "chunkflow", "zeppelin"]


def test_the_former_name_is_refused_with_the_new_one():
    with pytest.raises(SeqloomError, match="strategies is called hydraulis now"):
        parse_planner("strategies")


@pytest.mark.parametrize(("name", "near"), [("flx", "flex"), ("Statik", "static"), ("adaptve:3", "adaptive")])
def test_unknown_names_are_refused_with_the_nearest(name, near):
    for ask in (parse_planner, lambda name: make_plan(name, np.array([9]), COST)):
        with pytest.raises(SeqloomError, match=f"unknown planner.*did you mean.*{near}"):
            ask(name)
    with pytest.raises(SeqloomError, match="unknown planner"):
        plan_batches([name], [np.array([9])], COST)


def test_planners_of_data_sets_plan_no_batch():
    for ask in (parse_planner, lambda name: make_plan(name, np.array([9]), COST)):
        with pytest.raises(SeqloomError, match=r"packs a whole data set.*--tokens-per-step"):
            ask("hbp")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("length", [1, 128, 40_000])
def test_one_document(name, length):
    plan = make_plan(name, np.array([length]), cost_for(name))
    assert plan.documents == (length,) and (name in ("pipeline", "hydraulis") or len(plan.pipelines[0].rounds) == 1)


@pytest.mark.parametrize("name", OURS)
def test_an_impossible_batch_is_refused_alike(name):
    with pytest.raises(SeqloomError, match="--max-length"):
        make_plan(name, np.array([10**8, 5]), cost_for(name))
    with pytest.raises(SeqloomError, match="empty"):
        make_plan(name, np.array([]), cost_for(name))
    with pytest.raises(SeqloomError, match="not a length"):
        make_plan(name, np.array([0]), cost_for(name))


def test_a_run_has_one_static_degree_and_names_as_given():
    short, long = np.full(30, 2_000), np.array([40_000, 10])
    seen = []
    found = plan_batches(
        ["auto", "static", "static:8"], [short, long], COST, progress=lambda name, index: seen.append((name, index))
    )
    assert [list(batch) for batch in found] == [["auto", "static", "static:8"]] * 2
    assert len({frozenset(degrees_of(batch["static"].plan)) for batch in found}) == 1
    assert degrees_of(make_plan("static", short, COST)) == {1} != degrees_of(found[0]["static"].plan)
    assert all(degrees_of(batch["static:8"].plan) == {8} for batch in found)
    assert seen == [(name, index) for name in ("static", "static:8", "auto") for index in (0, 1)]
    assert all(planned.plan_ns > 0 for batch in found for planned in batch.values())
    assert plan_batches(["flex"], [], COST) == []


def test_a_run_has_one_number_of_chunks():
    batches = [np.full(16, 900), np.array([9_000, 300, 200, 100])]
    cost = roomy_cost_model("1x8xH200", "llama3-8b", None, "full", 0)
    found = plan_batches(["pipeline:4", "flex"], batches, cost, chunks="auto")
    each = {chunks: plan_batches(["pipeline:4"], batches, cost, chunks=chunks) for chunks in (1, 2, 4)}
    times = {chunks: sum(predicted_ns(row["pipeline:4"].plan, cost) for row in rows) for chunks, rows in each.items()}
    best = min(times, key=times.get)
    assert [row["pipeline:4"].plan for row in found] == [row["pipeline:4"].plan for row in each[best]]
    assert {chunk_count(row["pipeline:4"].plan) for row in each[4]} == {4}
    assert all(chunk_count(row["flex"].plan) == 1 for row in found)


@pytest.mark.parametrize("cluster", ["3x4xH100", "2x6xH100", "1x6xH100", "3x8xH100"])
def test_degrees_that_are_no_powers_of_two_are_used_where_cheaper(cluster):
    used = set()
    for sharding in ("full", "hybrid"):
        cost = roomy_cost_model(cluster, "llama3-8b", None, sharding, 0)
        for seed in range(3):
            plan = make_plan("flex", sample("commoncrawl", 40, seed=seed, max_length=60_000), cost, evaluations=40)
            used |= degrees_of(plan)
    assert any(degree & (degree - 1) for degree in used), used


def test_every_planner_takes_one_expert_degree_for_a_run():
    first = roomy_cost_model("2x4xH200", MIXTURE.name, None, "full", 3)
    costs = [first.with_expert(degree) for degree in first.expert_degrees]
    batches = [sample("wikipedia", 24, seed=seed) for seed in (0, 1)]
    found = plan_batches(["static", "flex"], batches, costs[0], others=costs[1:])
    for name in ("static", "flex"):
        alone = {cost.expert: plan_batches([name], batches, cost) for cost in costs}
        times = {cost.expert: sum(predicted_ns(row[name].plan, cost) for row in alone[cost.expert]) for cost in costs}
        best = min(times, key=times.get)
        assert [row[name].plan for row in found] == [row[name].plan for row in alone[best]]


def test_what_no_cost_model_allows_is_refused_as_by_the_first():
    def run(cost):
        if cost > 1:
            raise SeqloomError(f"refused by {cost}")
        return -cost, str(cost)

    assert fastest([3, 0, 2, 1], run) == "1"
    with pytest.raises(SeqloomError, match="refused by 3"):
        fastest([3, 2], run)
