"""docs/pipelines.md: its commands run, its grid is what they print, its keys are those of the config."""

import json
import re
import shlex
import shutil
from dataclasses import fields
from pathlib import Path

from typer.testing import CliRunner

import seqloom
from seqloom.cli import app
from seqloom.cost import MemoryPolicy
from seqloom.layout import Span
from seqloom.plan import Group, Reduce
from seqloom.planners.pipeline.stage_layout import stage_layers
from seqloom.train.config import Pipelining

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pipelines.md").read_text()


def test_its_commands_run_and_its_grid_is_what_the_first_prints(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    lines = "".join(re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)).splitlines()
    results = [CliRunner().invoke(app, shlex.split(line)[1:]) for line in lines]
    assert [result.exit_code for result in results] == [0, 0, 0], [result.output for result in results]
    grid = re.findall(r"^ {4}(pp_rank .*)$", PAGE, re.MULTILINE)
    assert len(grid) == 3 and set(grid) <= set(results[0].output.splitlines())
    assert "pipeline:4" in results[1].output


def test_every_key_is_explained():
    block = PAGE.split("## The config")[1].split("## What is refused")[0]
    for key in fields(Pipelining):
        assert f"    {key.name} = " in block


def busiest_over_mean(stages: int, length: int) -> float:
    """Of the stages of llama3-8b, levelled as the planner does."""
    cost = seqloom.cost_model("8x8xH100", "llama3-8b")
    policy = MemoryPolicy(cost.engine.policies[0].checkpoint, Reduce.STEP, resident=True)
    parts = cost.group_cost(Group((0,), 1, 1, (Span(0, 0, length),)), policy)
    layer = (parts.total_ns - parts.head) / cost.model.layers
    *others, last = (layer * count for count in stage_layers(cost, stages, length=length))
    times = [*others, last + parts.head]
    return max(times) * stages / sum(times)


def test_what_a_head_on_one_stage_costs_is_what_the_page_says():
    said = re.search(
        r"is (\d+) - (\d+) % above the mean in four stages and (\d+) - (\d+) % in eight", " ".join(PAGE.split())
    )
    assert said is not None
    measured = json.loads((ROOT / "benchmarks" / "results" / "pipeline_head.json").read_text())["figures"]
    for stages, pair in ((4, said.groups()[:2]), (8, said.groups()[2:])):
        for length, percent in zip((8, 64), map(int, pair), strict=True):
            name = f"{stages} stages, {length}K, head on the last"
            assert percent == round(100 * measured[name]["busiest over mean"]) - 100
            assert abs(percent + 100 - 100 * busiest_over_mean(stages, length * 1024)) < 1.5, "as levelled today"
