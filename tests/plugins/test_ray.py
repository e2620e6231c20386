"""Ray Train starts and connects the ranks of recipes/launch/ray_train.py; losses are those of a plain run."""

import subprocess
import sys
from pathlib import Path

import pytest

from seqloom.train.logging import read_steps
from support.pages import python_blocks
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


OWN_TRAINER = """
import sys
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

exec(open("page.py").read())
settings = {"config": sys.argv[1], "overrides": [each for each in sys.argv[2:] if each != "--set"]}
scaling = ScalingConfig(num_workers=2)
TorchTrainer(
    train_rank, train_loop_config=settings, torch_config=TorchConfig(backend="gloo"), scaling_config=scaling
).fit()
"""


def test_the_function_of_the_page_trains_in_a_trainer_of_ones_own(tmp_path):
    [block] = python_blocks(Path(__file__).parents[2] / "docs" / "how-to" / "ray-train.md")
    (tmp_path / "page.py").write_text(block)
    output = tmp_path / "run"
    command = [sys.executable, "-c", OWN_TRAINER, RECIPE, *small_run(output)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4_000:]
    assert [len(str(record.step)) for record in read_steps(output / "metrics.jsonl")] == [1, 1, 1]
