"""`seqloom verify --nccl`: plans of recipes on real processes that share a GPU, against one process on it."""

import json
from pathlib import Path

import pytest

RECIPE_FOLDER = Path(__file__).parents[2] / "recipes"
RUNS = {
    # recipe, ranks, planners (None: the usual ones and the run's own), overrides
    "every planner of one stage": ("tiny-cpu", 4, None, {}),
    "shards of a node": ("tiny-cpu", 4, "flex,pipeline:2", {"plan.sharding": "hybrid", "plan.cluster": "2x2xCPU"}),
    "a pipeline": ("pipeline-cpu", 4, None, {}),
    "divided experts": ("experts-cpu", 4, None, {}),
    "parameters that move": ("hydraulis-cpu", 8, None, {"plan.cluster": "1x8xCPU"}),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_plans_do_not_change_the_result(device, seqloom_here, name):
    recipe, ranks, planners, changes = RUNS[name]
    settings = {"data.source": "toy:64", "data.max_length": 512, "plan.capacity": 512, **changes}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    words += ["--planners", planners] if planners else []
    words += ["--ranks", str(ranks), "--nccl" if device == "cuda" else "--gloo", "--json"]
    done = seqloom_here("verify", str(RECIPE_FOLDER / f"{recipe}.toml"), *words)
    assert done.returncode == 0, done.stderr + done.stdout
    report = json.loads(done.stdout)
    assert report["passed"] and (report["ranks"], report["on"]) == (ranks, "nccl" if device == "cuda" else "gloo")
    assert max(row["max_relative_gradient_difference"] for row in report["plans"]) < 1e-9
