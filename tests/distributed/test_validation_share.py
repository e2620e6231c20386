"""`data.validation_share` in a run: as if both parts were stores of their own, whatever the ranks, resumed or not."""

import json
from pathlib import Path

import pytest

from seqloom.data import StoreWriter, TokenStore, open_source, split_source
from support.runs import logged

pytestmark = pytest.mark.distributed
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
COMMON = ("data.sequences=4", "data.max_length=96", "data.too_long=truncate", "run.steps=4", "schedule.warmup=1")
COMMON += ("model.dtype=float64", "plan.capacity=128", "plan.planner=flex", "evaluation.every=2")
COMMON += ("checkpoint.every=2", "log.sinks=[]")


def trained(seqloom_here, folder, ranks, *settings):
    words = [word for each in (*COMMON, f"run.output={folder}", *settings) for word in ("--set", each)]
    result = seqloom_here("train", RECIPE, *words, "--ranks", str(ranks), "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["steps"] == 4
    return logged(folder, "loss"), logged(folder, "evaluation_loss")


@pytest.mark.slow
def test_a_run_with_a_share_is_one_with_two_stores(seqloom_here, tmp_path):
    whole = open_source("toy:40")
    for name, part in zip(("training", "evaluation"), split_source(whole, 0.2, seed=0), strict=True):
        with StoreWriter(tmp_path / name, vocabulary=whole.vocabulary) as writer:
            for document, length in enumerate(part.lengths.tolist()):
                writer.add(part.tokens(document, 0, length))
    assert len(TokenStore(tmp_path / "evaluation")) == 8
    stores = (f"data.source={tmp_path / 'training'}", f"data.validation={tmp_path / 'evaluation'}")
    wanted = trained(seqloom_here, tmp_path / "stores", 1, *stores)
    share = ("data.source=toy:40", "data.validation=", "data.validation_share=0.2")
    found = trained(seqloom_here, tmp_path / "share", 2, *share)
    assert found[0] == pytest.approx(wanted[0], rel=1e-9) and found[1] == pytest.approx(wanted[1], rel=1e-9)
    assert len(found[1]) == 2
    half = tmp_path / "share" / "checkpoints" / "step-00000002"
    resumed = trained(seqloom_here, tmp_path / "resumed", 1, *share, f"checkpoint.resume={half}")
    assert resumed[0] == pytest.approx(wanted[0][2:], rel=1e-9)
    words = [word for each in (*COMMON, *share, "data.validation_share=0.3") for word in ("--set", each)]
    other = ("--set", f"run.output={tmp_path / 'other'}", "--set", f"checkpoint.resume={half}")
    refused = seqloom_here("train", RECIPE, *words, *other, "--ranks", "1")
    assert refused.returncode == 2 and "resume with the data" in refused.stderr
