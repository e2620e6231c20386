"""Who plans a run, and on how many stages."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqloom.cost import CostModel
from seqloom.describe import Cluster, ModelSpec
from seqloom.errors import SeqloomError
from seqloom.plan import Stage
from seqloom.planners.registry import PlannerChoice
from seqloom.simulate import predicted_ns
from seqloom.train.config import Config, Data, Model, Pipelining, Planning, Run
from seqloom.train.setup import Planners, Setup, number_of_stages

RECIPE = Path(__file__).parents[3] / "recipes" / "pipeline-cpu.toml"
BATCHES = [np.array([900, 60, 400, 70]), np.array([300, 120, 80])]


def config(planner="auto", **pipeline):
    parts = (Run(Path("out"), steps=1, seed=3), Model("x"), Data(Path("store"), sequences=1), Planning(planner))
    return Config(*parts, Pipelining(**pipeline))


def cost(cluster="1x4xCPU", sharding="full", layers=4):
    spec = replace(ModelSpec.load(str(RECIPE.parent / "models" / "tiny.toml")), layers=layers, windows=())
    return CostModel(Cluster.parse(cluster), spec, sharding=sharding, max_length=1024)


def test_without_a_pipeline_the_config_s_planner_plans_and_static_stands_in():
    planners = Planners.of(config("flex"), cost(), 1)
    assert planners == Planners((Stage((0, 1, 2, 3), (0, 4)),), PlannerChoice("flex", seed=3), PlannerChoice("static"))


@pytest.mark.parametrize(
    ("pipeline", "plain"),
    [
        ({"stages": 4}, "1f1b"),
        ({"stages": 2}, "1f1b"),
        ({"stages": 2, "chunks": 2}, "interleaved"),
        ({"stages": 2, "chunks": 2, "schedule": "zb-v"}, "zb-v"),
        ({"stages": 4, "schedule": "seq1f1b"}, "1f1b"),
    ],
)
def test_all_plans_of_a_run_have_its_stages(pipeline, plain):
    planners = Planners.of(config(**pipeline), cost(), pipeline["stages"])
    assert planners.fallback.options["schedule"] == plain
    for batch in BATCHES:
        for each in (planners.planner, planners.fallback):
            assert each.plan(batch, cost()).pipelines[0].stages == planners.stages


@pytest.mark.parametrize(
    ("changes", "pipeline", "message"),
    [
        ({}, {"stages": 8}, "8 stages for the 4 layers of tiny: every stage needs a layer; use at most 4 stages"),
        ({}, {"stages": 2, "chunks": 3}, "every stage needs a layer"),
        ({}, {"stages": 3}, "3 stages on 4 ranks: .*; use 2 stages"),
        ({}, {"stages": 2, "schedule": "interleaved"}, "interleaved with 1 chunks"),
        ({"cluster": "3x2xCPU", "sharding": "hybrid"}, {"stages": 2}, "stages of 3 ranks in nodes of 2"),
    ],
)
def test_stages_that_cannot_be_are_refused(changes, pipeline, message):
    with pytest.raises(SeqloomError, match=message):
        Planners.of(config(**pipeline), cost(**changes), pipeline["stages"])


def test_auto_takes_the_fastest_number_of_stages():
    run, prices = config("static", stages="auto"), cost()
    times = {}
    for stages in (1, 2, 4):
        planner = Planners.of(run, prices, stages).planner
        times[stages] = sum(predicted_ns(planner.plan(batch, prices), prices) for batch in BATCHES)
    assert number_of_stages(run, prices, BATCHES) == min(times, key=times.get)


def test_auto_leaves_out_what_the_layers_do_not_allow():
    assert number_of_stages(config("static", stages="auto"), cost(layers=1), BATCHES) == 1
    assert number_of_stages(config("static", stages="auto", chunks=4), cost(layers=4), BATCHES) == 1


def test_a_run_that_was_left_open_goes_on_with_a_number():
    setup = Setup.of(
        Config.load(
            RECIPE, ["pipeline.stages=auto", "plan.planner=static", "data.source=toy:40", "data.max_length=300"]
        ),
        4,
    )
    assert setup.config.pipeline.stages == len(setup.planners.stages) in (1, 2, 4)


def test_a_choice_says_what_it_is():
    assert str(PlannerChoice("static:4")) == "static:4"
    assert str(PlannerChoice("pipeline", {"stages": 4, "schedule": "1f1b"})) == "pipeline:4,1f1b"
