"""Planner strategies on the command line: planned, simulated from its file, compared; refused where it must be."""

import pytest

BOX = "--cluster 1x8xH100 --model qwen3-0.6b --sharding free"


def test_planned_and_simulated_alike(run, folder):
    planned = run(f"plan --lengths lengths.txt {BOX} --planner hydraulis --out plan.json --json").json
    assert planned["made_by"] == "hydraulis" and planned["sharding"] == "free" and planned["gap"] >= 0
    simulated = run("simulate plan.json --cluster 1x8xH100 --model qwen3-0.6b --json").json
    assert simulated["step_ms"] == pytest.approx(planned["step_ms"])


def test_compared_with_the_others(run):
    found = run(f"compare --lengths lengths.txt --batch-size 12 {BOX} --planners flex,hydraulis,auto --json").json
    steps = {name: figures["step_ms"][0] for name, figures in found["planners"].items()}
    assert steps["auto"] <= min(steps["flex"], steps["hydraulis"])


@pytest.mark.parametrize("sharding", ["full", "hybrid", "none"])
def test_other_shardings_are_refused_with_the_way_out(run, sharding):
    box = BOX.replace("free", sharding)
    result = run(f"plan --lengths lengths.txt {box} --planner hydraulis")
    assert result.code == 2 and f"sharding {sharding}" in result.err and "--sharding free" in result.err
