"""``seqloom verify``: equal numbers, an exit code when they are not, and refusals."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GemmaConfig
from typer.testing import CliRunner

from seqloom.cli import app
from seqloom.data import StoreWriter
from seqloom.errors import SeqloomError
from seqloom.planners.hydraulis import ParallelConfig, PipelineConfig, Strategy, strategies_to_json
from seqloom.profiling import verify as module
from support.tiny_models import tiny_model
from support.tiny_specs import TINY

torch.set_num_threads(1)
RECIPE = Path(__file__).parents[3] / "recipes" / "tiny-cpu.toml"


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Overrides of the recipe: few short documents, a smaller model."""
    folder = tmp_path_factory.mktemp("verify")
    draw = np.random.default_rng(0)
    with StoreWriter(folder / "store", vocabulary=257) as writer:
        for length in (40, 3, 90, 1, 17, 60, 8, 25):
            writer.add(draw.integers(0, 257, length))
    (folder / "tiny.toml").write_text(TINY)
    values = {"data.source": folder / "store", "model.spec": folder / "tiny.toml", "data.sequences": 8}
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def other_token(source, context, batch, real=module.rank_rows):
    """The rows of a batch, with other tokens where there are several ranks."""
    ids, labels = real(source, context, batch)
    return (ids + (context.transport.ranks > 1)) % 257, labels


def run(*words):
    return CliRunner().invoke(app, ["verify", str(RECIPE), *map(str, words)])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_plans_do_not_change_the_result(settings, dtype):
    names = ["static", "static:2", "flex", "pipeline:2"]
    words = ("--planners", ",".join(names), "--set", "plan.capacity=50", "--dtype", dtype, "--json")
    result = run(*settings, *words)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"] and [row["planner"] for row in report["plans"]] == names
    assert max(row["max_relative_gradient_difference"] for row in report["plans"]) < 1e-5
    assert max(row["rounds"] for row in report["plans"]) > 1
    assert len({round(row["loss"], 5) for row in report["plans"]}) == 1


def test_every_strategy_of_a_run_is_compared_where_it_holds_the_batch(settings, tmp_path):
    """Weights split over ranks beside a pipeline, stages of several ranks; the third holds no document of 90 tokens."""
    tp_groups, stages = (
        PipelineConfig(ParallelConfig(1, 2), (0, 1), 90),
        PipelineConfig(ParallelConfig(2, 1), (2, 3), 90),
    )
    wide, short = (
        PipelineConfig(ParallelConfig(2, 1, 1, 2), (0, 1, 2, 3), 90),
        PipelineConfig(ParallelConfig(1, 1, 4), (0, 1, 2, 3), 89),
    )
    listed = [Strategy(each) for each in ((tp_groups, stages), (wide,), (short,))]
    (tmp_path / "list.json").write_text(strategies_to_json(listed))
    free = ("plan.planner=hydraulis", "plan.sharding=free", f"plan.strategies={tmp_path / 'list.json'}")
    result = run(*settings, *(word for each in free for word in ("--set", each)), "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    names = ["static", "adaptive", "flex", "zones", "hydraulis:t2p1, t1p2", "hydraulis:t1p2r2"]
    assert report["passed"] and [row["planner"] for row in report["plans"]] == names
    assert max(row["max_relative_gradient_difference"] for row in report["plans"]) < 1e-9


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("planners", "sharding", "cluster"),
    [
        ("flex,pipeline:2", "full", "1x2xCPU"),
        pytest.param("zones,pipeline:2", "hybrid", "2x2xCPU", marks=pytest.mark.slow),
        pytest.param("static,adaptive", "none", "1x4xCPU", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_are_processes_with_sharded_parameters(fork_server, settings, planners, sharding, cluster):
    ranks = 2 if cluster == "1x2xCPU" else 4
    sets = (f"plan.sharding={sharding}", f"plan.cluster={cluster}", "plan.capacity=50")
    words = [word for each in sets for word in ("--set", each)]
    result = run(*settings, *words, "--planners", planners, "--gloo", "--ranks", ranks, "--batches", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"] and (report["on"], report["ranks"]) == ("gloo", ranks)
    assert [row["planner"] for row in report["plans"]] == planners.split(",") * 2
    assert 0 < max(row["max_relative_gradient_difference"] for row in report["plans"]) < 1e-9


@pytest.mark.distributed
def test_the_strategies_of_a_run_on_processes_that_move_parameters(fork_server, settings, tmp_path):
    tp_group = PipelineConfig(ParallelConfig(1, 2), (0, 1), 90)
    (tmp_path / "list.json").write_text(strategies_to_json([Strategy((tp_group,))]))
    free = ("plan.planner=hydraulis", "plan.sharding=free", f"plan.strategies={tmp_path / 'list.json'}")
    result = run(*settings, *(word for each in free for word in ("--set", each)), "--gloo", "--ranks", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("same") == 5, "four usual planners, and the strategy"
    assert "on 2 processes over gloo, float64" in " ".join(result.output.split())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A recipe for Hugging Face folders, and two of them: with parameters, and with experts and none."""
    place = tmp_path_factory.mktemp("huggingface")
    tiny_model("llama", vocab_size=257).save_pretrained(place / "llama")
    tiny_model("mixtral", vocab_size=257).config.save_pretrained(place / "mixtral")
    recipe = RECIPE.read_text().replace('spec = "models/tiny.toml" ', 'huggingface = "llama"')
    (place / "recipe.toml").write_text(recipe)
    return place


def run_folder(place, settings, *words):
    values = [word for word in settings if word != "--set" and not word.startswith("model.spec")]
    sets = [word for value in values for word in ("--set", value)]
    return CliRunner().invoke(app, ["verify", str(place / "recipe.toml"), *sets, *map(str, words)])


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_plans_do_not_change_the_result_of_hugging_face_models(settings, folders, name):
    names = ["static", "flex", "pipeline:2"]
    words = ("--planners", ",".join(names), "--set", "plan.capacity=50", "--set", f"model.huggingface={folders / name}")
    result = run_folder(folders, settings, *words, "--ranks", "2", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["passed"] and [row["planner"] for row in report["plans"]] == names
    assert max(row["max_relative_gradient_difference"] for row in report["plans"]) < 1e-9


GEMMA = {
    **{"vocab_size": 257, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
}


@pytest.fixture(scope="module")
def gemma(folders):
    """A model whose norms compute in float32 by design, also their gradients, which are sums over tokens."""
    GemmaConfig(**GEMMA).save_pretrained(folders / "gemma")
    return f"model.huggingface={folders / 'gemma'}"


@pytest.mark.parametrize("sequences", [8, 1])
def test_a_model_is_compared_as_exactly_as_it_computes(settings, folders, gemma, sequences):
    words = ("--set", gemma, "--set", f"data.sequences={sequences}", "--set", "plan.capacity=50", "--ranks", "2")
    result = run_folder(folders, settings, *words, "--planners", "static,flex", "--json")
    assert result.exit_code == 0, result.output
    for row in json.loads(result.stdout)["plans"]:
        assert 1e-9 < row["tolerance"] < 1e-5 and row["max_relative_gradient_difference"] < row["tolerance"]
    result = run_folder(folders, settings, *words, "--planners", "static")
    assert "one process differs from itself" in " ".join(result.output.split())


def test_a_difference_is_found_in_such_a_model_too(settings, folders, gemma, monkeypatch):
    monkeypatch.setattr(module, "rank_rows", other_token)
    words = ("--set", gemma, "--planners", "static", "--ranks", "2", "--json")
    assert run_folder(folders, settings, *words).exit_code == 1


def test_parameters_that_are_no_numbers_are_refused(settings, folders):
    model = tiny_model("llama", vocab_size=257)
    model.model.norm.weight.data[3] = float("nan")
    model.save_pretrained(folders / "nan")
    result = run_folder(folders, settings, "--set", f"model.huggingface={folders / 'nan'}", "--json")
    assert isinstance(result.exception, SeqloomError) and "loss nan" in str(result.exception)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("lengths", "counted"), [((2,) * 8, None), ((9, 5, 12, 30), 1)], ids=["pairs", "one label"])
def test_gradients_that_are_zero_but_for_rounding(settings, tmp_path, lengths, counted, dtype):
    """Of queries and keys: the first token of a document sees itself alone, whatever they are."""
    draw = np.random.default_rng(0)
    with StoreWriter(tmp_path / "store", vocabulary=257) as writer:
        for number, length in enumerate(lengths):
            mask = None if counted is None else np.arange(length) == (counted if number == 0 else -1)
            writer.add(draw.integers(0, 257, length), mask)
    words = ("--set", f"data.source={tmp_path / 'store'}", "--set", f"data.sequences={len(lengths)}")
    result = run(*settings, *words, "--planners", "static:2,flex,pipeline:2", "--dtype", dtype, "--json")
    assert result.exit_code == 0, result.output
    assert all(
        row["tolerance"] == module.TOLERANCE[getattr(torch, dtype)] for row in json.loads(result.stdout)["plans"]
    )


def test_a_hugging_face_model_is_refused_by_name(settings, folders):
    refused = folders / "refused"
    refused.mkdir()
    config = json.loads((folders / "llama" / "config.json").read_text())
    changes = {"model_type": "mixtral", "router_jitter_noise": 0.1}
    (refused / "config.json").write_text(json.dumps({**config, **changes, "architectures": ["MixtralForCausalLM"]}))
    result = run_folder(folders, settings, "--set", f"model.huggingface={refused}")
    assert isinstance(result.exception, SeqloomError)
    assert "router noise" in str(result.exception) and str(refused) in str(result.exception)


def test_parameters_in_other_files_are_not_drawn_silently(settings, folders):
    other = folders / "bin"
    other.mkdir()
    (other / "config.json").write_text((folders / "llama" / "config.json").read_text())
    (other / "pytorch_model.bin").write_bytes(b"")
    result = run_folder(folders, settings, "--set", f"model.huggingface={other}")
    assert isinstance(result.exception, SeqloomError)
    assert "none in .safetensors" in str(result.exception)


def test_a_table_for_people(settings):
    result = run(*settings, "--planners", "static", "--ranks", "2", "--batches", "2")
    assert result.exit_code == 0, result.output
    assert result.output.count("same") == 2


def test_the_run_s_own_pipeline_is_among_the_usual_planners(settings):
    changes = ("pipeline.stages=2", "pipeline.schedule=1f1b", "pipeline.head=all")
    result = run(*settings, "--ranks", "2", *(part for change in changes for part in ("--set", change)), "--json")
    assert result.exit_code == 0, result.output
    found = [row["planner"] for row in json.loads(result.stdout)["plans"]]
    assert found == ["static", "adaptive", "flex", "zones", "pipeline:2,1,1f1b,all"]


def test_a_difference_is_exit_code_1(settings, monkeypatch):
    monkeypatch.setattr(module, "rank_rows", other_token)
    result = run(*settings, "--planners", "static", "--json")
    assert result.exit_code == 1
    assert not json.loads(result.stdout)["passed"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dtype", "float16"), "unknown dtype 'float16'"),
        (("--planners", ","), "no planner in"),
        (("--batches", "0"), "--batches 0; give 1 or more"),
        (("--ranks", "0"), "--ranks 0; give 1 or more"),
        (("--ranks", "100000"), "100000 ranks on a machine with"),
        (("--gloo", "--nccl"), "leave one out"),
        (("--planners", "flix"), "did you mean"),
        (("--set", "plan.cluster=1x2xCPU"), "has 2 ranks, the run has 4"),
        (("--set", "data.source=nowhere"), "no token store"),
        (("--set", "plan.planer=flex"), "planner"),
    ],
)
def test_what_cannot_be_is_refused(settings, words, message):
    result = run(*settings, *words)
    assert isinstance(result.exception, Exception) and result.exit_code != 0
    assert message in str(result.exception)


def test_nccl_without_a_gpu_is_refused_with_the_way_out(settings, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    result = run(*settings, "--nccl")
    assert isinstance(result.exception, SeqloomError)
    assert "finds no GPU" in str(result.exception) and "--gloo" in str(result.exception)


def test_processes_under_a_launcher_are_refused(settings, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    result = run(*settings, "--gloo")
    assert isinstance(result.exception, SeqloomError) and "leave the launcher out" in str(result.exception)


@pytest.mark.slow
def test_an_interrupted_command_says_so_and_ends(tmp_path):
    """Threads of ranks may be deep in torch: a process that ends in the usual way would abort."""
    recipe, codes = Path(__file__).parents[3] / "recipes" / "tiny-cpu.toml", []
    for wait_s in (3.0, 4.0, 5.0, 6.0):
        command = [sys.executable, "-m", "seqloom", "verify", str(recipe), "--ranks", "4", "--batches", "9"]
        process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(wait_s)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
        codes.append(process.returncode)
        assert b"terminate called" not in said and b"Traceback" not in said
    assert {*codes} <= {130, -signal.SIGINT} and 130 in codes
