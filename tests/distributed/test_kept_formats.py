"""Files that earlier versions wrote are read: plans, profiles, strategies, recipes and checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

from seqloom.cost import Profile
from seqloom.plan import Plan
from seqloom.planners.hydraulis import Strategy
from seqloom.train.logging import read_steps

pytestmark = pytest.mark.distributed
KEPT = Path(__file__).parents[1] / "corpus" / "formats"
PLANS = {
    "auto-dgx-b200": "5def9dcc52dd",
    "pipeline4-1x8xH100": "471549c27427",
    "strategies-1x4xL40S": "a9aa7db92602",
    "strategies-1x8xA100-40G": "9e8dabb9a208",
    "zeppelin-zeppelin-a800": "7fe524ddeb06",
}
"""Plan files and the first digits of their hashes when they were written."""


@pytest.mark.parametrize("suffix", [".json", ".txt"])
@pytest.mark.parametrize("name", PLANS)
def test_plans(name, suffix):
    plan = Plan.load(KEPT / f"{name}{suffix}")
    plan.validate()
    assert plan.hash.startswith(PLANS[name])
    again = plan.to_json() if suffix == ".json" else plan.to_text()
    assert again == (KEPT / f"{name}{suffix}").read_text()


def test_profile():
    profile = Profile.load(KEPT / "profile.json")
    assert profile.name == "kept"


def test_strategies():
    strategies = [Strategy.from_dict(each) for each in json.loads((KEPT / "strategies.json").read_text())["strategies"]]
    assert [str(each) for each in strategies] == ["4 of t1p1"]


def test_checkpoint_of_a_recipe_is_resumed(seqloom_here, tmp_path):
    """The second step gives the loss that the earlier version found for it."""
    for file in ("run.toml", "model.toml"):
        shutil.copy(KEPT / file, tmp_path)
    resume = f"checkpoint.resume={KEPT / 'checkpoints' / 'step-00000001'}"
    done = seqloom_here("train", tmp_path / "run.toml", "--set", resume)
    assert done.returncode == 0, done.stderr
    [record] = read_steps(tmp_path / "run" / "metrics.jsonl")
    assert record.step == 2 and record.loss == pytest.approx(5.535285785986119, rel=1e-6)
