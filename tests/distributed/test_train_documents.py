"""`seqloom train` on documents that its config names: as on the store that `data prepare` makes of them."""

import json
from pathlib import Path

import numpy as np
import pytest

from seqloom.train.config import Config
from support.runs import logged

pytestmark = pytest.mark.distributed
RECIPE = Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
COMMON = ("data.sequences=4", "data.max_length=96", "run.steps=4", "schedule.warmup=1", "model.dtype=float64")
COMMON += ("plan.capacity=128", "plan.planner=flex", "evaluation.every=2", "checkpoint.every=2", "log.sinks=[]")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Files with texts, pairs, and documents for evaluation."""
    folder, draw = tmp_path_factory.mktemp("documents"), np.random.default_rng(0)
    texts = ["ab" * int(draw.integers(1, 40)) for _ in range(16)]
    (folder / "texts.txt").write_text("\n".join(texts))
    pairs = [{"question": text[:3], "reply": text[3:] + "!"} for text in texts]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (folder / "held-out").mkdir()
    (folder / "held-out" / "some.txt").write_text("\n".join(texts[:5]))
    return folder


def sets(place, run, *settings):
    return [word for each in (*COMMON, f"run.output={place / run}", *settings) for word in ("--set", each)]


def trained(seqloom_here, place, run, ranks, *settings):
    result = seqloom_here("train", RECIPE, *sets(place, run, *settings), "--ranks", str(ranks), folder=place)
    assert result.returncode == 0, result.stderr
    return (logged(place / run, "loss"), logged(place / run, "evaluation_loss")), result


@pytest.mark.slow
def test_documents_are_prepared_once_and_trained_on_as_their_store(seqloom_here, place):
    named = ("data.source=pairs.jsonl", "data.validation=held-out", "data.tokenizer=bytes")
    named += ("data.fields.prompt=question", "data.fields.answer=reply")
    checked = seqloom_here("check", RECIPE, *sets(place, "run", *named), "--ranks", "2", "--json", folder=place)
    assert checked.returncode == 0, checked.stderr
    assert json.loads(checked.stdout)["training"]["documents"] == 16 and "preparing pairs.jsonl" in checked.stderr
    found, result = trained(seqloom_here, place, "run", 2, *named)
    assert "preparing" not in result.stderr and "tokens/s" in result.stdout
    stores = sorted(path.name.rpartition("-")[0] for path in (place / "run" / "data").iterdir())
    assert stores == ["held-out", "pairs"]
    fields = ("--prompt", "question", "--answer", "reply")
    made = seqloom_here(
        *("data", "prepare", place / "pairs.jsonl", "--out", place / "store", "--tokenizer", "bytes", *fields)
    )
    assert made.returncode == 0, made.stderr
    held_out = next((place / "run" / "data").glob("held-out-*"))
    wanted, _ = trained(seqloom_here, place, "stores", 1, "data.source=store", f"data.validation={held_out}")
    assert found[0] == pytest.approx(wanted[0], rel=1e-9) and found[1] == pytest.approx(wanted[1], rel=1e-9)
    again = seqloom_here("train", RECIPE, *sets(place, "run", *named), "--ranks", "1", folder=place)
    assert again.returncode == 0 and "already complete" in again.stdout and "tokens/s" not in again.stdout


@pytest.mark.slow
def test_a_mixture_of_documents_resumes_from_the_same_stores(seqloom_here, place):
    own = "{path=['texts.txt','held-out/*.txt'], weight=3}, {path='texts.txt', weight=1}"
    named = ("data.source=", f"data.sources=[{own}]", "data.validation=", "data.validation_share=0.2")
    named += ("data.tokenizer=bytes", f"data.cache={place / 'cache'}")
    wanted, _ = trained(seqloom_here, place, "mixture", 2, *named)
    assert len(list((place / "cache").iterdir())) == 2 and not (place / "mixture" / "data").exists()
    half = place / "mixture" / "checkpoints" / "step-00000002"
    found, _ = trained(seqloom_here, place, "resumed", 1, *named, f"checkpoint.resume={half}")
    assert found[0] == pytest.approx(wanted[0][2:], rel=1e-9)
    verified = seqloom_here(
        *("verify", RECIPE, *sets(place, "verify", *named), "--ranks", "2", "--planners", "flex"), folder=place
    )
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("data.source=nowhere.jsonl",), "data.source: '{}/nowhere.jsonl' does not exist"),
        (("data.source=texts.txt",), "a text, and no tokenizer to encode it; name one, for example bytes; data.token"),
        (("data.source=*.csv", "data.tokenizer=bytes"), "data.source: no file matches"),
        (("data.source=texts.txt", "data.tokenizer=nothing"), "neither a file nor a folder"),
        (("data.tokenizer=bytes",), "data.tokenizer is set, and nothing is prepared"),
        (("data.source=pairs.jsonl", "data.fields.promt=a"), "unknown key 'data.fields.promt'; did you mean 'prompt'?"),
        (("data.source=pairs.jsonl", "data.chat_template=a.jinja"), "a.jinja' without a tokenizer"),
        (("data.source=hf:a/b/c/d", "data.tokenizer=bytes"), "data.source: 'hf:a/b/c/d' is no data set"),
        (("data.source=elsewhere",), "is no token store, it does not exist; make one with `seqloom data prepare`"),
    ],
)
def test_refused_before_any_process_starts(seqloom_here, place, settings, message):
    result = seqloom_here("train", RECIPE, *sets(place, "refused", *settings), "--ranks", "2", folder=place)
    assert result.returncode == 2 and message.format(place) in result.stderr, result.stderr
    assert "Traceback" not in result.stderr


def test_paths_of_documents_are_relative_to_the_config(place):
    (place / "run.toml").write_text(
        "[run]\nsteps = 1\noutput = 'o'\n[model]\nspec = 'llama3-8b'\n[data]\nsequences = 1\n"
        "source = ['a.jsonl', 'b/*.gz', 'hf:org/name:test', 'hf:held-out', 'toy:6']\nvalidation = 'hf:org/name'\n"
    )
    data = Config.load(place / "run.toml").data
    wanted = [
        str(place / "a.jsonl"),
        str(place / "b" / "*.gz"),
        "hf:org/name:test",
        f"hf:{place / 'held-out'}",
        "toy:6",
    ]
    assert [*map(str, data.source)] == wanted and str(data.validation) == "hf:org/name"
