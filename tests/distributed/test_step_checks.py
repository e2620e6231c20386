"""What a run checks while it trains: copies of parameters, a document alone, numbers that are none; and the replay."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from seqloom.cli import app
from seqloom.train.config import Config
from support.runs import SMALL, logged, train_disturbed
from support.workers import Workers

pytestmark = pytest.mark.distributed
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"


@pytest.fixture(scope="module")
def pool(fork_server):
    """Two processes, since parameters are sharded over a whole job."""
    with Workers(2) as pool:
        yield pool


def configured(folder, *changes):
    return Config.load(RECIPE, [*SMALL, "plan.cluster=2x1xCPU", "checks.every=1", f"run.output={folder}", *changes])


@pytest.mark.parametrize(
    ("changes", "replicas", "ranks"),
    [
        (["plan.sharding=full"], 0, 2),
        (["plan.sharding=none"], 20, 2),
        (["plan.sharding=hybrid", "model.dtype=bfloat16"], 20, 2),
        (["plan.sharding=free", "plan.planner=zones"], 0, 2),
        (["plan.planner=auto", "pipeline.stages=2"], 1, 1),
        (["plan.sharding=none", "optimiser.offload=true"], 20, 2),
    ],
    ids=["full", "none", "hybrid", "free", "pipeline", "offloaded"],
)
def test_an_undisturbed_run_passes(pool, tmp_path, changes, replicas, ranks):
    assert pool.run(train_disturbed, configured(tmp_path, *changes), "nothing") == ["", ""]
    notes = [each for each in logged(tmp_path, "note") if each.startswith("checked")]
    assert len(notes) == 3, "after every step"
    for note in notes:
        found = int(note.partition(": ")[2].split()[0])
        assert found >= replicas and (replicas > 0 or found == 0), note
        assert note.endswith(f"on {ranks} ranks") and "tokens" in note, note


def test_a_bit_that_differs_between_copies_stops_the_run(pool, tmp_path):
    said = pool.run(train_disturbed, configured(tmp_path, "plan.sharding=none"), "bit")
    for each in said:
        assert each.startswith("step 2, plan ") and "ranks 0 and 1 hold other values of " in each
        assert "the checks after step 1 passed, and checkpoints since then may be wrong" in each


def test_a_rank_that_computes_another_loss_stops_the_run(pool, tmp_path):
    said = pool.run(train_disturbed, configured(tmp_path), "loss")
    for each in said:
        assert each.startswith("step 1, plan ") and "alone on rank 1; sums in another order" in each
        assert "no check passed before" in each
    dump = tmp_path / "failed" / "step-00000001"
    result = CliRunner().invoke(app, ["replay", str(dump), "--plan"])
    assert result.exit_code == 0, result.output
    assert "all numbers are finite here: look at the machine" in " ".join(result.output.split())


WEIGHT = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("sharding", ["full", "none"])
def test_a_step_that_is_not_finite_is_saved_and_replayed(pool, tmp_path, sharding):
    config = configured(tmp_path, f"plan.sharding={sharding}")
    for _ in range(2):  # the same step again takes the place of its dump
        said = pool.run(train_disturbed, config, WEIGHT, float("nan"))
        dump = tmp_path / "failed" / "step-00000002"
        for each in said:
            assert each.startswith("step 2, plan ") and "nothing was updated" in each
            assert f"`seqloom replay {dump}` runs it again on CPU" in each
    result = CliRunner().invoke(app, ["replay", str(dump), "--json", "--plan"])
    assert result.exit_code == 1, result.output
    found = json.loads(result.stdout)
    assert found["step"] == 2 and found["documents"] == 4 and found["plan_hash"][:12] in said[0]
    assert not isinstance(found["grad_norm"], float) and not isinstance(found["plan_grad_norm"], float)
    assert found["first_not_finite"] == f"parameter {WEIGHT}" and len(found["documents_not_finite"]) == 4
    assert "nothing was updated" in found["reason"]
    shown = CliRunner().invoke(app, ["replay", str(dump)])
    assert "first value that is no number" in " ".join(shown.output.split())


def test_a_gradient_of_zero_is_saved_and_replayed(pool, tmp_path):
    """A weight of 1e300: the squares of the next norm overflow, its outputs are zero, and the loss is finite."""
    for each in pool.run(train_disturbed, configured(tmp_path), WEIGHT, 1e300):
        assert each.startswith("step 2, plan ") and "the gradient's norm 0; nothing was updated" in each
    dump = str(tmp_path / "failed" / "step-00000002")
    result = CliRunner().invoke(app, ["replay", dump, "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1 and found["grad_norm"] == 0 < found["loss"] and found["first_not_finite"] is None
    shown = CliRunner().invoke(app, ["replay", dump])
    assert "no parameter has a gradient here either" in " ".join(shown.output.split())


def test_a_finite_step_is_the_same_in_one_process_and_under_its_plan(pool, tmp_path):
    pool.run(train_disturbed, configured(tmp_path), "loss")
    result = CliRunner().invoke(app, ["replay", str(tmp_path / "failed" / "step-00000001"), "--json", "--plan"])
    found = json.loads(result.stdout)
    assert found["loss"] == pytest.approx(found["plan_loss"], rel=1e-12)
    assert found["grad_norm"] == pytest.approx(found["plan_grad_norm"], rel=1e-9)
    assert found["first_not_finite"] is None and found["documents_not_finite"] == []


def test_what_is_no_dump_is_refused(pool, tmp_path):
    pool.run(train_disturbed, configured(tmp_path, "run.steps=1", "schedule.warmup=0"), "nothing")
    for path, said in ((tmp_path, "is not a checkpoint"), (next((tmp_path / "checkpoints").iterdir()), "no dump")):
        result = CliRunner().invoke(app, ["replay", str(path)])
        assert said in str(result.exception)
