import json
from dataclasses import replace

import numpy as np
import pytest

import seqloom
from seqloom.plan import Plan
from seqloom.planners.bounds import plan_bound
from seqloom.planners.flex import plan_flex
from seqloom.planners.pipeline import plan_pieces
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


@pytest.mark.parametrize("suffix", ["json", "txt"])
def test_a_plan_file_alone_suffices(run, suffix):
    """Content and options are in the file: other names of presets, or none at all, change nothing."""
    limits = "--max-length 40000 --budget-gib 100"
    made = run(f"plan --lengths lengths.txt {BOX} --planner adaptive {limits} --out plan.{suffix} --json").json
    report = run(f"simulate plan.{suffix} --json").json
    same = ("step_ms", "bound_ms", "plan_hash", "cluster", "model", "profile", "budget_gib")
    assert {key: report[key] for key in same} == {key: made[key] for key in same}
    assert report["differences"] == []


def test_given_options_win_and_differences_are_named(run):
    run(f"plan --lengths lengths.txt {BOX} --planner adaptive --out plan.json")
    report = run("simulate plan.json --cluster 1x8xH100 --json").json
    assert (report["cluster"], report["profile"], report["budget_gib"]) == ("8xH100", "h100", 72)
    assert report["differences"] == [
        "made for cluster 8xH200, here it is cluster 8xH100",
        "made for profile h200, here it is profile h100",
        "made with budget_gib 126.0, here it is 72.0",
    ]
    out = run("simulate plan.json --budget-gib 120").out
    assert "made with budget_gib 126.0, here it is 120.0" in out and "made for" not in out


def test_a_plan_of_python_says_what_it_was_made_for(plan, lengths, tmp_path):
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.made_for == plan.made_for and loaded.hash == plan.hash
    there = seqloom.simulate(loaded)
    assert there.step_ns == seqloom.simulate(plan, cluster="1x8xH200", model="llama3-8b").step_ns
    bare = replace(plan, made_for=None)
    assert bare == plan and bare.hash == plan.hash and "made_for" not in bare.to_json()
    with pytest.raises(seqloom.SeqloomError, match="does not say for which cluster it was made"):
        seqloom.simulate(bare)


def test_what_a_file_says_it_was_made_for_is_read_strictly(refused, plan, folder):
    for change, message in [
        ({"cluster": 3}, "made_for of the plan.cluster is 3; give a JSON object"),
        ({"cluter": {}}, "made_for of the plan: unknown key 'cluter'; did you mean cluster?"),
        ({"budget_gib": -1}, "made_for of the plan.budget_gib is -1; give a number of GiB above 0"),
        ({"profile": {"kind": "other"}}, "made_for of the plan.profile: kind is 'other'"),
    ]:
        (folder / "plan.json").write_text(replace(plan, made_for=plan.made_for | change).to_json())
        assert message in refused("simulate plan.json")


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
    assert plan_bound(plan_pieces(np.array(plan.documents), cost, pieces=2), cost) is None


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
