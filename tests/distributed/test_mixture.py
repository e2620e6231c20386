"""`data.sources` in a run: the documents that its order says, on any number of ranks, resumed or not."""

import json
from pathlib import Path

import pytest

from seqloom.train.config import Config
from seqloom.train.setup import RunSetup
from support.runs import logged

pytestmark = pytest.mark.distributed
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
COMMON = ("data.sequences=4", "data.max_length=96", "data.too_long=truncate", "run.steps=4", "schedule.warmup=1")
COMMON += ("model.dtype=float64", "plan.capacity=128", "plan.planner=flex", "evaluation.every=2", "data.validation=")
COMMON += ("checkpoint.every=2", "log.sinks=[]", "data.validation_share=0.1", "data.source=")
MIXED = "data.sources=[{path = 'toy:30', weight = 0.6}, {path = 'toy:10:1', weight = 0.4}]"


def trained(seqloom_here, folder, ranks, *settings):
    words = [word for each in (*COMMON, f"run.output={folder}", *settings) for word in ("--set", each)]
    result = seqloom_here("train", RECIPE, *words, "--ranks", str(ranks), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 4
    return logged(folder, "loss"), logged(folder, "evaluation_loss")


@pytest.mark.slow
def test_a_mixture_goes_on_where_it_was_on_other_ranks(seqloom_here, tmp_path):
    wanted = trained(seqloom_here, tmp_path / "whole", 1, MIXED)
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    resumed = trained(seqloom_here, tmp_path / "resumed", 2, MIXED, f"checkpoint.resume={half}")
    assert resumed[0] == pytest.approx(wanted[0][2:], rel=1e-9)
    assert resumed[1] == pytest.approx(wanted[1][1:], rel=1e-9)
    batches = RunSetup.load(Config.load(RECIPE, [*COMMON, MIXED]), 1).sampler.peek(4)
    assert logged(tmp_path / "whole", "tokens") == [batch.tokens for batch in batches]
