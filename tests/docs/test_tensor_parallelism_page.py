"""docs/tensor-parallelism.md: its commands run, and say what the page says of them."""

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tensor-parallelism.md").read_text()
PLANS, RUNS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_planning_commands_run(run_block):
    said = " ".join(run_block("sh", PLANS).split())
    assert "no plan with tensor degree 2 can beat" in said and "on these stages with tensor degree 2" in said
    assert "speed-up" in said


@pytest.mark.slow
@pytest.mark.distributed
def test_the_training_commands_run(run_block, tmp_path):
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    said = run_block("sh", RUNS)
    assert said.count(" same ") == 2 and "differs" not in said
    assert "4 steps, loss" in said and (tmp_path / "tensor" / "metrics.jsonl").exists()
