import json
from dataclasses import replace

import numpy as np
import pytest

import seqloom
from seqloom.planners.bounds import plan_bound
from seqloom.planners.flex import plan_flex
from seqloom.simulate import predicted_ns

BOX = "--cluster 1x8xH200 --model llama3-8b"
SIMULATE = f"simulate plan.json {BOX}"


@pytest.fixture(scope="module")
def plan(lengths):
    return seqloom.plan(lengths, cluster="1x8xH200", model="llama3-8b", planner="adaptive")


@pytest.fixture
def planned(plan, folder):
    """The plan in plan.json."""
    plan.save(folder / "plan.json")


def test_it_says_what_planning_said(run):
    planned = run(f"plan --lengths lengths.txt {BOX} --planner adaptive --out plan.json --json").json
    report = run(f"{SIMULATE} --json").json
    same = (
        "step_ms",
        "bound_ms",
        "gap",
        "rounds",
        "comm_share",
        "idle_share",
        "peak_memory_gib",
        "plan_hash",
    )
    assert {key: report[key] for key in same} == {key: planned[key] for key in same}
    assert report["plan"] == "plan.json"
    assert report["plan_ms"] is None
    assert report["nic_share"] == {"busiest": 0, "mean": 0}  # one node


def test_text_has_table_and_timeline(run, planned):
    result = run(SIMULATE)
    assert result.code == 0
    assert "8xH200, llama3-8b" in result.out
    assert "rank 0" in result.out
    assert "above the bound" in result.out


def test_use_of_nics_is_shown_where_there_are_several_nodes(run):
    box = "--cluster 2x4xH200 --model llama3-8b"
    report = run(f"plan --lengths lengths.txt {box} --planner static:8 --out wide.json --json").json
    shares = report["nic_share"]
    assert 0 < shares["mean"] <= shares["busiest"] <= 1
    text = run(f"simulate wide.json {box}").out
    assert "NICs 1" in text
    assert f"NICs in use {100 * shares['mean']:.0f} % of the time" in " ".join(text.split())


def test_the_bound_is_given_only_where_it_is_proven(plan):
    cost = seqloom.cost_model("1x8xH200", "llama3-8b")
    assert plan_bound(plan, cost) == seqloom.lower_bound(plan.documents, cost)
    tensor = plan_flex(np.array(plan.documents), cost.with_tensor(2))
    assert 0 < plan_bound(tensor, cost) <= predicted_ns(tensor, cost)
    assert plan_bound(replace(plan, documents=plan.documents[:-1]), cost) is None


def _first_group(content):
    return content["pipelines"][0]["rounds"][0][0]["groups"][0]


EDITS = {
    "coverage": lambda content: content["documents"].append(77),
    "documents": lambda content: content["documents"].__setitem__(0, -5),
    "group-shape": lambda content: _first_group(content).update(ulysses=64),
    "limits": lambda content: content["limits"].update(node_size=3),
    "stage-ranks": lambda content: content["pipelines"][0]["stages"][0]["ranks"].append(0),
    "capacity": lambda content: content["limits"].update(capacity=[["none", 1], ["selective", 1], ["full", 1]]),
}


@pytest.mark.parametrize("rule", EDITS)
def test_a_plan_edited_by_hand_is_refused_with_the_rule(refused, planned, folder, rule):
    content = json.loads((folder / "plan.json").read_text())
    EDITS[rule](content)
    (folder / "plan.json").write_text(json.dumps(content))
    assert f"plan rule '{rule}'" in refused(SIMULATE)


def test_a_misspelt_key_in_a_plan_is_refused(refused, planned, folder):
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace('"sharding"', '"shardin"'))
    assert "shardin" in refused(SIMULATE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--cluster 2x8xH200 --model llama3-8b", "it has 8 ranks, not 16"),
        ("--cluster 2x4xH200 --model llama3-8b", "it has 8 ranks per node, not 4"),
        ("--cluster 1x8xH200 --model gpt-7b", "it has 32 query heads, not 64"),
        ("--cluster 1x8xH200 --model llama3-8b --sharding hybrid", "it has full sharding, not hybrid"),
        ("--cluster 1x8xH200 --model llama3-8b --budget-gib 30", "GiB"),
        ("--cluster 1x8xH200 --model llama3-9b", "llama3-8b"),
    ],
)
def test_a_plan_for_something_else_is_refused_with_the_values(refused, planned, options, message):
    assert message in refused(f"simulate plan.json {options}")


def test_missing_and_unreadable_files_are_refused(refused, folder):
    assert "nowhere.json" in refused(f"simulate nowhere.json {BOX}")
    assert ".json or .txt" in refused(f"simulate lengths.yaml {BOX}")
    (folder / "broken.json").write_text('{"limits": ')
    refused(f"simulate broken.json {BOX}")
    refused(f"simulate lengths.txt {BOX}")
