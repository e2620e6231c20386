"""``seqloom check``: figures of a run that is not started, warnings, and the refusals that it shares with the run."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from seqloom.data import StoreWriter
from seqloom.profiling.check import find_warnings, inspect_run, predict_steps
from seqloom.train.config import Config
from seqloom.train.run_folder import MANIFEST, Manifest, RunLock
from support.tiny_specs import TINY

RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu.toml"
LENGTHS = (40, 3, 90, 2, 17, 60, 8, 25, 150, 31)
HF = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def values(tmp_path_factory):
    """Overrides of the recipe: few short documents, a smaller model, steps of two documents."""
    folder = tmp_path_factory.mktemp("check")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=257) as writer:
        for length in LENGTHS:
            writer.add(draw.integers(0, 257, length))
    (folder / "tiny.toml").write_text(TINY)
    chosen = {
        "data.source": folder / "store",
        "data.validation": folder / "store",
        "data.sequences": 2,
        "data.max_length": 100,
        "model.spec": folder / "tiny.toml",
        "plan.planner": "adaptive",
        "plan.capacity": 64,
    }
    return [f"{key}={value}" for key, value in chosen.items()]


def given(values):
    return [word for value in values for word in ("--set", value)]


@pytest.fixture
def settings(values):
    return given(values)


def test_what_a_run_takes_of_each_source(run, settings, tmp_path):
    def store(name, lengths):
        with StoreWriter(tmp_path / name, vocabulary=257) as writer:
            for length in lengths:
                writer.add([1] * length)
        return tmp_path / name

    # Mean lengths 20 and 10: three quarters of the tokens are 3 documents to 2. An epoch ends after 4 of the second,
    # with 6 of the first, and 6 steps of 5 documents are three epochs.
    first, second = store("first", [10, 30] * 6), store("second", [5, 15, 5, 15])
    sources = f"data.sources=[{{path='{first}', weight=3}}, {{path='{second}', weight=1}}]"
    words = [*settings, *given(["data.source=", sources, "data.sequences=5", "run.steps=6", "evaluation.every=0"])]
    report = run("check", str(RECIPE), *words, "--json", "--batches", "1").json
    held = {"documents": 12, "tokens": 240, "taken_documents": 18, "passes": 1.5}
    tokens = [each.pop("taken_tokens") for each in report["sources"]]
    assert report["sources"][0] == {"path": str(first), "share": 0.75, **held}
    held = {"documents": 4, "tokens": 40, "taken_documents": 12, "passes": 3.0}
    assert report["sources"][1] == {"path": str(second), "share": 0.25, **held}
    assert tokens[1] == 120 and 18 * 20 - 60 <= tokens[0] <= 18 * 20 + 60
    assert report["training"]["documents"] == 10 and report["epochs"] == 3
    shown = run("check", str(RECIPE), *words, "--batches", "1").out
    assert f"{second} (25 % of tokens): 4 documents, 40 tokens; the run takes 12 documents (3 passes), 120" in shown
    wide = [*words, *given(["data.sequences=10"])]
    assert "an epoch of the mixture ends when" in run("check", str(RECIPE), *wide, "--batches", "1").out


def test_figures_of_the_run(run, settings):
    report = run("check", str(RECIPE), *settings, "--json", "--batches", "3").json
    assert report["training"] == {
        "documents": 10,
        "tokens": sum(LENGTHS) - 50,
        "valid": sum(LENGTHS) - 50 - 10,
        "longest": 100,
        "truncated": 1,
        "dropped": 0,
        "lost": 50,
        "batches": 5,
        "unlabelled": 0,
    }
    assert (report["steps"], report["ranks"], report["epochs"]) == (60, 4, 12)
    assert [batch["documents"] for batch in report["batches"]] == [2, 2, 2]
    (planner, static) = report["planners"].items()
    assert planner[0] == "adaptive" and static[0].startswith("static:")
    for figures in (planner[1], static[1]):
        assert len(figures["step_ms"]) == 3 and min(figures["gap"]) >= 0
        assert figures["worst_step_ms"] == figures["step_ms"][figures["worst_batch"]] == max(figures["step_ms"])
        assert max(figures["worst_step_memory_gib"]) <= figures["peak_memory_gib"] <= report["budget_gib"]
        assert len(figures["worst_step_memory_gib"]) == 4
    assert sum(planner[1]["step_ms"]) <= sum(static[1]["step_ms"])
    packings = report["packings"]
    assert list(packings["balance"]) == ["hbp", "first-fit"] and packings["refused"] is None
    for figures in (planner[1]["balance"], static[1]["balance"], *packings["balance"].values()):
        assert figures.keys() == {"dbr", "pr", "abr", "cr", "steps", "mean_step_ms"}
        assert all(0 <= figures[name] <= 1 for name in ("dbr", "pr", "abr", "cr"))
    assert planner[1]["balance"]["mean_step_ms"] == pytest.approx(sum(planner[1]["step_ms"]) / 3)
    tokens = [batch["tokens"] for batch in report["batches"]]
    assert packings["tokens_per_step"] == max(
        -(-sum(tokens) // 3), max(batch["longest"] for batch in report["batches"])
    )


def test_epochs_are_counted_out_and_documents_dropped(run, settings, tmp_path):
    text = RECIPE.read_text().replace("steps = 60", "epochs = 2").replace('"truncate"', '"drop"')
    (tmp_path / "run.toml").write_text(text)
    report = run("check run.toml", *settings, "--set", "schedule.warmup=0", "--json", "--batches", "99").json
    assert report["training"]["dropped"] == 1 and report["training"]["lost"] == 150
    assert report["training"]["batches"] == 5
    assert report["steps"] == len(report["batches"]) == 10  # no more batches than the run has steps


def test_a_table_for_people(run, settings):
    result = run("check", str(RECIPE), *settings, "--batches", "2")
    assert result.code == 0, result.err
    for words in (
        "10 documents",
        "1 truncated",
        "60 steps on 4 ranks",
        "adaptive",
        "static:",
        "of 3.6 GiB",
        "first-fit",
        "CR %",
    ):
        assert words in result.out


def test_no_bound_is_claimed_where_none_is_proven(run):
    """A document of 2,048 tokens runs in pieces, since no group holds it whole."""
    words = ("--set", "plan.planner=pieces", "--set", "plan.capacity=256", "--batches", "1")
    assert "not proven" in run("check", str(RECIPE), *words).out
    figures = run("check", str(RECIPE), *words, "--json").json["planners"]["pieces"]
    assert figures["gap"] == figures["bound_ms"] == [None]


def test_static_is_not_compared_with_itself(run, settings):
    report = run("check", str(RECIPE), *settings, "--set", "plan.planner=static:4", "--json", "--batches", "1").json
    assert list(report["planners"]) == ["static:4"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["plan.ahead=0"], "plan.ahead = 0"),
        (["evaluation.every=0"], "nothing is evaluated"),
        (["evaluation.every=61"], "more than the 60 steps"),
        (["evaluation.batches=6"], "lower it to 5"),
        (["plan.planner=static:1"], "the static planner is the fallback"),
    ],
)
def test_warnings(run, settings, changes, message):
    result = run("check", str(RECIPE), *settings, *given(changes), "--batches", "5")
    assert result.code == 0, result.err
    assert any(message in line for line in result.out.splitlines() if line.startswith("warning: "))


def test_planning_that_falls_behind_and_steps_without_labels(tmp_path, values):
    with StoreWriter(tmp_path / "store", vocabulary=257) as writer:
        writer.add(np.arange(9))
        writer.add(np.arange(1))  # one token predicts nothing
    run = inspect_run(Config.load(RECIPE, [*values, f"data.source={tmp_path / 'store'}", "data.sequences=1"]), 4)
    planned = predict_steps(run)[0]
    told = {ns: " ".join(find_warnings(run, _slower(planned, ns))) for ns in (0, 10**12)}
    assert "falls behind" in told[10**12] and "falls behind" not in told[0]
    assert "no label counts in 1 of the first epoch's 2 batches" in told[0]


def _slower(planned, ns):
    return replace(planned, evaluations=tuple(replace(each, planning_ns=ns) for each in planned.evaluations))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--set", "plan.capacity=16", "--set", "plan.planner=flex"),
            "document 8 has 100 tokens, but the largest group (4 ranks x 16 tokens) holds",
        ),
        (("--batches", "0"), "0 batches to look at"),
        (("--ranks", "-1"), "--ranks -1; give 1 or more"),
        (("--ranks", "2", "--set", "plan.cluster=1x4xCPU"), "has 4 ranks, the run has 2"),
        (("--set", "data.source=nowhere"), "no token store"),
        (("--set", "data.validation=nowhere"), "no token store"),
        (("--set", "data.too_long=refuse"), "document 8 has 150 tokens, more than the maximum length 100"),
        (("--set", "plan.budget_gib=0.0001"), "does not fit"),
        (("--set", "plan.planner=flix"), "did you mean"),
    ],
)
def test_a_run_that_cannot_start_is_refused(refused, settings, words, message):
    assert message in refused("check", str(RECIPE), *settings, *words)


def test_a_run_whose_folder_or_packages_are_missing_is_refused(refused, settings, tmp_path, monkeypatch):
    check = ("check", str(RECIPE), *settings, "--set")
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert "log.sinks names 'wandb', which cannot be imported" in refused(*check, 'log.sinks=["wandb"]')
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(*check, f"run.output={tmp_path / 'file' / 'run'}")
    with RunLock(tmp_path / "run") as lock:
        lock.acquire()
        assert "is in use by process" in refused(*check, f"run.output={tmp_path / 'run'}")
    assert "none.safetensors cannot be read" in refused(*check, f"model.parameters={tmp_path / 'none.safetensors'}")


def write_checkpoint(folder, **shapes):
    """A complete checkpoint, as far as one sees without reading its tensors."""
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text(Manifest(3, shapes, {}, {}, "2.13.0").to_json())
    (folder / ".metadata").touch()


def test_a_checkpoint_that_the_run_could_not_resume_from_is_refused(refused, settings, tmp_path):
    run, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    write_checkpoint(run / "checkpoints" / "step-00000003", weight="float32[2, 2]")
    check = ("check", str(RECIPE), *settings, "--set", f"run.output={run}")
    assert "is a checkpoint of another model: only in the checkpoint: weight float32[2, 2]" in refused(*check)
    assert "checkpoint.resume = 'never', and" in refused(*check, "--set", "checkpoint.resume=never")
    new = ("--set", f"run.output={tmp_path / 'new'}", "--set", f"checkpoint.resume={elsewhere}")
    assert "is not a checkpoint" in refused("check", str(RECIPE), *settings, *new)


def test_ids_that_the_model_does_not_have(refused, settings, tmp_path):
    (tmp_path / "small.toml").write_text(TINY.replace("257", "256"))
    assert "257 ids, the model has 256" in refused("check", str(RECIPE), *settings, "--set", "model.spec=small.toml")


def test_hugging_face_models_are_attached_without_weights(run, values, tmp_path):
    (tmp_path / "run.toml").write_text(RECIPE.read_text().replace('spec = "models/tiny.toml"', 'huggingface = "hf"'))
    (tmp_path / "hf").mkdir()
    words = given(value for value in values if not value.startswith("model."))
    described = tmp_path / "hf" / "config.json"
    described.write_text(json.dumps(HF))
    assert run("check run.toml --json", *words).json["model"] == "hf"
    described.write_text(json.dumps({**HF, "attention_dropout": 0.1}))
    assert run("check run.toml --json", *words).json["model"] == "hf"
    gpt2 = {"model_type": "gpt2", "vocab_size": HF["vocab_size"], "n_embd": 16, "n_layer": 2, "n_head": 4}
    described.write_text(json.dumps({**gpt2, "architectures": ["GPT2LMHeadModel"]}))  # dropout of embeddings
    result = run("check run.toml", *words)
    assert result.code == 2 and "GPT2LMHeadModel is refused" in result.err and "dropout" in result.err
    described.write_text(json.dumps({**HF, "auto_map": {"AutoConfig": "code.Config"}, "model_type": "deepseek"}))
    result = run("check run.toml", *words)
    assert result.code == 2 and "cannot be loaded" in result.err and result.err.count("\n") == 1


def test_shapes_alone_need_no_torch(settings):
    words = ["check", str(RECIPE), *settings, "--batches", "1"]
    script = f"import sys; from seqloom.cli import app; app({words!r}, standalone_mode=False); " + (
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
