import csv

import pytest

from seqloom.cli.compare import planner_names
from seqloom.errors import SeqloomError
from seqloom.version import __version__
from support.reports import Report

BOX = "--cluster 1x8xH200 --model llama3-8b"
FIGURES = {
    "step_ms",
    "bound_ms",
    "plan_ms",
    "rounds",
    "chunks",
    "tensor",
    "expert",
    "comm_share",
    "idle_share",
    "peak_memory_gib",
    "peak_host_memory_gib",
    "plan_hash",
}


def test_one_object_with_lists_over_the_batches(run):
    line = f"compare --lengths lengths.txt {BOX} --planners static,adaptive,static:8 --batch-size 4"
    report = run(f"{line} --batches 2 --skip 1 --max-length 20000 --json").json
    assert list(report["planners"]) == ["static", "adaptive", "static:8"]
    for figures in report["planners"].values():
        assert set(figures) == FIGURES
        assert all(len(values) == 2 for values in figures.values())
        assert all(step >= bound > 0 for step, bound in zip(figures["step_ms"], figures["bound_ms"], strict=True))
        assert all(0 <= share <= 1 for share in figures["comm_share"] + figures["idle_share"])
        assert all(rounds == int(rounds) >= 1 for rounds in figures["rounds"])
        assert all(len(text) == 64 for text in figures["plan_hash"])
    told = {key: report[key] for key in ("cluster", "model", "profile", "sharding", "dropped", "version")}
    assert told == {
        "cluster": "8xH200",
        "model": "llama3-8b",
        "profile": "h200",
        "sharding": "full",
        "dropped": 1,
        "version": __version__,
    }
    assert (report["batches"], report["batch_size"], report["skip"], report["seed"]) == (2, 4, 1, 0)
    assert report["sampler"] is None


def test_the_names_of_the_contract_exist(run):
    line = "compare --cluster 8x8xA100-40G --model gpt-7b --profile flexsp-a100 --sharding full"
    options = "--planners static:64,adaptive --batch-size 64 --batches 1 --max-length 196608 --json"
    report = run(f"{line} --lengths wikipedia {options}").json
    assert report["cluster"] == "8x8xA100-40G"
    assert report["budget_gib"] == 30
    assert report["planners"]["adaptive"]["step_ms"] <= report["planners"]["static:64"]["step_ms"]


def test_the_report_holds_the_figures_of_every_planner_on_the_first_batch(run, folder):
    line = f"compare --lengths lengths.txt {BOX} --planners static,adaptive --batch-size 4 --batches 2"
    printed = run(f"{line} --html planners.html --json").json
    data = Report.load(folder / "planners.html").data
    assert [step["name"] for step in data["steps"]] == ["static", "adaptive"]
    for step in data["steps"]:
        wanted = {key: values[0] for key, values in printed["planners"][step["name"]].items()}
        assert wanted.items() <= step["figures"].items()
    assert "the first batch" in data["notes"]


def test_same_seed_same_plans(run):
    line = f"compare --lengths web {BOX} --planners adaptive --batch-size 32 --max-length 65536 --json --seed"
    hashes = [run(f"{line} {seed}").json["planners"]["adaptive"]["plan_hash"] for seed in (1, 1, 2)]
    assert hashes[0] == hashes[1] != hashes[2]


def test_text_has_a_row_per_planner(run):
    result = run(f"compare --lengths github {BOX} --planners static,adaptive --batch-size 16 --max-length 65536")
    assert result.code == 0
    assert "stand-in" in result.out
    assert {line.split()[0] for line in result.out.splitlines() if line.strip()} >= {"static", "adaptive"}
    assert result.err == ""


def test_rows_of_published_planners_say_whether_they_are_validated(run):
    line = "compare --lengths web --cluster 2x2xA800 --model qwen2.5-0.5b --planners te-cp,adaptive --batch-size 8"
    result = run(f"{line} --max-length 65536")
    assert result.code == 0
    assert " te-cp * " in result.out and "* te-cp: not validated: the baseline" in result.out
    assert "adaptive *" not in result.out
    report = run(f"{line} --max-length 65536 --json").json
    assert list(report["planners"]) == ["te-cp", "adaptive"]
    assert list(report["published"]) == ["te-cp"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--planners flexy", "flex"),
        ("--planners ,", "no planner"),
        ("--planners static:x", "static:64"),
        ("--planners adaptive --batches 0", "number of batches 0"),
        ("--planners adaptive --batches 3", "batch 2 is wanted"),
        ("--planners adaptive --seed -1 --lengths web", "seed -1"),
    ],
)
def test_what_cannot_be_compared_is_refused(refused, options, message):
    assert message in refused(f"compare --lengths lengths.txt {BOX} --batch-size 10 {options} --json")


def test_a_planner_named_twice_counts_once():
    assert planner_names(" flex, static:64,,flex ") == ["flex", "static:64"]
    with pytest.raises(SeqloomError):
        planner_names("")


def test_a_planner_that_cannot_plan_costs_its_row_only(run):
    line = "compare --lengths lengths.txt --profile flexsp-a100 --cluster 1x8xA100-40G --model gpt-7b"
    out = " ".join(run(f"{line} --max-length 20000 --planners static,te-cp,flex").out.split())
    assert "te-cp: not planned, profile flexsp-a100 has no constants" in out
    report = run(f"{line} --max-length 20000 --planners static,te-cp,flex --json").json
    assert list(report["planners"]) == ["static", "flex"] and list(report["refused"]) == ["te-cp"]
    alone = run(f"{line} --max-length 20000 --planners te-cp")
    assert alone.code == 2 and "has no constants" in alone.err


def test_a_table_for_spreadsheets(run, folder):
    line = "compare --lengths lengths.txt --cluster 1x8xH200 --model llama3-8b --planners static,flex --batch-size 6"
    report = run(f"{line} --batches 2 --csv table.csv --json").json
    rows = list(csv.DictReader((folder / "table.csv").read_text().splitlines()))
    assert [(row["planner"], row["batch"]) for row in rows] == [
        ("static", "0"),
        ("flex", "0"),
        ("static", "1"),
        ("flex", "1"),
    ]
    assert [float(row["step_ms"]) for row in rows if row["planner"] == "flex"] == report["planners"]["flex"]["step_ms"]
