"""Callbacks of a run: what they are told, that they may end it, and what is said of one that fails."""

import json
from pathlib import Path

import pytest

from seqloom.errors import SeqloomError
from seqloom.train import Callback, Config, train
from seqloom.train.logging import Callbacks, load_callbacks
from seqloom.train.run_folder import complete_checkpoints
from support.runs import RecordingCallback, logged, small_run

pytestmark = pytest.mark.distributed
ROOT = Path(__file__).parents[2]
RECIPE, EXAMPLE = ROOT / "recipes" / "tiny-cpu.toml", ROOT / "examples" / "stop_early.py"
EVALUATED = ("run.steps=5", "data.validation=toy:8:1", "evaluation.every=2", "checkpoint.every=2")


def overrides(folder, *changes):
    return small_run(folder, *EVALUATED, *changes)[1::2]


def told(folder):
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_what_is_told_and_a_step_that_ends_the_run(fork_server, tmp_path):
    callbacks = [RecordingCallback(tmp_path / "told.jsonl", stops_after=3)]
    summary = train(RECIPE, overrides=overrides(tmp_path / "run"), ranks=2, callbacks=callbacks, show=False)
    assert summary["stopped"] == "step 3 of 5, by RecordingCallback" and summary["steps"] == 3
    events = told(tmp_path)
    assert [each[0] for each in events if each[0] != "checkpoint"] == [
        "begin",
        "step",
        "step",
        "evaluate",
        "step",
        "end",
    ]
    assert events[0] == ["begin", 0, 5, "flex"] and events[-1] == ["end", summary["final_loss"]]
    assert [each[1:] for each in events if each[0] == "step"] == [
        [step, loss] for step, loss in enumerate(logged(tmp_path / "run", "loss"), 1)
    ]
    assert [each[1:] for each in events if each[0] == "evaluate"] == [[2, *logged(tmp_path / "run", "evaluation_loss")]]
    assert [each[1:] for each in events if each[0] == "checkpoint"] == [[2, True], [3, True]]
    assert [step for step, _ in complete_checkpoints(tmp_path / "run" / "checkpoints")] == [2, 3]
    assert (tmp_path / "run" / "model" / "config.json").is_file()


@pytest.mark.slow
def test_a_run_goes_on_where_a_callback_has_ended_it(fork_server, seqloom_here, tmp_path):
    named = f"run.callbacks=['{EXAMPLE}:StopEarly']"
    wild = ("optimiser.lr=0.5", "evaluation.every=1", "schedule.kind=constant", "run.steps=8")
    words = small_run(tmp_path / "run", *EVALUATED, *wild)
    result = seqloom_here("train", RECIPE, *words, "--set", named, "--ranks", "2")
    assert result.returncode == 0, result.stderr
    losses = logged(tmp_path / "run", "evaluation_loss")
    assert f"stopped after step {len(losses)} of 8, by {EXAMPLE}:StopEarly" in result.stdout
    assert len(losses) < 8 and losses[-1] >= losses[-2] and losses[:-1] == sorted(losses[:-1], reverse=True)
    rest = seqloom_here("train", RECIPE, *words, "--ranks", "1", "--json")
    assert rest.returncode == 0, rest.stderr
    assert json.loads(rest.stdout)["steps"] == 8 and json.loads(rest.stdout)["stopped"] is None


@pytest.mark.slow
def test_one_that_fails_ends_the_run_and_is_named(fork_server, tmp_path):
    callbacks = [RecordingCallback(tmp_path / "told.jsonl", fails_after=2)]
    with pytest.raises(
        SeqloomError, match=r"callback RecordingCallback.on_step_end failed \(ValueError: no more, line"
    ):
        train(RECIPE, overrides=overrides(tmp_path / "run"), ranks=2, callbacks=callbacks, show=False)
    assert [each[1] for each in told(tmp_path) if each[0] == "step"] == [1, 2]


def test_by_name_from_a_file_beside_the_config_or_a_module(tmp_path):
    (tmp_path / "run.toml").write_text(
        "[run]\nsteps = 1\noutput = 'o'\ncallbacks = ['mine.py:Mine', 'support.runs:Nothing']\n"
        "[model]\nspec = 'llama3-8b'\n[data]\nsource = 'toy:3'\nsequences = 1\n"
    )
    (tmp_path / "mine.py").write_text("import seqloom.train\n\nclass Mine(seqloom.train.Callback):\n    pass\n")
    names = Config.load(tmp_path / "run.toml").run.callbacks
    assert names == (f"{tmp_path / 'mine.py'}:Mine", "support.runs:Nothing")
    [mine, other] = load_callbacks([names[0], f"{EXAMPLE}:StopEarly"])
    assert mine.__name__ == "Mine" and other().patience == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("support.runs:Nothing", r"'support.runs:Nothing' cannot be made \(AttributeError"),
        ("nowhere.to_be:Found", r"cannot be made \(ModuleNotFoundError"),
        ("nowhere.py:Found", r"cannot be made \(FileNotFoundError"),
        ("support.runs:RecordingCallback", r"cannot be made \(TypeError.*a class without arguments"),
        ("support.tiny_specs:TINY", r"cannot be made \(TypeError"),
        ("collections:Counter", r"'collections:Counter' is no subclass of seqloom.train.Callback"),
    ],
)
def test_what_cannot_be_made(name, message):
    with pytest.raises(SeqloomError, match=message):
        load_callbacks([name])


def test_names_are_checked_before_anything_is_imported(seqloom_here, tmp_path):
    for value, message in [
        ("['here']", "'here'; spell it module:Class"),
        ("['gone:Away']", "'gone:Away' cannot be made"),
    ]:
        words = small_run(tmp_path / "run", f"run.callbacks={value}")
        for verb in ("train", "check"):
            result = seqloom_here(verb, RECIPE, *words, "--ranks", "2")
            assert result.returncode == 2 and message in result.stderr, result.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_first_that_asks_is_named_and_a_request_counts_once():
    class Asks(Callback):
        def on_evaluate(self, step, loss):
            return loss > 1

    both = Callbacks([Callback(), Asks(), Asks()], [], leads=True)
    both.evaluate(1, 0.5)
    assert both.take_request() == -1
    both.evaluate(2, 1.5)
    assert (both.take_request(), both.take_request(), both.names[1]) == (1, -1, "Asks")
