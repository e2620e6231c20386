"""Which Hugging Face model types are exact, and which are refused: docs/huggingface.md says what running them shows."""

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import transformers
from typer.testing import CliRunner

from seqloom.cli import app
from seqloom.describe.huggingface import FAMILIES, model_from_config
from seqloom.integrations.transformers.describe import describe_folder

torch.set_num_threads(1)
DOCS, RECIPE = Path(__file__).parents[2] / "docs", Path(__file__).parents[2] / "recipes" / "tiny-cpu.toml"
PAGE = (DOCS / "huggingface.md").read_text()
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers warns of tiny configs


@pytest.fixture(scope="module")
def matrix():
    """The script that tries every type."""
    spec = importlib.util.spec_from_file_location("huggingface_matrix", DOCS / "huggingface_matrix.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_page_says_what_running_every_type_shows(matrix):
    if ".".join(transformers.__version__.split(".")[:2]) not in PAGE:
        pytest.skip("the page is of another release of transformers")
    assert matrix.renewed(PAGE, matrix.matrix()) == PAGE, "run: python docs/huggingface_matrix.py"


def test_nothing_is_wrong_and_most_of_what_is_trained_is_exact():
    rows = [line.split("|") for line in PAGE.split("<!-- matrix -->")[1].split("<!-- /matrix -->")[0].splitlines()[5:]]
    counts = {row[1].strip(): int(row[3]) for row in rows if len(row) > 3}
    assert not any(what.startswith("WRONG") for what in counts)
    assert sum(counts.values()) >= 180 and sum(n for what, n in counts.items() if what.startswith("exact")) >= 55


@pytest.mark.parametrize(
    "model_type",
    [
        *("ernie4_5", "opt", "hunyuan_v1_moe", "diffllama", "gpt_oss", "phi", "llama4_text", "mixtral"),
        *("qwen3_next", "falcon_h1"),
    ],
)
def test_types_of_every_kind(matrix, model_type):
    assert matrix.try_type(model_type) == matrix.what_page_says(PAGE)[model_type]


def test_a_few_types_are_tried_and_the_others_stay(matrix):
    wrong = PAGE.replace("`phi`, ", "").replace("| refused: attention", "| WRONG | `phi` | 1 |\n| refused: attention")
    assert matrix.what_page_says(wrong)["phi"] == "WRONG"
    assert matrix.renewed(wrong, matrix.matrix(["bert", "phi"], wrong)) == PAGE


NO_MODULES = {"deepseek", "gemma2", "gemma3", "kimi_k2"}  # refused, or not in transformers


@pytest.mark.parametrize("model_type", sorted({*FAMILIES} - NO_MODULES))
def test_shapes_from_the_config_are_those_of_the_modules(matrix, tmp_path, model_type):
    matrix.tiny_config(model_type).save_pretrained(tmp_path)
    by_config = asdict(model_from_config(json.loads((tmp_path / "config.json").read_text()), name=tmp_path.name))
    by_modules = asdict(describe_folder(tmp_path))
    if len(by_modules["moe_layers"]) == by_modules["layers"]:
        by_config["ffn"] = by_modules["ffn"]  # of no layer
    assert by_modules == by_config


@pytest.fixture(scope="module", params=["ernie4_5", "lfm2"])
def folder(request, matrix, tmp_path_factory):
    """A recipe, and the folder of a type that no table has: one with attention alone, one with convolutions."""
    place = tmp_path_factory.mktemp("other")
    config = matrix.tiny_config(request.param)
    config.vocab_size = 257
    config.save_pretrained(place / "model")
    recipe = RECIPE.read_text().replace('spec = "models/tiny.toml" ', 'huggingface = "model"')
    (place / "recipe.toml").write_text(recipe)
    return place


SMALL = ("data.source=toy:24", "data.sequences=4", "data.max_length=48", "data.too_long=truncate", "plan.capacity=48")


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)))


def test_the_commands_take_a_type_that_no_table_has(folder):
    sets = [word for each in (*SMALL, "run.ranks=2") for word in ("--set", each)]
    checked = run("check", folder / "recipe.toml", *sets, "--batches", 1, "--json")
    assert checked.exit_code == 0, checked.output
    verified = run("verify", folder / "recipe.toml", *sets, "--planners", "static:2,flex,pipeline:2", "--json")
    assert verified.exit_code == 0 and json.loads(verified.stdout)["passed"], verified.output
    lengths = folder / "lengths.txt"
    lengths.write_text("40\n7\n12\n")
    planned = run("plan", "--lengths", lengths, "--cluster", "1x2xCPU", "--model", folder / "model", "--json")
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["model"] == "model"


@pytest.mark.distributed
def test_such_a_type_is_trained_on_processes_and_saved(seqloom_here, folder):
    more = ("run.steps=2", "schedule.warmup=1", "evaluation.every=0", "checkpoint.every=0")
    sets = [word for each in (*SMALL, *more, f"run.output={folder / 'out'}") for word in ("--set", each)]
    done = seqloom_here("train", folder / "recipe.toml", "--ranks", "2", *sets)
    assert done.returncode == 0, done.stderr
    said, trained = (json.loads((folder / each / "config.json").read_text()) for each in ("model", "out/model"))
    assert trained["model_type"] == said["model_type"]
