import pytest

from seqloom.cli import demo
from seqloom.cli.doctor import Package
from seqloom.plan import Plan
from support.reports import Report


@pytest.fixture
def without_extras(monkeypatch):
    """No highspy and no torch: the published solver and training are left out, which also keeps a test short."""
    monkeypatch.setattr("seqloom.cli.doctor.probe", lambda package: Package(None, "not installed"))


def test_it_writes_the_plan_and_says_what_next(run, folder, without_extras):
    result = run("demo")
    assert result.code == 0, result.err
    plan = Plan.load(folder / "seqloom-demo-plan.json")
    assert len(plan.documents) == 512
    assert plan.limits.ranks == 64
    assert "flexsp is left out" in result.out
    assert "seqloom[exact]" in result.out and "seqloom[train]" in result.out
    assert "flexsp-a100" in result.out
    assert "not measurements" in result.out
    [command] = [line.strip() for line in result.out.splitlines() if line.startswith("  seqloom simulate")]
    simulated = run(command.removeprefix("seqloom ") + " --json").json
    assert simulated["plan_hash"] == plan.hash
    assert result.out.splitlines()[-1].startswith("Open seqloom-demo.html in a browser")
    steps = {step["name"]: step["figures"] for step in Report.load(folder / "seqloom-demo.html").data["steps"]}
    assert list(steps) == ["static", "adaptive", "flex", "auto"] and steps["auto"]["plan_hash"] == plan.hash


def test_json_compares_the_planners(run, folder, without_extras):
    report = run("demo --no-train --json --seed 5 --out other.txt --html other.html").json
    assert report["html"] == "other.html" and (folder / "other.html").exists()
    planners = report["planners"]
    assert list(planners) == ["static", "adaptive", "flex", "auto"]
    assert Plan.load(folder / "other.txt").hash == planners["auto"]["plan_hash"][0]
    steps = {name: figures["step_ms"][0] for name, figures in planners.items()}
    assert steps["auto"] == min(steps.values())
    assert steps["static"] > 1.2 * steps["auto"]


def test_a_bad_file_is_refused_at_once(refused):
    assert ".json or .txt" in refused("demo --out plan.pdf")


def test_every_planner_is_there_with_the_solver(monkeypatch):
    monkeypatch.setattr("seqloom.cli.doctor.probe", lambda package: Package("1.0", None))
    assert demo.installed_planners() == (list(demo.PLANNERS), {})


@pytest.mark.slow
def test_the_published_solver_takes_part(run):
    pytest.importorskip("highspy")
    planners = run("demo --no-train --json").json["planners"]
    assert list(planners) == list(demo.PLANNERS)
    assert planners["auto"]["step_ms"] <= planners["flexsp"]["step_ms"]
