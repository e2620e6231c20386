"""The best checkpoint of a run stays, and any of its checkpoints is exported as the run writes its last model."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from seqloom.train.run_folder import complete_checkpoints
from support.runs import logged, small_run

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
STEPS = 6
BEST = ("run.steps=6", "data.validation=toy:8:1", "evaluation.every=1", "evaluation.batches=1", "checkpoint.best=true")
BEST += ("checkpoint.keep=1", "optimiser.lr=0.02", "optimiser.betas=[0.0, 0.5]", "schedule.kind=constant")


def trained(seqloom_here, folder, *words, changes=()):
    result = seqloom_here("train", RECIPE, *small_run(folder, *changes), *words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def exported(seqloom_here, run, out, *words):
    result = seqloom_here("export", run, "--out", out, *words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def run(seqloom_here, tmp_path_factory):
    """A run on two ranks that keeps its newest checkpoint and the best, and its summary."""
    folder = tmp_path_factory.mktemp("runs") / "best"
    return folder, trained(seqloom_here, folder, "--ranks", "2", changes=BEST)


def test_the_checkpoint_with_the_lowest_validation_loss_stays(run):
    folder, summary = run
    losses = logged(folder, "evaluation_loss")
    best = losses.index(min(losses)) + 1
    assert len(losses) == STEPS and 1 < best < STEPS, "the loss has fallen and risen again"
    assert summary["best"] == {"step": best, "loss": losses[best - 1]}
    assert [step for step, _ in complete_checkpoints(folder / "checkpoints")] == [best, STEPS]
    found = [note for note in logged(folder, "note") if "the best checkpoint" in note]
    assert found[-1].startswith(f"the lowest loss on the validation documents so far, {min(losses):.4f}")
    assert len(found) == sum(loss == min(losses[: k + 1]) for k, loss in enumerate(losses))


def test_a_finished_run_still_names_it(seqloom_here, run):
    folder, summary = run
    assert trained(seqloom_here, folder, "--ranks", "1", changes=BEST)["best"] == summary["best"]


def test_the_newest_is_exported_as_the_run_has_written_it(seqloom_here, run, tmp_path):
    folder, _ = run
    found = exported(seqloom_here, folder, tmp_path / "out")
    assert (found["step"], found["adapter"], found["parameters"] > 0) == (STEPS, None, True)
    for file in (folder / "model").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_the_best_is_exported_for_transformers(seqloom_here, run, tmp_path):
    from transformers import AutoModelForCausalLM

    folder, summary = run
    best = summary["best"]["step"]
    found = exported(seqloom_here, folder, tmp_path / "best", "--best")
    assert found["step"] == best and found["checkpoint"].endswith(f"step-{best:08d}")
    exported(seqloom_here, folder, tmp_path / "step", "--step", best)
    exported(seqloom_here, found["checkpoint"], tmp_path / "folder")
    files = [tmp_path / name / "model.safetensors" for name in ("best", "step", "folder")]
    assert len({file.read_bytes() for file in files}) == 1
    last, own = load_file(folder / "model" / "model.safetensors"), load_file(files[0])
    assert last.keys() == own.keys() and not all(last[name].equal(own[name]) for name in own)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    assert all(each.equal(own[name]) for name, each in model.state_dict().items() if name in own)


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [
        ("2", ("pipeline.stages=2", "plan.planner=auto", "optimiser.offload=true")),
        ("2", ("plan.sharding=free", "plan.planner=static:2")),
        ("3", ("plan.sharding=none",)),
        ("4", ("plan.tensor=2", "plan.planner=static", "model.dtype=bfloat16")),
    ],
)
def test_a_checkpoint_of_any_ranks_and_stages_is_exported(seqloom_here, tmp_path, ranks, changes):
    trained(seqloom_here, tmp_path / "run", "--ranks", ranks, changes=changes)
    exported(seqloom_here, tmp_path / "run", tmp_path / "out")
    wanted, found = (load_file(tmp_path / name / "model.safetensors") for name in ("run/model", "out"))
    assert wanted.keys() == found.keys() and all(value.equal(found[name]) for name, value in wanted.items())


def test_what_is_refused(seqloom_here, run, tmp_path):
    folder, _ = run
    for words, message in [
        ((folder, "--step", "99"), "has no complete checkpoint of step 99; it has "),
        ((folder, "--step", "6", "--best"), "--best and --step 6: both name a checkpoint"),
        ((tmp_path,), "has no complete checkpoint; name the output folder of a run"),
        ((folder, "--set", "model.specs=x"), "unknown key 'model.specs'"),
    ]:
        result = seqloom_here("export", *words, "--out", tmp_path / "out")
        assert result.returncode == 2 and message in result.stderr, result.stderr
    (tmp_path / "there").mkdir()
    result = seqloom_here("export", folder, "--out", tmp_path / "there")
    assert result.returncode == 2 and "exists; choose another folder" in result.stderr
    assert not (tmp_path / "out").exists()
