"""Ray Train starts and connects the ranks of recipes/launch/ray_train.py; losses are those of a plain run."""

import subprocess
import sys
from pathlib import Path

import pytest

from seqloom.train.logging import read_steps
from support.runs import small_run

pytestmark = [pytest.mark.plugins, pytest.mark.distributed]
RECIPES = Path(__file__).parents[2] / "recipes"
RECIPE = str(RECIPES / "tiny-cpu.toml")


def losses(command: list[str], output: Path) -> list[float]:
    done = subprocess.run([*command, *small_run(output)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4_000:]
    return [record.loss for record in read_steps(output / "metrics.jsonl")]


def test_ray_train_runs_the_script(tmp_path):
    script = str(RECIPES / "launch" / "ray_train.py")
    found = losses([sys.executable, script, RECIPE, "--workers", "2"], tmp_path / "ray")
    expected = losses([sys.executable, "-m", "seqloom", "train", RECIPE, "--ranks", "2"], tmp_path / "plain")
    assert found == pytest.approx(expected, rel=1e-12) and len(found) == 3
