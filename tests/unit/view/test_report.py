"""Reports: what the file holds, that it fetches nothing, and that no name is read as HTML."""

import tomllib
from dataclasses import replace
from importlib.resources import files

import pytest

import seqloom as sl
from seqloom.api import evaluate
from seqloom.cli.demo import TINY_MODEL
from seqloom.describe import ModelSpec
from seqloom.view.report import MOST_POINTS, ReportRun, ReportStep, report_html
from support.reports import Report

LENGTHS = (512, 700, 1_300, 33_000, 4_096, 260)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)> &amp; {title} \u2028 \"'"


@pytest.fixture(scope="module")
def cost():
    return sl.cost_model("2x4xH200", "llama3-8b")


@pytest.fixture(scope="module")
def step(cost):
    one = evaluate(sl.plan(LENGTHS, cluster="2x4xH200", model="llama3-8b", planner="flex"), cost)
    return ReportStep("flex", one.plan, one.simulation, one.bound_ns, one.as_dict())


def test_names_stay_text(cost, step):
    plain = Report(report_html("title", [step], cost, notes=["note"]))
    hostile = replace(step, name=HOSTILE, figures={**step.figures, "planner": HOSTILE})
    report = Report(report_html(HOSTILE, [hostile], cost, notes=[HOSTILE]))
    assert report.elements == plain.elements
    assert report.texts["title"] == report.data["title"] == report.data["notes"][0] == HOSTILE
    assert report.data["steps"][0]["name"] == report.data["steps"][0]["figures"]["planner"] == HOSTILE


def test_the_script_writes_no_html_and_the_page_fetches_nothing(cost, step):
    script = files("seqloom.view").joinpath("report.js").read_text(encoding="utf-8")
    forbidden = ("innerHTML", "outerHTML", "insertAdjacent", "eval(", "document.write")
    assert not [word for word in forbidden if word in script]
    text = report_html("title", [step], cost)
    elements = Report(text).elements
    links = [own[key] for _, own in elements for key in ("src", "href", "action", "data") if key in own]
    assert links == ["data:,"]
    assert text.count("://") == text.count("http://www.w3.org/2000/svg") == 1
    [policy] = [own["content"] for _, own in elements if own.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none';")


def test_the_data_holds_every_token_the_timeline_and_the_memory(cost, step):
    [content] = Report(report_html("title", [step], cost)).data["steps"]
    held = dict.fromkeys(range(len(LENGTHS)), 0)
    for group in content["groups"]:
        for document, start, stop in zip(*[iter(group["spans"])] * 3, strict=True):
            held[document] += stop - start
    assert tuple(held.values()) == tuple(step.plan.documents)
    runs = content["runs"]
    ends = [start + length for start, length in zip(runs["start"], runs["length"], strict=True)]
    assert max(ends) == content["step_ns"] == step.simulation.step_ns
    counts = zip(runs["rank"], runs["count"], strict=True)
    assert {rank + k for rank, count in counts for k in range(count)} == set(range(8))
    assert max(content["memory_gib"]) == pytest.approx(step.figures["peak_memory_gib"], abs=1e-3)
    for share in ("sequences", "tokens", "attention"):
        assert sum(bucket[share] for bucket in content["lengths"]) == pytest.approx(1)
    assert sum(one["documents"] for one in content["classes"]) == len(LENGTHS)


def test_the_fastest_planner_is_chosen_and_cpus_have_ranks(cost, step):
    slower = evaluate(sl.plan(LENGTHS, cluster="2x4xH200", model="llama3-8b", planner="static"), cost)
    other = ReportStep("static", slower.plan, slower.simulation, slower.bound_ns, slower.as_dict())
    data = Report(report_html("title", [other, step], cost)).data
    assert [one["name"] for one in data["steps"]] == ["static", "flex"]
    assert data["chosen"] == int(step.simulation.step_ns < slower.simulation.step_ns)
    assert [data["unit"], data["run"]] == ["GPU", None]
    on_cpus = sl.cost_model("1x4xCPU", ModelSpec(**tomllib.loads(TINY_MODEL)), capacity=256)
    empty = Report(report_html("title", [], on_cpus)).data
    assert [empty["chosen"], empty["steps"], empty["unit"]] == [None, [], "rank"]


def test_lines_of_a_long_run_are_means(cost):
    numbers, unknown = range(1, 3 * MOST_POINTS + 1), {"gap_to_bound": None}
    times = [{"measured_ms": 30.0 + k % 3, "predicted_ms": 30.0 if k % 2 else None} for k in numbers]
    records = [{"step": k, "loss": 1 / k, **own, **unknown} for k, own in zip(numbers, times, strict=True)]
    run = Report(report_html("title", [], cost, run=ReportRun(records, {"steps": len(records)}))).data["run"]
    columns = run["columns"]
    assert run["each"] == 3 and len(columns["step"]) == MOST_POINTS
    assert columns["step"][:2] == [3, 6] and columns["step"][-1] == len(records)
    assert columns["loss"][0] == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert set(columns["measured_ms"]) == {31.0} and set(columns["gap_to_bound"]) == {None}
    assert set(columns["predicted_ms"]) == {30.0}
    known = [abs(one["measured_ms"] / 30 - 1) for one in records[1:] if one["predicted_ms"]]
    assert run["figures"] == {"steps": len(records), "prediction_error": pytest.approx(sum(known) / len(known))}
